"""The search for g against exllamav3's, and its corner cases."""

from __future__ import annotations

import pytest
import torch

from exl3kit.format.spec import GAUSS_SCALE, Codebook
from exl3kit.quantize.scale import best_scale, sample_tiles, search_scale
from tests import golden
from tests.quantize import cases


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS, ids=lambda v: str(v))
def test_golden_scale(bits: int | float, codebook: Codebook) -> None:
    """The same samples in the same order: exllamav3's g to 3e-4 (asked for: 2 %)."""
    found = best_scale(sample_tiles(cases.inner()), bits, codebook)
    assert found == pytest.approx(golden.combination(bits, codebook)["g_scale"], rel=1e-3)


def test_samples_are_tiles_of_the_matrix_with_the_extremes() -> None:
    matrix = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)).double()
    matrix[16:32, 32:48] *= 10
    matrix[64:80, 0:16] *= 0.1
    samples = sample_tiles(matrix)
    assert len(samples) == 3 * 16 + 2 * 8
    energy = samples.square().sum(dim=1)
    assert energy[48] == energy.max()
    assert energy[-1] == energy.min()


def test_zero_samples_need_no_search() -> None:
    assert best_scale(torch.zeros(5, 256).double(), 3, "mcg") == 1.0


def test_pooled_scale_is_near_that_of_each_matrix() -> None:
    """Regularised matrices are alike whatever their size, so one g serves a pool of them."""
    weights = [cases.random_case(128, 128, seed)[0] * 10.0**seed for seed in range(2)]
    pooled = search_scale(weights, 3, "mcg")
    for weight in weights:
        assert search_scale([weight], 3, "mcg") == pytest.approx(pooled, rel=0.04)
    assert search_scale(weights, 3, "mcg") == pooled


def test_scale_answers_the_size_of_the_samples() -> None:
    """g times the deviation is what suits the codebook, so doubling the samples halves g."""
    samples = torch.randn(30, 256, generator=torch.Generator().manual_seed(2)).double()
    g = best_scale(samples * GAUSS_SCALE, 3, "mcg")
    assert best_scale(samples * GAUSS_SCALE * 2, 3, "mcg") == pytest.approx(g / 2, rel=0.04)
