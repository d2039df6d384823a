"""CUDA prefill kernels: one linear and routed experts over the number of tokens, in one run.

    python benchmarks/prefill.py [--out benchmarks/results]

Beside ours: cuBLAS and torch's grouped product in bf16 and, where installed, exllamav3. Up to 512
tokens every case is checked before it is timed, against the path that decodes whole matrices. Times
are GPU time of whole calls in CUDA graphs over cold inputs, as in kernels.py. Writes prefill.json,
prefill.md and, with matplotlib, prefill.png.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import peer
import torch
from facts import RESULTS, bullet_list, write_results

from exl3kit.kernels import parity, prefill_panel
from exl3kit.kernels.cuda_moe import MoeWeights
from exl3kit.runtime import cuda_paths
from exl3kit.testing.compare import assert_three_gates
from kernels import (
    EXPERTS,
    HIDDEN,
    INNER,
    TOP_K,
    K,
    N,
    environment,
    graph_us,
    random_vector,
    random_words,
    routes,
)

LINEAR_TOKENS = (33, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MOE_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
RATES = (("mcg", 3), ("mul1", 3), ("mcg", 2), ("mcg", 4), ("mcg", 5), ("mcg", 6))
SHORT_LINEAR, SHORT_MOE = (64, 512, 4096), (128, 512, 4096)  # of the other rates
MOST_PEER_TOKENS = 4096
CHECKED_TOKENS = 512
COLUMNS = ("case", "codebook", "bits", "tokens", "us", "spread", "TFLOP/s", "bf16 us", "x bf16",
           "exllamav3 us", "x exllamav3")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A measured case; `flops` are those of its products."""

    case: str
    codebook: str
    bits: int
    tokens: int
    flops: int
    us: float
    spread_us: float
    bf16_us: float | None
    peer_us: float | None

    def cells(self) -> list[str]:
        """The columns of the table."""
        others = []
        for us in (self.bf16_us, self.peer_us):
            others += ["", ""] if us is None else [f"{us:.0f}", f"{us / self.us:.2f}"]
        return [
            self.case, self.codebook, str(self.bits), str(self.tokens), f"{self.us:.1f}",
            f"{self.spread_us:.1f}", f"{self.flops / self.us / 1e6:.0f}", *others,
        ]  # fmt: skip


def linear_bf16_us(tokens: tuple[int, ...]) -> dict[int, float]:
    """Time of cuBLAS's product of the same shape, by tokens."""
    weights = [torch.randn(K, N, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    found = {}
    for count in tokens:
        x = torch.randn(count, K, device="cuda", dtype=torch.bfloat16)
        found[count] = graph_us([functools.partial(torch.matmul, x, w) for w in weights])[0]
    return found


def bench_linear(codebook: str, bits: int, bf16: dict[int, float]) -> list[Row]:
    """One matrix size at every number of tokens."""
    words = [random_words(K // 16, N // 16, 16 * bits) for _ in range(6)]
    suh, svh = random_vector(K, scale=1 / (1.24 * K**0.5)), random_vector(N)
    rows = []
    for tokens in LINEAR_TOKENS if bits == 3 else SHORT_LINEAR:
        x = torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16)
        if tokens <= CHECKED_TOKENS:
            expected = prefill_panel.linear(x.float(), words[0], suh, svh, codebook)
            y = cuda_paths.linear(x, words[0], suh, svh, codebook)
            assert_three_gates(y.cpu(), expected.cpu(), "cuda_bfloat16", f"{tokens} tokens")
        calls = [functools.partial(cuda_paths.linear, x, own, suh, svh, codebook) for own in words]
        us, spread = graph_us(calls)
        peer_us = None
        if bits == 3 and peer.exllamav3() is not None and tokens <= MOST_PEER_TOKENS:
            half = x.half()
            modules = [peer.linear(own, suh, svh, codebook) for own in words]
            peer_us = peer.kernels_us([functools.partial(module, half) for module in modules])
        name, flops = f"linear {K} x {N}", 2 * tokens * K * N
        rows.append(Row(name, codebook, bits, tokens, flops, us, spread, bf16[tokens], peer_us))
        print(*rows[-1].cells(), flush=True)
    return rows


def moe_bf16_us() -> dict[int, float]:
    """Gate and up, activation and down by torch's grouped product over sorted rows, by tokens.

    Sorting, gathering and the weighted sum are left out.
    """
    product = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    w13 = torch.randn(EXPERTS, HIDDEN, 2 * INNER, device="cuda", dtype=torch.bfloat16)
    w2 = torch.randn(EXPERTS, INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
    found = {}
    for tokens in MOE_TOKENS:
        ids = routes(tokens, 0)[1]
        ends = torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        x = torch.randn(tokens * TOP_K, HIDDEN, device="cuda", dtype=torch.bfloat16)

        def run(x: torch.Tensor = x, ends: torch.Tensor = ends) -> torch.Tensor:
            gate, up = product(x, w13, offs=ends).chunk(2, dim=1)
            return product(torch.nn.functional.silu(gate) * up, w2, offs=ends)

        found[tokens] = graph_us([run])[0]
    return found


def random_experts(bits: int) -> MoeWeights:
    """GLM-5.2's experts on one of four ranks, all of one rate."""
    return MoeWeights(
        random_words(2, EXPERTS, HIDDEN // 16, INNER // 16, 16 * bits),
        random_vector(2, EXPERTS, HIDDEN, scale=1 / (1.24 * HIDDEN**0.5)),
        random_vector(2, EXPERTS, INNER),
        random_words(EXPERTS, INNER // 16, HIDDEN // 16, 16 * bits),
        random_vector(EXPERTS, INNER, scale=1 / (1.24 * INNER**0.5)),
        random_vector(EXPERTS, HIDDEN),
    )


def bench_moe(codebook: str, bits: int, bf16: dict[int, float]) -> list[Row]:
    """Routed experts at every number of tokens; other routes in every call of the graph."""
    weights, rows = random_experts(bits), []
    experts: Callable[..., torch.Tensor] | None = None
    if bits == 3 and peer.exllamav3() is not None:
        experts = peer.experts(weights, codebook, TOP_K)
    for tokens in MOE_TOKENS if bits == 3 else SHORT_MOE:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        routed = [routes(tokens, seed) for seed in range(4)]
        if tokens <= CHECKED_TOKENS:
            expected = parity.moe(x.float(), *routed[0], weights, codebook)
            y = cuda_paths.moe(x, *routed[0], weights, codebook)
            assert_three_gates(y.cpu(), expected.cpu(), "cuda_moe_bfloat16", f"{tokens} tokens")
        calls = [
            functools.partial(cuda_paths.moe, x, scores, ids, weights, codebook)
            for scores, ids in routed
        ]
        us, spread = graph_us(calls)
        peer_us = None
        if experts is not None and tokens <= MOST_PEER_TOKENS:
            half = x.half()
            peer_us = peer.kernels_us(
                [functools.partial(experts, half, scores.half(), ids) for scores, ids in routed]
            )
        name, flops = f"experts {TOP_K} of {EXPERTS}", 2 * tokens * TOP_K * 3 * HIDDEN * INNER
        rows.append(Row(name, codebook, bits, tokens, flops, us, spread, bf16[tokens], peer_us))
        print(*rows[-1].cells(), flush=True)
    return rows


def to_markdown(rows: list[Row], about: dict[str, str]) -> str:
    """The table for readers."""
    table = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    lines = [
        "# CUDA prefill kernels",
        "",
        bullet_list(about),
        "Whole calls, rotations and routing included; cold second-level cache. `bf16`: cuBLAS, or",
        "torch's grouped product without sorting, gathering and the weighted sum. `x`: their time",
        "over ours.",
        "",
        *(f"| {' | '.join(cells)} |" for cells in table),
    ]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Time over tokens, ours, bf16 and the peer, at 3 bits; nothing where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("linear", "experts"), strict=True):
        mine = [row for row in rows if row.case.startswith(kind) and row.bits == 3]
        for codebook in dict.fromkeys(row.codebook for row in mine):
            line = [row for row in mine if row.codebook == codebook]
            axes.plot([r.tokens for r in line], [r.us for r in line], "o-", label=codebook)
            theirs = [row for row in line if row.peer_us is not None]
            if theirs:
                times = [r.peer_us for r in theirs]
                label = f"exllamav3, {codebook}"
                axes.plot([r.tokens for r in theirs], times, "x:", label=label)
        line = [row for row in mine if row.codebook == "mcg"]
        axes.plot([r.tokens for r in line], [r.bf16_us for r in line], "k--", label="bf16")
        axes.set(title=mine[0].case + ", 3 bits", xlabel="tokens", ylabel="us")
        axes.set(xscale="log", yscale="log")
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run every case and write the result files."""
    parser = argparse.ArgumentParser(description="Measure the CUDA prefill kernels.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows, dense = [], linear_bf16_us(LINEAR_TOKENS)
    for codebook, bits in RATES:
        rows += bench_linear(codebook, bits, dense)
    grouped = moe_bf16_us()
    for codebook, bits in RATES:
        rows += bench_moe(codebook, bits, grouped)
    about = environment()
    result = {**about, "results": [asdict(row) for row in rows]}
    write_results("prefill", result, to_markdown(rows, about), options.out)
    plot(rows, options.out / "prefill.png")


if __name__ == "__main__":
    main()
