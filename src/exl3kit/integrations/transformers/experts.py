"""The routed experts of one layer on `exl3::moe`, in place of transformers' fused 3-D parameters.

Buffers carry the checkpoint's names: `3.gate_proj.trellis`; in a rank-sliced file
`3.gate_proj.rank1.trellis` and `shared_h.gate_proj.rank1.suh`; in an r7 one `r7_shared.down_svh`.
Once loaded, the experts are copied behind one another for the kernel and the named buffers become
views of its rows, so the weights are in memory once.

A rank-sliced file is expanded (`runtime.experts`): each slice of an expert becomes an expert, which
is exact for every file, whatever its hidden-side vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.names import PROJECTIONS, shared_h_name
from exl3kit.checkpoint.padding import check_padding
from exl3kit.checkpoint.r7 import r7_shared_name
from exl3kit.checkpoint.widths import padded
from exl3kit.errors import UnsupportedError
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.integrations.transformers.linear import (
    crop,
    extend,
    register_tensor,
    stored_fields,
    without_cast,
)
from exl3kit.runtime.experts import (
    ExpertWeights,
    exl3_experts,
    is_uniform,
    matrix_table,
)

Slice = tuple[Exl3Tensor, Exl3Tensor, Exl3Tensor]  # gate, up and down of one rank's part
_FIELDS = ("trellis", "suh", "svh")


class Exl3Experts(torch.nn.Module):
    """All routed experts of one layer; takes and returns what transformers' experts do."""

    def __init__(
        self, name: str, num_experts: int, tp: int | None, infos: Mapping[str, TensorInfo]
    ) -> None:
        """`name` is the module's in the checkpoint, `infos` its tensors by name below it.

        `tp` is the number of ranks in the names of a rank-sliced file, None for whole experts.
        """
        super().__init__()
        self.name, self.num_experts = name, num_experts
        self.is_sliced, self.slices = tp is not None, tp or 1
        self.codebook = next((m for m in ("mcg", "mul1") if _has_leaf(infos, m)), "3inst")
        self.weights: ExpertWeights | None = None
        for path, info in infos.items():
            register_tensor(self, path, info)
        self.register_load_state_dict_post_hook(_pack_again)

    def finish(self, intermediate_size: int) -> None:
        """Check the loaded values and pack them; `intermediate_size` is that of a whole expert.

        FormatError, CheckpointError and UnsupportedError name the tensor or the module.
        """
        experts = self._experts()
        padding = padded(intermediate_size) - intermediate_size
        for expert in experts:
            for part in expert:
                self._check(part)
            if padding:  # at the end of the last slice
                gate, up, _ = expert[-1]
                check_padding({f"{part.name}.svh": part.svh for part in (gate, up)}, padding)
        self._pack(experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H), ids (T, top_k), weights (T, top_k) -> (T, H) in the dtype of hidden_states."""
        assert self.weights is not None, "finish() packs the weights before the first call"
        x = extend(hidden_states, self.weights.w2_svh.shape[-1])
        weights, ids = top_k_weights.float().contiguous(), top_k_index.contiguous()
        y = exl3_experts(x, weights, ids, self.weights, self.codebook, self.slices)
        return crop(y, hidden_states.shape[-1])

    def __repr__(self) -> str:
        """One line in `print(model)`, not four for each expert."""
        sizes = f"experts={self.num_experts}, slices={self.slices}"
        return f"{type(self).__name__}({sizes}, codebook={self.codebook})"

    def _experts(self) -> list[list[Slice]]:
        """The slices of every expert."""
        return [
            [self._slice(expert, rank) for rank in range(self.slices)]
            for expert in range(self.num_experts)
        ]

    def _slice(self, expert: int, rank: int) -> Slice:
        suffix = f".rank{rank}" if self.is_sliced else ""
        gate, up, down = (self._tensor(f"{expert}.{proj}{suffix}") for proj in PROJECTIONS)
        return gate, up, down

    def _tensor(self, path: str) -> Exl3Tensor:
        fields = stored_fields(self.get_submodule(path), f"{self.name}.{path}")
        for field in ("suh", "svh"):
            if field not in fields and (shared := self._shared(path, field)) is not None:
                fields[field] = self.get_buffer(self._below(shared))
        return Exl3Tensor(**fields, name=f"{self.name}.{path}")

    def _shared(self, path: str, field: str) -> str | None:
        """The tensor that stands for a vector of several experts."""
        of_layout = shared_h_name if self.is_sliced else r7_shared_name
        return of_layout(f"{self.name}.{path}", field)

    def _below(self, name: str) -> str:
        return name.removeprefix(f"{self.name}.")

    def _check(self, part: Slice) -> None:
        """Refuse what the kernel cannot do."""
        if other := [tensor for tensor in part if tensor.codebook != self.codebook]:
            raise UnsupportedError(
                f"{other[0].name}: expected codebook {self.codebook}, as others of this layer's "
                f"experts have, got {other[0].codebook}"
            )
        if any(tensor.bias is not None for tensor in part):
            raise UnsupportedError(f"{part[0].name}: a bias of a routed expert is not supported")

    def _pack(self, experts: list[list[Slice]]) -> None:
        """Copy the experts behind one another, slice by slice."""
        slices = [part for expert in experts for part in expert]
        rates = [(gate.bits, up.bits, down.bits) for gate, up, down in slices]
        gates, ups, downs = zip(*slices, strict=True)
        width, hidden_size = len(downs[0].suh), len(downs[0].svh)
        lead13, lead2 = (2, -1), (-1,)
        trellis = {"w13_trellis": self._join("trellis", (*gates, *ups))}
        trellis["w2_trellis"] = self._join("trellis", downs)
        matrices = None
        if is_uniform(rates):
            trellis["w13_trellis"] = trellis["w13_trellis"].view(*lead13, *gates[0].trellis.shape)
            trellis["w2_trellis"] = trellis["w2_trellis"].view(*lead2, *downs[0].trellis.shape)
        else:
            matrices = matrix_table(rates, hidden_size, width).to(downs[0].suh.device)
        self.weights = ExpertWeights(
            w13_suh=self._vectors("suh", gates, ups).view(*lead13, hidden_size),
            w13_svh=self._vectors("svh", gates, ups).view(*lead13, width),
            w2_suh=self._vectors("suh", downs).view(*lead2, width),
            w2_svh=self._vectors("svh", downs).view(*lead2, hidden_size),
            matrices=matrices,
            **trellis,
        )

    def _vectors(self, field: str, *sides: Sequence[Exl3Tensor]) -> torch.Tensor:
        """All vectors, behind one another; one a slice where all experts share those of a side."""
        pairs = [(side[0], side[-self.slices]) for side in sides]  # of the first and last expert
        is_shared = all(getattr(first, field) is getattr(last, field) for first, last in pairs)
        rows = self.slices if is_shared else len(sides[0])
        return self._join(field, [tensor for side in sides for tensor in side[:rows]])

    def _join(self, field: str, tensors: Sequence[Exl3Tensor]) -> torch.Tensor:
        """`field` of all tensors, flat; buffers become views of their part.

        Each source is freed once it is copied, so only one field of a layer is held twice.
        """
        sources = [getattr(tensor, field) for tensor in tensors]
        flat = sources[0].new_empty(sum(source.numel() for source in sources))
        del sources
        end = 0
        for tensor in tensors:
            source = getattr(tensor, field)
            view = flat[end : end + source.numel()].view_as(source).copy_(source)
            end += source.numel()
            setattr(tensor, field, view)
            owner = self.get_submodule(self._below(tensor.name))
            if field in owner._buffers:  # a shared vector is nobody's own
                owner._buffers[field] = view
        return flat

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Exl3Experts:
        """Move the buffers, never cast them, and pack them again where they then lie."""
        super()._apply(without_cast(fn), recurse)
        _pack_again(self)
        return self


def _has_leaf(infos: Mapping[str, TensorInfo], leaf: str) -> bool:
    return any(path.endswith(f".{leaf}") for path in infos)


def _pack_again(experts: Exl3Experts, *_: object) -> None:
    """After buffers were exchanged for others: a move, or `load_state_dict` with assign=True."""
    if experts.weights is not None:
        experts._pack(experts._experts())
