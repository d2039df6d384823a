"""Linears to stored EXL3 matrices: those of one shape and rate together, those that are done never.

What comes back is decoded from the stored parts, in a run that made them and in one that found them
alike, so that both go on with the same bits. With several devices each takes the next call when it
is free: what is encoded together, and so every bit, is the same on one device as on many.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from exl3kit.errors import FormatError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.models.base import LinearSpec
from exl3kit.quantize.hessian import Coverage
from exl3kit.quantize.journal import MatrixResult
from exl3kit.quantize.layout import Layout, Matrix, decode
from exl3kit.quantize.stats import TensorStats
from exl3kit.quantize.store import Store
from exl3kit.quantize.tensor import quantize_tensors

_SHOWN = 4


@dataclass(frozen=True)
class Assignment:
    """A linear to quantise: `weight` (out, in) and `hessian` (in, in) fp32 on one device, `bits`.

    `hessian` None: no error feedback. `scale` is the g it shares with others, None to find its own.
    `tokens` and `coverage` are for the log.
    """

    spec: LinearSpec
    bits: int | float
    weight: Tensor
    hessian: Tensor | None
    coverage: Coverage
    tokens: int
    scale: float | None = None


@dataclass(frozen=True)
class _Piece:
    matrix: Matrix
    weight: Tensor  # (in, out)
    hessian: Tensor | None
    owner: Assignment


@dataclass(frozen=True)
class _Encoded:
    """What a call made of its matrices, and the seconds that each took."""

    results: list[tuple[Exl3Tensor, TensorStats]]
    seconds: float


@dataclass(frozen=True)
class LinearQuantizer:
    """Quantises into `store`; `seed` and a matrix's name give its signs, whatever the order.

    Encodes on all of `devices`, which are of one kind.
    """

    store: Store
    codebook: Codebook
    seed: int
    devices: Sequence[torch.device]

    def is_done(self, name: str, layout: Layout) -> bool:
        """Whether the linear is stored already, so that it needs no Hessian."""
        return all(map(self.store.has, layout.matrices(name)))

    def quantize(self, batches: Iterable[Iterable[Assignment]], layout: Layout) -> None:
        """Store every matrix of `batches` that is not stored yet.

        Matrices of one batch and shape are encoded in one call, with all of them if one is missing:
        sums on a GPU may depend on how many there are, and a run that goes on must find the same
        bits.
        """
        calls = [
            group
            for batch in batches
            for group in _groups(batch, layout)
            if not all(self.store.has(piece.matrix) for piece in group)
        ]
        for group, encoded in zip(calls, self._encode_all(calls), strict=True):
            self._store_group(group, encoded, layout)

    def decoded(self, spec: LinearSpec, layout: Layout, device: torch.device) -> Tensor:
        """The stored linear as a dense fp32 weight (out_features, in_features), padding cut off."""
        parts = [part for m in layout.matrices(spec.name) for part in self.store.get(m)]
        whole = decode(parts, spec.shard, device)
        return whole[: spec.in_features, : spec.out_features].T

    def _encode_all(self, calls: Sequence[Sequence[_Piece]]) -> Iterator[_Encoded]:
        """Each call's results, in order."""
        if len(self.devices) == 1:
            yield from (self._encode(group, self.devices[0]) for group in calls)
            return
        free: SimpleQueue[torch.device] = SimpleQueue()
        for device in self.devices:
            free.put(device)

        @torch.inference_mode()  # a thread has its own mode
        def on_a_free_one(group: Sequence[_Piece]) -> _Encoded:
            device = free.get()
            try:
                return self._encode(group, device)
            finally:
                free.put(device)

        with ThreadPoolExecutor(len(self.devices)) as pool:
            yield from pool.map(on_a_free_one, calls)

    def _encode(self, group: Sequence[_Piece], device: torch.device) -> _Encoded:
        """Matrices of one shape, rate and way to find their scale, in one call on `device`.

        FormatError names them where one cannot be quantised.
        """
        begun = time.monotonic()
        scales = [p.owner.scale for p in group if p.owner.scale is not None]
        # One copy of a Hessian that matrices share: the quantiser conditions it once.
        hessians = {id(p.hessian): p.hessian for p in group}
        moved = {key: None if h is None else h.to(device) for key, h in hessians.items()}
        try:
            done = quantize_tensors(
                [p.weight.to(device) for p in group],
                [moved[id(p.hessian)] for p in group],
                group[0].owner.bits,
                self.codebook,
                scales=scales or None,
                seeds=[matrix_seed(self.seed, p.matrix.name) for p in group],
            )
        except FormatError as error:
            names = ", ".join(piece.matrix.name for piece in group[:_SHOWN])
            more = f" or {len(group) - _SHOWN} more" if len(group) > _SHOWN else ""
            raise FormatError(f"one of {names}{more}: {error}") from error
        return _Encoded(done, (time.monotonic() - begun) / len(group))

    def _store_group(self, group: Sequence[_Piece], encoded: _Encoded, layout: Layout) -> None:
        for piece, (tensor, stats) in zip(group, encoded.results, strict=True):
            if self.store.has(piece.matrix):
                continue
            owner = piece.owner
            result = MatrixResult(
                name=piece.matrix.name,
                bits=owner.bits,
                proxy_error=stats.proxy_error,
                scale=stats.scale,
                coverage=Coverage.NONE if stats.fallback else owner.coverage,
                tokens=owner.tokens,
            )
            parts = layout.parts(tensor, owner.spec.shard)
            self.store.put(piece.matrix, parts, result, encoded.seconds)


def _groups(work: Iterable[Assignment], layout: Layout) -> Iterable[list[_Piece]]:
    """The matrices of `work` by what lets them be encoded in one call."""
    groups: dict[tuple[object, ...], list[_Piece]] = {}
    for assignment in work:
        for piece in _pieces(assignment, layout):
            has_scale = assignment.scale is not None
            key = (*piece.weight.shape, assignment.bits, has_scale)
            groups.setdefault(key, []).append(piece)
    return groups.values()


def _pieces(assignment: Assignment, layout: Layout) -> list[_Piece]:
    """The matrices of a linear with their parts of its weight and Hessian."""
    matrices = layout.matrices(assignment.spec.name)
    parts = layout.split(assignment.weight.T, assignment.hessian, assignment.spec.shard)
    return [_Piece(m, *part, assignment) for m, part in zip(matrices, parts, strict=True)]


def matrix_seed(seed: int, name: str) -> int:
    """The sign seed of one matrix, by the job's seed and its name, whatever the order of work."""
    return zlib.crc32(f"{seed}:{name}".encode())
