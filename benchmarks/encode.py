"""Speed of the trellis encoder on every tier, and quality of the quantiser against exllamav3's.

    python benchmarks/encode.py [--threads N] [--out benchmarks/results]

A tile is 256 weights. Times are processor time over the number of threads, the best of twelve runs:
what the wall clock shows on a machine that does nothing else, and what a busy one does not disturb.
Writes encode.json and encode.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from facts import RESULTS, ROOT, bullet_list, facts, write_results
from safetensors.torch import load_file

from exl3kit.format.spec import SUPPORTED_BITS, TILE_SIZE, Codebook
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.jit.cpu import ISA_NAMES, cpu_isa
from exl3kit.kernels.encode import encode_tiles
from exl3kit.quantize.regularize import Signs
from exl3kit.quantize.stats import TensorStats
from exl3kit.quantize.tensor import quantize_tensor

GOLDEN = ROOT.parent / "tests" / "data" / "golden"
TILES = {"portable": 4, "avx2": 4, "avx512": 8, "avx512fp16": 16}
REPEATS = 12


def milliseconds_a_tile(bits: int | float, isa: int, threads: int) -> float:
    """Encode Gaussian tiles with mul1, which has every rate; all codebooks take the same time."""
    count = TILES[ISA_NAMES[isa]]
    tiles = torch.randn(count, TILE_SIZE, generator=torch.Generator().manual_seed(0))
    encode_tiles(tiles[:4], bits, Codebook.MUL1, threads, isa)
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        encode_tiles(tiles, bits, Codebook.MUL1, threads, isa)
        times.append(time.process_time() - begin)
    return 1e3 * min(times) / threads / count


def speeds(threads: int) -> list[dict[str, Any]]:
    """One row a tier and rate."""
    rows = []
    for isa in range(cpu_isa(), -1, -1):
        for bits in SUPPORTED_BITS:
            ms = milliseconds_a_tile(bits, isa, threads)
            print(f"{ISA_NAMES[isa]} {bits}: {ms:.2f} ms a tile", flush=True)
            weights_a_second = round(1e3 * TILE_SIZE / ms)
            row = {"tier": ISA_NAMES[isa], "bits": bits, "ms_a_tile": round(ms, 3)}
            rows.append(row | {"weights_a_second": weights_a_second})
    return rows


def qualities() -> list[dict[str, Any]]:
    """The golden matrix with exllamav3's signs: in its way at its g, and in ours at our own g."""
    stored = load_file(GOLDEN / "exl3_golden.safetensors")
    combinations = json.loads((GOLDEN / "manifest.json").read_text())["combos"]
    calibration = stored["A.calib"].double()
    hessian = calibration.T @ calibration
    rows = []
    for combination in (c for c in combinations if f"{c['tag']}.suh" in stored):
        tag, bits, codebook = (combination[key] for key in ("tag", "bits", "codebook"))
        signs = -stored[f"{tag}.suh"].float().sign(), stored[f"{tag}.svh"].float().sign()

        def quantize(
            scale: float | None,
            scaled_hessian: bool,
            bits: float = bits,
            codebook: str = codebook,
            signs: Signs = signs,
        ) -> tuple[Exl3Tensor, TensorStats]:
            return quantize_tensor(
                stored["A.weight"], hessian, bits, codebook, signs, scale,
                scaled_hessian=scaled_hessian,
            )  # fmt: skip

        theirs, same = quantize(combination["g_scale"], scaled_hessian=False)
        _, ours = quantize(None, scaled_hessian=True)
        row = {
            "tag": tag,
            "exllamav3": combination["proxy_err"],
            "exllamav3_g": combination["g_scale"],
            "its_way": same.proxy_error,
            "its_way_equal_tiles": int(
                (theirs.trellis == stored[f"{tag}.trellis"]).all(dim=-1).sum()
            ),
            "ours": ours.proxy_error,
            "g": ours.scale,
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def speed_table(rows: list[dict[str, Any]]) -> list[str]:
    """Rates down, tiers across: ms a tile, and million weights a second on the best tier."""
    tiers = list(dict.fromkeys(row["tier"] for row in rows))
    ms = {(row["tier"], row["bits"]): row["ms_a_tile"] for row in rows}
    best = tiers[0]
    cells = []
    for bits in SUPPORTED_BITS:
        times = [f"{ms[tier, bits]:.2f}" for tier in tiers]
        cells.append([str(bits), *times, f"{TILE_SIZE / ms[best, bits] / 1e3:.2f}"])
    return table(["bits", *(f"{tier} ms" for tier in tiers), f"{best} Mweights/s"], cells)


def quality_table(rows: list[dict[str, Any]]) -> list[str]:
    """Combinations down: exllamav3's proxy error, ours as multiples of it, equal tiles, both g."""
    cells = [
        [
            row["tag"].removeprefix("A."),
            f"{row['exllamav3']:.4g}",
            f"{row['its_way'] / row['exllamav3']:.4f}",
            str(row["its_way_equal_tiles"]),
            f"{row['ours'] / row['exllamav3']:.4f}",
            f"{row['exllamav3_g']:.4f}",
            f"{row['g']:.4f}",
        ]
        for row in rows
    ]
    head = ["", "exllamav3", "x, its way", "equal tiles of 384", "x, default", "its g", "our g"]
    return table(head, cells)


def main() -> None:
    """Measure, then write both result files."""
    parser = argparse.ArgumentParser(description="Measure the trellis encoder and the quantiser.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    clock = "processor time / threads"
    about = {**facts(), "threads": str(options.threads), "clock": clock}
    speed, quality = speeds(options.threads), qualities()
    text = [
        "# Trellis encoder and quantiser",
        "",
        bullet_list(about),
        "Time of one tile of 256 weights:",
        "",
        *speed_table(speed),
        "",
        "Proxy error of the golden 256 x 384 matrix with exllamav3's signs, free-running. Its way:",
        "feedback by signs alone and its g. Default: feedback with channel scales and our own g.",
        "",
        *quality_table(quality),
    ]
    result = {**about, "speed": speed, "quality": quality}
    write_results("encode", result, "\n".join(text) + "\n", options.out)


if __name__ == "__main__":
    main()
