"""Perplexity of a plain or EXL3 checkpoint on a text.

The text is cut into windows that do not overlap; in each, every token but the first is predicted
from those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from exl3kit.evaluate.metrics import Interval, exp_or_infinity, interval, token_nll
from exl3kit.evaluate.states import Progress, final_states, text_windows
from exl3kit.models.registry import model_map

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint


@dataclass(frozen=True)
class Perplexity:
    """Result on one text: `perplexity` = exp(`nll`), `nll` in nats per predicted token.

    `interval` is the 95 % interval of the perplexity, None where there is but one window.
    """

    perplexity: float
    interval: Interval | None
    nll: float
    predicted_tokens: int
    windows: int
    window: int


@torch.inference_mode()
def perplexity(
    checkpoint: Checkpoint,
    text: str,
    window: int = 512,
    progress: Progress | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Perplexity:
    """Perplexity of `text` under `checkpoint`; `window` in tokens, `seed` draws the resamples.

    Infinite where float64 has no number for it. A tail shorter than a window is left out.
    `progress` is given the layers done and their total.
    Raises TextError when the text is shorter than one window and UnsupportedError for an
    architecture without a forward pass.
    """
    vocab_size = model_map(checkpoint.config).vocab_size
    tokens = text_windows(text, checkpoint.path, vocab_size, window)
    states = final_states(checkpoint, tokens, progress, device)
    rows = tokens.to(states.hidden.device)
    means = np.array(
        [float(token_nll(states.logits(i), row[1:]).mean()) for i, row in enumerate(rows)]
    )
    nll = float(means.mean())
    return Perplexity(
        perplexity=exp_or_infinity(nll),
        interval=interval(lambda i: exp_or_infinity(means[i].mean()), len(means), seed),
        nll=nll,
        predicted_tokens=tokens[:, 1:].numel(),
        windows=len(tokens),
        window=window,
    )
