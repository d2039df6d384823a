"""Every CUDA kernel compiles for every architecture, within its spill budget; constants agree."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from exl3kit.errors import UnsupportedError
from exl3kit.format.spec import SUPPORTED_BITS
from exl3kit.jit.cache import load_or_compile
from exl3kit.jit.source import SOURCES
from exl3kit.jit.spec import ARCHES
from exl3kit.kernels.catalogue import all_specs
from exl3kit.kernels.encode_cuda import (
    _STATIC_SHARED,
    SPECS,
    _check_shared,
    kept_rows,
    row_nodes,
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_within_its_spill_budget(arch: str) -> None:
    """The cache makes this cheap after `make kernels`."""
    for spec in all_specs():
        if spec.is_for(arch):
            resources = load_or_compile(spec, arch).resources
            assert resources.spill_bytes <= spec.spill_budget, f"{spec} for {arch}: {resources}"


def test_no_kernel_is_listed_twice() -> None:
    names = [(spec.header, spec.expression) for spec in all_specs()]
    assert len(names) == len(set(names))


def test_encoder_scratch_is_what_the_kernel_takes(tmp_path: Path) -> None:
    """kRowNodes and kKeptRows of encode_rate.cuh, compiled for the host."""
    source = tmp_path / "rates.cpp"
    lines = [
        f'std::printf("%d %d\\n", exl3::EncodeRate<{int(2 * bits)}>::kKeptRows, '
        f"exl3::EncodeRate<{int(2 * bits)}>::kRowNodes);"
        for bits in SUPPORTED_BITS
    ]
    source.write_text(
        '#include <cstdio>\n#include "encode_rate.cuh"\nint main() {' + "".join(lines) + "}\n"
    )
    program = tmp_path / "rates"
    subprocess.run(
        ["g++", "-std=c++17", f"-I{SOURCES}", str(source), "-o", str(program)], check=True
    )
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    expected = [f"{kept_rows(bits)} {row_nodes(bits)}" for bits in SUPPORTED_BITS]
    assert printed.split("\n")[:-1] == expected


def test_static_shared_memory_of_the_encoder_is_accounted_for() -> None:
    taken = load_or_compile(SPECS[0], "sm_90a").resources.shared_bytes
    assert _STATIC_SHARED - 256 < taken <= _STATIC_SHARED


def test_one_bit_needs_more_shared_memory_than_some_devices_have() -> None:
    _check_shared(1, 227 * 1024)
    _check_shared(2, 99 * 1024)
    with pytest.raises(UnsupportedError, match=r"at 1.5 bits: expected 134400 bytes.*got 101376"):
        _check_shared(1.5, 99 * 1024)
