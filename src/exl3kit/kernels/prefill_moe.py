"""Routed EXL3 experts for many tokens on a CUDA device: plan, scratch, and the launches.

    plan = plan_prefill(4096, top_k, experts, hidden, inner)   # sizes; allocates nothing
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    layer = bind_prefill(plan, scratch, weights, codebook)      # one for each layer
    layer.run(x, topk_weights, topk_ids, y, expert_map)

Routes are sorted by expert, so that a weight is decoded once for a block of up to 64 rows.
One buffer of a row each route holds in turn the rotated input of gate, that of up, and the output
of down. A row's sums have one order, whatever block it is in: results depend neither on the tokens
beside a token nor on where a batch is cut. docs/numerics.md has what differs from the decode plan.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from exl3kit.errors import FormatError
from exl3kit.format.spec import HADAMARD_BLOCK, Codebook, check_codebook
from exl3kit.jit.launch import get_kernel
from exl3kit.jit.spec import KernelSpec, Param
from exl3kit.kernels.cuda_moe import MoeWeights
from exl3kit.kernels.heuristics import choose_core
from exl3kit.kernels.launch import DTYPE_CODES
from exl3kit.kernels.prefill_core import Core, ProductShape
from exl3kit.kernels.scratch import offsets_of, views_of

CAPACITY = 4096  # tokens of one launch; more are cut, which does not show
_POINTER, _INT = Param.POINTER, Param.INT32
_ROUTE_WARPS, _ACTIVATE_WARPS, _ROWS_WARPS = 16, 8, 4
_TILE_ROWS = 16  # rows that a warp rotates together (hadamard_mma.cuh)


def _route_spec(name: str, pointers: int, numbers: int) -> KernelSpec:
    parameters = (_POINTER,) * pointers + (_INT,) * numbers
    return KernelSpec("prefill_route.cuh", f"exl3::{name}", (_ROUTE_WARPS,), parameters)


def _rows_spec(name: str, warps: int, pointers: int, numbers: int) -> KernelSpec:
    parameters = (_POINTER,) * pointers + (_INT,) * numbers
    return KernelSpec("prefill_rows.cuh", f"exl3::{name}", (warps,), parameters)


EXPERTS = _route_spec("prefill_experts", 4, 5)
COUNT = _route_spec("prefill_count", 2, 1)
PLACE = _route_spec("prefill_place", 5, 2)
ROTATE = _rows_spec("prefill_rotate", _ROWS_WARPS, 5, 6)
ACTIVATE = _rows_spec("prefill_activate", _ACTIVATE_WARPS, 7, 3)
COMBINE = _rows_spec("prefill_combine", _ROWS_WARPS, 6, 5)
SPECS = (EXPERTS, COUNT, PLACE, ROTATE, ACTIVATE, COMBINE)


@dataclass(frozen=True)
class PrefillPlan:
    """Sizes of one layer's experts for up to `capacity` tokens of top_k routes.

    hidden and inner are H and S, experts those on this device; block_rows bounds the rows of a
    block.
    """

    capacity: int
    top_k: int
    experts: int
    hidden: int
    inner: int
    block_rows: int

    @property
    def rows(self) -> int:
        """Rows of a full batch: those of an expert start at a multiple of 8."""
        routes = self.capacity * self.top_k
        return -(-(routes + 7 * min(self.experts, routes)) // 8) * 8

    def max_blocks(self, tokens: int) -> int:
        """Most blocks of rows that `tokens` can make."""
        routes = tokens * self.top_k
        return min(self.experts, routes) + routes // self.block_rows

    def items(self) -> dict[str, int]:
        """Bytes of each view of the scratch, unaligned."""
        routes = self.capacity * self.top_k
        return {
            "expert": 4 * routes,
            "row": 4 * routes,
            "counts": 4 * self.experts,
            "blocks": 16 * self.max_blocks(self.capacity),
            "num_blocks": 4,
            "rows": 2 * self.rows * self.hidden,
            "gate_up": 2 * self.rows * 2 * self.inner,
            "activated": 2 * self.rows * self.inner,
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
def plan_prefill(
    capacity: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    block_rows: int,
) -> PrefillPlan:
    """The plan of up to `capacity` tokens; FormatError for rows beyond 32-bit numbers."""
    plan = PrefillPlan(capacity, top_k, experts, hidden, inner, block_rows)
    if capacity < 1 or plan.rows >= 1 << 31:
        raise FormatError(
            f"prefill plan: expected 1 to 2^31 routes, got {capacity} tokens of {top_k}"
        )
    return plan


@dataclass(frozen=True)
class BoundPrefill:
    """The experts of one layer with their plan and scratch; made by `bind_prefill`."""

    plan: PrefillPlan
    views: dict[str, torch.Tensor]
    weights: MoeWeights
    codebook: Codebook
    core: Core

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        y: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> None:
        """y = sum over slots of topk_weight * expert(x); arguments as in `cuda_moe.BoundMoe.run`.

        Allocates nothing, reads nothing back; can be captured in a CUDA graph. FormatError for more
        tokens than the plan holds.
        """
        tokens, capacity = x.shape[0], self.plan.capacity
        if not 1 <= tokens <= capacity:
            raise FormatError(f"x: expected 1 to {capacity} tokens of the plan, got {tokens}")
        self._place(topk_weights, topk_ids, expert_map)
        self._gate_up(x)
        self._activate(tokens)
        self._down(tokens)
        self._combine(topk_weights, y)

    def _place(
        self, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None
    ) -> None:
        """Sort the routes by expert."""
        plan, views, device = self.plan, self.views, topk_ids.device
        routes = topk_ids.numel()
        map_size = plan.experts if expert_map is None else len(expert_map)
        is_wide_map = expert_map is not None and expert_map.dtype == torch.int64
        get_kernel(EXPERTS, device).launch(
            -(-routes // (32 * _ROUTE_WARPS)),
            32 * _ROUTE_WARPS,
            (
                topk_ids, topk_weights, expert_map, views["expert"], routes, plan.experts, map_size,
                topk_ids.dtype == torch.int64, is_wide_map,
            ),
            overlaps=True,
        )  # fmt: skip
        get_kernel(COUNT, device).launch(
            plan.experts,
            32 * _ROUTE_WARPS,
            (views["expert"], views["counts"], routes),
            overlaps=True,
        )
        get_kernel(PLACE, device).launch(
            plan.experts,
            32 * _ROUTE_WARPS,
            (
                views["expert"], views["counts"], views["row"], views["blocks"],
                views["num_blocks"], routes, plan.block_rows,
            ),
            overlaps=True,
        )  # fmt: skip

    def _gate_up(self, x: torch.Tensor) -> None:
        """Both products, one after the other from one buffer."""
        plan, views, weights = self.plan, self.views, self.weights
        vectors, routes = weights.w13_suh.shape[1], len(x) * plan.top_k
        for side in range(2):
            get_kernel(ROTATE, x.device).launch(
                (-(-routes // _TILE_ROWS), _parts(plan.hidden, _ROWS_WARPS)),
                32 * _ROWS_WARPS,
                (
                    x, weights.w13_suh[side], views["expert"], views["row"], views["rows"], routes,
                    plan.top_k, plan.hidden, plan.rows, vectors, DTYPE_CODES[x.dtype],
                ),
                overlaps=True,
            )  # fmt: skip
            shape = ProductShape(plan.hidden, plan.inner, plan.rows, plan.max_blocks(len(x)))
            self._product(shape, side, views["rows"], views["gate_up"][side * self._up :])

    @property
    def _up(self) -> int:
        """Byte at which the product of up starts behind that of gate."""
        return 2 * self.plan.rows * self.plan.inner

    def _down(self, tokens: int) -> None:
        plan = self.plan
        shape = ProductShape(plan.inner, plan.hidden, plan.rows, plan.max_blocks(tokens))
        self._product(shape, 2, self.views["activated"], self.views["rows"])

    def _product(self, shape: ProductShape, which: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Product by gate (0), up (1) or down (2) of every block's expert."""
        weights, table = self.weights, (self.views["blocks"], self.views["num_blocks"])
        trellis = weights.w2_trellis if which == 2 else weights.w13_trellis
        matrices = None if weights.matrices is None else weights.matrices[which]
        if matrices is None and which < 2:
            trellis = trellis[which]
        self.core.product(shape, trellis, matrices, self.codebook, table, x, y)

    def _activate(self, tokens: int) -> None:
        plan, views, weights = self.plan, self.views, self.weights
        gate = views["gate_up"]
        get_kernel(ACTIVATE, gate.device).launch(
            (tokens * plan.top_k, _parts(plan.inner, _ACTIVATE_WARPS)),
            32 * _ACTIVATE_WARPS,
            (
                gate, gate[self._up :], views["expert"], views["row"], weights.w13_svh,
                weights.w2_suh, views["activated"], plan.inner, plan.experts, plan.rows,
            ),
            overlaps=True,
        )  # fmt: skip

    def _combine(self, topk_weights: torch.Tensor, y: torch.Tensor) -> None:
        plan, views, svh = self.plan, self.views, self.weights.w2_svh
        get_kernel(COMBINE, y.device).launch(
            (-(-len(y) // _TILE_ROWS), _parts(plan.hidden, _ROWS_WARPS)),
            32 * _ROWS_WARPS,
            (
                views["rows"], views["expert"], views["row"], topk_weights, svh, y, len(y),
                plan.top_k, plan.hidden, svh.shape[0], DTYPE_CODES[y.dtype],
            ),
            overlaps=True,
        )  # fmt: skip


def _parts(width: int, warps: int) -> int:
    """Blocks of threads for the blocks of 128 in `width`, a warp each."""
    return -(-width // (warps * HADAMARD_BLOCK))


def bind_prefill(
    plan: PrefillPlan, scratch: torch.Tensor, weights: MoeWeights, codebook: str, core: Core
) -> BoundPrefill:
    """A layer's experts ready to run in `scratch`, uint8 of plan.scratch_bytes on their device.

    FormatError for a scratch that does not fit.
    """
    views = views_of(scratch, plan.offsets, weights.w2_suh.device)
    return BoundPrefill(plan, views, weights, check_codebook(codebook), core)


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: MoeWeights,
    codebook: str,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """`BoundPrefill.run` with a plan and scratch of its own for any number of tokens; new (T, H).

    Scratch comes from torch's allocator, which knows streams and graph captures: target and draft,
    or two streams, never share any.
    """
    y = torch.empty_like(x)
    top_k, (experts, inner) = topk_ids.shape[1], weights.w2_suh.shape
    if 0 in (x.shape[0], top_k, experts):
        return y.zero_()
    core = choose_core(x.device, weights.matrices is not None)
    tokens = min(CAPACITY, x.shape[0])
    plan = plan_prefill(tokens, top_k, experts, x.shape[1], inner, core.block_rows)
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=x.device)
    layer = bind_prefill(plan, scratch, weights, codebook, core)
    for start in range(0, x.shape[0], tokens):
        part = slice(start, start + tokens)
        layer.run(x[part], topk_weights[part], topk_ids[part], y[part], expert_map)
    return y
