"""CPU prefill against torch's dense products of the same matrices, in the same run.

    python benchmarks/cpu_prefill.py [--threads N] [--out benchmarks/results]

Each case is checked against the dense product before it is timed. Calls of ours and of torch's take
turns, and the best time of each counts, so that a machine that slows down slows both. bf16 is timed
where oneDNN has it; elsewhere torch takes seconds a call, which no ratio should hide behind. Bytes
are the workspace of a float32 call beside the trellis. Writes cpu_prefill.json and cpu_prefill.md.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cpu_kernels import Call, Routed, dense_moe, stack
from facts import RESULTS, bullet_list, facts, write_results

from exl3kit.jit.cpu import ISA_NAMES, cpu_isa
from exl3kit.kernels.launch import require_library
from exl3kit.kernels.linear import linear
from exl3kit.kernels.moe import moe
from exl3kit.runtime.ops import exl3_linear, exl3_moe
from exl3kit.testing.generate import random_exl3

SIDE, BITS = 4096, 3
TOKENS = (32, 128, 512, 2048)
EXPERTS, TOP_K, HIDDEN, INNER = 64, 8, 2048, 768
MOE_TOKENS = (128, 512)
DISTINCT = 4  # experts; 64 would take 1.2 GB in float32, and one is 19 MB already
ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """Milliseconds of one call; those of bf16 are None where torch has no unit for it."""

    case: str
    tokens: int
    ours_fp32: float
    torch_fp32: float
    ours_bf16: float | None
    torch_bf16: float | None
    workspace_mib: float

    def cells(self) -> tuple[str, ...]:
        """The columns of the table."""
        pairs = ((self.ours_fp32, self.torch_fp32), (self.ours_bf16, self.torch_bf16))
        times = []
        for ours, theirs in pairs:
            if ours is None or theirs is None:
                times += "---"
            else:
                times += [f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]
        return (self.case, str(self.tokens), *times, f"{self.workspace_mib:.1f}")


COLUMNS = (
    "case", "tokens", "fp32 ms", "torch fp32", "ratio", "bf16 ms", "torch bf16", "ratio", "MiB",
)  # fmt: skip


def best_milliseconds(calls: list[Call]) -> list[float]:
    """Best wall time of every call, taking turns."""
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - start))
    return best


def workspace(entry: str, *sizes: int) -> float:
    """MiB that the library asks for a launch."""
    floats = getattr(require_library(), entry)(*map(ctypes.c_int64, sizes))
    return floats * 4 / 2**20


def timed(case: str, tokens: int, calls: list[Call], scratch: float) -> Row:
    """Check ours (the first, and the third in bf16) against float32 (the second), then time all."""
    expected = calls[1]()
    assert (calls[0]() - expected).norm() < 1e-5 * expected.norm(), (case, tokens)
    assert len(calls) == 2 or (calls[2]() - expected).norm() < 1e-2 * expected.norm(), case
    times = best_milliseconds(calls)
    ours_bf16, torch_bf16 = times[2:] if len(calls) > 2 else (None, None)
    return Row(case, tokens, times[0], times[1], ours_bf16, torch_bf16, scratch)


def linear_rows(threads: int, has_bf16: bool) -> list[Row]:
    """One square linear at every number of tokens."""
    w = random_exl3(SIDE, SIDE, BITS, "mcg", 0)
    dense = w.dequantize()
    half = dense.bfloat16()
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, SIDE)
        narrow = x.bfloat16()
        calls: list[Call] = [
            lambda x=x: linear(x, w.trellis, w.suh, w.svh, w.codebook, threads=threads),
            lambda x=x: x @ dense,
        ]
        if has_bf16:
            calls += [
                lambda x=narrow: exl3_linear(x, w.trellis, w.suh, w.svh, w.codebook),
                lambda x=narrow: x @ half,
            ]
        scratch = workspace("exl3_linear_workspace", tokens, SIDE, threads)
        rows.append(timed(f"linear {SIDE} x {SIDE}", tokens, calls, scratch))
    return rows


def moe_rows(threads: int, has_bf16: bool) -> list[Row]:
    """Routed experts; torch takes them one by one, with their rows gathered."""

    def repeated(first: int, k: int, n: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        few = [random_exl3(k, n, BITS, "mcg", seed) for seed in range(first, first + DISTINCT)]
        copies = EXPERTS // DISTINCT
        return stack(few * copies), [e.dequantize() for e in few] * copies

    gate, up = repeated(0, HIDDEN, INNER), repeated(9, HIDDEN, INNER)
    down = repeated(18, INNER, HIDDEN)
    w13_trellis, w13_suh, w13_svh = map(torch.stack, zip(gate[0], up[0], strict=True))
    w2_trellis, w2_suh, w2_svh = down[0]
    dense = [gate[1], up[1], down[1]]
    halves = [[e.bfloat16() for e in few[:DISTINCT]] * (EXPERTS // DISTINCT) for few in dense]
    rows = []
    for tokens in MOE_TOKENS:
        x, top = torch.randn(tokens, HIDDEN), torch.rand(tokens, EXPERTS).topk(TOP_K)
        routed = Routed(x, top.values, top.indices)
        narrow = Routed(x.bfloat16(), top.values.bfloat16(), top.indices)
        calls: list[Call] = [
            lambda r=routed: moe(
                r.x, r.weights, r.ids, w13_trellis, w13_suh, w13_svh, w2_trellis, w2_suh, w2_svh,
                "mcg", threads=threads,
            ),
            lambda r=routed: dense_moe(r, dense),
        ]  # fmt: skip
        if has_bf16:
            calls += [
                lambda r=narrow: exl3_moe(
                    r.x, r.weights.float(), r.ids, w13_trellis, w13_suh, w13_svh, w2_trellis,
                    w2_suh, w2_svh, "mcg",
                ),
                lambda r=narrow: dense_moe(r, halves),
            ]  # fmt: skip
        scratch = workspace("exl3_moe_workspace", tokens, TOP_K, HIDDEN, INNER, threads)
        rows.append(timed(f"moe {TOP_K} of {EXPERTS}, {HIDDEN} x {INNER}", tokens, calls, scratch))
    return rows


def main() -> None:
    """Run every case and write the two result files."""
    parser = argparse.ArgumentParser(description="Measure CPU prefill against torch.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    rows = linear_rows(options.threads, has_bf16) + moe_rows(options.threads, has_bf16)
    about = {**facts(), "threads": str(options.threads), "tier": ISA_NAMES[cpu_isa()]}
    table = [COLUMNS, ("---",) * len(COLUMNS), *(row.cells() for row in rows)]
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    page = f"# CPU prefill, mcg, {BITS} bits\n\n{bullet_list(about)}\n{lines}"
    result = {**about, "results": [asdict(row) for row in rows]}
    write_results("cpu_prefill", result, page, options.out)


if __name__ == "__main__":
    main()
