"""How a linear becomes EXL3 matrices: whole, or in one part for each tensor-parallel rank.

whole        one matrix, stored under the linear's name
independent  cut first, then quantised: every rank's part is a matrix of its own, `NAME.rank{r}`,
             with its own scales and its own error feedback. Parts cannot be joined again
cut          quantised whole, then cut: what `slice` would make of the whole one, byte for byte, and
             `slice` can merge it again

A column cut shares out output channels, and every part needs all of the Hessian; a row cut shares
out input channels, and a part needs its diagonal block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from exl3kit.checkpoint.shard import Entry
from exl3kit.checkpoint.widths import padded
from exl3kit.format.decode import decode_dense
from exl3kit.format.spec import TILE, marker_value, words_per_tile
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.models.base import LinearSpec, ShardKind
from exl3kit.slicing.apply import cut_exl3
from exl3kit.slicing.axes import rank_range

SliceMode = Literal["independent", "cut"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix to quantise; `stored` are the EXL3 linears of the checkpoint that hold it."""

    name: str
    stored: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """`tp` None stores linears whole; else they are stored in `tp` parts, made as `mode` says."""

    tp: int | None = None
    mode: SliceMode = "independent"

    @property
    def _is_cut_first(self) -> bool:
        return self.tp is not None and self.mode == "independent"

    def matrices(self, name: str) -> list[Matrix]:
        """What the quantiser is given for the linear `name`."""
        stored = tuple(self.stored(name))
        if self._is_cut_first:
            return [Matrix(part, (part,)) for part in stored]
        return [Matrix(name, stored)]

    def stored(self, name: str) -> list[str]:
        """Names of the EXL3 linears that the checkpoint has for the linear `name`."""
        return [name] if self.tp is None else [f"{name}.rank{r}" for r in range(self.tp)]

    def split(
        self, weight: Tensor, hessian: Tensor | None, kind: ShardKind
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Weight (in, out) and Hessian (in, in) of each of `matrices`, contiguous."""
        if not self._is_cut_first:
            return [(weight.contiguous(), hessian)]
        assert self.tp is not None
        dim = _cut_dim(kind)
        parts = []
        for rank in range(self.tp):
            channels = rank_range("linear", weight.shape[dim], self.tp, rank)
            span = slice(channels.start, channels.stop)
            block = hessian
            if hessian is not None and kind is ShardKind.ROW:
                block = hessian[span, span].contiguous()
            parts.append((weight.narrow(dim, span.start, len(channels)).contiguous(), block))
        return parts

    def parts(self, tensor: Exl3Tensor, kind: ShardKind) -> list[Exl3Tensor]:
        """A quantised matrix as it is stored, in the order of its `stored`."""
        if self.tp is None or self.mode == "independent":
            return [tensor]
        width = tensor.in_features if kind is ShardKind.ROW else tensor.out_features
        ranks = [rank_range("linear", width, self.tp, rank) for rank in range(self.tp)]
        return [cut_exl3(tensor, kind, channels) for channels in ranks]

    def entries(
        self, spec: LinearSpec, bits: int | float, codebook: str, has_bias: bool = False
    ) -> Iterator[Entry]:
        """The tensors that the checkpoint has for a linear; sizes are padded to 128."""
        ins, outs = padded(spec.in_features), padded(spec.out_features)
        names = self.stored(spec.name)
        if spec.shard is ShardKind.ROW:
            ins //= len(names)
        else:
            outs //= len(names)
        for name in names:
            yield from _entries(name, ins, outs, bits, codebook, has_bias)


WHOLE = Layout()


def decode(parts: Sequence[Exl3Tensor], kind: ShardKind, device: torch.device) -> Tensor:
    """The stored parts of a linear as one dense matrix (in, out), fp32, padding included.

    Wherever the parts are, they are decoded on `device`.
    """
    matrices = []
    for part in parts:
        trellis, suh, svh = (t.to(device) for t in (part.trellis, part.suh, part.svh))
        matrices.append(decode_dense(trellis, suh, svh, part.codebook))
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, dim=_cut_dim(kind))


def _cut_dim(kind: ShardKind) -> int:
    """The dimension of an (in, out) matrix that ranks share out."""
    return 0 if kind is ShardKind.ROW else 1


def _entries(
    name: str, ins: int, outs: int, bits: int | float, codebook: str, has_bias: bool
) -> Iterator[Entry]:
    shape = (ins // TILE, outs // TILE, words_per_tile(bits))
    yield Entry(f"{name}.trellis", torch.int16, shape)
    yield Entry(f"{name}.suh", torch.float16, (ins,))
    yield Entry(f"{name}.svh", torch.float16, (outs,))
    if marker_value(codebook) is not None:
        yield Entry(f"{name}.{codebook}", torch.int32, ())
    if has_bias:
        yield Entry(f"{name}.bias", torch.float16, (outs,))
