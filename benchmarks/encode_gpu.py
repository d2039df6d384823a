"""The CUDA encoder and quantiser against exllamav3's, in one process on one GPU.

    python benchmarks/encode_gpu.py [--out benchmarks/results] [--quick]

The encoder's states are compared with the CPU encoder's before anything is timed. exllamav3, where
it can be imported, is called through its own `quantize_exl3` and `quantize_exl3_batch` on copies of
the same weights and Hessians. Times are host times around synchronised calls, the best of several.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from facts import RESULTS, facts, write_results

from exl3kit.format.spec import HALF_BITS, SUPPORTED_BITS
from exl3kit.kernels.encode import encode_tiles
from exl3kit.kernels.encode_cuda import CudaEncoder
from exl3kit.quantize.tensor import quantize_tensors

CALIBRATION_ROWS = 8192


def best_time(call: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, the GPU idle before and after."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)


def encoder_rows(device: torch.device, waves: int) -> list[dict[str, Any]]:
    """Million weights a second of the encoder alone at every rate, on full waves of tiles."""
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = torch.randn(waves * blocks, 256, generator=torch.Generator().manual_seed(1)) * 1.2
    on_gpu, rows = tiles.to(device), []
    for bits in SUPPORTED_BITS:
        codebook = "mul1" if bits in HALF_BITS else "mcg"
        encoder = CudaEncoder(bits, codebook, device)
        checked = encode_tiles(tiles[:64], bits, codebook)
        assert torch.equal(encoder(on_gpu[:64]).cpu(), checked), f"{bits} bits: states differ"
        seconds = best_time(lambda run=encoder: run(on_gpu), 3)
        rows.append(
            {
                "bits": bits,
                "ms_a_wave": seconds / waves * 1e3,
                "mweights_s": tiles.numel() / seconds / 1e6,
            }
        )
    return rows


def make_case(
    k: int, n: int, count: int, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """`count` weights float32 (k, n) and one Hessian (k, k), the mean over correlated rows."""
    generator = torch.Generator(device).manual_seed(2)
    x = torch.randn(CALIBRATION_ROWS, k, generator=generator, device=device)
    x[:, 1:] += 0.4 * x[:, :-1]
    x[:, 7::53] *= 5
    weights = []
    for _ in range(count):
        weight = torch.randn(k, n, generator=generator, device=device) * 0.02
        weight[3::61] *= 6
        weights.append(weight)
    return weights, x.T @ x / len(x)


class Peer:
    """exllamav3's quantiser: leaf modules only, so that its model code need not load."""

    def __init__(self) -> None:
        """Raises ImportError where exllamav3 or its compiled extension is missing."""
        extension = importlib.import_module("exllamav3_ext")
        spec = importlib.util.find_spec("exllamav3")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("exllamav3 is not installed")
        root = Path(next(iter(spec.submodule_search_locations)))
        for name in ("", ".modules", ".modules.quant", ".modules.quant.exl3_lib"):
            module = types.ModuleType(f"exllamav3{name}")
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
            sys.modules[module.__name__] = module
        holder = types.ModuleType("exllamav3.ext")
        holder.exllamav3_ext = extension  # pyright: ignore[reportAttributeAccessIssue]
        sys.modules["exllamav3.ext"] = holder
        self._library = importlib.import_module("exllamav3.modules.quant.exl3_lib.quantize")
        version: dict[str, Any] = {}
        exec((root / "version.py").read_text(), version)
        self.version = str(version["__version__"])

    def quantize(
        self, weights: list[torch.Tensor], hessian: torch.Tensor, bits: int, codebook: str
    ) -> list[float]:
        """Proxy errors; one matrix through quantize_exl3, several through quantize_exl3_batch."""
        arguments = [
            self._arguments(weights[0].device, bits, codebook, 7 + i) for i in range(len(weights))
        ]
        data, copies = self._data(hessian), [weight.clone() for weight in weights]
        if len(copies) == 1:
            return [float(self._library.quantize_exl3(copies[0], data, arguments[0], False)[1])]
        done = self._library.quantize_exl3_batch(copies, [data] * len(copies), arguments)
        return [float(error) for error, _ in done]

    def quantize_by_seeds(
        self,
        weight: torch.Tensor,
        hessian: torch.Tensor,
        bits: int,
        codebook: str,
        seeds: int,
        scaled_hessian: bool,
    ) -> list[dict[str, torch.Tensor]]:
        """The stored tensors of one matrix with the signs of each of so many seeds.

        Each has a Hessian record of its own, which holds the input signs.
        """
        arguments = [self._arguments(weight.device, bits, codebook, seed) for seed in range(seeds)]
        for one in arguments:
            one["scaled_hessian"] = scaled_hessian
        data = [self._data(hessian) for _ in range(seeds)]
        copies = [weight.clone() for _ in range(seeds)]
        return [
            tensors for _, tensors in self._library.quantize_exl3_batch(copies, data, arguments)
        ]

    @staticmethod
    def _arguments(device: torch.device, bits: int, codebook: str, seed: int) -> dict[str, Any]:
        return {
            "seed": seed,
            "K": bits,
            "devices": [device.index],
            "device_ratios": None,
            "apply_out_scales": True,
            "sigma_reg": 0.025,
            codebook: True,
        }

    @staticmethod
    def _data(hessian: torch.Tensor) -> dict[str, Any]:
        return {
            "H": hessian.clone(),
            "packed": False,
            "n": len(hessian),
            "first_key": "benchmark",
            "count": 1,
            "finalized": False,
            "num_total": len(hessian),
            "inf_nan": torch.zeros(2, dtype=torch.long, device=hessian.device),
            "device": hessian.device,
        }


def matrix_row(
    shape: tuple[int, int, int],
    bits: int,
    codebook: str,
    device: torch.device,
    peer: Peer | None,
    repeats: int,
) -> dict[str, Any]:
    """Seconds and mean proxy error of `shape` = (k, n, matrices), ours and the peer's."""
    k, n, count = shape
    weights, hessian = make_case(k, n, count, device)
    row: dict[str, Any] = {"shape": f"{count} x {k} x {n}", "bits": bits, "codebook": codebook}

    def note(name: str, call: Callable[[], list[float]]) -> None:
        errors = call()  # warm
        seconds = best_time(call, repeats)
        row[name] = {
            "seconds": seconds,
            "mweights_s": k * n * count / seconds / 1e6,
            "proxy_error": sum(errors) / count,
        }

    def ours(scaled: bool) -> list[float]:
        done = quantize_tensors(weights, [hessian] * count, bits, codebook, scaled_hessian=scaled)
        return [stats.proxy_error for _, stats in done]

    note("exl3kit", lambda: ours(True))
    note("exl3kit, its feedback", lambda: ours(False))
    if peer is not None:
        note("exllamav3", lambda: peer.quantize(weights, hessian, bits, codebook))
        row["speed_ratio"] = row["exllamav3"]["seconds"] / row["exl3kit"]["seconds"]
    return row


def find_peer() -> Peer | None:
    """The peer, or None with a line that says why."""
    try:
        return Peer()
    except ImportError as error:
        print(f"no peer: {error}")
        return None


def report(results: dict[str, Any]) -> str:
    """Markdown of what the JSON file holds."""
    about = [f"- {key}: {value}" for key, value in results.items() if isinstance(value, str | int)]
    lines = [
        "# CUDA encoder and quantiser",
        "",
        *about,
        "",
        "Encoder alone, eight tiles a multiprocessor, states equal to the CPU's:",
        "",
        "| bits | ms a tile and multiprocessor | Mweights/s |",
        "| --- | --- | --- |",
    ]
    lines += [
        f"| {row['bits']} | {row['ms_a_wave']:.3f} | {row['mweights_s']:.1f} |"
        for row in results["encoder"]
    ]
    lines += [
        "",
        "Whole matrices, from weight and Hessian to packed tensors; several matrices share one",
        "Hessian. Proxy error: the mean over matrices.",
        "",
        "| matrices | quantiser | s | Mweights/s | proxy error |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results["matrices"]:
        for name in ("exl3kit", "exl3kit, its feedback", "exllamav3"):
            if name in row:
                cells = row[name]
                lines.append(
                    f"| {row['shape']}, {row['bits']} bits {row['codebook']} | {name} "
                    f"| {cells['seconds']:.3f} | {cells['mweights_s']:.1f} "
                    f"| {cells['proxy_error']:.5f} |"
                )
    lines += [
        "",
        "Its feedback: by signs alone, as exllamav3 does by default; that of exl3kit takes channel",
        "scales in too, and the test matrices have loud channels.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Check, measure, print, and write the result files."""
    parser = argparse.ArgumentParser(description="Measure the CUDA encoder and quantiser.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="Small matrices, one repeat.")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    peer = find_peer()
    results: dict[str, Any] = {
        **facts("cuda"),
        "exllamav3": peer.version if peer else "not installed",
        "encoder": encoder_rows(device, 1 if options.quick else 8),
    }
    shapes = [(6144, 2048, 1), (6144, 512, 1), (6144, 512, 16)]
    results["matrices"] = [
        matrix_row(shape, 3, "mcg", device, peer, 1 if options.quick else 2)
        for shape in ([(512, 512, 1)] if options.quick else shapes)
    ]
    write_results("encode_gpu", results, report(results), options.out)


if __name__ == "__main__":
    main()
