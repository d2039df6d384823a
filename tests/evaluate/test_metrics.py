"""Metrics against closed forms, and intervals that mean what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.evaluate.metrics import (
    Index,
    TokenMetrics,
    exp_or_infinity,
    interval,
    summarize,
    token_metrics,
    token_nll,
)


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log().float()


def test_closed_forms_of_one_token() -> None:
    reference, candidate = logits_of([0.5, 0.25, 0.25]), logits_of([0.25, 0.5, 0.25])
    found = token_metrics(reference, candidate, torch.tensor([1]))
    assert found.nll.item() == pytest.approx(math.log(2))
    assert found.reference_nll.item() == pytest.approx(math.log(4))
    assert found.kld.item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))
    assert found.agrees.item() == 0


def test_nll_is_cross_entropy() -> None:
    logits = torch.randn(100, 50, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(100) % 50
    expected = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(token_nll(logits, targets), expected)


def test_equals_torchs_kl_div_over_many_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(200, 50, generator=generator) for _ in range(2))
    found = token_metrics(p, q, torch.zeros(200, dtype=torch.int64))
    expected = torch.nn.functional.kl_div(
        q.double().log_softmax(-1), p.double().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(found.kld, expected, rtol=1e-12, atol=0)


def test_a_model_against_itself_and_a_shift_of_all_logits() -> None:
    logits = torch.randn(100, 4096, generator=torch.Generator().manual_seed(1)) * 8
    targets = torch.arange(100)
    same = token_metrics(logits, logits, targets)
    assert (same.kld == 0).all() and (same.agrees == 1).all()
    assert torch.equal(same.nll, same.reference_nll)
    shifted = token_metrics(logits, logits + 2, targets)
    assert shifted.kld.max() < 1e-11  # the square of what rounding of logits + 2 moves


def test_a_small_divergence_is_not_lost_in_float32() -> None:
    # second order: KL of logits moved by d is about half the variance of d under p
    logits = torch.zeros(1, 4096)
    moved = logits.clone()
    moved[0, ::2] += 2.0**-16
    kld = token_metrics(logits, moved, torch.zeros(1, dtype=torch.int64)).kld.item()
    assert kld == pytest.approx(2.0**-32 / 8, rel=1e-4)


@pytest.mark.parametrize(("name", "bad"), [("reference", 0), ("candidate", 1)])
def test_logits_that_are_not_finite_are_refused(name: str, bad: int) -> None:
    pair = [torch.zeros(3, 4), torch.zeros(3, 4)]
    pair[bad][1, 2] = math.nan
    with pytest.raises(CheckpointError, match=f"{name}: expected finite logits.* 1 of 3 tokens"):
        token_metrics(pair[0], pair[1], torch.zeros(3, dtype=torch.int64))


def metrics_of(kld: torch.Tensor, nll: torch.Tensor) -> TokenMetrics:
    return TokenMetrics(nll, torch.full_like(nll, 2.0), kld, (kld < 0.5).double())


def test_a_perplexity_beyond_float64_is_infinite() -> None:
    nll = torch.full((2, 5), 710.0, dtype=torch.float64)
    quality = summarize(metrics_of(torch.zeros(2, 5), nll))
    assert quality.perplexity == math.inf
    assert quality.intervals["perplexity"] == (math.inf, math.inf)
    assert exp_or_infinity(709.0) == pytest.approx(math.exp(709))


def test_summary_figures() -> None:
    kld = torch.arange(100, dtype=torch.float64).view(4, 25) / 100
    nll = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[:, None].expand(4, 25)
    quality = summarize(metrics_of(kld, nll))
    assert quality.perplexity == pytest.approx(math.exp(2.5))
    assert quality.reference_perplexity == pytest.approx(math.exp(2))
    assert quality.perplexity_ratio == pytest.approx(math.exp(0.5))
    assert quality.kld_mean == pytest.approx(0.495)
    assert quality.kld_median == pytest.approx(0.495)
    assert quality.kld_p99 == pytest.approx(0.9801)
    assert quality.kld_max == 0.99
    assert quality.top1_agreement == 0.5
    assert (quality.windows, quality.predicted_tokens) == (4, 100)
    assert quality.intervals["reference_perplexity"] == pytest.approx((math.exp(2),) * 2)
    low, high = quality.intervals["kld_p99"]
    assert low < quality.kld_p99 <= high


def test_intervals_are_those_of_the_mean_and_repeat_with_the_seed() -> None:
    values = np.random.default_rng(0).normal(3.0, 1.0, 400)

    def mean(windows: Index) -> float:
        return float(values[windows].mean())

    low, high = interval(mean, 400, seed=1) or (0, 0)
    half = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - half, abs=0.02)
    assert high == pytest.approx(values.mean() + half, abs=0.02)
    assert interval(mean, 400, seed=1) == (low, high)
    assert interval(mean, 400, seed=2) != (low, high)


def test_one_window_has_no_interval() -> None:
    quality = summarize(metrics_of(torch.zeros(1, 5, dtype=torch.float64), torch.ones(1, 5)))
    assert quality.intervals == {}
