"""CUDA decode kernels: one linear and routed experts, against exllamav3, cuBLAS bf16 and a copy.

    python benchmarks/kernels.py [--out benchmarks/results]

Every case is checked against float64 before it is timed. Times are GPU time of whole calls,
rotations included: a CUDA graph walks over inputs that together exceed the second-level cache
several times, the median of the replays counts. exllamav3, where installed, runs in the same
process on the same tensors; its experts cannot be captured, so the times of their kernels are added
up, in its favour. Writes kernels.json, kernels.md and, with matplotlib, kernels.png.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import peer
import torch
from facts import RESULTS, bullet_list, facts, write_results

from exl3kit.kernels import cuda_moe, gemm
from exl3kit.runtime.reference import reference_linear, reference_moe
from exl3kit.testing.compare import assert_three_gates

K, N = 6144, 12288
TOKENS = (1, 8, 16, 32)
RATES = (("mcg", 3), ("mul1", 3), ("3inst", 3), ("mcg", 2), ("mcg", 4), ("mcg", 6), ("mcg", 8),
         ("mul1", 2.5))  # fmt: skip
# GLM-5.2 on one of four ranks: hidden size, slice of an expert, experts, routes of a token.
HIDDEN, INNER, EXPERTS, TOP_K = 6144, 512, 256, 8
MOE_TOKENS = (1, 2, 4, 8, 16, 32)
# Weights a us at 3 bits of decoding and multiplying in registers alone: docs/cuda-kernels.md.
CEILINGS = {"mcg": 4.7e6, "mul1": 5.15e6}
WALK_BYTES = 256 << 20  # what one graph reads, at least; the second-level cache has 50 MiB
REPLAYS = 15

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """A measured case: `weights` are decoded in a call, `copy_us` moves as many trellis bytes.

    `peer_us` is exllamav3's time, `cublas_us` that of the bf16 product.
    """

    case: str
    codebook: str
    bits: float
    tokens: int
    weights: int
    us: float
    spread_us: float
    copy_us: float
    cublas_us: float | None
    peer_us: float | None

    def cells(self) -> list[str]:
        """The columns of the table."""

        def over(us: float | None) -> str:
            return "" if us is None else f"{us / self.us:.2f}"

        ceiling = CEILINGS.get(self.codebook) if self.bits == 3 else None
        peer_us = "" if self.peer_us is None else f"{self.peer_us:.1f}"
        return [
            self.case, self.codebook, f"{self.bits:g}", str(self.tokens), f"{self.us:.1f}",
            f"{self.spread_us:.1f}", f"{self.weights / self.us / 1e6:.2f}",
            over(ceiling and self.weights / ceiling), over(self.copy_us), over(self.cublas_us),
            peer_us, over(self.peer_us),
        ]  # fmt: skip


COLUMNS = (
    "case",
    "codebook",
    "bits",
    "tokens",
    "us",
    "spread",
    "Tweights/s",
    "of ceiling",
    "of copy",
    "x cuBLAS",
    "exllamav3 us",
    "x exllamav3",
)


def graph_us(calls: Sequence[Call]) -> tuple[float, float]:
    """Median and spread (max - min) of the time of one call, in us: `calls` in turn, in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    times = []
    for _ in range(3 + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    kept = times[3:]
    return statistics.median(kept), max(kept) - min(kept)


def copies_for(size: int) -> int:
    """How many inputs of `size` bytes one graph walks over."""
    return max(2, -(-WALK_BYTES // size))


def random_words(*shape: int) -> torch.Tensor:
    """Any words are a valid trellis."""
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device="cuda")


def random_vector(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """fp16 with random signs and magnitudes of 0.75 to 1.25 times `scale`."""
    signs = torch.randint(0, 2, shape, device="cuda") * 2 - 1
    return (signs * (0.75 + 0.5 * torch.rand(shape, device="cuda")) * scale).half()


def copy_rate() -> float:
    """Bytes a us that a large device copy reads and writes together."""
    source = torch.ones(1 << 28, device="cuda")
    copy = functools.partial(torch.mul, source, 1, out=torch.empty_like(source))
    return 2 * 4 * source.numel() / graph_us([copy])[0]


def cublas_us() -> dict[int, float]:
    """Time of torch's bf16 product of the same shape, by rows."""
    weights = [torch.randn(K, N, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    found = {}
    for tokens in TOKENS:
        x = torch.randn(tokens, K, device="cuda", dtype=torch.bfloat16)
        found[tokens] = graph_us([functools.partial(torch.matmul, x, w) for w in weights])[0]
    return found


def check_linear(
    x: torch.Tensor, words: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, codebook: str
) -> None:
    """The first and the last strip of 128 columns against float64."""
    y = gemm.linear(x, words, suh, svh, codebook).cpu()
    for strip in (0, N // 128 - 1):
        part = slice(128 * strip, 128 * strip + 128)
        tiles = words[:, 8 * strip : 8 * strip + 8].cpu()
        expected = reference_linear(
            x.cpu(), tiles, suh.cpu(), svh[part].cpu(), codebook, dtype=torch.float64
        )
        assert_three_gates(y[:, part], expected, "cuda_float16", f"strip {strip}")


def check_peer(found: torch.Tensor, ours: torch.Tensor) -> None:
    """It computes the same: rounding of both keeps 1 - cosine below 1e-5."""
    cosine = torch.nn.functional.cosine_similarity(
        found.double().flatten(), ours.double().flatten(), 0
    )
    assert cosine > 1 - 1e-5, f"exllamav3: expected the same product, got cosine {float(cosine)}"


def peer_linear_us(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    suh: torch.Tensor,
    svh: torch.Tensor,
    codebook: str,
) -> float | None:
    """exllamav3's time of the same call, None without it."""
    if peer.exllamav3() is None:
        return None
    modules = [peer.linear(words, suh, svh, codebook) for words in weights]
    check_peer(modules[0](x), gemm.linear(x, weights[0], suh, svh, codebook))
    return graph_us([functools.partial(module, x) for module in modules])[0]


def bench_linear(codebook: str, bits: float, rate: float, dense: dict[int, float]) -> list[Row]:
    """One matrix size at every number of tokens."""
    shape = (K // 16, N // 16, int(16 * bits))
    size = int(K * N * bits / 8)
    weights = [random_words(*shape) for _ in range(copies_for(size))]
    suh, svh = random_vector(K, scale=1 / (1.24 * K**0.5)), random_vector(N)
    rows = []
    for tokens in TOKENS:
        x = torch.randn(tokens, K, device="cuda", dtype=torch.float16)
        check_linear(x, weights[0], suh, svh, codebook)
        calls = [functools.partial(gemm.linear, x, w, suh, svh, codebook) for w in weights]
        us, spread = graph_us(calls)
        theirs = peer_linear_us(x, weights, suh, svh, codebook) if bits == 3 else None
        name, copy = f"linear {K} x {N}", size / rate
        row = Row(name, codebook, bits, tokens, K * N, us, spread, copy, dense[tokens], theirs)
        rows.append(row)
    return rows


def routes(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights that sum to 1 and distinct experts, uniformly at random."""
    random = torch.Generator().manual_seed(seed)
    top = torch.rand(tokens, EXPERTS, generator=random).topk(TOP_K)
    return (top.values / top.values.sum(1, keepdim=True)).cuda(), top.indices.cuda()


def check_moe(x: torch.Tensor, weights: cuda_moe.MoeWeights, codebook: str) -> None:
    """A token of two experts against float64; the weights of the other slots are 0."""
    scores, ids = routes(1, 7)
    scores[:, 2:] = 0
    y = cuda_moe.moe(x[:1], scores, ids, weights, codebook).cpu()
    used = ids[0, :2]
    chosen = cuda_moe.MoeWeights(
        *(tensor.index_select(1, used).cpu() for tensor in weights[:3]),
        *(tensor.index_select(0, used).cpu() for tensor in weights[3:6]),
    )
    local = torch.tensor([[0, 1]])
    expected = reference_moe(
        x[:1].cpu(), scores[:, :2].cpu(), local, *chosen[:6], codebook,
        dtype=torch.float64,
    )  # fmt: skip
    assert_three_gates(y, expected, "cuda_moe_bfloat16", "two experts")


def bench_moe(codebook: str, bits: int, rate: float) -> list[Row]:
    """Routed experts at every number of tokens; other routes in every call of the graph."""
    weights = cuda_moe.MoeWeights(
        random_words(2, EXPERTS, HIDDEN // 16, INNER // 16, 16 * bits),
        random_vector(2, EXPERTS, HIDDEN, scale=1 / (1.24 * HIDDEN**0.5)),
        random_vector(2, EXPERTS, INNER),
        random_words(EXPERTS, INNER // 16, HIDDEN // 16, 16 * bits),
        random_vector(EXPERTS, INNER, scale=1 / (1.24 * INNER**0.5)),
        random_vector(EXPERTS, HIDDEN),
    )
    x = torch.randn(max(MOE_TOKENS), HIDDEN, device="cuda", dtype=torch.bfloat16)
    check_moe(x, weights, codebook)
    theirs = None if peer.exllamav3() is None else peer.experts(weights, codebook, TOP_K)
    expert = 3 * HIDDEN * INNER
    rows = []
    for tokens in MOE_TOKENS:
        routed = [routes(tokens, seed) for seed in range(16)]
        calls = [
            functools.partial(cuda_moe.moe, x[:tokens], scores, ids, weights, codebook)
            for scores, ids in routed
        ]
        us, spread = graph_us(calls)
        decoded = expert * sum(len(ids.unique()) for _, ids in routed) // len(routed)
        name, copy = f"experts {TOP_K} of {EXPERTS}", decoded * bits / 8 / rate
        peer_us = None
        if theirs is not None:
            inputs = [(x[:tokens].half(), scores.half(), ids) for scores, ids in routed]
            check_peer(theirs(*inputs[0]), calls[0]())
            peer_us = peer.kernels_us([functools.partial(theirs, *each) for each in inputs])
        rows.append(Row(name, codebook, bits, tokens, decoded, us, spread, copy, None, peer_us))
    return rows


def environment() -> dict[str, str]:
    """What a reader needs to repeat the run."""
    properties = torch.cuda.get_device_properties(0)
    return {
        **facts("cuda"),
        "multiprocessors": str(properties.multi_processor_count),
        "cuda": torch.version.cuda or "",
        "exllamav3": peer.version() or "not installed",
    }


NOTES = (
    "Whole calls, rotations included; cold second-level cache. `of ceiling`: weights a second over",
    "those of decoding and multiplying in registers alone (4.7 mcg, 5.15 mul1); `of copy`: time of",
    "a copy of as many bytes over the call's; `x cuBLAS`: the bf16 product's time over the call's.",
    "exllamav3: its modules on the same tensors in the same process; experts without router and",
    "shared expert, the times of their kernels added up without the gaps between them.",
)


def to_markdown(rows: list[Row], about: dict[str, str]) -> str:
    """The table for readers."""
    table = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    lines = [
        "# CUDA decode kernels",
        "",
        bullet_list(about),
        *NOTES,
        "",
        *(f"| {' | '.join(cells)} |" for cells in table),
    ]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Time over tokens, a line for each case of 3 bits; nothing where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2), ("linear", "experts"), strict=True):
        mine = [row for row in rows if row.case.startswith(kind) and row.bits == 3]
        for codebook in dict.fromkeys(row.codebook for row in mine):
            line = [row for row in mine if row.codebook == codebook]
            (drawn,) = axes.plot(
                [r.tokens for r in line], [r.us for r in line], marker="o", label=codebook
            )
            if all(r.peer_us is not None for r in line):
                axes.plot(
                    [r.tokens for r in line], [r.peer_us for r in line], marker="x", ls=":",
                    color=drawn.get_color(), label=f"{codebook}, exllamav3",
                )  # fmt: skip
        if kind == "linear":
            line = mine[: len(TOKENS)]
            axes.plot([r.tokens for r in line], [r.cublas_us for r in line], "k--", label="cuBLAS")
        axes.set(title=mine[0].case + ", 3 bits", xlabel="tokens", ylabel="us", ylim=(0, None))
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run every case and write the result files."""
    parser = argparse.ArgumentParser(description="Measure the CUDA decode kernels.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    rate, dense = copy_rate(), cublas_us()
    rows = []
    for codebook, bits in RATES:
        rows += bench_linear(codebook, bits, rate, dense)
    for codebook in ("mcg", "mul1"):
        rows += bench_moe(codebook, 3, rate)
    about = {**environment(), "copy_TB_per_s": f"{rate / 1e6:.2f}"}
    result = {**about, "results": [asdict(row) for row in rows]}
    write_results("kernels", result, to_markdown(rows, about), options.out)
    plot(rows, options.out / "kernels.png")


if __name__ == "__main__":
    main()
