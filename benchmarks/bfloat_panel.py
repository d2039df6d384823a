"""What CPU prefill in bf16 adds to the library's product, and how far its result is from the truth.

    python benchmarks/bfloat_panel.py [--threads N] [--out benchmarks/results]

The steps need no bf16 unit and are timed everywhere, best of several; the product itself is
cpu_prefill.py's, where oneDNN has one. Errors are RMS over that of the float64 result, of a matrix
with fewer columns, since torch takes seconds for a large bf16 product without a unit. Writes
bfloat_panel.json and bfloat_panel.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from facts import RESULTS, bullet_list, facts, write_results

from exl3kit.jit.cpu import ISA_NAMES, cpu_isa
from exl3kit.kernels import bfloat_panel
from exl3kit.kernels.linear import linear
from exl3kit.testing.generate import random_exl3

SIDE, BITS, CODEBOOK, TOKENS = 4096, 3, "mcg", 512
ERROR_COLUMNS, ERROR_TOKENS = 256, 64
ROUNDS = 9


def best_milliseconds(call: Callable[[], object]) -> float:
    """Best wall time of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def steps() -> dict[str, float]:
    """Milliseconds of each step for a square matrix."""
    w, isa = random_exl3(SIDE, SIDE, BITS, CODEBOOK, 0), cpu_isa()
    columns = bfloat_panel.panel_columns(SIDE, SIDE, torch.get_num_threads())
    panel = torch.empty((columns, SIDE), dtype=torch.bfloat16)
    x = torch.randn(TOKENS, SIDE).bfloat16()
    product, y = torch.randn(TOKENS, columns).bfloat16(), torch.empty_like(x)
    starts = range(0, SIDE, columns)

    def decode() -> None:
        for first in starts:
            bfloat_panel.decode(w.trellis, CODEBOOK, first, panel[: SIDE - first], isa)

    def finish() -> None:
        for first in starts:
            part = product[:, : SIDE - first].contiguous()
            bfloat_panel.finish(part, first, w.svh, None, y, isa)

    return {
        "decode the matrix": best_milliseconds(decode),
        "rotate the input": best_milliseconds(lambda: bfloat_panel.rotate(x, w.suh, isa)),
        "finish the output": best_milliseconds(finish),
    }


def errors() -> dict[str, float]:
    """RMS errors of bf16 rows, by the way they are multiplied."""
    w = random_exl3(SIDE, ERROR_COLUMNS, BITS, CODEBOOK, 1)
    dense, parts = w.dequantize(torch.float64), (w.trellis, w.suh, w.svh, CODEBOOK)
    x = torch.randn(ERROR_TOKENS, SIDE).bfloat16()
    truth = x.double() @ dense
    results = {
        "panels in bf16": bfloat_panel.linear(x, *parts),
        "panels in bf16, float32 result": bfloat_panel.linear(x.float(), *parts),
        "a bf16 model": x @ dense.bfloat16(),
        "products in float32": linear(x, *parts),
    }
    return {name: float((y - truth).norm() / truth.norm()) for name, y in results.items()}


def main() -> None:
    """Measure and write the two result files."""
    parser = argparse.ArgumentParser(description="Measure the steps of CPU prefill in bf16.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    times, rms = steps(), errors()
    about = {**facts(), "threads": str(options.threads), "tier": ISA_NAMES[cpu_isa()]}
    page = f"# CPU prefill in bf16: its steps, {CODEBOOK}, {BITS} bits\n\n{bullet_list(about)}\n"
    page += f"| {SIDE} x {SIDE}, {TOKENS} tokens | ms |\n| --- | --- |\n"
    page += "".join(f"| {name} | {time:.1f} |\n" for name, time in times.items())
    page += f"\n| {SIDE} x {ERROR_COLUMNS}, {ERROR_TOKENS} tokens | RMS error |\n| --- | --- |\n"
    page += "".join(f"| {name} | {error:.2e} |\n" for name, error in rms.items())
    write_results("bfloat_panel", {**about, "ms": times, "rms": rms}, page, options.out)


if __name__ == "__main__":
    main()
