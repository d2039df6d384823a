"""Routed EXL3 experts on a CUDA device: plan, scratch, and the launches of kernels/cuda/moe.cuh.

    plan = plan_moe(32, top_k, hidden, inner, num_sms)         # sizes; allocates nothing
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    experts = bind_moe(plan, scratch, weights, codebook)       # one for each layer
    experts.run(x, topk_weights, topk_ids, y, expert_map)

One scratch serves every layer of a model, one after the other on one stream; its contents mean
nothing between calls. `moe` does all of it for one call, with scratch from torch's allocator, which
knows streams and graph captures: target and draft, or two streams, never share any.

K is cut by the shapes and the device alone: a token's result does not depend on the tokens beside
it, nor on the plan's capacity.
"""

from __future__ import annotations

import functools
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
    SLICES,
    choose_splits,
    num_multiprocessors,
    product_shared_bytes,
)
from exl3kit.kernels.launch import CODEBOOK_CODES, DTYPE_CODES, double_bits

# Tokens of one launch; more are cut, which cannot show because tokens are independent.
CAPACITY = 32
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

    def items(self) -> dict[str, int]:
        """Bytes of each view of the scratch, unaligned."""
        routes = self.capacity * self.top_k
        rows = self.capacity if self.is_shared_h else 2 * routes
        return {
            "routes": 4 * (3 + BLOCK_ROWS) * routes,
            "rotated": 4 * rows * self.hidden,
            "firsts13": 4 * rows * self.hidden // HADAMARD_BLOCK,
            "partial13": 4 * self.splits13 * routes * 2 * self.inner,
            "activated": 4 * routes * self.inner,
            "firsts2": 4 * routes * self.inner // HADAMARD_BLOCK,
            "partial2": 4 * self.splits2 * routes * self.hidden,
        }

    @functools.cached_property
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


@functools.cache
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


@functools.cache
def strips_per_block(strips: int, blocks: int, wave: int) -> int:
    """Strips a block takes one after the other, a divisor of `strips`, where there are `blocks`.

    It loads ahead over their borders; two waves of blocks have to be left. Does not show in sums.
    """
    fitting = (n for n in range(1, strips + 1) if strips % n == 0 and blocks // n >= 2 * wave)
    return max(fitting, default=1)


@dataclass(frozen=True)
class BoundMoe:
    """The experts of one layer with their plan and scratch; made by `bind_moe`."""

    plan: MoePlan
    views: dict[str, torch.Tensor]
    weights: MoeWeights
    codebook: Codebook

    @property
    def experts(self) -> int:
        """Experts on this device."""
        return self.weights.w2_suh.shape[0]

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        y: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> None:
        """y = sum over slots of topk_weight * expert(x).

        x, y (T, H) float32, float16 or bfloat16, 1 <= T <= plan.capacity; topk_weights float32 and
        topk_ids int32 or int64 (T, top_k); expert_map int32 or int64 (E_global,), -1 = not here.
        Routes of weight 0, of an id outside the model or of an expert not here add exactly zero.

        All tensors are on one device. Allocates nothing, reads nothing back; can be captured in a
        CUDA graph. FormatError for more tokens than the plan holds; other shapes are the caller's
        to check.
        """
        tokens, capacity = x.shape[0], self.plan.capacity
        if not 1 <= tokens <= capacity:
            raise FormatError(f"x: expected 1 to {capacity} tokens of the plan, got {tokens}")
        self._route(x, topk_weights, topk_ids, expert_map)
        self._gate_up(tokens)
        self._activate(tokens)
        self._down(tokens)
        self._combine(topk_weights, y)

    def _sharing(self, tokens: int) -> tuple[int, int]:
        """Rows from gate's rotated inputs to up's, and routes that share one."""
        return (0, self.plan.top_k) if self.plan.is_shared_h else (tokens * self.plan.top_k, 1)

    def _route(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> None:
        plan, views = self.plan, self.views
        routes, map_size = topk_ids.numel(), self.experts if expert_map is None else len(expert_map)
        is_wide_map = expert_map is not None and expert_map.dtype == torch.int64
        get_kernel(ROUTE, x.device).launch(
            (routes, -(-plan.hidden // (_ROUTE_WARPS * HADAMARD_BLOCK))),
            32 * _ROUTE_WARPS,
            (
                x, topk_ids, topk_weights, expert_map, self.weights.w13_suh, views["routes"],
                views["rotated"], views["firsts13"], routes, plan.top_k, plan.hidden, self.experts,
                map_size, topk_ids.dtype == torch.int64, is_wide_map, plan.is_shared_h,
                DTYPE_CODES[x.dtype],
            ),
            overlaps=True,
        )  # fmt: skip

    def _gate_up(self, tokens: int) -> None:
        plan, trellis = self.plan, self.weights.w13_trellis
        x, y = self.views["rotated"], self.views["partial13"]
        sizes = (plan.hidden, plan.inner, 2)
        self._product(trellis, x, y, tokens, plan.splits13, sizes, self._sharing(tokens))

    def _down(self, tokens: int) -> None:
        plan, trellis = self.plan, self.weights.w2_trellis
        x, y = self.views["activated"], self.views["partial2"]
        self._product(trellis, x, y, tokens, plan.splits2, (plan.inner, plan.hidden, 1), (0, 1))

    def _product(
        self,
        trellis: torch.Tensor,
        rotated: torch.Tensor,
        partial: torch.Tensor,
        tokens: int,
        splits: int,
        sizes: tuple[int, int, int],
        sharing: tuple[int, int],
    ) -> None:
        """Launch of moe_product; `sizes` are k, n and the matrices side by side."""
        _, n, sides = sizes
        routes, bits2, strips = tokens * self.plan.top_k, double_bits(trellis), n // HADAMARD_BLOCK
        items = strips_per_block(strips, splits * sides * strips * routes, self.plan.wave)
        get_kernel(product_spec(bits2, self.codebook), trellis.device).launch(
            (splits, sides * strips // items, routes),
            32 * SLICES,
            (
                trellis, self.views["routes"], rotated, partial, routes, *sizes, self.experts,
                *sharing, items,
            ),
            shared_bytes=sum(product_shared_bytes(bits2, 1)),
            overlaps=True,
        )  # fmt: skip

    def _activate(self, tokens: int) -> None:
        plan, views, weights = self.plan, self.views, self.weights
        routes, code = tokens * plan.top_k, CODEBOOK_CODES[self.codebook]
        get_kernel(ACTIVATE, weights.w2_suh.device).launch(
            (routes, -(-plan.inner // (_ACTIVATE_WARPS * HADAMARD_BLOCK))),
            32 * _ACTIVATE_WARPS,
            (
                views["partial13"], views["firsts13"], views["routes"], weights.w13_svh,
                weights.w2_suh, views["activated"], views["firsts2"], routes, plan.hidden,
                plan.inner, self.experts, plan.splits13, code, *self._sharing(tokens),
            ),
            overlaps=True,
        )  # fmt: skip

    def _combine(self, topk_weights: torch.Tensor, y: torch.Tensor) -> None:
        plan, views, code = self.plan, self.views, CODEBOOK_CODES[self.codebook]
        get_kernel(COMBINE, y.device).launch(
            (len(y), plan.hidden // HADAMARD_BLOCK),
            32 * _COMBINE_WARPS,
            (
                views["partial2"], views["firsts2"], views["routes"], topk_weights,
                self.weights.w2_svh, y, topk_weights.numel(), plan.top_k, plan.hidden, plan.inner,
                plan.splits2, code, DTYPE_CODES[y.dtype],
            ),
            overlaps=True,
        )  # fmt: skip


def bind_moe(plan: MoePlan, scratch: torch.Tensor, weights: MoeWeights, codebook: str) -> BoundMoe:
    """A layer's experts ready to run in `scratch`, uint8 of plan.scratch_bytes on their device.

    FormatError for a scratch of another dtype or device, too small, or not aligned to 256 bytes.
    """
    device = weights.w2_suh.device
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
    views = {name: scratch[start:] for name, start in plan.offsets.items()}
    return BoundMoe(plan, views, weights, check_codebook(codebook))


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: MoeWeights,
    codebook: str,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """`BoundMoe.run` with a plan and scratch of its own for any number of tokens; (T, H), new."""
    y = torch.empty_like(x)
    top_k, hidden, inner = topk_ids.shape[1], x.shape[1], weights.w2_suh.shape[1]
    if x.shape[0] == 0 or top_k == 0:
        return y.zero_()
    tokens = min(CAPACITY, MAX_ROUTES // top_k, x.shape[0])
    sms, is_shared_h = num_multiprocessors(x.device), weights.w13_suh.dim() == 1
    plan = plan_moe(tokens, top_k, hidden, inner, sms, is_shared_h)
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=x.device)
    experts = bind_moe(plan, scratch, weights, codebook)
    for start in range(0, x.shape[0], tokens):
        part = slice(start, start + tokens)
        experts.run(x[part], topk_weights[part], topk_ids[part], y[part], expert_map)
    return y
