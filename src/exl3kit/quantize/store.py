"""Where finished matrices go and come from: the shard being filled, and the log of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exl3kit.errors import CheckpointError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import Exl3Tensor, make_marker
from exl3kit.quantize.journal import Journal, MatrixResult, crc32
from exl3kit.quantize.layout import Matrix
from exl3kit.quantize.shard_file import ShardFile


@dataclass(frozen=True, slots=True)
class Step:
    """Progress: `done` of `total` matrices of the job, `layer_done` of `layer_total` of a layer."""

    name: str
    done: int
    total: int
    layer_done: int
    layer_total: int


Progress = Callable[[Step], None]


class Store:
    """The matrices of one shard. Those that the log says are done are checked once, by CRC-32."""

    def __init__(
        self,
        shard: ShardFile,
        journal: Journal,
        codebook: Codebook,
        matrices: Sequence[Matrix],
        before: int,
        total: int,
        progress: Progress | None,
    ) -> None:
        """`before` matrices of the job's `total` lie in other shards that are complete."""
        self._shard, self._journal, self._codebook = shard, journal, codebook
        self._before, self._total, self._progress = before, total, progress
        self._count = len(matrices)
        self._done = {matrix.name for matrix in matrices if self._is_intact(matrix)}
        if self._done and progress is not None:
            progress(self._step(next(iter(self._done))))

    def has(self, matrix: Matrix) -> bool:
        """Whether the matrix is done."""
        return matrix.name in self._done

    def put(
        self, matrix: Matrix, parts: Sequence[Exl3Tensor], result: MatrixResult, seconds: float
    ) -> None:
        """Store a finished matrix: its bytes, then the line of the log that vouches for them."""
        for name, part in zip(matrix.stored, parts, strict=True):
            for field, tensor in part.tensors().items():
                self._shard.write(f"{name}.{field}", tensor)
        self._journal.add(result, crc32(parts), seconds)
        self._done.add(matrix.name)
        if self._progress is not None:
            self._progress(self._step(matrix.name))

    def get(self, matrix: Matrix) -> list[Exl3Tensor]:
        """The stored parts of a matrix that is done."""
        fields = ["trellis", "suh", "svh"]
        if make_marker(self._codebook) is not None:
            fields.append(str(self._codebook))
        return [
            Exl3Tensor(**{f: self._shard.read(f"{name}.{f}") for f in fields}, name=name)
            for name in matrix.stored
        ]

    def result(self, matrix: Matrix) -> MatrixResult:
        """What a matrix that is done has cost."""
        return self._journal.result(matrix.name)

    def _is_intact(self, matrix: Matrix) -> bool:
        found = self._journal.get(matrix.name)
        if found is None:
            return False
        try:
            return crc32(self.get(matrix)) == found[1]
        except (CheckpointError, ValueError):  # bytes that are no EXL3 linear: never written
            return False

    def _step(self, name: str) -> Step:
        done = len(self._done)
        return Step(name, self._before + done, self._total, done, self._count)
