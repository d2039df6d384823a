"""How far one model's next-token distribution is from another's, with intervals.

Logits are fp32; every softmax, sum and mean is float64, since a KL divergence of 1e-4 is a sum of
terms that nearly cancel. Intervals are 95 % percentile bootstrap over windows: tokens of a window
share their context and are not independent, windows nearly are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
Index = slice | np.ndarray  # of windows


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
    """A candidate against its reference on one text; KL divergences in nats a token.

    `intervals` holds the 95 % interval of each figure by name, but for `kld_max`; it is empty where
    there is but one window.
    """

    perplexity: float
    reference_perplexity: float
    perplexity_ratio: float
    kld_mean: float
    kld_median: float
    kld_p99: float
    kld_max: float
    top1_agreement: float
    predicted_tokens: int
    windows: int
    intervals: Mapping[str, Interval]


def token_metrics(reference: Tensor, candidate: Tensor, targets: Tensor) -> TokenMetrics:
    """Metrics of one window: logits (n, V) of any float dtype, targets (n,) int64 -> four (n,).

    CheckpointError when logits are not finite.
    """
    parts = zip(
        reference.split(_CHUNK), candidate.split(_CHUNK), targets.split(_CHUNK), strict=True
    )
    columns = zip(*(_chunk_metrics(*part) for part in parts), strict=True)
    return TokenMetrics(*(torch.cat(column) for column in columns))


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats it takes to code targets (n,) int64 under logits (n, V): float64 (n,)."""
    parts = zip(logits.split(_CHUNK), targets.split(_CHUNK), strict=True)
    return torch.cat([-_log_softmax(x, "model").gather(1, y[:, None])[:, 0] for x, y in parts])


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
    nll, reference, agrees = (
        values.mean(1).numpy() for values in (metrics.nll, metrics.reference_nll, metrics.agrees)
    )
    kld = metrics.kld.numpy()
    figures: dict[str, Callable[[Index], float]] = {
        "perplexity": lambda i: exp_or_infinity(nll[i].mean()),
        "reference_perplexity": lambda i: exp_or_infinity(reference[i].mean()),
        "perplexity_ratio": lambda i: exp_or_infinity((nll - reference)[i].mean()),
        "kld_mean": lambda i: float(kld[i].mean()),
        "kld_median": lambda i: float(np.median(kld[i])),
        "kld_p99": lambda i: float(np.quantile(kld[i], 0.99)),
        "top1_agreement": lambda i: float(agrees[i].mean()),
    }
    intervals = {name: interval(figure, len(kld), seed) for name, figure in figures.items()}
    return Quality(
        **{name: figure(slice(None)) for name, figure in figures.items()},
        kld_max=float(kld.max()),
        predicted_tokens=kld.size,
        windows=len(kld),
        intervals={name: found for name, found in intervals.items() if found is not None},
    )


def exp_or_infinity(x: float) -> float:
    """exp(x), infinite above the 709.78 from which on float64 has no number for it."""
    with np.errstate(over="ignore"):
        return float(np.exp(x))


def interval(figure: Callable[[Index], float], windows: int, seed: int) -> Interval | None:
    """95 % bootstrap interval of `figure(i)`, taken over the windows `i`; None for one window."""
    if windows < 2:
        return None
    draws = np.random.default_rng(seed).integers(0, windows, (RESAMPLES, windows))
    resampled = [figure(draw) for draw in draws]
    # A resampled value as it is, not one between two, which of infinite ones would be NaN.
    low, high = np.quantile(resampled, (_TAIL, 1 - _TAIL), method="inverted_cdf").tolist()
    return low, high
