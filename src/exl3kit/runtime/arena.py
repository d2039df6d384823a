"""The arena of the published EXL3 engine for vLLM, item by item: what ours is compared with.

`inspect` shows it beside the scratch that the kernels of this package take, which
`kernels.cuda_moe` and `kernels.prefill_moe` plan.

One arena serves every layer of a model. A plan is made for a capacity of tokens and a route block:
32 tokens in blocks of 8 for decoding, the scheduler's token budget in blocks of 64 for prefill.
GLM-5.2 at TP4 (H 6144, S 512, E 256, top-8) on 188 SMs: 33.51 MiB for 32 tokens, 1054.16 MiB for
3072, of which four fifths are three fp16 buffers of a row each route.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNMENT = 256  # bytes; every view of the arena starts at a multiple
_SMALL = 8  # up to this many tokens the partial sums keep a block for each route
_TILE_N = 256  # columns of a partial-sum tile, four of them in flight on a multiprocessor
_TILES = 4


@dataclass(frozen=True, slots=True)
class MoeShape:
    """One rank's experts: H, slice width S, experts E, routes a token."""

    hidden_size: int
    slice_size: int
    num_experts: int
    top_k: int


def arena_items(shape: MoeShape, capacity: int, block_m: int, num_sms: int) -> dict[str, int]:
    """Bytes of each buffer for `capacity` tokens in route blocks of `block_m`, aligned to 256."""
    hidden, width, experts = shape.hidden_size, shape.slice_size, shape.num_experts
    routed = capacity * shape.top_k
    slots = routed + experts * (block_m - 1)
    if routed < experts:
        slots = min(slots, routed * block_m)
    sums = max(slots, routed * block_m) if capacity <= _SMALL else slots

    def partial_sums(columns: int) -> int:
        elements = min(columns * sums, num_sms * _TILES * block_m * _TILE_N)
        return elements * (2 if block_m == 8 else 1)

    sizes = {
        "fc1 output, fc2 rows": 2 * routed * max(2 * width, hidden),
        "activation product": 2 * routed * width,
        "output accumulator": 4 * capacity * hidden,
        "fc1 partial sums": 4 * partial_sums(2 * width),
        "fc2 partial sums": 4 * partial_sums(hidden),
        "packed routes": 4 * slots,
        "expert of each block": 4 * -(-slots // block_m),
        "packed count": 4,
        "expert offsets": 4 * (experts + 1),
        "expert counts": 4 * experts,
        "rotated input, gate": 2 * routed * hidden,
        "rotated input, up": 2 * routed * hidden,
        "workspace": 4 * (4 * num_sms + 2),
    }
    return {name: -(-size // _ALIGNMENT) * _ALIGNMENT for name, size in sizes.items()}


def arena_bytes(shape: MoeShape, capacity: int, block_m: int, num_sms: int) -> int:
    """Size of the whole arena in bytes; see `arena_items`."""
    return sum(arena_items(shape, capacity, block_m, num_sms).values())
