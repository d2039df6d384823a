"""The fields of one layer's routed experts as flat parameters, and where each stored tensor goes.

A rank holds f slices of each of E experts, f > 1 where the file is cut for f times as many ranks
(`exl3kit.runtime.experts`): R = f E rows, row e f + j being slice j of expert e.

    trellis int16   w13: gate of all rows, then up             w2: all rows
    suh fp16        w13: gate (R, H), then up                  w2: (R, S)
    svh fp16        w13: gate (R, S), then up                  w2: (R, H)
    mcg, mul1 int32 w13: gate (R,), then up                    w2: (R,)

with hidden size H and S intermediate channels in a slice. A row of a trellis is
(H/16, S/16, 16 K) or (S/16, H/16, 16 K), K being the rate of its matrix. A vector that the file
stores once for all experts has f rows, one for each slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from exl3kit.checkpoint.names import TensorRule, check_rule
from exl3kit.errors import FormatError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import check_marker
from exl3kit.integrations.vllm.params import Cut

SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


@dataclass(frozen=True)
class ExpertTensor:
    """One stored tensor of one shard of experts with the same rates.

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

    `tensors[expert][shard]` describes what is stored; `ranks` are the file's ranks whose slices
    this rank holds, `range(1)` where experts are stored whole.
    """

    name: str
    codebook: Codebook
    ranks: range
    tensors: Sequence[dict[str, ExpertTensor]]
    received: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._starts: dict[str, list[int]] = {}  # of each expert's rows, and the end
        end = 0
        for shard, first in self.tensors[0].items():
            sizes = [prod(own[shard].local) * len(self.ranks) for own in self.tensors]
            if first.is_shared:
                sizes[1:] = [0] * (len(sizes) - 1)
            self._starts[shard] = list(itertools.accumulate(sizes, initial=end))
            end = self._starts[shard][-1]
        self.numel = end  # of the flat parameter

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameter."""
        return next(iter(self.tensors[0].values())).stored.dtype

    @property
    def width(self) -> int:
        """Length of a vector."""
        return next(iter(self.tensors[0].values())).local[-1]

    def rows(self, flat: torch.Tensor, shard: str, expert: int) -> torch.Tensor:
        """The slices of one expert, (f, ...), a view of the flat parameter."""
        tensor = self.tensors[expert][shard]
        shape = len(self.ranks), *tensor.local
        start = self._starts[shard][0 if tensor.is_shared else expert]
        return flat.narrow(0, start, prod(shape)).view(shape)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """A parameter of matrices of one rate: (2, R, ...) for gate and up, (R, ...) for down."""
        lead = (len(self._starts), -1) if len(self._starts) > 1 else (-1,)
        return flat.view(*lead, *next(iter(self.tensors[0].values())).local)

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
        tensor = self.tensors[expert_id][shard_id]
        parts = self._parts(tensor, loaded_weight, expert_id)
        for row, part in zip(self.rows(param.data, shard_id, expert_id), parts, strict=True):
            row.copy_(part)
        experts = range(len(self.tensors)) if tensor.is_shared else (expert_id,)
        self.received |= {(shard_id, expert) for expert in experts}
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
            for expert, shards in enumerate(self.tensors)
            for shard, tensor in shards.items()
            for rank in self.ranks
            if (shard, expert) not in self.received
        }


def _unmerged(label: str, weight: torch.Tensor, words: int) -> torch.Tensor:
    if weight.shape[1] % words:
        raise FormatError(
            f"{label}: expected tiles of {words} words, got rows of {weight.shape[1]}"
        )
    return weight.unflatten(1, (-1, words))
