"""The words in which a model's tensors are described, and what every architecture must answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class ShardKind(StrEnum):
    """How tensor parallelism cuts a linear: output side, input side, or not at all."""

    COLUMN = "column"
    ROW = "row"
    REPLICATED = "replicated"


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer y = x W (+ bias): its module name, sizes, and how it is cut.

    An optional one may be left out of a checkpoint.
    """

    name: str
    in_features: int
    out_features: int
    shard: ShardKind
    has_bias: bool = False
    is_optional: bool = False

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Shape of the Hugging Face `.weight`: (out_features, in_features)."""
        return self.out_features, self.in_features


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the unquantised model; an optional one may be left out of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    is_optional: bool = False


class ModelMap(Protocol):
    """One model of a known architecture, read from its config.json."""

    @property
    def vocab_size(self) -> int:
        """V, rows of the embedding and of the head."""
        ...

    @property
    def hidden_size(self) -> int:
        """H, width of the residual stream."""
        ...

    @property
    def moe_intermediate_size(self) -> int:
        """I, width of one routed expert."""
        ...

    @property
    def num_experts(self) -> int:
        """E, routed experts a layer."""
        ...

    @property
    def layers(self) -> range:
        """All decoder layers, multi-token-prediction layers included."""
        ...

    @property
    def mtp_layers(self) -> range:
        """The multi-token-prediction layers; they follow the target's layers."""
        ...

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, ascending, multi-token-prediction layers included."""
        ...

    def linears(self, layer: int) -> list[LinearSpec]:
        """The layer's linears other than routed experts."""
        ...

    def expert_linears(self, layer: int, expert: int) -> tuple[LinearSpec, LinearSpec, LinearSpec]:
        """gate, up and down projection of one routed expert, not cut."""
        ...

    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor of the unquantised model under its checkpoint name."""
        ...
