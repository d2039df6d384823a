"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest

from exl3kit.jit.cpu import ISA_NAMES, cpu_library


@pytest.fixture(params=range(len(ISA_NAMES)), ids=ISA_NAMES)
def isa(request: pytest.FixtureRequest) -> int:
    """Every instruction-set tier that this machine and its compiler have."""
    library = cpu_library()
    if library is None:
        pytest.skip("no C++ compiler: the kernels do not exist here")
    if request.param > library.exl3_cpu_isa_max():
        pytest.skip("this machine does not have the tier")
    return request.param
