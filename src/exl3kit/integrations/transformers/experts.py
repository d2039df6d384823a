"""The routed experts of one layer on `exl3::moe`, in place of transformers' fused 3-D parameters.

Buffers carry the checkpoint's names: `3.gate_proj.trellis`; in a rank-sliced file
`3.gate_proj.rank1.trellis` and `shared_h.gate_proj.rank1.suh`; in an r7 one `r7_shared.down_svh`.
Once loaded, the experts of one rate are copied behind one another for the kernel and the named
buffers become views of its rows, so the weights are in memory once.

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
from exl3kit.runtime.experts import TierWeights, exl3_experts, rate_tiers

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
        self.tiers: list[TierWeights] = []
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
        x = extend(hidden_states, self.tiers[0].w2_svh.shape[-1])
        weights, ids = top_k_weights.float().contiguous(), top_k_index.contiguous()
        y = exl3_experts(x, weights, ids, self.tiers, self.codebook, self.slices)
        return crop(y, hidden_states.shape[-1])

    def __repr__(self) -> str:
        """One line in `print(model)`, not four for each expert."""
        sizes = f"experts={self.num_experts}, slices={self.slices}, tiers={len(self.tiers)}"
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
        """Copy the experts of each rate behind one another."""
        tiers = rate_tiers([(g.bits, u.bits, d.bits) for (g, u, d), *_ in experts])
        self.tiers = []
        for tier in tiers:
            gate, up, down = zip(*(s for e in tier.experts for s in experts[e]), strict=True)
            w13 = {f"w13_{field}": self._stack(field, (gate, up)) for field in ("suh", "svh")}
            trellis = (
                self._stack("trellis", (gate, up))
                if gate[0].bits == up[0].bits
                else (self._stack("trellis", (gate,))[0], self._stack("trellis", (up,))[0])
            )
            w2 = {f"w2_{field}": self._stack(field, (down,))[0] for field in _FIELDS}
            rows = None
            if len(tiers) > 1:
                rows = tier.make_map(self.num_experts, self.slices).to(w2["w2_suh"].device)
            self.tiers.append(TierWeights(trellis, **w13, **w2, expert_map=rows))

    def _stack(self, field: str, sides: Sequence[Sequence[Exl3Tensor]]) -> torch.Tensor:
        """`field` of all tensors as one (sides, experts, …); buffers become views of its rows.

        Each source is freed once it is copied, so only one field of a layer is held twice.
        """
        first = getattr(sides[0][0], field)
        stack = first.new_empty((len(sides), len(sides[0]), *first.shape))
        for side, tensors in enumerate(sides):
            for row, tensor in enumerate(tensors):
                view = stack[side, row].copy_(getattr(tensor, field))
                setattr(tensor, field, view)
                owner = self.get_submodule(self._below(tensor.name))
                if field in owner._buffers:  # a shared vector is nobody's own
                    owner._buffers[field] = view
        return stack

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Exl3Experts:
        """Move the buffers, never cast them, and pack them again where they then lie."""
        super()._apply(without_cast(fn), recurse)
        _pack_again(self)
        return self


def _has_leaf(infos: Mapping[str, TensorInfo], leaf: str) -> bool:
    return any(path.endswith(f".{leaf}") for path in infos)


def _pack_again(experts: Exl3Experts, *_: object) -> None:
    """After buffers were exchanged for others: a move, or `load_state_dict` with assign=True."""
    if experts.tiers:
        experts._pack(experts._experts())
