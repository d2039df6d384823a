"""Routed EXL3 experts on a CUDA device: plan, scratch, and the launches of kernels/cuda/moe.cuh.

    plan = plan_moe(32, top_k, hidden, inner, num_sms)         # sizes; allocates nothing
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    run_moe(plan, scratch, x, topk_weights, topk_ids, weights, codebook, y, expert_map)

One scratch serves every layer of a model, one after the other on one stream; its contents mean
nothing between calls. K is cut by the shapes and the device alone: a token's result does not depend
on the tokens beside it, nor on the plan's capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from exl3kit.errors import FormatError
from exl3kit.format.spec import HADAMARD_BLOCK, TILE, Codebook, check_codebook
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels.gemm import (
    BLOCKS_PER_SM,
    CODEBOOK_NAMES,
    RATES,
    choose_splits,
    num_multiprocessors,
    product_shared_bytes,
)
from exl3kit.kernels.launch import DTYPE_CODES, codebook_code, double_bits

CAPACITY = (
    32  # tokens of one launch; more are cut, which cannot show because tokens are independent
)
MAX_ROUTES = 4096  # kMaxRoutes of moe.cuh
BLOCK_ROWS = 8  # routes of an expert that are multiplied together, kBlockRows of route.cuh
_ALIGNMENT = 256
_ROUTE_WARPS, _ACTIVATE_WARPS, _COMBINE_WARPS = 8, 4, 8

_POINTER, _INT = Param.POINTER, Param.INT32


def _spec(name: str, template: tuple[int | str, ...], pointers: int, numbers: int) -> KernelSpec:
    parameters = (_POINTER,) * pointers + (_INT,) * numbers
    return KernelSpec("moe.cuh", f"exl3::{name}", template, parameters)


ROUTE = _spec("moe_route", (_ROUTE_WARPS,), 8, 9)
ACTIVATE = _spec("moe_activate", (_ACTIVATE_WARPS,), 7, 8)
COMBINE = _spec("moe_combine", (_COMBINE_WARPS,), 6, 7)


def product_spec(bits2: int, codebook: Codebook) -> KernelSpec:
    """The product kernel of a rate and a codebook, for gate and up or for down."""
    return _spec("moe_product", (bits2, CODEBOOK_NAMES[codebook]), 4, 8)


SPECS = (ROUTE, ACTIVATE, COMBINE, *(product_spec(*rate) for rate in RATES))


class MoeWeights(NamedTuple):
    """Stacked experts of one layer, E of them, as `exl3_moe` takes them.

    w13_trellis int16 (2, E, H/16, S/16, 16 K), gate then up; w13_svh float16 (2, E, S); w13_suh
    (2, E, H), or (H,) where one vector serves all experts and both sides (layout shared_h_v1)
    w2_trellis int16 (E, S/16, H/16, 16 K'); w2_suh (E, S); w2_svh (E, H)
    """

    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor


@dataclass(frozen=True)
class MoePlan:
    """Sizes of one layer's experts for up to `capacity` tokens of top_k routes.

    hidden and inner are H and S; splits13 and splits2 cut K of gate and up and of down; wave is the
    number of blocks that fill the device; is_shared_h says that one suh serves all experts.
    """

    capacity: int
    top_k: int
    hidden: int
    inner: int
    splits13: int
    splits2: int
    wave: int
    is_shared_h: bool

    def items(self, tokens: int | None = None) -> dict[str, int]:
        """Bytes of each view of the scratch for `tokens` (default: the capacity), unaligned."""
        tokens = self.capacity if tokens is None else tokens
        routes = tokens * self.top_k
        rows = tokens if self.is_shared_h else 2 * routes
        return {
            "routes": 4 * (3 + BLOCK_ROWS) * routes,
            "rotated": 4 * rows * self.hidden,
            "firsts13": 4 * rows * self.hidden // HADAMARD_BLOCK,
            "partial13": 4 * self.splits13 * routes * 2 * self.inner,
            "activated": 4 * routes * self.inner,
            "firsts2": 4 * routes * self.inner // HADAMARD_BLOCK,
            "partial2": 4 * self.splits2 * routes * self.hidden,
        }

    @property
    def offsets(self) -> dict[str, int]:
        """Byte at which each view starts, a multiple of 256; the last is the end of the scratch."""
        starts, end = {}, 0
        for name, size in self.items().items():
            starts[name] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return {**starts, "end": end}

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch a call reads and writes at most."""
        return self.offsets["end"]


def plan_moe(
    capacity: int,
    top_k: int,
    hidden: int,
    inner: int,
    num_sms: int,
    is_shared_h: bool = False,
) -> MoePlan:
    """The plan of up to `capacity` tokens; FormatError where the routes are too many.

    The splits fill `num_sms` multiprocessors once with the routes of a single token.
    """
    if not 1 <= capacity * top_k <= MAX_ROUTES:
        raise FormatError(
            f"MoE plan: expected 1 to {MAX_ROUTES} routes, got {capacity} tokens of {top_k}"
        )
    strips13, strips2 = 2 * inner // HADAMARD_BLOCK, hidden // HADAMARD_BLOCK
    splits13 = choose_splits(hidden // TILE, top_k * strips13, num_sms)
    splits2 = choose_splits(inner // TILE, top_k * strips2, num_sms)
    wave = BLOCKS_PER_SM * num_sms
    return MoePlan(capacity, top_k, hidden, inner, splits13, splits2, wave, is_shared_h)


def strips_per_block(strips: int, blocks: int, wave: int) -> int:
    """Strips a block takes one after the other, a divisor of `strips`, where there are `blocks`.

    It loads ahead over their borders; two waves of blocks have to be left. Does not show in sums.
    """
    fitting = (n for n in range(1, strips + 1) if strips % n == 0 and blocks // n >= 2 * wave)
    return max(fitting, default=1)


def check_scratch(plan: MoePlan, scratch: torch.Tensor, device: torch.device) -> None:
    """FormatError unless `scratch` is uint8 on `device`, large enough and aligned to 256 bytes."""
    if scratch.dtype != torch.uint8 or scratch.device != device or not scratch.is_contiguous():
        raise FormatError(
            f"scratch: expected contiguous torch.uint8 on {device}, "
            f"got {scratch.dtype} on {scratch.device}"
        )
    if scratch.numel() < plan.scratch_bytes or scratch.data_ptr() % _ALIGNMENT:
        raise FormatError(
            f"scratch: expected {plan.scratch_bytes} bytes aligned to {_ALIGNMENT}, "
            f"got {scratch.numel()} at address {scratch.data_ptr():#x}"
        )


def run_moe(
    plan: MoePlan,
    scratch: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: MoeWeights,
    codebook: str,
    y: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> None:
    """y = sum over slots of topk_weight * expert(x); the launches of one plan, in place.

    x, y (T, H) float32, float16 or bfloat16, 1 <= T <= plan.capacity; topk_weights float32 and
    topk_ids int32 or int64 (T, top_k); expert_map int32 or int64 (E_global,), -1 = not here.
    Routes of weight 0, of an id outside the model or of an expert not here add exactly zero.

    Allocates nothing, reads nothing back; can be captured in a CUDA graph. Shapes are the caller's
    to check, except that FormatError refuses more tokens than the plan holds and an unfit scratch.
    """
    tokens, device = x.shape[0], x.device
    if tokens > plan.capacity:
        raise FormatError(f"x: expected at most {plan.capacity} tokens of the plan, got {tokens}")
    check_scratch(plan, scratch, device)
    views = {name: scratch[start:] for name, start in plan.offsets.items()}
    routes, experts, name = tokens * plan.top_k, weights.w2_suh.shape[0], check_codebook(codebook)
    hidden, inner, dtype = plan.hidden, plan.inner, DTYPE_CODES[x.dtype]
    table, ids_map, code = views["routes"], expert_map, codebook_code(codebook)
    side_rows, share = (0, plan.top_k) if plan.is_shared_h else (routes, 1)
    get_kernel(ROUTE, device).launch(
        (routes, -(-hidden // (_ROUTE_WARPS * HADAMARD_BLOCK))),
        32 * _ROUTE_WARPS,
        (
            x, topk_ids, topk_weights, ids_map, weights.w13_suh, table, views["rotated"],
            views["firsts13"], routes, plan.top_k, hidden, experts,
            experts if ids_map is None else len(ids_map), topk_ids.dtype == torch.int64,
            ids_map is not None and ids_map.dtype == torch.int64,
            plan.is_shared_h, dtype,
        ),
        overlaps=True,
    )  # fmt: skip
    bits2, strips = double_bits(weights.w13_trellis), inner // HADAMARD_BLOCK
    items = strips_per_block(strips, plan.splits13 * 2 * strips * routes, plan.wave)
    get_kernel(product_spec(bits2, name), device).launch(
        (plan.splits13, 2 * strips // items, routes),
        256,
        (
            weights.w13_trellis, table, views["rotated"], views["partial13"], routes, hidden, inner,
            2, experts, side_rows, share, items,
        ),
        shared_bytes=product_shared_bytes(bits2, 1, 8),
        overlaps=True,
    )  # fmt: skip
    get_kernel(ACTIVATE, device).launch(
        (routes, -(-inner // (_ACTIVATE_WARPS * HADAMARD_BLOCK))),
        32 * _ACTIVATE_WARPS,
        (
            views["partial13"], views["firsts13"], table, weights.w13_svh, weights.w2_suh,
            views["activated"], views["firsts2"], routes, hidden, inner, experts, plan.splits13,
            code, side_rows, share,
        ),
        overlaps=True,
    )  # fmt: skip
    bits2, strips = double_bits(weights.w2_trellis), hidden // HADAMARD_BLOCK
    items = strips_per_block(strips, plan.splits2 * strips * routes, plan.wave)
    get_kernel(product_spec(bits2, name), device).launch(
        (plan.splits2, strips // items, routes),
        256,
        (
            weights.w2_trellis, table, views["activated"], views["partial2"], routes, inner, hidden,
            1, experts, 0, 1, items,
        ),
        shared_bytes=product_shared_bytes(bits2, 1, 8),
        overlaps=True,
    )  # fmt: skip
    get_kernel(COMBINE, device).launch(
        (tokens, hidden // HADAMARD_BLOCK),
        32 * _COMBINE_WARPS,
        (
            views["partial2"], views["firsts2"], table, topk_weights, weights.w2_svh, y,
            routes, plan.top_k, hidden, inner, plan.splits2, code, dtype,
        ),
        overlaps=True,
    )  # fmt: skip


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: MoeWeights,
    codebook: str,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """`run_moe` with a plan and scratch of its own, for any number of tokens; returns y, new."""
    y = torch.empty_like(x)
    top_k, hidden, inner = topk_ids.shape[1], x.shape[1], weights.w2_suh.shape[1]
    tokens = min(CAPACITY, x.shape[0])
    if tokens == 0 or top_k == 0:
        return y.zero_()
    plan = plan_moe(
        tokens, top_k, hidden, inner, num_multiprocessors(x.device), weights.w13_suh.dim() == 1
    )
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=x.device)
    for start in range(0, x.shape[0], tokens):
        part = slice(start, start + tokens)
        run_moe(
            plan, scratch, x[part], topk_weights[part], topk_ids[part], weights, codebook, y[part],
            expert_map,
        )  # fmt: skip
    return y
