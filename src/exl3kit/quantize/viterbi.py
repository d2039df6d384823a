"""Trellis search: 256 target values -> the cheapest closed path of states.

State s at position t holds the 16 - D(t) bits it shares with its predecessor (node s >> D(t)), and
its low 16 - D(t + 1) bits are the node it hands on. The cost of a path is the sum of squared errors
in fp16 with one rounding a step: d = RN(value - x), cost = RN(d * d + cost before). Ties go to the
lowest predecessor. The ring is closed in two passes: the first starts half way with every node
allowed, runs once around, and its best path tells the node at position 0; the second starts at
position 0 with that node alone and must end in it.

`encode` runs the compiled kernel of the tiles' device, or `reference_encode` where there is no
compiler; all return the same states.
"""

from __future__ import annotations

import numpy as np
import torch

from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import NUM_STATES, TILE_SIZE, check_bits, check_codebook, fresh_bits
from exl3kit.jit.cpu import cpu_library
from exl3kit.kernels.encode import check_tiles, encode_tiles
from exl3kit.kernels.encode_cuda import CudaEncoder

_HALF_WAY = TILE_SIZE // 2


class Encoder:
    """The trellis search of one rate and codebook on one device, for many calls."""

    def __init__(self, bits: int | float, codebook: str, device: torch.device) -> None:
        """On a CUDA device this loads the kernel and takes its scratch memory."""
        self._bits, self._codebook = bits, codebook
        self._cuda = CudaEncoder(bits, codebook, device) if device.type == "cuda" else None

    def encode_into(self, tiles: torch.Tensor, out: torch.Tensor) -> None:
        """States of float32 tiles (n, 256), in stream order and the codebook's scale, into `out`.

        out: int32 (n, 256), contiguous.

        On a CUDA device without waiting for it, and values that fp16 cannot hold are `check`'s to
        refuse. Without a compiler (`cpu_library` warns once) the CPU takes half a second a tile.
        """
        if self._cuda is not None:
            self._cuda(tiles, out)
        elif cpu_library() is None:
            out[:] = reference_encode(tiles, self._bits, self._codebook)
        else:
            out[:] = encode_tiles(tiles, self._bits, self._codebook)

    def check(self) -> None:
        """FormatError if any target so far was not finite in fp16."""
        if self._cuda is not None:
            self._cuda.check()


def encode(tiles: torch.Tensor, bits: int | float, codebook: str) -> torch.Tensor:
    """`Encoder` for one call, checked."""
    encoder = Encoder(bits, codebook, tiles.device)
    states = torch.empty_like(tiles, dtype=torch.int32)
    encoder.encode_into(tiles, states)
    encoder.check()
    return states


def reference_encode(tiles: torch.Tensor, bits: int | float, codebook: str) -> torch.Tensor:
    """The same states as `encode` in numpy, one tile at a time, vectorised over states."""
    name = check_codebook(codebook)
    rate = check_bits(bits, name)
    search = _TileSearch(rate, codebook_values(name).numpy().astype(np.float32))
    halves = check_tiles(tiles).to(torch.float16).to(torch.float32).numpy()
    states = np.stack([search.encode(x) for x in halves]) if len(halves) else halves[:, :]
    return torch.from_numpy(states.astype(np.int32))


def _end_node_rank(nodes: np.ndarray) -> np.ndarray:
    """Order in which equal-cost final nodes of the first pass are preferred."""

    def reverse5(v: np.ndarray) -> np.ndarray:
        return sum(((v >> i) & 1) << (4 - i) for i in range(5))  # pyright: ignore[reportReturnType]

    return (reverse5((nodes >> 5) & 31) << 10) | (reverse5(nodes & 31) << 5) | (nodes >> 10)


class _TileSearch:
    """Both passes over one tile; `values` are the float32 values of all states."""

    def __init__(self, bits: int | float, values: np.ndarray) -> None:
        self._fresh = fresh_bits(bits)
        self._values = values
        self._states = np.arange(NUM_STATES)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """x: float32 (256,), fp16 values -> states int64 (256,)."""
        free = np.zeros(NUM_STATES >> int(self._fresh[_HALF_WAY]))
        costs, choices = self._forward(x, _HALF_WAY, free)
        ends = np.flatnonzero(costs == costs.min())
        node, _ = self._trace(choices, _HALF_WAY, int(ends[_end_node_rank(ends).argmin()]))

        pinned = np.full(NUM_STATES >> int(self._fresh[0]), np.inf)
        pinned[node] = 0
        _, choices = self._forward(x, 0, pinned)
        _, states = self._trace(choices, 0, node)
        return self._closed(states)

    def _forward(
        self, x: np.ndarray, start: int, costs: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """Costs after one turn from position `start`, and each step's winning top bits by node."""
        choices = []
        for t in np.roll(np.arange(TILE_SIZE), -start):
            heads = 1 << int(self._fresh[(t + 1) % TILE_SIZE])
            d = (self._values - x[t]).astype(np.float16).astype(np.float64)
            before = costs[self._states >> int(self._fresh[t])]
            # float64 holds d * d + before exactly where it decides a rounding: one rounding.
            with np.errstate(over="ignore"):
                reached = (d * d + before).astype(np.float16).astype(np.float64).reshape(heads, -1)
            winner = reached.argmin(axis=0)  # the first of equals: the lowest predecessor
            choices.append(winner.astype(np.uint8))
            costs = np.take_along_axis(reached, winner[None], axis=0)[0]
        return costs, choices

    def _trace(self, choices: list[np.ndarray], start: int, node: int) -> tuple[int, np.ndarray]:
        """Back from `node` after the last step: the node that enters position 0, and states."""
        states = np.zeros(TILE_SIZE, dtype=np.int64)
        for step in range(TILE_SIZE - 1, (TILE_SIZE - start) % TILE_SIZE - 1, -1):
            t = (start + step) % TILE_SIZE
            node_bits = 16 - int(self._fresh[(t + 1) % TILE_SIZE])
            states[t] = (int(choices[step][node]) << node_bits) | node
            node = int(states[t]) >> int(self._fresh[t])
        return node, states

    def _closed(self, states: np.ndarray) -> np.ndarray:
        """Rebuild states from their fresh bits: no change unless every path overflowed fp16."""
        state = int(states[-1])
        for t, fresh in enumerate(self._fresh.tolist()):
            state = ((state << fresh) | (int(states[t]) & ((1 << fresh) - 1))) & 0xFFFF
            states[t] = state
        return states
