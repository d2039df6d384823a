"""A candidate checkpoint against the reference it was made from, on the same windows of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl3kit.errors import CheckpointError
from exl3kit.evaluate.metrics import TokenMetrics, token_metrics
from exl3kit.evaluate.states import FinalStates, Progress, final_states, text_windows
from exl3kit.models.registry import model_map

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint


def compare(
    candidate: Checkpoint,
    reference: Checkpoint,
    text: str,
    window: int = 512,
    progress: Progress | None = None,
    device: str = "cpu",
) -> TokenMetrics:
    """Every predicted token of `text`, in windows of `window` tokens that do not overlap.

    `metrics.summarize` makes figures of it. `progress` counts the layers of both, which run on
    `device`. CheckpointError
    when the two do not have the same vocabulary or do not make the same tokens of the text.
    """
    tokens = shared_windows(candidate, reference, text, window)
    expected = final_states(reference, tokens, _half(progress, 0), device)
    reached = final_states(candidate, tokens, _half(progress, 1), device)
    return compare_states(reached, expected, tokens)


def _half(progress: Progress | None, models_before: int) -> Progress | None:
    """`progress` of one of two models with the same number of layers."""
    if progress is None:
        return None
    return lambda done, total: progress(models_before * total + done, 2 * total)


def shared_windows(candidate: Checkpoint, reference: Checkpoint, text: str, window: int) -> Tensor:
    """Token rows (R, window) that both checkpoints' tokenizers make of `text`."""
    sizes = [model_map(c.config).vocab_size for c in (reference, candidate)]
    if sizes[0] != sizes[1]:
        raise CheckpointError(
            f"{candidate.path}: vocab_size {sizes[1]}: expected the reference's {sizes[0]}"
        )
    rows = [text_windows(text, c.path, sizes[0], window) for c in (reference, candidate)]
    if not torch.equal(rows[0], rows[1]):
        raise CheckpointError(
            f"{candidate.path}: tokenizer.json: expected the tokens of {reference.path} for this "
            "text, got others; KL divergence compares the same tokens only"
        )
    return rows[0]


@torch.inference_mode()
def compare_states(candidate: FinalStates, reference: FinalStates, tokens: Tensor) -> TokenMetrics:
    """Metrics, on the CPU, from both models' states on token rows (R, S), a window at a time."""
    windows = [
        token_metrics(reference.logits(i), candidate.logits(i), row[1:])
        for i, row in enumerate(tokens.to(reference.hidden.device))
    ]
    columns = ("nll", "reference_nll", "kld", "agrees")
    stacked = [torch.stack([getattr(w, column) for w in windows]).cpu() for column in columns]
    return TokenMetrics(*stacked)
