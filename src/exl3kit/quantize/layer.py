"""One decoder layer: its linears are quantised on what reaches them, then the rows pass through it.

A part of the layer (attention, dense MLP, shared experts) first runs as it is, to see the inputs of
those of its linears that become EXL3; after that it runs with the quantised ones. So the experts
are calibrated behind quantised attention, and the next layer behind this one as it will be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl3kit.models.forward import ForwardModel, Observe
from exl3kit.quantize.activations import Hidden, Scratch
from exl3kit.quantize.contents import PlannedLinear
from exl3kit.quantize.experts import ExpertPass
from exl3kit.quantize.hessian import Coverage, InputMoments, require_finite
from exl3kit.quantize.layout import WHOLE
from exl3kit.quantize.linears import Assignment, LinearQuantizer
from exl3kit.quantize.weights import LayerWeights


class Buffers:
    """Two (T, H) buffers that all layers use: the MLP's input, and what its experts add up to."""

    def __init__(self, hidden: Hidden, scratch: Scratch) -> None:
        shape = hidden.x.flatten(0, 1).shape
        self.tokens, self.sum = scratch.make(*shape), scratch.make(*shape)


@dataclass(frozen=True)
class LayerPass:
    """Quantises the `linears` of `layer` and runs it; `at_once` experts are encoded together."""

    model: ForwardModel
    layer: int
    linears: Sequence[PlannedLinear]
    weights: LayerWeights
    quantizer: LinearQuantizer
    device: torch.device
    at_once: int
    route_all: bool

    @property
    def _prefix(self) -> str:
        return f"model.layers.{self.layer}."

    def run(self, hidden: Hidden, buffers: Buffers) -> None:
        """Take `hidden` through the layer, in place. CheckpointError if it turns non-finite."""
        self._attention(hidden)
        self._require_finite(hidden, "self_attn")
        self._mlp(hidden, buffers)
        self._require_finite(hidden, "mlp")

    def _attention(self, hidden: Hidden) -> None:
        def observed(observe: Observe) -> None:
            for piece, carry in zip(hidden.pieces, hidden.carries, strict=True):
                x, kept = piece.to(self.device), copy.copy(carry)
                self.model.attention_block(x, self.weights, self.layer, kept, observe)

        self._quantize_dense("self_attn.", observed, hidden.num_tokens)
        for piece, carry in zip(hidden.pieces, hidden.carries, strict=True):
            x = piece.to(self.device)
            piece.copy_(self.model.attention_block(x, self.weights, self.layer, carry))

    def _mlp(self, hidden: Hidden, buffers: Buffers) -> None:
        places = buffers.tokens.split([p.shape[0] * p.shape[1] for p in hidden.pieces])
        for piece, place in zip(hidden.pieces, places, strict=True):
            x = self.model.mlp_input(piece.to(self.device), self.weights)
            place.copy_(x.flatten(0, 1))
        if self.model.is_moe(self.layer):
            self._experts(buffers)
            hidden.x.add_(buffers.sum.view_as(hidden.x))
            if self.model.has_shared_experts:
                self._add(hidden, places, "mlp.shared_experts.", self.model.shared_experts)
        else:
            self._add(hidden, places, "mlp.", self.model.dense_mlp)

    def _add(
        self,
        hidden: Hidden,
        places: Sequence[Tensor],
        prefix: str,
        part: Callable[..., Tensor],
    ) -> None:
        """Quantise the linears under `prefix` and add what `part` makes of the MLP's input."""

        def observed(observe: Observe) -> None:
            for tokens in places:
                part(tokens.to(self.device), self.weights, observe)

        self._quantize_dense(prefix, observed, hidden.num_tokens)
        for piece, tokens in zip(hidden.pieces, places, strict=True):
            out = part(tokens.to(self.device), self.weights)
            piece.add_(out.view(piece.shape).to(piece.device))

    def _experts(self, buffers: Buffers) -> None:
        planned = [p for p in self.linears if f"{self._prefix}mlp.experts." in p.spec.name]
        experts = [(planned[i], planned[i + 1], planned[i + 2]) for i in range(0, len(planned), 3)]
        passing = ExpertPass(
            self.model,
            self.layer,
            experts,
            self.weights,
            self.quantizer,
            buffers.tokens,
            self.device,
            self.route_all,
        )
        passing.run_into(buffers.sum, self.at_once)

    def _quantize_dense(
        self, prefix: str, observed: Callable[[Observe], None], tokens: int
    ) -> None:
        """Quantise the layer's dense linears under `prefix`, and put them in place.

        `observed` runs that part on all `tokens`, telling its callback what the linears are given.
        """
        linears = {
            p.spec.name.removeprefix(self._prefix): p
            for p in self.linears
            if p.spec.name.startswith(f"{self._prefix}{prefix}")
        }
        if not all(self.quantizer.is_done(p.spec.name, WHOLE) for p in linears.values()):
            moments = InputMoments(linears)
            observed(moments.observe)
            work = [
                Assignment(
                    spec=planned.spec,
                    bits=planned.bits,
                    weight=self.weights[f"{local}.weight"],
                    hessian=moments.of(local),
                    coverage=Coverage.ALL,
                    tokens=tokens,
                )
                for local, planned in linears.items()
            ]
            self.quantizer.quantize([work], WHOLE)
        for local, planned in linears.items():
            decoded = self.quantizer.decoded(planned.spec, WHOLE, self.device)
            self.weights.replace(f"{local}.weight", decoded)

    def _require_finite(self, hidden: Hidden, part: str) -> None:
        for piece in hidden.pieces:
            require_finite(piece, f"{self._prefix}{part}: output")
