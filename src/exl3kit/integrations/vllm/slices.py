"""Slices of one expert become one tensor, because vLLM routes one tensor an expert and projection.

Only a file that is cut for more ranks than the engine has comes here (`exl3kit.runtime.experts`).
"""

from __future__ import annotations

import torch

from exl3kit.checkpoint.names import missing_text
from exl3kit.errors import CheckpointError


class SliceJoiner:
    """Collects the slices of `ranks`, which may come in any order, tensor by tensor.

    A slice is copied when it comes, since fast loaders reuse the buffer it lies in. What is held at
    a time is what the files interleave: an expert where they are ordered by expert, a layer in
    files that have one layer each, ordered by rank.
    """

    def __init__(self, ranks: range) -> None:
        self._ranks = ranks
        self._joined: dict[str, torch.Tensor] = {}
        self._missing: dict[str, set[int]] = {}

    def add(self, stored_name: str, rank: int, part: torch.Tensor) -> torch.Tensor | None:
        """Take the part (n, ...) that `rank` has of a tensor; (slices * n, ...) with the last one.

        CheckpointError for a part of another shape or dtype than those before it.
        """
        part = part.reshape(-1) if part.dim() == 0 else part
        key = _with_rank(stored_name, "{rank}")
        joined = self._joined.get(key)
        if joined is None:
            joined = part.new_empty((len(self._ranks), *part.shape))
            self._joined[key], self._missing[key] = joined, set(self._ranks)
        if part.dtype != joined.dtype or part.shape != joined.shape[1:]:
            raise CheckpointError(
                f"tensor {stored_name!r}: expected {joined.dtype} {list(joined.shape[1:])} as in "
                f"the other slices, got {part.dtype} {list(part.shape)}"
            )
        joined[self._ranks.index(rank)].copy_(part)
        self._missing[key].discard(rank)
        if self._missing[key]:
            return None
        del self._joined[key], self._missing[key]
        return joined.flatten(0, 1)

    def check_done(self) -> None:
        """CheckpointError naming the slices that never came."""
        names = [
            _with_rank(key, str(rank))
            for key, ranks in self._missing.items()
            for rank in sorted(ranks)
        ]
        if names:
            raise CheckpointError(missing_text("slices of experts", names))


def _with_rank(name: str, rank: str) -> str:
    """`name` (...rank{r}.{field}) with another rank."""
    stem, _, field = name.rpartition(".")
    return f"{stem.rpartition('.rank')[0]}.rank{rank}.{field}"
