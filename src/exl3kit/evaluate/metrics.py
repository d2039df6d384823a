"""How far one model's next-token distribution is from another's, with intervals.

Logits are fp32; every softmax, sum and mean is float64, since a KL divergence of 1e-4 is a sum of
terms that nearly cancel. Intervals are 95 % percentile bootstrap over windows: tokens of a window
share their context and are not independent, windows nearly are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exl3kit.errors import CheckpointError

RESAMPLES = 1000
_TAIL = 0.025  # of each side outside the interval
# Positions of one softmax: at a vocabulary of 150,000, 77 MB for each float64 copy.
_CHUNK = 64

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval; no interval where there is but one window."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class TokenMetrics:
    """One value a predicted token, (windows, tokens) float64; `agrees` is 0 or 1.

    `nll` and `reference_nll` are of the token that follows, `kld` is KL(reference || candidate),
    both in nats; `agrees` says that both models' likeliest next tokens are the same.
    """

    nll: Tensor
    reference_nll: Tensor
    kld: Tensor
    agrees: Tensor


@dataclass(frozen=True)
class Quality:
    """A candidate against its reference on one text; KL divergences in nats a token."""

    perplexity: Estimate
    reference_perplexity: Estimate
    perplexity_ratio: Estimate
    kld_mean: Estimate
    kld_median: Estimate
    kld_p99: Estimate
    kld_max: float
    top1_agreement: Estimate
    predicted_tokens: int
    windows: int


def token_metrics(reference: Tensor, candidate: Tensor, targets: Tensor) -> TokenMetrics:
    """Metrics of one window: logits (n, V) of any float dtype, targets (n,) int64 -> four (n,).

    CheckpointError when logits are not finite.
    """
    parts = zip(
        reference.split(_CHUNK), candidate.split(_CHUNK), targets.split(_CHUNK), strict=True
    )
    columns = zip(*(_chunk_metrics(*part) for part in parts), strict=True)
    return TokenMetrics(*(torch.cat(column) for column in columns))


def _chunk_metrics(
    reference: Tensor, candidate: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_p, log_q = _log_softmax(reference, "reference"), _log_softmax(candidate, "candidate")
    kld = (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)  # rounding may leave -1e-17
    agrees = log_p.argmax(-1) == log_q.argmax(-1)
    at = targets[:, None]
    nll, reference_nll = -log_q.gather(1, at)[:, 0], -log_p.gather(1, at)[:, 0]
    return nll, reference_nll, kld, agrees.double()


def _log_softmax(logits: Tensor, name: str) -> Tensor:
    is_bad = ~torch.isfinite(logits).all(-1)
    if is_bad.any():
        raise CheckpointError(
            f"{name}: expected finite logits, got NaN or infinity for {int(is_bad.sum())} of "
            f"{len(logits)} tokens"
        )
    return logits.double().log_softmax(-1)


def summarize(metrics: TokenMetrics, seed: int = 0) -> Quality:
    """The figures over all tokens of (windows, tokens), intervals resampled from `seed`."""
    nll, reference = _window_means(metrics.nll), _window_means(metrics.reference_nll)
    kld = metrics.kld.numpy()
    return Quality(
        perplexity=mean_estimate(nll, seed, np.exp),
        reference_perplexity=mean_estimate(reference, seed, np.exp),
        perplexity_ratio=mean_estimate(nll - reference, seed, np.exp),
        kld_mean=mean_estimate(kld.mean(1), seed),
        kld_median=_quantile_estimate(kld, 0.5, seed),
        kld_p99=_quantile_estimate(kld, 0.99, seed),
        kld_max=float(kld.max()),
        top1_agreement=mean_estimate(_window_means(metrics.agrees), seed),
        predicted_tokens=kld.size,
        windows=len(kld),
    )


def mean_estimate(
    values: np.ndarray, seed: int, transform: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> Estimate:
    """`transform` of the mean of float64 `values`, one a window of equal length."""
    draws = _draws(len(values), seed)
    resampled = transform(values[draws].mean(1))
    return Estimate(float(transform(values.mean())), _interval(resampled, len(values)))


def _quantile_estimate(values: np.ndarray, share: float, seed: int) -> Estimate:
    """Quantile over all tokens of (windows, tokens), between neighbours by linear interpolation."""
    resampled = [np.quantile(values[draw], share) for draw in _draws(len(values), seed)]
    return Estimate(float(np.quantile(values, share)), _interval(np.array(resampled), len(values)))


def _draws(windows: int, seed: int) -> np.ndarray:
    """Indices of the windows of each resample, (RESAMPLES, windows)."""
    return np.random.default_rng(seed).integers(0, windows, (RESAMPLES, windows))


def _interval(resampled: np.ndarray, windows: int) -> Interval | None:
    if windows < 2:
        return None
    low, high = np.quantile(resampled, (_TAIL, 1 - _TAIL)).tolist()
    return low, high


def _window_means(values: Tensor) -> np.ndarray:
    return values.mean(1).numpy()
