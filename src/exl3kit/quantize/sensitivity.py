"""What an error of each routed expert costs, measured in one pass of the unquantised model.

At a given rate every regularised matrix has about the same relative error, so an expert's output is
wrong by about the same share of its energy, whichever expert it is. What differs is how much of the
residual stream that output is, which is what the norms of all later layers see:

    weight(e) = sum over the tokens t routed to e of  |w_t f_e(y_t)|^2 / |x_t|^2

w_t the router's weight, f_e(y_t) the expert's output, x_t the stream behind the layer. It counts
how often an expert is chosen, and how much it then says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.models.forward import Carry, ForwardModel, Weights, gated_activation
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize.allocate import Expert

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint

# Tokens measured at most, whole rows: with 160 experts of which 8 are chosen, 800 an expert.
MAX_TOKENS = 16384
_DIGITS = 3
_TINY = 1e-30  # stands for the energy of a token whose stream is zero


@torch.inference_mode()
def measure_experts(
    checkpoint: Checkpoint,
    model: ForwardModel,
    rows: Tensor,
    layers: Collection[int],
    progress: Callable[[int, int], None] | None = None,
) -> dict[Expert, float]:
    """The weight of every routed expert of `layers`, from token rows (R, S) int64, or some of them.

    Layers are read one at a time, on the CPU. Weights have three digits: sums differ in the last
    bits with the number of threads, and the plan made of them must not. `progress` is given the
    layers done and their total.
    """
    tokens = rows[:: max(1, -(-rows.numel() // MAX_TOKENS))]
    x = model.embed(tokens, ModuleWeights(checkpoint)["model.embed_tokens.weight"])
    carry, found = Carry(), {}
    for layer in range(max(layers, default=-1) + 1):
        weights = ModuleWeights(checkpoint, f"model.layers.{layer}.")
        if layer in layers:
            x, energies = _measured_layer(x, weights, model, layer, carry)
            found.update({(layer, expert): energy for expert, energy in enumerate(energies)})
        else:
            x = model.decoder_layer(x, weights, layer, carry)
        if progress is not None:
            progress(layer + 1, max(layers) + 1)
    return found


def _measured_layer(
    x: Tensor, weights: Weights, model: ForwardModel, layer: int, carry: Carry
) -> tuple[Tensor, list[float]]:
    """x (R, S, H) behind the layer, and the weight of each of its experts."""
    x = model.attention_block(x, weights, layer, carry)
    tokens = model.mlp_input(x, weights).flatten(0, 1)
    out = torch.zeros_like(tokens)
    if model.has_shared_experts:
        out += model.shared_experts(tokens, weights)
    spoken: list[tuple[Tensor, Tensor]] = []
    for expert, index, weight in model.route(tokens, weights).by_expert(model.num_experts):
        gate, up, down = (weights[f"mlp.experts.{expert}.{name}.weight"] for name in PROJECTIONS)
        said = F.linear(gated_activation(tokens[index], gate, up), down) * weight[:, None]
        out.index_add_(0, index, said)
        spoken.append((index, said.double().square().sum(-1)))
    x = x + out.view_as(x)
    stream = x.flatten(0, 1).double().square().sum(-1).clamp(min=_TINY)
    shares = [float((energy / stream[index]).sum()) for index, energy in spoken]
    return x, [float(f"{share:.{_DIGITS}g}") for share in shares]
