"""The CUDA compiler and its cache: stubs, include closures, keys, damaged and locked entries.

NVRTC needs no GPU, so all of this runs anywhere the `cuda` extra is installed.
"""

from __future__ import annotations

import fcntl
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from exl3kit.errors import CompileError, MissingKernelError, UnsupportedError
from exl3kit.jit import cache, compiler, source, toolkit
from exl3kit.jit.spec import ARCHES, KernelSpec, Param, arch_of

HEADER = """#pragma once
#include "value.cuh"
#include <cuda_fp16.h>
namespace tiny {
template <int kAdd, bool kTwice>
__global__ void add(__half* out) {
    out[threadIdx.x] = __float2half(value(kAdd) * (kTwice ? 2 : 1));
}
}
"""
VALUE = "#pragma once\n__device__ inline float value(int add) { return 1.0f + add; }\n"
SPEC = KernelSpec("tiny.cuh", "tiny::add", (3, True), (Param.POINTER,))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources and cache of one test."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "tiny.cuh").write_text(HEADER)
    (sources / "value.cuh").write_text(VALUE)
    monkeypatch.setattr(source, "SOURCES", sources)
    monkeypatch.setenv("EXL3KIT_CACHE_DIR", str(tmp_path / "cache"))
    source.closure_digest.cache_clear()
    return sources


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Specs that are really compiled from now on."""
    seen: list[KernelSpec] = []
    compile_spec = compiler.compile_spec

    def counted(spec: KernelSpec, arch: str) -> compiler.Compiled:
        seen.append(spec)
        return compile_spec(spec, arch)

    monkeypatch.setattr(compiler, "compile_spec", counted)
    return seen


@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_for_every_architecture_without_a_gpu(arch: str) -> None:
    compiled = compiler.compile_spec(SPEC, arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert compiled.symbol.encode() in compiled.cubin
    assert 0 < compiled.resources.registers < 32
    assert compiled.resources.spill_bytes == 0


def test_template_arguments_name_the_instantiation() -> None:
    spec = KernelSpec("a.cuh", "exl3::f", (3, True, "exl3::kMcg"), ())
    assert spec.expression == "exl3::f<3, true, exl3::kMcg>"
    assert spec.is_for("sm_80")
    assert not replace(spec, arches=frozenset({"sm_90a"})).is_for("sm_80")


def test_arch_of_a_device() -> None:
    assert [arch_of(c) for c in ((8, 6), (9, 0), (12, 0))] == ["sm_86", "sm_90a", "sm_120a"]
    with pytest.raises(UnsupportedError, match=r"8.0 or newer, got 7.5"):
        arch_of((7, 5))


def test_compiler_text_reaches_the_error(folder: Path) -> None:
    (folder / "value.cuh").write_text("#pragma once\nint broken = ;\n")
    with pytest.raises(CompileError, match=r"(?s)tiny::add<3, true>.* for sm_90a.*value"):
        compiler.compile_spec(SPEC, "sm_90a")


def test_includes_outside_the_key_are_refused(folder: Path) -> None:
    (folder / "value.cuh").write_text("#include <vector>\n" + VALUE)
    with pytest.raises(CompileError, match=r"value.cuh: includes 'vector', expected.*cuda_fp16.h"):
        source.closure("tiny.cuh", folder)
    (folder / "value.cuh").write_text("#define NAME <vector>\n#include NAME\n" + VALUE)
    with pytest.raises(CompileError, match="includes 'NAME'"):
        source.closure("tiny.cuh", folder)
    (folder / "value.cuh").unlink()
    with pytest.raises(CompileError, match=r"tiny.cuh: expected a file value.cuh"):
        source.closure("tiny.cuh", folder)


def test_key_follows_everything_the_code_depends_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {cache.cache_key(SPEC, "sm_90a"), cache.cache_key(SPEC, "sm_80")}
    keys.add(cache.cache_key(replace(SPEC, template=(4, True)), "sm_90a"))
    (folder / "value.cuh").write_text(VALUE + "// changed\n")
    source.closure_digest.cache_clear()
    keys.add(cache.cache_key(SPEC, "sm_90a"))
    version = toolkit.nvrtc_version()
    monkeypatch.setattr(toolkit, "nvrtc_version", lambda: f"{version}1")
    keys.add(cache.cache_key(SPEC, "sm_90a"))
    monkeypatch.setitem(compiler.OPTIONS, "lineinfo", False)
    keys.add(cache.cache_key(SPEC, "sm_90a"))
    assert len(keys) == 6


def test_version_tells_patches_of_a_release_apart() -> None:
    assert toolkit.nvrtc_version() == metadata.version("nvidia-cuda-nvrtc")


def test_file_is_named_after_template_and_arguments() -> None:
    spec = replace(SPEC, template=(3, "tiny::kOther"))
    assert cache.entry_path(spec, "sm_90a").name.startswith("add_3_kOther-")


def test_second_load_reads_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = count_compiles(monkeypatch)
    first = cache.load_or_compile(SPEC, "sm_90a")
    assert cache.load_or_compile(SPEC, "sm_90a") == first
    assert len(compiles) == 1
    path = cache.entry_path(SPEC, "sm_90a")
    assert path.read_bytes() == first.cubin
    assert path.name.startswith("add_3_true-")
    assert not list(path.parent.glob(".*")), "temporary files"


def test_other_users_may_read_what_they_may_read_elsewhere() -> None:
    """Kernels built into an image by root run for a user who cannot write there."""
    cache.load_or_compile(SPEC, "sm_90a")
    path = cache.entry_path(SPEC, "sm_90a")
    (path.parent / "plain").write_text("")
    modes = {p.stat().st_mode for p in (path, path.with_suffix(".json"), path.parent / "plain")}
    assert len(modes) == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "no_json", "bad_json", "json_list"])
def test_damaged_entry_is_a_miss(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.load_or_compile(SPEC, "sm_90a")
    path = cache.entry_path(SPEC, "sm_90a")
    facts = path.with_suffix(".json")
    if damage == "cut":
        path.write_bytes(first.cubin[:-100])
    elif damage == "flip":
        path.write_bytes(first.cubin[:-1] + bytes([first.cubin[-1] ^ 1]))
    elif damage == "no_json":
        facts.unlink()
    else:
        facts.write_text("{" if damage == "bad_json" else json.dumps([1]))
    compiles = count_compiles(monkeypatch)
    assert cache.load_or_compile(SPEC, "sm_90a").cubin == first.cubin
    assert len(compiles) == 1
    assert cache.read_entry(path) == first


def test_forbidden_compile_names_spec_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL3KIT_JIT_FORBID", "1")
    with pytest.raises(MissingKernelError, match=r"tiny::add<3, true>.*cache build --arch sm_90a"):
        cache.load_or_compile(SPEC, "sm_90a")
    monkeypatch.setenv("EXL3KIT_JIT_FORBID", "yes")
    with pytest.raises(UnsupportedError, match="EXL3KIT_JIT_FORBID: expected 0 or 1, got 'yes'"):
        cache.load_or_compile(SPEC, "sm_90a")


def test_held_lock_means_a_compile_without_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.0)
    path = cache.entry_path(SPEC, "sm_90a")
    path.parent.mkdir(parents=True)
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        compiled = cache.load_or_compile(SPEC, "sm_90a")
    assert compiled.cubin[:4] == b"\x7fELF"
    assert not path.exists()


def test_unwritable_cache_still_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EXL3KIT_CACHE_DIR", str(tmp_path / "file"))
    assert cache.load_or_compile(SPEC, "sm_90a").cubin[:4] == b"\x7fELF"


def test_verbose_logs_each_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EXL3KIT_JIT_VERBOSE", "1")
    cache.load_or_compile(SPEC, "sm_90a")
    cache.load_or_compile(SPEC, "sm_90a")
    (record,) = [r for r in caplog.records if "tiny::add<3, true>" in r.getMessage()]
    assert "registers=" in record.getMessage()


def test_resources_are_read_from_ptxas() -> None:
    log = (
        "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas         .     608 bytes stack frame, 576 bytes spill stores, 860 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 608 bytes cumulative stack size, "
        "1024 bytes smem\n"
    )
    assert compiler.resources_of(log) == compiler.Resources(32, 1024, 608, 576, 860)
    with pytest.raises(CompileError, match="expected registers"):
        compiler.resources_of("nothing")
