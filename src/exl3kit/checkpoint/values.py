"""What the bytes of a shard say: one pass over the file gives its digest and facts of each tensor.

Blocks are read in the order of the file, hashed, and looked at while they are in cache. Memory is
a block of 1 MiB and its float32 copy, whatever the size of the tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from exl3kit.checkpoint.atomic import read_errors
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.errors import CheckpointError
from exl3kit.format.spec import SUPPORTED_BITS, TILE

_BLOCK_BYTES = 2**20
MIN_GAP = 1024  # values; what a transfer leaves out is 4 KiB or more
_MAX_WORDS = TILE * int(SUPPORTED_BITS[-1])


@dataclass(slots=True)
class TensorFacts:
    """Sums over one tensor's values; `first_bad` is the place and value of the first non-finite.

    `num_tail` zeros follow the last value that is not 0 (nor -0), of a floating-point tensor;
    `gap` is place and length of the longest run of zeros before it, (0, 0) if none is `MIN_GAP`.
    `zero_tiles` counts tiles of a trellis whose words are all 0; `is_constant` is set for a trellis
    that repeats one word. `is_zero` is set when all bytes are 0.
    """

    num_values: int = 0
    sum_squares: float = 0.0
    num_bad: int = 0
    first_bad: tuple[int, float] | None = None
    num_tail: int = 0
    gap: tuple[int, int] = (0, 0)
    zero_tiles: int = 0
    is_constant: bool = True
    is_zero: bool = True

    @property
    def rms(self) -> float:
        """Root mean square of a floating-point tensor's values; 0 for one without values."""
        return math.sqrt(self.sum_squares / self.num_values) if self.num_values else 0.0


def is_linear_trellis(info: TensorInfo) -> bool:
    """True for a tensor that can be the trellis of a linear: int16, three dimensions, a rate."""
    is_named = info.name.endswith(".trellis") and len(info.shape) == 3
    return is_named and info.dtype == torch.int16 and 0 < info.shape[2] <= _MAX_WORDS


@dataclass(frozen=True)
class FileFacts:
    """SHA-256 of a file, None if it was not asked for, and the facts of its tensors by name."""

    digest: str | None
    tensors: dict[str, TensorFacts]


def read_facts(
    path: Path, infos: Iterable[TensorInfo], use_digest: bool, count: Callable[[int], None]
) -> FileFacts:
    """Read the safetensors file `path`, which holds `infos` and nothing else.

    `count` is told of bytes read. CheckpointError if the file is shorter than its header says.
    """
    digest = hashlib.sha256() if use_digest else None
    facts: dict[str, TensorFacts] = {}
    ordered = sorted(infos, key=lambda info: (info.start, info.end))
    buffer = bytearray(_BLOCK_BYTES)
    with read_errors(path), path.open("rb", buffering=0) as file:
        header = file.read(ordered[0].start if ordered else -1)
        if digest:
            digest.update(header)
        for info in ordered:
            look = _Look(info)
            for size in look.block_sizes():
                block = memoryview(buffer)[:size]
                _fill(file.readinto, block, info)
                if digest:
                    digest.update(block)
                look.at(block)
                count(size)
            facts[info.name] = look.facts
    return FileFacts(digest.hexdigest() if digest else None, facts)


def _fill(
    readinto: Callable[[memoryview], int | None], block: memoryview, info: TensorInfo
) -> None:
    done = 0
    while done < len(block):
        count = readinto(block[done:])
        if not count:
            raise CheckpointError(f"{info.file}: truncated: tensor {info.name!r} is cut short")
        done += count


class _Look:
    """Collects the facts of one tensor, block by block."""

    def __init__(self, info: TensorInfo) -> None:
        self._info = info
        self._is_trellis = is_linear_trellis(info)
        self._first_word: int | None = None
        self.facts = TensorFacts()

    def block_sizes(self) -> Iterable[int]:
        """Sizes of the blocks to read the tensor in: whole values, of a trellis whole tiles."""
        unit = self._info.dtype.itemsize
        if self._is_trellis:
            unit *= self._info.shape[2]
        block = _BLOCK_BYTES // unit * unit
        left = self._info.nbytes
        while left:
            yield min(block, left)
            left -= min(block, left)

    def at(self, block: memoryview) -> None:
        """Look at the next block."""
        if self._is_trellis:
            self._trellis(torch.frombuffer(block, dtype=torch.int16))
        elif self._info.dtype.is_floating_point:
            self._floats(torch.frombuffer(block, dtype=self._info.dtype))
        elif self.facts.is_zero:
            self.facts.is_zero = not torch.frombuffer(block, dtype=torch.uint8).any()

    def _trellis(self, words: torch.Tensor) -> None:
        facts = self.facts
        if self._first_word is None:
            self._first_word = int(words[0])
        start = words[:64]
        if facts.is_constant and bool((start == self._first_word).all()):
            facts.is_constant = bool((words == self._first_word).all())
        else:
            facts.is_constant = False
        facts.is_zero = facts.is_constant and self._first_word == 0
        tiles = words.view(-1, self._info.shape[2])
        candidates = (tiles[:, 0] == 0).nonzero().reshape(-1)
        if len(candidates):
            facts.zero_tiles += int((tiles[candidates] == 0).all(dim=1).sum())

    def _floats(self, values: torch.Tensor) -> None:
        facts = self.facts
        wide = values.float()
        square = float(torch.dot(wide, wide))
        self._gaps(wide)
        if not math.isfinite(square):
            bad = (~torch.isfinite(wide)).nonzero().reshape(-1)
            if len(bad) and facts.first_bad is None:
                first = int(bad[0])
                facts.first_bad = facts.num_values + first, float(wide[first])
            facts.num_bad += len(bad)
        facts.sum_squares += square
        facts.num_values += len(values)
        facts.is_zero = facts.is_zero and square == 0

    def _gaps(self, values: torch.Tensor) -> None:
        """Look for runs of zeros: only where one of every MIN_GAP / 2 values, or an end, is 0.

        A run of MIN_GAP has two of those that are looked at, side by side.
        """
        facts, before = self.facts, self.facts.num_values
        zero = values[:: MIN_GAP // 2] == 0
        is_dense = not bool((zero[1:] & zero[:-1]).any())
        if is_dense and values[0] != 0 and values[-1] != 0:
            self._note_gap(before - facts.num_tail, facts.num_tail)
            facts.num_tail = 0
            return
        places = values.nonzero().reshape(-1)
        if not len(places):
            facts.num_tail += len(values)
            return
        self._note_gap(before - facts.num_tail, facts.num_tail + int(places[0]))
        if len(places) > 1:
            steps = places.diff()
            longest = int(steps.argmax())
            self._note_gap(before + int(places[longest]) + 1, int(steps[longest]) - 1)
        facts.num_tail = len(values) - 1 - int(places[-1])

    def _note_gap(self, start: int, length: int) -> None:
        if length >= max(MIN_GAP, self.facts.gap[1] + 1):
            self.facts.gap = start, length
