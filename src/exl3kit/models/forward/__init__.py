"""The forward pass of every known architecture in plain torch, one decoder layer at a time.

Calibration and evaluation need a layer's arithmetic, not a serving engine. `forward_model(config)`
gives a `ForwardModel`; a pass over token rows (R, S) is

    x = model.embed(rows, weights["model.embed_tokens.weight"])          # (R, S, H) fp32
    carry = Carry()                                # what the rows hand on from layer to layer
    for layer in range(model.num_hidden_layers):
        own = ModuleWeights(checkpoint, f"model.layers.{layer}.")
        x = model.decoder_layer(x, own, layer, carry)
    logits = model.logits(x, weights["model.norm.weight"], head)          # (R, S, V) fp32

and `decoder_layer` is made of steps that a caller may take alone:

    x = model.attention_block(x, own, layer, carry)      # x + attention(norm(x))
    y = model.mlp_input(x, own).flatten(0, 1)            # norm(x): tokens (T, H)
    if model.is_moe(layer):
        routing = model.route(y, own)                    # topk_ids, topk_weights (T, K_top)
        y = model.routed_experts(y, routing, own) (+ model.shared_experts(y, own))
    else:
        y = model.dense_mlp(y, own)
    x = x + y.view_as(x)

Weights are a mapping of layer-local names to fp32 tensors in Hugging Face orientation
(out_features, in_features), asked for one at a time, so a lazy mapping keeps one matrix resident.
Rows are independent sequences from position 0; they may be passed in pieces, each with a `Carry` of
its own. Everything runs on the device of x, where the weights must be too. An `observe` callback is
given the inputs of attention's linears, of a dense MLP and of shared experts: `observe(names, x)`,
with the layer-local names of the linears that share one ("self_attn.q_proj", ...) and x (..., n).
A next-token layer is fed by `mtp_input` and runs as any other decoder layer.

Each architecture is held to transformers' own class by tests/models/forward. A config value that
the arithmetic here does not cover is refused by name with UnsupportedError.
"""

from __future__ import annotations

from exl3kit.models.forward.base import Carry, Observe, Routing, Weights
from exl3kit.models.forward.mlp import gated_activation
from exl3kit.models.forward.model import ForwardModel
from exl3kit.models.forward.registry import forward_model

__all__ = [
    "Carry",
    "ForwardModel",
    "Observe",
    "Routing",
    "Weights",
    "forward_model",
    "gated_activation",
]
