"""A text through all layers of a checkpoint, one layer at a time, up to the logits of a window.

All windows pass one layer before the next is read, so memory is the hidden states of the text and
one decoded matrix, afterwards the head and the logits of one window. An EXL3 file is evaluated
through exactly the dense weights its tensors stand for. All arithmetic is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exl3kit.models.forward import Carry, ForwardModel, forward_model
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize.calibration import encode_text, token_windows
from exl3kit.quantize.documents import TextError

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint

# layers done, layers in all
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class FinalStates:
    """`hidden` (R, S, H) after the last layer; `norm` (H,) and `head` (V, H) follow it.

    All on the device that the pass ran on.
    """

    model: ForwardModel
    hidden: Tensor
    norm: Tensor
    head: Tensor

    def logits(self, window: int) -> Tensor:
        """Logits (S - 1, V) of a window, for every token after its first."""
        return self.model.logits(self.hidden[window, :-1], self.norm, self.head)


def text_windows(text: str, folder: Path, vocab_size: int, window: int) -> Tensor:
    """Token rows (R, window) int64 of `text`, which do not overlap; what is left over is dropped.

    TextError for a window below 2 tokens or a text shorter than one; CheckpointError for a
    tokenizer in `folder` that is missing or does not fit the model.
    """
    if window < 2:
        raise TextError(f"window: expected at least 2 tokens, got {window}")
    return token_windows(encode_text(text, folder, vocab_size), window)


@torch.inference_mode()
def final_states(
    checkpoint: Checkpoint, tokens: Tensor, progress: Progress | None = None, device: str = "cpu"
) -> FinalStates:
    """Run token rows (R, S) int64 through all layers but the next-token ones, on `device`.

    UnsupportedError for an architecture without a forward pass here.
    """
    model, on = forward_model(checkpoint.config), torch.device(device)
    weights = ModuleWeights(checkpoint, "", on)
    x = model.embed(tokens.to(on), weights["model.embed_tokens.weight"])
    carry = Carry()
    for layer in range(model.num_hidden_layers):
        own = ModuleWeights(checkpoint, f"model.layers.{layer}.", on)
        x = model.decoder_layer(x, own, layer, carry)
        if progress is not None:
            progress(layer + 1, model.num_hidden_layers)
    # Presence decides, not the tie flag: files exist that say tied and hold a head of their own.
    has_head = any(name.startswith("lm_head.") for name in checkpoint.infos)
    head = weights["lm_head.weight" if has_head else "model.embed_tokens.weight"]
    return FinalStates(model, x, weights["model.norm.weight"], head)
