"""The routed experts of one layer on `exl3::moe`, in place of transformers' fused 3-D parameters.

Buffers carry the checkpoint's names (`3.gate_proj.trellis`, or `3.gate_proj.rank1.trellis` and
`shared_h.gate_proj.rank1.suh` where the file is rank-sliced). Once loaded, all experts of one rate
are copied into one slab for the kernel and the named buffers become views of its rows, so the
weights are in memory once.

A rank-sliced file is expanded: slice r of expert e is an expert of its own, number e * tp + r, and
every route goes to all slices of its expert with the same weight. The sum over slices is the sum
over routes, so this is exact for every file, whatever its hidden-side vectors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.names import PROJECTIONS, shared_h_name
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.integrations.transformers.linear import crop, extend, register_tensor, without_cast
from exl3kit.runtime.ops import exl3_moe

Expert = tuple[Exl3Tensor, Exl3Tensor, Exl3Tensor]  # gate, up and down of one (expert, slice)
_FIELDS = ("trellis", "suh", "svh")


@dataclass(frozen=True)
class Slab:
    """E' experts of one rate and codebook, behind one another, as `exl3_moe` takes them.

    `expert_map` int32 (E tp,) finds them; None where the slab has all experts in order.
    """

    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor
    codebook: str
    expert_map: torch.Tensor | None

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The weighted sum over this slab's experts, (T, H) in the dtype of x (T, H)."""
        return exl3_moe(
            x,
            weights,
            ids,
            self.w13_trellis,
            self.w13_suh,
            self.w13_svh,
            self.w2_trellis,
            self.w2_suh,
            self.w2_svh,
            self.codebook,
            self.expert_map,
        )


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
        self.is_sliced, self.tp = tp is not None, tp or 1
        self.slabs: list[Slab] = []
        for path, info in infos.items():
            register_tensor(self, path, info)

    def finish(self, intermediate_size: int) -> None:
        """Check the loaded values and pack them; `intermediate_size` is that of a whole expert.

        FormatError, CheckpointError and UnsupportedError name the tensor or the module.
        """
        experts = self._experts()
        for expert in experts:
            _check(expert, intermediate_size // self.tp)
        self._pack(experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H), ids (T, top_k), weights (T, top_k) -> (T, H) in the dtype of hidden_states.

        With several slabs their results, each rounded to that dtype, are added in float32.
        """
        x = extend(hidden_states, self.slabs[0].w2_svh.shape[-1])
        ids, weights = self._routes(top_k_index, top_k_weights.float())
        y = self.slabs[0].run(x, weights, ids)
        if len(self.slabs) > 1:
            others = (slab.run(x, weights, ids) for slab in self.slabs[1:])
            y = sum((other.float() for other in others), start=y.float()).to(x.dtype)
        return crop(y, hidden_states.shape[-1])

    def extra_repr(self) -> str:
        """Experts, slices and slabs, for `print(model)`."""
        return f"experts={self.num_experts}, slices={self.tp}, slabs={len(self.slabs)}"

    def _routes(
        self, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each route (e, w) as one route (e * tp + r, w) for every slice r."""
        if self.tp == 1:
            return ids.contiguous(), weights.contiguous()
        ranks = torch.arange(self.tp, device=ids.device, dtype=ids.dtype)
        expanded = (ids.unsqueeze(-1) * self.tp + ranks).flatten(1)
        return expanded, weights.repeat_interleave(self.tp, dim=1)

    def _experts(self) -> list[Expert]:
        """Every slice of every expert, in the order of their numbers."""
        experts = []
        for expert in range(self.num_experts):
            for rank in range(self.tp):
                gate, up, down = (self._tensor(expert, proj, rank) for proj in PROJECTIONS)
                experts.append((gate, up, down))
        return experts

    def _tensor(self, expert: int, proj: str, rank: int) -> Exl3Tensor:
        path = f"{expert}.{proj}.rank{rank}" if self.is_sliced else f"{expert}.{proj}"
        fields = dict(self.get_submodule(path).named_buffers())
        for field in ("suh", "svh"):
            shared = shared_h_name(f"{self.name}.{path}", field)
            if field not in fields and shared is not None:
                fields[field] = self.get_buffer(self._below(shared))
        return Exl3Tensor(**fields, name=f"{self.name}.{path}")

    def _below(self, name: str) -> str:
        return name.removeprefix(f"{self.name}.")

    def _pack(self, experts: list[Expert]) -> None:
        """Copy the experts into one slab for each rate and codebook."""
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number, (gate, _, down) in enumerate(experts):
            groups[gate.bits, down.bits, gate.codebook].append(number)
        self.slabs = []
        for (_, _, codebook), numbers in groups.items():
            gate, up, down = zip(*(experts[number] for number in numbers), strict=True)
            w13 = {f"w13_{field}": self._stack(field, (gate, up)) for field in _FIELDS}
            w2 = {f"w2_{field}": self._stack(field, (down,))[0] for field in _FIELDS}
            device = gate[0].suh.device
            found = _expert_map(numbers, len(experts), device) if len(groups) > 1 else None
            self.slabs.append(Slab(**w13, **w2, codebook=str(codebook), expert_map=found))

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
        if self.slabs:
            self._pack(self._experts())
        return self


def _check(expert: Expert, width: int) -> None:
    """Refuse what one `exl3_moe` call cannot do; `width` is the model's, before padding."""
    gate, up, _ = expert
    if gate.bits != up.bits or len({part.codebook for part in expert}) > 1:
        found = ", ".join(f"{part.name}: {part.bits} bits {part.codebook}" for part in expert)
        raise UnsupportedError(
            f"expert: gate and up must have the same bits and all three one codebook, got {found}"
        )
    if any(part.bias is not None for part in expert):
        raise UnsupportedError(f"{gate.name}: a bias of a routed expert is not supported")
    for part in (gate, up):
        if part.svh[width:].any():
            raise CheckpointError(
                f"tensor '{part.name}.svh': expected zeros from {width} on, where the intermediate "
                "size is padded; nothing is cropped between up and down"
            )


def _expert_map(numbers: list[int], total: int, device: torch.device) -> torch.Tensor:
    """int32 (total,): the row of every expert in `numbers`, -1 for the others."""
    found = torch.full((total,), -1, dtype=torch.int32)
    found[numbers] = torch.arange(len(numbers), dtype=torch.int32)
    return found.to(device)
