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
from exl3kit.format.spec import HADAMARD_BLOCK, TILE, Codebook, check_codebook, rates_of
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels.gemm import (
    CODEBOOK_NAMES,
    MAX_BITS2,
    PRODUCT_WARPS,
    RATES,
    choose_splits,
    num_multiprocessors,
    product_shared_bytes,
)
from exl3kit.kernels.launch import CODEBOOK_CODES, DTYPE_CODES, double_bits
from exl3kit.kernels.scratch import offsets_of, views_of

# Tokens of one launch; more are cut, which cannot show because tokens are independent. Beyond 32
# only where experts have few routes each (heuristics.decode_tokens): few weights are decoded twice.
CAPACITY = 128
MAX_ROUTES = 4096  # kMaxRoutes of moe.cuh
BLOCK_ROWS = 8  # routes of an expert that are multiplied together, kBlockRows of route.cuh
# Warps that share a strip's part of K, for gate and up and for down.
SLICES13, SLICES2 = 8, 8
_REGISTERS = 65536  # of a multiprocessor
_ROUTE_WARPS, _ACTIVATE_WARPS, _COMBINE_WARPS = 8, 4, 8

_POINTER, _INT = Param.POINTER, Param.INT32


def _spec(
    name: str, template: tuple[int | str, ...], pointers: int, numbers: int, spilled: int = 0
) -> KernelSpec:
    parameters = (_POINTER,) * pointers + (_INT,) * numbers
    return KernelSpec("moe.cuh", f"exl3::{name}", template, parameters, spill_budget=spilled)


ROUTE = _spec("moe_route", (_ROUTE_WARPS,), 8, 10)
ACTIVATE = _spec("moe_activate", (_ACTIVATE_WARPS,), 7, 9)
COMBINE = _spec("moe_combine", (_COMBINE_WARPS,), 6, 8)


def product_spec(codebook: Codebook, slices: int, bits2: int | None) -> KernelSpec:
    """The product kernel of a codebook for one rate, or for matrices of any of its rates (None)."""
    rates = tuple(int(2 * bits) for bits in rates_of(codebook)) if bits2 is None else (bits2,)
    # 3inst at 3 bits on capability 8.0 needs 20 bytes more than 80 registers.
    return _spec("moe_product", (CODEBOOK_NAMES[codebook], slices, *rates), 5, 10, spilled=24)


SPECS = (
    ROUTE,
    ACTIVATE,
    COMBINE,
    *(
        product_spec(codebook, slices, bits2)
        for bits2, codebook in (*RATES, *((None, codebook) for codebook in Codebook))
        for slices in sorted({SLICES13, SLICES2})
    ),
)


def specs_of(bits2: int | None, codebook: Codebook) -> tuple[KernelSpec, ...]:
    """Every kernel that `moe` may launch for matrices of a rate, or of several (None)."""
    products = (product_spec(codebook, slices, bits2) for slices in sorted({SLICES13, SLICES2}))
    return (ROUTE, ACTIVATE, COMBINE, *products)


class MoeWeights(NamedTuple):
    """Stacked experts of one layer, E of them, as `exl3_moe` takes them."""

    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor
    matrices: torch.Tensor | None = None


@dataclass(frozen=True)
class MoePlan:
    """Sizes of one layer's experts for up to `capacity` tokens of top_k routes.

    hidden and inner are H and S; splits13 and splits2 cut K of gate and up and of down. `vectors`
    is the number of input vectors that serve all experts, 0 where each route has rows of its own.
    """

    capacity: int
    top_k: int
    hidden: int
    inner: int
    splits13: int
    splits2: int
    num_sms: int
    vectors: int

    def input_rows(self, tokens: int) -> int:
        """Rotated inputs of one side."""
        return tokens * (self.vectors or self.top_k)

    def items(self) -> dict[str, int]:
        """Bytes of each view of the scratch, unaligned."""
        routes = self.capacity * self.top_k
        rows = 2 * self.input_rows(self.capacity)
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
        """Byte at which each view starts; `end` is the end of the scratch."""
        return offsets_of(self.items())

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
    suh_rows: int | None = None,
) -> MoePlan:
    """The plan of up to `capacity` tokens; FormatError where the routes are too many.

    The splits fill `num_sms` multiprocessors once with the routes of a single token. `suh_rows` is
    the number of input vectors of a side where experts share them; a token is rotated once for
    each of these if its routes are not fewer.
    """
    if not 1 <= capacity * top_k <= MAX_ROUTES:
        raise FormatError(
            f"MoE plan: expected 1 to {MAX_ROUTES} routes, got {capacity} tokens of {top_k}"
        )
    strips13, strips2 = 2 * inner // HADAMARD_BLOCK, hidden // HADAMARD_BLOCK
    splits13 = choose_splits(hidden // TILE, top_k * strips13, num_sms, SLICES13)
    splits2 = choose_splits(inner // TILE, top_k * strips2, num_sms, SLICES2)
    vectors = 0 if suh_rows is None or suh_rows > top_k else suh_rows
    return MoePlan(capacity, top_k, hidden, inner, splits13, splits2, num_sms, vectors)


def resident_blocks(registers: int, num_sms: int) -> int:
    """Blocks of a product kernel that run at once; so many share out the work."""
    return _REGISTERS // (32 * PRODUCT_WARPS * registers) * num_sms


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

    def _inputs(self, tokens: int) -> tuple[int, int, int]:
        """Rows from gate's rotated inputs to up's, and how a route finds its own (Inputs)."""
        return self.plan.input_rows(tokens), self.plan.top_k, self.plan.vectors

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
                map_size, topk_ids.dtype == torch.int64, is_wide_map,
                self.weights.w13_suh.shape[1], plan.vectors, DTYPE_CODES[x.dtype],
            ),
            overlaps=True,
        )  # fmt: skip

    def _gate_up(self, tokens: int) -> None:
        plan, trellis, matrices = self.plan, self.weights.w13_trellis, self.weights.matrices
        x, y = self.views["rotated"], self.views["partial13"]
        sizes = (tokens * plan.top_k, plan.hidden, plan.inner, 2, self.experts, plan.splits13)
        self._product(SLICES13, trellis, matrices, x, y, sizes, self._inputs(tokens))

    def _down(self, tokens: int) -> None:
        plan, trellis, matrices = self.plan, self.weights.w2_trellis, self.weights.matrices
        x, y = self.views["activated"], self.views["partial2"]
        sizes = (tokens * plan.top_k, plan.inner, plan.hidden, 1, self.experts, plan.splits2)
        down = None if matrices is None else matrices[2]
        self._product(SLICES2, trellis, down, x, y, sizes, (0, plan.top_k, 0))

    def _product(
        self,
        slices: int,
        trellis: torch.Tensor,
        matrices: torch.Tensor | None,
        rotated: torch.Tensor,
        partial: torch.Tensor,
        sizes: tuple[int, int, int, int, int, int],
        inputs: tuple[int, int, int],
    ) -> None:
        """Launch of moe_product; `sizes` and `inputs` are its ProductSizes and Inputs."""
        bits2 = double_bits(trellis) if matrices is None else None
        kernel = get_kernel(product_spec(self.codebook, slices, bits2), trellis.device)
        rings, sums = product_shared_bytes(bits2 or MAX_BITS2, 1)
        routes, _, n, sides, _, splits = sizes
        columns = -(-n // (HADAMARD_BLOCK * PRODUCT_WARPS // slices))
        resident = resident_blocks(kernel.resources.registers, self.plan.num_sms)
        kernel.launch(
            min(resident, routes * sides * splits * columns),
            32 * PRODUCT_WARPS,
            (
                trellis, matrices, self.views["routes"], rotated, partial, *sizes, *inputs,
                rings // PRODUCT_WARPS,
            ),
            shared_bytes=rings + sums,
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
                plan.inner, self.experts, plan.splits13, code, *self._inputs(tokens),
            ),
            overlaps=True,
        )  # fmt: skip

    def _combine(self, topk_weights: torch.Tensor, y: torch.Tensor) -> None:
        plan, views, weights = self.plan, self.views, self.weights
        code = CODEBOOK_CODES[self.codebook]
        get_kernel(COMBINE, y.device).launch(
            (len(y), plan.hidden // HADAMARD_BLOCK),
            32 * _COMBINE_WARPS,
            (
                views["partial2"], views["firsts2"], views["routes"], topk_weights,
                weights.w2_svh, y, topk_weights.numel(), plan.top_k, plan.hidden, plan.inner,
                plan.splits2, code, weights.w2_svh.shape[0],
                DTYPE_CODES[y.dtype],
            ),
            overlaps=True,
        )  # fmt: skip


def bind_moe(plan: MoePlan, scratch: torch.Tensor, weights: MoeWeights, codebook: str) -> BoundMoe:
    """A layer's experts ready to run in `scratch`, uint8 of plan.scratch_bytes on their device.

    FormatError for a scratch of another dtype or device, too small, or not aligned to 256 bytes.
    """
    views = views_of(scratch, plan.offsets, weights.w2_suh.device)
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
    suh_rows = weights.w13_suh.shape[1]
    shared = suh_rows if suh_rows < weights.w2_suh.shape[0] else None
    plan = plan_moe(tokens, top_k, hidden, inner, num_multiprocessors(x.device), shared)
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=x.device)
    experts = bind_moe(plan, scratch, weights, codebook)
    for start in range(0, x.shape[0], tokens):
        part = slice(start, start + tokens)
        experts.run(x[part], topk_weights[part], topk_ids[part], y[part], expert_map)
    return y
