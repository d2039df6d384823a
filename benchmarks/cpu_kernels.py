"""CPU kernels against torch's float32 product of the same matrix, decoded, in the same run.

    python benchmarks/cpu_kernels.py [--threads N] [--out benchmarks/results]

Every case is checked against the dense product before it is timed. Times are the best of repeated
calls that walk over copies larger than the second-level cache. The other tiers are measured on one
case. Writes cpu_kernels.json and cpu_kernels.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
from facts import RESULTS, bullet_list, facts, write_results

from exl3kit.format.tensors import Exl3Tensor
from exl3kit.jit.cpu import ISA_NAMES, cpu_isa
from exl3kit.kernels.linear import linear
from exl3kit.kernels.moe import moe
from exl3kit.testing.generate import random_exl3

COPIES = 4  # of a linear: 25 MB of trellis at 4096 x 4096 and 3 bits
RATES = (("mcg", 2), ("mcg", 3), ("mcg", 4), ("mcg", 6), ("mul1", 2.5), ("mul1", 3), ("3inst", 3))
LINEAR_SIDE = 4096
TOKENS = (1, 8, 128)
EXPERTS, TOP_K, HIDDEN, INNER = 16, 4, 2048, 1024
MOE_TOKENS = (1, 16, 256)


Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is multiplied: `weights` are decoded once a call, `products` counts weight times row."""

    name: str
    tokens: int
    tier: str
    bits: float
    weights: int
    products: int


@dataclass(frozen=True)
class Row:
    """A measured case: seconds of one call, ours and torch's."""

    case: Case
    seconds: float
    torch_seconds: float

    @property
    def speedup(self) -> float:
        """Time of torch's dense float32 product over ours."""
        return self.torch_seconds / self.seconds

    def cells(self) -> list[str]:
        """The columns of the table."""
        case, seconds = self.case, self.seconds
        return [
            case.name,
            str(case.tokens),
            case.tier,
            f"{seconds * 1e6:.0f}",
            f"{case.weights * case.bits / 8 / seconds / 1e9:.2f}",
            f"{case.weights / seconds / 1e9:.2f}",
            f"{2 * case.products / seconds / 1e9:.0f}",
            f"{self.speedup:.2f}",
        ]


COLUMNS = ("case", "tokens", "tier", "us", "trellis GB/s", "Gweights/s", "GFLOP/s", "x torch")


def best_seconds(call: Call, threads: int, budget: float = 0.4) -> float:
    """Best time of one call: at least 3 calls, then until `budget` seconds are used.

    With one thread the clock is the processor's, which a busy machine does not disturb.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    call()
    times: list[float] = []
    while len(times) < 3 or sum(times) < budget:
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def measure(case: Case, ours: Call, dense: Call, threads: int) -> Row:
    """Check one result against the other, then time both."""
    # Two float32 results: each may be 1e-6 RMS away from the truth.
    expected = dense()
    assert (ours() - expected).norm() < 1e-5 * expected.norm(), case
    return Row(case, best_seconds(ours, threads), best_seconds(dense, threads))


def bench_linear(codebook: str, bits: int | float, isa: int, threads: int) -> list[Row]:
    """One square linear at every number of tokens, walking over copies."""
    side = LINEAR_SIDE
    name = f"linear {side} x {side}, {codebook} {bits} bits"
    linears = [random_exl3(side, side, bits, codebook, seed) for seed in range(COPIES)]
    dense = linears[-1].dequantize()
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, side)
        walk = cycle([linears[-1], *linears[:-1]])

        def ours(x: torch.Tensor = x, walk: Iterator[Exl3Tensor] = walk) -> torch.Tensor:
            w = next(walk)
            return linear(x, w.trellis, w.suh, w.svh, w.codebook, isa=isa, threads=threads)

        def torchs(x: torch.Tensor = x) -> torch.Tensor:
            return x @ dense

        case = Case(name, tokens, ISA_NAMES[isa], bits, side * side, tokens * side * side)
        rows.append(measure(case, ours, torchs, threads))
    return rows


class Routed(NamedTuple):
    """Rows and where they go."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def dense_moe(routed: Routed, matrices: list[list[torch.Tensor]]) -> torch.Tensor:
    """The experts in use, one by one, as dense float32 products of gathered rows."""
    x, weights, ids = routed
    gate, up, down = matrices
    y = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        hidden = torch.nn.functional.silu(x[token] @ gate[e]) * (x[token] @ up[e])
        y.index_add_(0, token, weights[token, slot, None] * (hidden @ down[e]))
    return y


def stack(linears: list[Exl3Tensor]) -> list[torch.Tensor]:
    """Trellis, suh and svh of several linears, each stacked."""
    return [torch.stack([getattr(e, f) for e in linears]) for f in ("trellis", "suh", "svh")]


def bench_moe(bits: int, isa: int, threads: int) -> list[Row]:
    """Routed experts at every number of tokens."""
    name = f"moe {TOP_K} of {EXPERTS}, {HIDDEN} x {INNER}, mcg {bits} bits"
    gate, up, down = (
        [random_exl3(k, n, bits, "mcg", seed) for seed in range(first, first + EXPERTS)]
        for first, k, n in ((0, HIDDEN, INNER), (100, HIDDEN, INNER), (200, INNER, HIDDEN))
    )
    w13_trellis, w13_suh, w13_svh = map(torch.stack, zip(stack(gate), stack(up), strict=True))
    w2_trellis, w2_suh, w2_svh = stack(down)
    dense = [[e.dequantize() for e in matrix] for matrix in (gate, up, down)]
    rows = []
    for tokens in MOE_TOKENS:
        x = torch.randn(tokens, HIDDEN)
        weights, ids = torch.rand(tokens, EXPERTS).topk(TOP_K)
        routed = Routed(x, weights, ids)

        def ours(routed: Routed = routed) -> torch.Tensor:
            x, weights, ids = routed
            return moe(
                x, weights, ids, w13_trellis, w13_suh, w13_svh, w2_trellis, w2_suh, w2_svh, "mcg",
                isa=isa, threads=threads,
            )  # fmt: skip

        def torchs(routed: Routed = routed) -> torch.Tensor:
            return dense_moe(routed, dense)

        expert = 3 * HIDDEN * INNER
        decoded, products = len(ids.unique()) * expert, ids.numel() * expert
        case = Case(name, tokens, ISA_NAMES[isa], bits, decoded, products)
        rows.append(measure(case, ours, torchs, threads))
    return rows


def to_markdown(rows: list[Row], about: dict[str, str]) -> str:
    """The table for readers, with a geometric mean of the speed-ups on the machine's best tier."""
    best = [row for row in rows if row.case.tier == rows[0].case.tier]
    mean = math.exp(statistics.fmean(math.log(row.speedup) for row in best))
    table = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    lines = [
        "# CPU kernels",
        "",
        bullet_list(about),
        *(f"| {' | '.join(cells)} |" for cells in table),
        "",
        f"Geometric mean on {rows[0].case.tier}: {mean:.2f} x torch's float32 product.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run every case and write the two result files."""
    parser = argparse.ArgumentParser(description="Measure the CPU kernels against torch.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    best = cpu_isa()
    rows = []
    for codebook, bits in RATES:
        rows += bench_linear(codebook, bits, best, options.threads)
    for isa in range(best):
        rows += bench_linear("mcg", 3, isa, options.threads)
    rows += bench_moe(3, best, options.threads)
    clock = "processor time" if options.threads == 1 else "wall clock"
    about = {**facts(), "threads": str(options.threads), "clock": clock}
    results = [{**asdict(row), "speedup": row.speedup} for row in rows]
    write_results(
        "cpu_kernels", {**about, "results": results}, to_markdown(rows, about), options.out
    )


if __name__ == "__main__":
    main()
