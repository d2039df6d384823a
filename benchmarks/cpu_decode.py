"""CPU decode against dense bf16: torch's linear, and vLLM's fused experts, in the same run.

    python benchmarks/cpu_decode.py [--out benchmarks/results]

Medians of calls that take turns, ours and the peers', on one and on two threads; all walk over
copies larger than the second-level cache. vLLM's kernel takes weights that it has packed itself,
and is left out, by name, where vllm is not installed. Results are checked before they are timed:
the linear against its decoded matrix; the experts' trellises are random bits, whose product the
tests check. Writes cpu_decode.json and cpu_decode.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import time
from itertools import cycle
from pathlib import Path

import torch
from cpu_kernels import Call
from facts import RESULTS, bullet_list, facts, write_results

from exl3kit.jit.cpu import ISA_NAMES, cpu_isa
from exl3kit.kernels.linear import linear
from exl3kit.kernels.moe import moe
from exl3kit.testing.generate import random_exl3

SIDE, BITS, COPIES = 4096, 3, 3
TOKENS = (1, 2, 4, 8)
EXPERTS, TOP_K, HIDDEN, INNER = 64, 8, 2048, 768
THREADS = (1, 2)
ROUNDS = 9
STREAM_BYTES = 256 << 20
COLUMNS = ("case", "tokens", "threads", "ms", "torch fp32", "bf16 peer", "x bf16")


def medians(calls: dict[str, Call]) -> dict[str, float]:
    """Milliseconds of each call; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def linear_calls(tokens: int, threads: int) -> dict[str, Call]:
    """Ours and torch's, which reads W as a checkpoint stores it, (out, in)."""
    packed = [random_exl3(SIDE, SIDE, BITS, "mcg", seed) for seed in range(COPIES)]
    dense = [torch.randn(SIDE, SIDE) for _ in range(COPIES)]
    narrow = [matrix.bfloat16() for matrix in dense]
    x = torch.randn(tokens, SIDE)
    x16, walk = x.bfloat16(), cycle(range(COPIES))

    def ours(x: torch.Tensor = x16) -> torch.Tensor:
        w = packed[next(walk)]
        return linear(x, w.trellis, w.suh, w.svh, w.codebook, threads=threads)

    expected = x @ packed[0].dequantize()
    assert (ours(x) - expected).norm() < 1e-5 * expected.norm(), tokens
    return {
        "ours": ours,
        "fp32": lambda: torch.nn.functional.linear(x, dense[next(walk)]),
        "bf16": lambda: torch.nn.functional.linear(x16, narrow[next(walk)]),
    }


def our_experts(threads: int) -> Call:
    """One token through experts of random bits, other ones at each call."""

    def trellis(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, 16 * BITS, dtype=torch.int16).random_(-(1 << 15), 1 << 15)

    w13 = trellis(2, EXPERTS, HIDDEN // 16, INNER // 16)
    w2 = trellis(EXPERTS, INNER // 16, HIDDEN // 16)
    shapes = ((2, EXPERTS, HIDDEN), (2, EXPERTS, INNER), (EXPERTS, INNER), (EXPERTS, HIDDEN))
    suh13, svh13, suh2, svh2 = (torch.ones(*shape, dtype=torch.half) for shape in shapes)
    x, weights = torch.randn(1, HIDDEN).bfloat16(), torch.full((1, TOP_K), 1 / TOP_K)

    def call() -> torch.Tensor:
        ids = torch.randperm(EXPERTS)[None, :TOP_K].contiguous()
        return moe(x, weights, ids, w13, suh13, svh13, w2, suh2, svh2, "mcg", threads=threads)

    return call


def vllm_experts() -> Call | None:
    """vLLM's fused experts in bf16; None where vllm is not installed."""
    library = "_C_AVX2"  # as vLLM chooses; loading another one stops the process
    if torch.cpu._is_avx512_supported():
        library = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    # The library is no Python module: importing it registers its ops, then fails.
    with contextlib.suppress(ImportError):
        importlib.import_module(f"vllm.{library}")
    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        return None
    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    packed = []
    for shape in ((EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)):
        plain = torch.randn(*shape, dtype=torch.bfloat16)
        packed.append(torch.empty_like(plain))
        torch.ops._C.prepack_moe_weight(plain, packed[-1], isa)
    x, weights = torch.randn(1, HIDDEN).bfloat16(), torch.full((1, TOP_K), 1 / TOP_K)
    y = torch.empty_like(x)

    def call() -> torch.Tensor:
        ids = torch.randperm(EXPERTS, dtype=torch.int32)[None, :TOP_K].contiguous()
        torch.ops._C.cpu_fused_moe(y, x, *packed, None, None, weights, ids, False, "silu", isa)
        return y

    return call


def stream_rate() -> float:
    """Bytes a second that torch's threads read."""
    values = torch.ones(STREAM_BYTES // 4)
    return STREAM_BYTES / medians({"sum": values.sum})["sum"] * 1e3


def row(case: str, tokens: int, threads: int, times: dict[str, float]) -> dict[str, str]:
    """One line of the table; what was not measured is a dash."""
    cells = {name: f"{times[name]:.2f}" if name in times else "-" for name in ("fp32", "bf16")}
    ratio = f"{times['bf16'] / times['ours']:.2f}" if "bf16" in times else "-"
    values = (case, str(tokens), str(threads), f"{times['ours']:.2f}", *cells.values(), ratio)
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    """Run every case and write the two result files."""
    parser = argparse.ArgumentParser(description="Measure CPU decode against dense bf16.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    header = {**facts(), "tier": ISA_NAMES[cpu_isa()]}
    fused, rows = vllm_experts(), []
    header["bf16 peer of experts"] = "vLLM's cpu_fused_moe" if fused else "skipped: no vllm"
    for threads in THREADS:
        torch.set_num_threads(threads)
        header[f"read GB/s, {threads} threads"] = f"{stream_rate() / 1e9:.1f}"
        for tokens in TOKENS:
            times = medians(linear_calls(tokens, threads))
            rows.append(row(f"linear {SIDE} x {SIDE}, mcg {BITS}", tokens, threads, times))
        calls = {"ours": our_experts(threads)} | ({"bf16": fused} if fused else {})
        name = f"moe {TOP_K} of {EXPERTS}, {HIDDEN} x {INNER}, mcg {BITS}"
        rows.append(row(name, 1, threads, medians(calls)))
    table = [COLUMNS, ["---"] * len(COLUMNS), *(line.values() for line in rows)]
    lines = (f"| {' | '.join(cells)} |\n" for cells in table)
    page = (
        f"# CPU decode\n\n{bullet_list(header)}\n{''.join(lines)}\nx bf16: speed over the peer's.\n"
    )
    write_results("cpu_decode", {**header, "results": rows}, page, options.out)


if __name__ == "__main__":
    main()
