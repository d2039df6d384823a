"""Regularising: what is undone exactly, what comes out Gaussian, what is zero stays zero."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.decode import rotate_back
from exl3kit.format.spec import GAUSS_SCALE
from exl3kit.quantize.regularize import check_signs, make_signs, pad_matrix, regularize
from tests.quantize import cases


def test_is_undone_by_the_decoder() -> None:
    regular = regularize(cases.weight(), cases.signs())
    back = rotate_back(regular.inner, regular.su, regular.sv, torch.float64)
    assert torch.allclose(back, cases.weight().double(), rtol=0, atol=1e-12)


def test_outliers_are_gone() -> None:
    """The golden matrix has rows of 6 and columns of 8 times the usual size."""
    regular = regularize(cases.weight(), cases.signs())
    assert regular.inner.square().mean().sqrt().item() == pytest.approx(GAUSS_SCALE, rel=1e-6)
    assert regular.inner.abs().max() < 6 * GAUSS_SCALE
    kurtosis = (regular.inner / GAUSS_SCALE).pow(4).mean().item()
    assert 2.5 < kurtosis < 3.2


def test_signs_are_where_the_format_has_them() -> None:
    regular = regularize(cases.weight(), cases.signs())
    assert torch.equal(-regular.su.sign(), cases.signs()[0].double())
    assert torch.equal(regular.sv.sign(), cases.signs()[1].double())


def test_zero_channels_decode_to_exact_zeros() -> None:
    weight = cases.weight().clone()
    weight[:, 7], weight[13] = 0, 0
    regular = regularize(weight, cases.signs())
    assert regular.sv[7] == 0
    assert regular.su[13] == 0
    assert torch.isfinite(regular.inner).all()
    back = rotate_back(regular.inner, regular.su, regular.sv, torch.float64)
    assert torch.allclose(back, weight.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_size_of_the_weights_does_not_matter(size: float) -> None:
    regular = regularize(cases.weight().double() * size, cases.signs())
    # 1e-10 is added to the scales; it is not small beside weights of 1e-27.
    assert torch.isfinite(regular.inner).all()
    if size > 1:
        assert torch.allclose(regular.inner, cases.inner(), rtol=1e-6, atol=1e-6)


def test_padding_is_zero_and_up_to_128() -> None:
    padded = pad_matrix(torch.ones(130, 128))
    assert padded.shape == (256, 128)
    assert padded[130:].abs().max() == 0
    assert padded.sum() == 130 * 128


def test_signs_are_drawn_from_the_seed() -> None:
    first, again, other = (make_signs(128, 256, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert set(torch.cat(first).tolist()) == {-1.0, 1.0}


def test_signs_are_checked_and_padded() -> None:
    ones = torch.ones(130), torch.ones(128)
    padded = check_signs(ones, 130, 128)
    assert [len(v) for v in padded] == [256, 128]
    with pytest.raises(
        FormatError, match=r"signs \(in\): expected \(130,\) or \(256,\), got \(7,\)"
    ):
        check_signs((torch.ones(7), ones[1]), 130, 128)
    for wrong in (0.0, 2.0, float("nan")):
        with pytest.raises(FormatError, match=r"signs \(out\): expected \+1 or -1"):
            check_signs((ones[0], torch.full((128,), wrong)), 130, 128)
