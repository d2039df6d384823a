"""The Hessian's checks, damping, rotation and block factor."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.hadamard import hadamard
from exl3kit.quantize import ldl
from tests.quantize import cases


def test_factor_is_unit_block_triangular_and_rebuilds_the_hessian() -> None:
    _, hessian = cases.random_case(128, 128)
    h = ldl.damped(ldl.normalized(hessian), 0.025)
    unit = ldl.feedback_factor(h) + torch.eye(128, dtype=torch.float64)
    blocks = torch.linalg.solve(unit, torch.linalg.solve(unit, h).T)
    for i in range(0, 128, 16):
        assert torch.equal(unit[i : i + 16, i : i + 16], torch.eye(16, dtype=torch.float64))
        assert not unit[i : i + 16, i + 16 :].any()
        blocks[i : i + 16, i : i + 16] = 0
    assert blocks.abs().max() < 1e-12  # D has nothing outside its 16 x 16 blocks


def test_rotation_is_that_of_the_inner_basis() -> None:
    """tr(E' H E) is the same in both bases, E = diag(s) H_k E_inner."""
    weight, hessian = cases.random_case(256, 128)
    signs = cases.signs()[0].double()
    inner = hadamard(weight.double() * signs.unsqueeze(1), dim=0)
    there = ldl.rotated(hessian.double(), signs)
    first = (weight.double() * (hessian.double() @ weight.double())).sum()
    assert torch.allclose((inner * (there @ inner)).sum(), first, rtol=1e-12)


def test_sum_and_mean_are_the_same_after_normalising() -> None:
    _, hessian = cases.random_case(128, 128)
    assert torch.allclose(ldl.normalized(hessian / 513), ldl.normalized(hessian), rtol=1e-6)
    assert ldl.normalized(hessian).diagonal().mean().item() == pytest.approx(1)


def test_singular_hessian_is_damped_until_it_factors() -> None:
    row = torch.randn(1, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(ldl.feedback_factor(row.T @ row)).all()


def test_indefinite_hessian_is_refused() -> None:
    h = torch.full((128, 128), 5.0, dtype=torch.float64)
    h[:64, 64:] = h[64:, :64] = -50.0
    h.diagonal().fill_(1.0)
    with pytest.raises(FormatError, match="positive semi-definite"):
        ldl.feedback_factor(h)


def test_hessian_checks() -> None:
    _, good = cases.random_case(128, 128)
    ldl.check_hessian(good, 128)
    with pytest.raises(FormatError, match=r"hessian: expected shape \(64, 64\), got \(128, 128\)"):
        ldl.check_hessian(good, 64)
    bad = good.clone()
    bad[3, 4] = float("nan")
    with pytest.raises(FormatError, match=r"hessian: expected finite values, got nan at \(3, 4\)"):
        ldl.check_hessian(bad, 128)
    bad = good.clone()
    bad[5, 5] = -1
    with pytest.raises(FormatError, match="negative diagonal"):
        ldl.check_hessian(bad, 128)
    bad = good.clone()
    bad[0, 1] += good.abs().max()
    with pytest.raises(FormatError, match="symmetric"):
        ldl.check_hessian(bad, 128)


def test_dead_hessian() -> None:
    assert ldl.is_dead(torch.zeros(4, 4))
    assert ldl.is_dead(torch.eye(4) * 1e-21)
    assert not ldl.is_dead(torch.eye(4) * 1e-19)
