"""Random inputs for the kernel tests, and their float64 ground truth."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from exl3kit.format.tensors import Exl3Tensor
from exl3kit.runtime.experts import Rates, matrix_table
from exl3kit.testing.generate import random_exl3

# 1 and 2: single rows; 15 to 17: a tile; 31 to 33: the first panels, no multiple of any register
# block; 512: one chunk of tokens; 521: a second, partly filled chunk.
TOKENS = (0, 1, 2, 15, 16, 17, 31, 32, 33, 145, 512, 521)
MOST_TOKENS = 800
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Experts(NamedTuple):
    """Stacked weights in the order of the arguments of `moe`."""

    w13_trellis: torch.Tensor
    w13_suh: torch.Tensor
    w13_svh: torch.Tensor
    w2_trellis: torch.Tensor
    w2_suh: torch.Tensor
    w2_svh: torch.Tensor


class MixedExperts(NamedTuple):
    """Experts of several rates: weights with flat trellises, and where each matrix lies."""

    weights: Experts
    matrices: torch.Tensor


class Routing(NamedTuple):
    """Router output: float32 weights and ids, both (T, top_k)."""

    weights: torch.Tensor
    ids: torch.Tensor


@cache
def random_experts(
    num_experts: int,
    hidden: int,
    inner: int,
    bits13: int | float = 3,
    bits2: int | float = 4,
    codebook: str = "mcg",
) -> Experts:
    """Random experts of which gate and up have `bits13` and down has `bits2`."""

    def stack(k: int, n: int, bits: int | float, first_seed: int) -> list[torch.Tensor]:
        seeds = range(first_seed, first_seed + num_experts)
        linears = [random_exl3(k, n, bits, codebook, seed) for seed in seeds]
        return [torch.stack([getattr(e, f) for e in linears]) for f in ("trellis", "suh", "svh")]

    gate = stack(hidden, inner, bits13, 1000)
    up = stack(hidden, inner, bits13, 2000)
    down = stack(inner, hidden, bits2, 3000)
    return Experts(*(torch.stack(pair) for pair in zip(gate, up, strict=True)), *down)


# Gate, up and down of five experts, each rate next to others.
MIXED_RATES: tuple[Rates, ...] = ((3, 4, 2), (8, 3, 3), (2, 2, 6), (4, 4, 4), (6, 3, 8))
Linears = tuple[Exl3Tensor, Exl3Tensor, Exl3Tensor]


@cache
def linears_of(rates: tuple[Rates, ...], hidden: int, inner: int, codebook: str) -> list[Linears]:
    """Gate, up and down of every expert."""
    return [
        (
            random_exl3(hidden, inner, gate, codebook, 1000 + e),
            random_exl3(hidden, inner, up, codebook, 2000 + e),
            random_exl3(inner, hidden, down, codebook, 3000 + e),
        )
        for e, (gate, up, down) in enumerate(rates)
    ]


def mixed_experts(
    rates: tuple[Rates, ...], hidden: int, inner: int, codebook: str = "mcg"
) -> MixedExperts:
    """The same as `exl3_moe` takes them."""
    gate, up, down = zip(*linears_of(rates, hidden, inner, codebook), strict=True)
    weights = Experts(
        torch.cat([linear.trellis.flatten() for linear in (*gate, *up)]),
        torch.stack([torch.stack([linear.suh for linear in side]) for side in (gate, up)]),
        torch.stack([torch.stack([linear.svh for linear in side]) for side in (gate, up)]),
        torch.cat([linear.trellis.flatten() for linear in down]),
        torch.stack([linear.suh for linear in down]),
        torch.stack([linear.svh for linear in down]),
    )
    return MixedExperts(weights, matrix_table(rates, hidden, inner))


def true_sum(x: torch.Tensor, routing: Routing, experts: list[Linears]) -> torch.Tensor:
    """Experts one by one in float64, from decoded matrices."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for e, (gate, up, down) in enumerate(experts):
        share = (routing.weights * (routing.ids == e)).sum(1, keepdim=True)
        inner = torch.nn.functional.silu(true_linear(x, gate)) * true_linear(x, up)
        y += share.double() * true_linear(inner, down)
    return y


@cache
def _rows(width: int) -> torch.Tensor:
    return torch.randn(MOST_TOKENS, width, generator=torch.Generator().manual_seed(7))


def random_rows(tokens: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(tokens, width) standard normal, own copy: the first rows of one table."""
    return _rows(width)[:tokens].to(dtype, copy=True)


@cache
def _scores(num_experts: int) -> torch.Tensor:
    return torch.rand(MOST_TOKENS, num_experts, generator=torch.Generator().manual_seed(8))


def random_routing(tokens: int, top_k: int, num_experts: int) -> Routing:
    """Weights that sum to 1 and distinct experts for each token: the first rows of one table."""
    top = _scores(num_experts)[:tokens].topk(top_k)
    return Routing(top.values / top.values.sum(dim=1, keepdim=True), top.indices)


@cache
def _dense(linear: Exl3Tensor) -> torch.Tensor:
    return linear.dequantize(torch.float64)


def true_linear(x: torch.Tensor, linear: Exl3Tensor) -> torch.Tensor:
    """x W in float64 from the decoded dense matrix, x taken as it is stored."""
    return x.double() @ _dense(linear)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that starts one element after the start of its storage."""
    storage = tensor.new_empty(tensor.numel() + 1)
    return storage[1:].view(tensor.shape).copy_(tensor)
