"""Routed experts of one layer: quantised one after another on the tokens routed to them.

Gate and up share the Hessian of the expert's inputs, down has that of its activations. The linears
of `at_once` experts go to the quantiser together: one matrix offers it a row of tiles at a time,
which leaves cores, or a GPU, idle; and as many such groups as there are devices are quantised side
by side. A projection has one scale g a layer and rate: searching each matrix costs as much as
encoding it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.models.base import ShardKind
from exl3kit.models.forward import ForwardModel, Routing, Weights, gated_activation
from exl3kit.quantize.activations import PIECE_TOKENS
from exl3kit.quantize.contents import PlannedLinear
from exl3kit.quantize.hessian import ExpertHessians, LayerHessians
from exl3kit.quantize.layout import Layout
from exl3kit.quantize.linears import Assignment, LinearQuantizer
from exl3kit.quantize.scale import search_scale
from exl3kit.quantize.weights import LayerWeights

# Experts a scale is searched on. The error is flat around its minimum: 0.01 off costs 0.04 % at 3
# bits, 0.05 off 0.9 %, and 32 tiles find g within 0.02.
_SCALE_EXPERTS = 2

Projections = tuple[PlannedLinear, PlannedLinear, PlannedLinear]  # gate, up, down


@dataclass(frozen=True)
class _Routed:
    """An expert, the indices (n,) of the tokens routed to it, and their weights (n,)."""

    expert: int
    index: Tensor
    weight: Tensor


class ExpertPass:
    """The routed experts of `layer` and its `tokens` (T, H), wherever those lie.

    `planned` is empty if the experts stay as they are. With `route_all` Hessians are made of all
    tokens, as if the router sent every expert each of them; what the layer computes is the same.
    """

    def __init__(
        self,
        model: ForwardModel,
        layer: int,
        planned: Sequence[Projections],
        weights: LayerWeights,
        quantizer: LinearQuantizer,
        tokens: Tensor,
        device: torch.device,
        route_all: bool,
    ) -> None:
        self._model, self._layer, self._planned = model, layer, planned
        self._weights, self._quantizer = weights, quantizer
        self._tokens, self._device, self._route_all = tokens, device, route_all
        self._scales: dict[tuple[str, int | float], float] = {}

    def run_into(self, out: Tensor, at_once: int) -> None:
        """Quantise all experts, and write what they make of the tokens to `out` (T, H)."""
        out.zero_()
        routed = [_Routed(*found) for found in self._routing().by_expert(self._model.num_experts)]
        groups = [routed[i : i + at_once] for i in range(0, len(routed), at_once)]
        busy = len(self._quantizer.devices)
        for start in range(0, len(groups), busy):
            turn = groups[start : start + busy]
            if self._planned:
                self._quantize([g for g in turn if not all(map(self._is_done, g))])
            for one in (one for group in turn for one in group):
                self._add_output(one, out)

    def _routing(self) -> Routing:
        parts = [self._model.route(piece, self._weights) for piece in self._pieces()]
        return Routing(
            torch.cat([part.topk_ids for part in parts]),
            torch.cat([part.topk_weights for part in parts]),
        )

    def _quantize(self, groups: Sequence[Sequence[_Routed]]) -> None:
        """All linears of groups of experts: a group's gates and ups in a call, downs in another."""
        batches = []
        for group in groups:
            work = [assignment for one in group for assignment in self._assignments(one)]
            for names in (PROJECTIONS[:2], PROJECTIONS[2:]):
                batches.append([a for a in work if a.spec.name.endswith(names)])
        self._quantizer.quantize(batches, self._planned[0][0].layout)

    def _is_done(self, one: _Routed) -> bool:
        planned = self._planned[one.expert]
        return all(self._quantizer.is_done(p.spec.name, p.layout) for p in planned)

    def _assignments(self, one: _Routed) -> Iterator[Assignment]:
        """The three linears of an expert, with the Hessians of its tokens."""
        planned = self._planned[one.expert]
        dense = [self._dense(one.expert, name) for name in PROJECTIONS]
        hessians = self._expert_hessians(one, dense[0], dense[1])
        moments = (hessians.gate_up, hessians.gate_up, hessians.down)
        for name, linear, weight, moment in zip(PROJECTIONS, planned, dense, moments, strict=True):
            yield Assignment(
                spec=linear.spec,
                bits=linear.bits,
                weight=weight,
                hessian=moment,
                coverage=hessians.coverage,
                tokens=len(self._tokens) if self._route_all else len(one.index),
                scale=self._scale(linear, name),
            )

    def _expert_hessians(self, one: _Routed, gate: Tensor, up: Tensor) -> ExpertHessians:
        if self._route_all:
            return self._hessians.of_all(one.expert, gate, up, self._pieces())
        return self._hessians.of(one.expert, gate, up, [self._inputs(one)])

    @cached_property
    def _hessians(self) -> LayerHessians:
        found = LayerHessians(f"model.layers.{self._layer}", len(self._tokens))
        for piece in self._pieces():
            found.add(piece)
        return found

    def _pieces(self) -> Iterator[Tensor]:
        return (piece.to(self._device) for piece in self._tokens.split(PIECE_TOKENS))

    def _scale(self, linear: PlannedLinear, projection: str) -> float:
        key = projection, linear.bits
        if key not in self._scales:
            quantizer, count = self._quantizer, self._model.num_experts
            settings = linear.bits, quantizer.codebook, quantizer.seed
            found = layer_scale(self._weights, count, projection, linear.layout, *settings)
            self._scales[key] = found
        return self._scales[key]

    def _add_output(self, one: _Routed, out: Tensor) -> None:
        """Add an expert's weighted output for its tokens, as the checkpoint will have it."""
        if not len(one.index):
            return
        gate, up, down = (self._final(one.expert, i) for i in range(len(PROJECTIONS)))
        result = F.linear(gated_activation(self._inputs(one), gate, up), down)
        result *= one.weight[:, None]
        out.index_add_(0, one.index.to(out.device), result.to(out.device))

    def _final(self, expert: int, projection: int) -> Tensor:
        if not self._planned:
            return self._dense(expert, PROJECTIONS[projection])
        linear = self._planned[expert][projection]
        return self._quantizer.decoded(linear.spec, linear.layout, self._device)

    def _inputs(self, one: _Routed) -> Tensor:
        chosen = self._tokens.index_select(0, one.index.to(self._tokens.device))
        return chosen.to(self._device)

    def _dense(self, expert: int, projection: str) -> Tensor:
        return self._weights[f"mlp.experts.{expert}.{projection}.weight"]


def layer_scale(
    weights: Weights,
    num_experts: int,
    projection: str,
    layout: Layout,
    bits: int | float,
    codebook: str,
    seed: int,
) -> float:
    """The g of one projection of a layer, from a matrix each of a few experts spread over it.

    `weights` has the layer's tensors by local name, with `num_experts` experts.
    """
    kind = ShardKind.ROW if projection == "down_proj" else ShardKind.COLUMN
    matrices = []
    for expert in range(0, num_experts, -(-num_experts // _SCALE_EXPERTS)):
        weight = weights[f"mlp.experts.{expert}.{projection}.weight"].T
        matrices.append(layout.split(weight, None, kind)[0][0])
    return search_scale(matrices, bits, codebook, seed)
