"""The fields of one layer's routed experts as flat parameters, and where each stored tensor goes.

A rank holds f slices of each of E experts, f > 1 where the file is cut for f times as many ranks
(`exl3kit.runtime.experts`). Experts of the same rates lie together: a tier t of E_t experts has
R = f E_t rows, row i f + j being slice j of its i-th expert, and its blocks lie behind those of the
tier before it:

    trellis int16   w13: gate (R, H/16, S/16, 16 K), then up   w2: (R, S/16, H/16, 16 K)
    suh fp16        w13: gate (R, H), then up                  w2: (R, S)
    svh fp16        w13: gate (R, S), then up                  w2: (R, H)
    mcg, mul1 int32 w13: gate (R,), then up                    w2: (R,)

with hidden size H and S intermediate channels in a slice. A vector that the file stores once a
layer is copied to every row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from exl3kit.checkpoint.names import TensorRule, check_rule
from exl3kit.errors import FormatError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import check_marker
from exl3kit.integrations.vllm.params import Cut
from exl3kit.runtime.experts import RateTier

SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


@dataclass(frozen=True)
class ExpertTensor:
    """One stored tensor of one shard in one tier.

    `label` is its name in the checkpoint, {expert} and {rank} standing for numbers; `stored` what
    it must be; `local` the shape of the part that this rank keeps, `cut` where that part lies
    (None: all of it). With `is_shared` the file has one for all experts of the layer.
    """

    label: str
    stored: TensorRule
    local: tuple[int, ...]
    cut: Cut | None = None
    is_shared: bool = False


@dataclass
class ExpertField:
    """One field of one fused group, e.g. w13_suh: loads each expert's slices into their rows.

    `tensors[tier][shard]` describes what is stored; `ranks` are the file's ranks whose slices this
    rank holds, `range(1)` where experts are stored whole.
    """

    name: str
    codebook: Codebook
    tiers: Sequence[RateTier]
    ranks: range
    tensors: Sequence[dict[str, ExpertTensor]]
    received: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._places = {
            expert: (tier, position)
            for tier, own in enumerate(self.tiers)
            for position, expert in enumerate(own.experts)
        }
        self._starts: list[dict[str, int]] = []
        self.numel = 0  # of the flat parameter
        for tier, shards in enumerate(self.tensors):
            self._starts.append({})
            for shard in shards:
                self._starts[tier][shard] = self.numel
                self.numel += prod(self._shape(tier, shard))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameter."""
        return next(iter(self.tensors[0].values())).stored.dtype

    def _shape(self, tier: int, shard: str) -> tuple[int, ...]:
        rows = len(self.tiers[tier].experts) * len(self.ranks)
        return rows, *self.tensors[tier][shard].local

    def block(self, flat: torch.Tensor, tier: int, shard: str) -> torch.Tensor:
        """The rows of one shard in one tier, (R, ...), a view of the flat parameter."""
        shape = self._shape(tier, shard)
        return flat.narrow(0, self._starts[tier][shard], prod(shape)).view(shape)

    def view(self, flat: torch.Tensor, tier: int) -> torch.Tensor:
        """One tier as `exl3_moe` takes it: (2, R, ...) for gate and up, (R, ...) for down.

        Gate and up must have one shape; a trellis of two rates is two blocks.
        """
        first, *others = self.tensors[tier]
        shape = self._shape(tier, first)
        lead = (2,) if others else ()
        start = self._starts[tier][first]
        return flat.narrow(0, start, prod(lead + shape)).view(lead + shape)

    def load(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's expert loader: check one expert's tensor, copy it to its rows; True for success.

        The slices of several ranks arrive as one tensor, behind one another, and a trellis with its
        last two dimensions merged (see `loader`). FormatError or CheckpointError name the tensor
        whose shape, dtype or marker is wrong.
        """
        tier, _ = self._places[expert_id]
        tensor = self.tensors[tier][shard_id]
        parts = self._parts(tensor, loaded_weight, expert_id)
        slices = len(self.ranks)
        for expert in self._places if tensor.is_shared else (expert_id,):
            tier, position = self._places[expert]
            rows = self.block(param.data, tier, shard_id)
            for index, part in enumerate(parts):
                rows[position * slices + index].copy_(part)
            self.received.add((shard_id, expert))
        return True if return_success else None

    def _parts(self, tensor: ExpertTensor, weight: torch.Tensor, expert: int) -> list[torch.Tensor]:
        """The checked part of each slice."""
        slices = len(self.ranks)
        parts = [weight] if slices == 1 else weight.unflatten(0, (slices, -1)).unbind()
        return [
            self._checked(tensor, tensor.label.format(expert=expert, rank=rank), part)
            for rank, part in zip(self.ranks, parts, strict=True)
        ]

    def _checked(self, tensor: ExpertTensor, label: str, weight: torch.Tensor) -> torch.Tensor:
        if self.name == "trellis" and weight.dim() == 2:
            weight = _unmerged(label, weight, tensor.stored.shape[-1])
        check_rule(label, weight.dtype, tuple(weight.shape), tensor.stored)
        if self.name == self.codebook:
            check_marker(weight, self.codebook, label)
            return weight.reshape(())
        return weight if tensor.cut is None else tensor.cut.apply(self.name, weight)

    def missing(self) -> set[str]:
        """Checkpoint names of the tensors not loaded yet."""
        return {
            tensor.label.format(expert=expert, rank=rank)
            for tier, shards in zip(self.tiers, self.tensors, strict=True)
            for shard, tensor in shards.items()
            for expert in tier.experts
            for rank in self.ranks
            if (shard, expert) not in self.received
        }


def _unmerged(label: str, weight: torch.Tensor, words: int) -> torch.Tensor:
    if weight.shape[1] % words:
        raise FormatError(
            f"{label}: expected tiles of {words} words, got rows of {weight.shape[1]}"
        )
    return weight.unflatten(1, (-1, words))
