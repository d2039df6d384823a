"""Perplexity of a plain or EXL3 checkpoint, layer by layer in fp32.

The text is cut into windows that do not overlap; in each, every token but the first is predicted
from those before it. All windows pass one layer before the next is read, so memory is the hidden
states of the text plus one decoded expert, and an EXL3 file is measured through exactly the dense
weights its tensors stand for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.models.forward import Carry, ForwardModel, forward_model
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize.calibration import TextError, encode_text

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint


@dataclass(frozen=True)
class Perplexity:
    """Result on one text: `perplexity` = exp(`nll`), `nll` in nats per predicted token."""

    perplexity: float
    nll: float
    predicted_tokens: int
    windows: int
    window: int


@torch.inference_mode()
def perplexity(
    checkpoint: Checkpoint,
    text: str,
    window: int = 512,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity of `text` under `checkpoint`, fp32 arithmetic.

    `window` is in tokens; a tail shorter than a window is left out. `progress` is given the layers
    done and their total. Raises TextError when the text is shorter than one window and
    UnsupportedError for an architecture without a forward pass.
    """
    model = forward_model(checkpoint.config)
    tokens = _windows(encode_text(text, checkpoint.path, model.vocab_size), window)
    weights = ModuleWeights(checkpoint)
    x = model.embed(tokens, weights["model.embed_tokens.weight"])
    carry = Carry()
    for layer in range(model.num_hidden_layers):
        layer_weights = ModuleWeights(checkpoint, f"model.layers.{layer}.")
        x = model.decoder_layer(x, layer_weights, layer, carry)
        if progress is not None:
            progress(layer + 1, model.num_hidden_layers)
    nll = _mean_nll(x, tokens, weights, model)
    return Perplexity(math.exp(nll), nll, tokens[:, 1:].numel(), len(tokens), window)


def _windows(tokens: Tensor, window: int) -> Tensor:
    if window < 2:
        raise TextError(f"window: expected at least 2 tokens, got {window}")
    count = len(tokens) // window
    if count == 0:
        raise TextError(
            f"text: {len(tokens)} tokens, expected at least one window of {window}; "
            "give a longer text or a smaller window"
        )
    return tokens[: count * window].view(count, window)


def _mean_nll(x: Tensor, tokens: Tensor, weights: ModuleWeights, model: ForwardModel) -> float:
    """Mean cross entropy in nats, one window's logits at a time."""
    # Presence decides, not the tie flag: files exist that say tied and hold a head of their own.
    has_head = any(name.startswith("lm_head.") for name in weights)
    head = weights["lm_head.weight" if has_head else "model.embed_tokens.weight"]
    norm = weights["model.norm.weight"]
    total = 0.0
    for hidden, row in zip(x, tokens, strict=True):
        logits = model.logits(hidden[:-1], norm, head)
        total += float(F.cross_entropy(logits, row[1:], reduction="sum").double())
    return total / tokens[:, 1:].numel()
