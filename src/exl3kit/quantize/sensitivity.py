"""What an error of each routed expert costs, measured in one pass of the unquantised model.

Regularising makes all matrices equally hard to quantise, so an expert's matrices are given the
error that the codebook leaves at two bits, as noise, and its weight is what that does to the
residual stream, seen as the norms of all later layers see it:

    weight(e) = sum over the tokens t routed to e of  |w_t (f'_e(y_t) - f_e(y_t))|^2 / |x_t|^2

w_t the router's weight, f_e and f'_e the expert without and with noise, x_t the stream behind the
layer. It counts how often an expert is chosen, how much it says, and how wrong that gets. On the
demo model, correlation of its logarithm with that of the KL divergence that noise in this one
expert causes, within a layer, mean of three layers:

    |w (f' - f)|^2 / |x|^2   (this)    0.90
    |w f|^2 / |x|^2                    0.79
    tokens routed                      0.71
    w^2                                0.71

Without the division a few tokens of enormous activations decide, which the next norm divides away:
0.37 over the experts of all layers, against 0.60. Weights are those of the calibration text: an
expert of prose weighs little on chat.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.models.forward import Carry, ForwardModel, Weights, gated_activation
from exl3kit.quantize.allocate import Expert
from exl3kit.quantize.weights import LayerWeights

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint

# Tokens measured at most, whole rows: with 160 experts of which 8 are chosen, 800 an expert.
MAX_TOKENS = 16384
_NOISE = 0.04  # of a matrix' energy: about what two bits leave with error feedback
_DIGITS = 3
_TINY = 1e-30  # stands for the energy of a token whose stream is zero


@torch.inference_mode()
def measure_experts(
    checkpoint: Checkpoint,
    model: ForwardModel,
    rows: Tensor,
    layers: Collection[int],
    device: torch.device,
) -> dict[Expert, float]:
    """The weight of every routed expert of `layers`, from token rows (R, S) int64, or some of them.

    Layers are read one at a time, to `device`. Weights have three digits: sums differ in the last
    bits with the number of threads, and the plan made of them should not.
    """
    tokens = rows[:: max(1, -(-rows.numel() // MAX_TOKENS))]
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    x = model.embed(tokens, embedding).to(device)
    carry, found = Carry(), {}
    for layer in range(max(layers, default=-1) + 1):
        weights = LayerWeights(checkpoint, layer, device)
        if layer in layers:
            x, measured = _measured_layer(x, weights, model, layer, carry)
            found.update({(layer, expert): weight for expert, weight in enumerate(measured)})
        else:
            x = model.decoder_layer(x, weights, layer, carry)
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
    wrong: list[tuple[Tensor, Tensor]] = []
    for expert, index, weight in model.route(tokens, weights).by_expert(model.num_experts):
        names = [f"mlp.experts.{expert}.{name}.weight" for name in PROJECTIONS]
        dense = [weights[name] for name in names]
        said = _expert(tokens[index], dense) * weight[:, None]
        noisy = [add_noise(w, f"{layer}.{n}") for w, n in zip(dense, names, strict=True)]
        error = _expert(tokens[index], noisy) * weight[:, None] - said
        out.index_add_(0, index, said)
        wrong.append((index, error.double().square().sum(-1)))
    x = x + out.view_as(x)
    stream = x.flatten(0, 1).double().square().sum(-1).clamp(min=_TINY)
    shares = [float((energy / stream[index]).sum()) for index, energy in wrong]
    return x, [float(f"{share:.{_DIGITS}g}") for share in shares]


def _expert(x: Tensor, projections: list[Tensor]) -> Tensor:
    gate, up, down = projections
    return F.linear(gated_activation(x, gate, up), down)


def add_noise(weight: Tensor, name: str) -> Tensor:
    """weight (out, in) with an error of 4 % of its energy, spread over rows and columns as EXL3's.

    The quantiser evens out rows and columns first, so its error at an entry goes with the RMS of
    the entry's row times that of its column. The draw depends on `name` and the kind of device.
    """
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    rows = weight.square().mean(1, keepdim=True).sqrt()
    columns = weight.square().mean(0, keepdim=True).sqrt()
    size = rows * columns
    size *= (_NOISE * weight.square().sum() / size.square().sum().clamp(min=_TINY)).sqrt()
    return weight + size * torch.randn(weight.shape, generator=generator, device=weight.device)
