"""Proxy errors of exl3kit and exllamav3 over 16 seeds of the random signs, at every rate.

    python benchmarks/seeds.py [--seeds 16]

Needs a GPU and exllamav3 with its extension. Both are given the same weight and Hessian and draw
their own signs; every error is computed here, in float64, from the tensors as they are stored.
Writes seeds.json and seeds.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from encode_gpu import Peer, make_case
from facts import RESULTS, bullet_list, facts, write_results

from exl3kit.format.decode import decode_dense
from exl3kit.format.spec import Codebook
from exl3kit.quantize.stats import proxy_error
from exl3kit.quantize.tensor import quantize_tensors

SHAPES = ((512, 384), (1024, 512))
BITS = (1, 2, 3, 4, 6, 8)
WAYS = {"signs alone": False, "channel scales too": True}


class Measured:
    """One weight (k, n) and its Hessian, quantised by either with all seeds."""

    def __init__(self, shape: tuple[int, int], seeds: int, peer: Peer) -> None:
        (self._weight,), self._hessian = make_case(*shape, 1, torch.device("cuda", 0))
        self._seeds, self._peer = seeds, peer

    def errors(self, bits: int, codebook: Codebook, scaled: bool) -> dict[str, list[float]]:
        """Proxy errors, one a seed, by who made them."""
        theirs = self._peer.quantize_by_seeds(
            self._weight, self._hessian, bits, str(codebook), self._seeds, scaled
        )
        ours = quantize_tensors(
            [self._weight] * self._seeds,
            [self._hessian] * self._seeds,
            bits,
            codebook,
            scaled_hessian=scaled,
        )
        return {
            "exl3kit": self._stored_errors((t.tensors() for t, _ in ours), codebook),
            "exllamav3": self._stored_errors(theirs, codebook),
        }

    def _stored_errors(
        self, stored: Iterable[dict[str, torch.Tensor]], codebook: Codebook
    ) -> list[float]:
        found = []
        for tensors in stored:
            on = {name: tensor.to(self._weight.device) for name, tensor in tensors.items()}
            dense = decode_dense(on["trellis"], on["suh"], on["svh"], codebook, torch.float64)
            found.append(proxy_error(self._weight, dense, self._hessian))
        return found


def measure(measured: Measured, bits: int, codebook: Codebook) -> dict[str, Any]:
    """Means and standard deviations over seeds, by who made it and how errors are fed back."""
    row: dict[str, Any] = {"bits": bits, "codebook": str(codebook)}
    for way, scaled in WAYS.items():
        for who, errors in measured.errors(bits, codebook, scaled).items():
            row[f"{who}, {way}"] = {"mean": mean(errors), "deviation": stdev(errors)}
    return row


def ratio(row: dict[str, Any], ours: str, theirs: str, seeds: int) -> str:
    """Our mean error over theirs, and its standard error over the seeds."""
    own, other = row[f"exl3kit, {ours}"], row[f"exllamav3, {theirs}"]
    spread = [x["deviation"] / x["mean"] for x in (own, other)]
    value = own["mean"] / other["mean"]
    return f"{value:.4f} ± {value * ((spread[0] ** 2 + spread[1] ** 2) / seeds) ** 0.5:.4f}"


def markdown(header: dict[str, str], results: dict[str, list[dict[str, Any]]], seeds: int) -> str:
    """The result page."""
    signs, scales = WAYS
    page = f"""# Proxy errors against exllamav3's over {seeds} seeds

{bullet_list(header)}
One weight with loud rows and one Hessian with loud channels a shape, {seeds} draws of the signs by
either. Our mean proxy error over theirs, with its standard error. exllamav3 feeds errors back under
the Hessian by signs alone unless told otherwise, exl3kit with channel scales too.
"""
    for shape, rows in results.items():
        page += f"""
## {shape}

| bits | codebook | exllamav3, signs | signs alone, both | scales too, both | each by default |
| --- | --- | --- | --- | --- | --- |
"""
        for row in rows:
            cells = [
                f"{row[f'exllamav3, {signs}']['mean']:.6f}",
                ratio(row, signs, signs, seeds),
                ratio(row, scales, scales, seeds),
                ratio(row, scales, signs, seeds),
            ]
            page += f"| {row['bits']} | {row['codebook']} | {' | '.join(cells)} |\n"
    return page


def main() -> None:
    """Measure and write both result files, again after each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    peer = Peer()
    header = facts("cuda:0") | {"exllamav3": peer.version}
    results: dict[str, list[dict[str, Any]]] = {}
    for shape in SHAPES:
        measured, begun = Measured(shape, options.seeds, peer), time.monotonic()
        name = f"{shape[0]} x {shape[1]}"
        results[name] = [measure(measured, bits, book) for bits in BITS for book in Codebook]
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
        result = {**header, "seeds": options.seeds, "results": results}
        page = markdown(header, results, options.seeds)
        write_results("seeds", result, page, options.out)


if __name__ == "__main__":
    main()
