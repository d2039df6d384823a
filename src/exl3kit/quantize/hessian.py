"""Second moments of the inputs of a layer's experts, one expert at a time.

`of` gives an expert's two Hessians when the job comes to it, so that one (H, H) and one (I, I)
matrix exist at a time. An expert that saw fewer than MIN_TOKENS tokens takes the layer's: the
mean over all tokens for gate and up, the mean over all routed activations for down. A Hessian
that still carries nothing (all zero) becomes None, which quantises without error feedback.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from exl3kit.errors import CheckpointError
from exl3kit.models import glm4_moe_block as block

MIN_TOKENS = 32

# Tokens of one product. From 2,000 on the BLAS splits the sum over its threads, and its last bits
# then depend on their number; at 512 the result was the same for widths from 128 to 4096.
_CHUNK = 512
# Below this mean diagonal a Hessian says nothing; the same bound as exllamav3's.
_DEAD = 1e-20


class Coverage(StrEnum):
    """Where an expert's Hessians come from."""

    ROUTED = "routed"
    LAYER = "layer"
    NONE = "none"


@dataclass(frozen=True)
class ExpertHessians:
    """`gate_up` (H, H) and `down` (I, I), fp32 means of outer products or None, and origin."""

    gate_up: Tensor | None
    down: Tensor | None
    coverage: Coverage
    tokens: int


NO_HESSIANS = ExpertHessians(None, None, Coverage.NONE, 0)


def second_moment(x: Tensor) -> Tensor:
    """x^T x / T of tokens (T, n), fp32."""
    total = torch.zeros(x.shape[1], x.shape[1])
    for part in x.split(_CHUNK):
        total.addmm_(part.T, part)
    return total / len(x)


class LayerHessians:
    """The Hessians of one MoE layer, made from its input tokens (T, H) and their routing."""

    def __init__(
        self,
        name: str,
        tokens: Tensor,
        routing: block.Routing,
        weights: block.Weights,
        config: block.ForwardConfig,
    ) -> None:
        self._name = name
        self._tokens, self._routing = tokens, routing
        self._weights, self._config = weights, config
        self._layer: ExpertHessians | None = None

    def of(self, expert: int, inputs: Tensor, activation: Tensor) -> ExpertHessians:
        """Hessians of `expert`, which is given `inputs` (n, H) and makes `activation` (n, I).

        CheckpointError when the activations are not finite.
        """
        require_finite(activation, f"{self._name}.mlp.experts.{expert}: activation")
        count = len(inputs)
        if count < MIN_TOKENS:
            return self._layer_average(count)
        return _checked(second_moment(inputs), second_moment(activation), Coverage.ROUTED, count)

    def _layer_average(self, count: int) -> ExpertHessians:
        if self._layer is None:
            self._layer = _checked(
                second_moment(self._tokens), self._down_average(), Coverage.LAYER, 0
            )
        shared = self._layer
        return ExpertHessians(shared.gate_up, shared.down, shared.coverage, count)

    def _down_average(self) -> Tensor:
        """Mean of the outer products of every routed activation of the layer, (I, I)."""
        total: list[Tensor] = []

        def observe(expert: int, inputs: Tensor, activation: Tensor, weight: Tensor) -> None:
            moment = second_moment(activation) * len(activation)
            total[:] = [moment + total[0]] if total else [moment]

        block.routed_experts(self._tokens, self._routing, self._weights, self._config, observe)
        return total[0] / self._routing.topk_ids.numel()


def _checked(gate_up: Tensor, down: Tensor, coverage: Coverage, tokens: int) -> ExpertHessians:
    is_dead = [float(h.diagonal().mean()) < _DEAD for h in (gate_up, down)]
    if any(is_dead):
        coverage = Coverage.NONE
    return ExpertHessians(
        None if is_dead[0] else gate_up, None if is_dead[1] else down, coverage, tokens
    )


def require_finite(x: Tensor, name: str) -> None:
    """CheckpointError naming `name` if any element of x (..., n) is not finite.

    A Hessian made of such tokens fails later, in the Cholesky factor of another layer.
    """
    is_bad = ~torch.isfinite(x).flatten(0, -2).all(-1)
    if is_bad.any():
        raise CheckpointError(
            f"{name}: expected finite values, got NaN or infinity in {int(is_bad.sum())} of "
            f"{is_bad.numel()} calibration tokens"
        )
