"""A small part of `make sanitize`, and that the sanitizer would tell."""

from __future__ import annotations

import subprocess
import sys

import pytest

from exl3kit.jit.cpu import cpu_library
from tests.kernels.sanitizer import ROOT, environment

# Eight tiles are decoded of which seven are there.
OVERRUN = """
import torch
from tests.kernels.test_decode import decode_strip
decode_strip(torch.zeros(7, 48, dtype=torch.int16), 3, "mcg", 0)
"""

PART = """
import sys, pytest
rates = "test_every_rate_and_codebook or test_random_rings"
corners = "test_unaligned or test_hostile_ids or test_threads or test_expert_map"
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-k", f"{rates} or {corners}",
    *(f"tests/kernels/test_{name}.py" for name in ("decode", "linear", "moe"))]))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Python with kernels under AddressSanitizer; the first call builds them."""
    if cpu_library() is None:
        pytest.skip("no C++ compiler: the kernels do not exist here")
    command = [sys.executable, "-c", code]
    sanitized = environment("address")
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=sanitized)


@pytest.mark.slow
def test_an_overrun_is_found() -> None:
    done = run(OVERRUN)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


@pytest.mark.slow
def test_kernels_are_clean() -> None:
    done = run(PART)
    assert done.returncode == 0, done.stdout + done.stderr
