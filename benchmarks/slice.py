"""`slice` against `cp` of the same files.

    python benchmarks/slice.py [--experts 100] [--cold] [--rounds 5] [--folder FOLDER] [--out OUT]

Makes an ordinary checkpoint with one MoE layer of real sizes (10 MB an expert), cuts it for four
ranks, and copies the source with cp, in turns. The slicer does more than cp: it waits until the
disk has the files and hashes them. So cp is timed alone, with sync, and with sync and SHA-256 (of
the same OpenSSL). With --cold the source is not in the page cache; 1100 experts and their slices
take 24 GB, so that neither of them fits. Before anything is timed, the output is proved to be the
source's bytes. What the parts of the work cost is measured beside it, on one core: it says which
speed is possible. Writes slice.json, or slice-cold.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.slicing.experts import experts_prefix
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.slicing.prove import source_faults
from exl3kit.testing.generate import random_exl3
from exl3kit.testing.tiny_model import TinyGlm4Moe, tiny_config

ROOT = Path(__file__).parent
HIDDEN, WIDTH, BITS, TP = 4096, 2048, 3, 4
LAYER = 1
PROBE_BYTES = 2**30


def make_source(folder: Path, experts: int) -> Path:
    """An ordinary checkpoint of one MoE layer and an embedding; experts repeat eight weights."""
    config = tiny_config(
        TinyGlm4Moe(HIDDEN, moe_intermediate_size=WIDTH, num_experts=experts, num_layers=2)
    )
    sides = {"gate_proj": (HIDDEN, WIDTH), "up_proj": (HIDDEN, WIDTH), "down_proj": (WIDTH, HIDDEN)}
    with CheckpointWriter(folder) as writer:
        writer.add("model.embed_tokens.weight", torch.randn(20_000, HIDDEN).bfloat16())
        for expert in range(experts):
            for number, proj in enumerate(PROJECTIONS):
                tensor = random_exl3(*sides[proj], BITS, seed=3 * (expert % 8) + number)
                for field, value in tensor.tensors().items():
                    writer.add(f"{experts_prefix(LAYER)}{expert}.{proj}.{field}", value)
        writer.finish(config | {"quantization_config": {"quant_method": "exl3", "bits": BITS}})
    return folder


@dataclass(frozen=True)
class Times:
    """Seconds of one call: on the clock, and of all processors."""

    wall: float
    processor: float


def timed(call: Callable[[Path], object], out: Path) -> Times:
    """Of `call(out)`, which writes the folder `out`; it is removed afterwards."""
    os.sync()
    used, start = processor_seconds(), time.perf_counter()
    call(out)
    took = Times(time.perf_counter() - start, processor_seconds() - used)
    shutil.rmtree(out)
    return took


def processor_seconds() -> float:
    """User and system time of this process and of the children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def copy(source: Path, out: Path, *, sync: bool = False, digest: bool = False) -> None:
    """cp -r; then, if asked, wait until the disk has the files, and hash them."""
    subprocess.run(["cp", "-r", str(source), str(out)], check=True)
    files = sorted(out.iterdir())
    if sync:
        subprocess.run(["sync", *map(str, files)], check=True)
    for path in files if digest else ():
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")


def measure(source: Path, work: Path, rounds: int, cold: bool) -> dict[str, list[Times]]:
    """Times of each way, in turns, so that other load meets all of them alike."""
    options = SliceOptions(TP)
    ways: dict[str, Callable[[Path], object]] = {
        "cp": lambda out: copy(source, out),
        "cp, sync": lambda out: copy(source, out, sync=True),
        "cp, sync, sha256": lambda out: copy(source, out, sync=True, digest=True),
        "slice": lambda out: slice_checkpoint(source, out, options),
    }
    times: dict[str, list[Times]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            for file in source.iterdir() if cold else ():
                forget(file)
            times[name].append(timed(call, work / "out"))
    return times


def forget(file: Path) -> None:
    """Take a file that the disk has out of the page cache."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def probe(source: Path, work: Path) -> dict[str, float]:
    """Seconds of one core for a GB read from the page cache, written to it, and hashed."""
    block = bytearray(2**19)
    file = max(source.iterdir(), key=lambda path: path.stat().st_size)

    def read() -> int:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(block):
                pass
        return file.stat().st_size

    def write() -> int:
        with (work / "probe").open("wb", buffering=0) as opened:
            for _ in range(PROBE_BYTES // len(block)):
                opened.write(block)
        (work / "probe").unlink()
        return PROBE_BYTES

    def digest() -> int:
        sha256 = hashlib.sha256()
        for _ in range(PROBE_BYTES // len(block)):
            sha256.update(block)
        return PROBE_BYTES

    return {call.__name__: min(_per_gb(call) for _ in range(5)) for call in (read, write, digest)}


def _per_gb(call: Callable[[], int]) -> float:
    start = time.thread_time()
    size = call()
    return round((time.thread_time() - start) / size * 1e9, 3)


def main() -> None:
    """Make, prove, measure, write the result file."""
    parser = argparse.ArgumentParser(description="Measure the slicer against cp.")
    parser.add_argument("--experts", type=int, default=100)
    parser.add_argument("--cold", action="store_true", help="read the source from the disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to work; the system's temporary folder")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        work = Path(name)
        source = make_source(work / "source", options.experts)
        slice_checkpoint(source, work / "out", SliceOptions(TP))
        faults = source_faults(open_checkpoint(work / "out"), open_checkpoint(source))
        assert not faults, faults
        shutil.rmtree(work / "out")
        costs = probe(source, work)
        times = measure(source, work, options.rounds, options.cold)
        num_bytes = sum(file.stat().st_size for file in source.iterdir())
        file_system = subprocess.run(
            ["stat", "-f", "-c", "%T", str(work)], capture_output=True, text=True, check=True
        ).stdout.strip()
    rates = {
        name: {
            "gb_per_s_best": round(num_bytes / min(t.wall for t in values) / 1e9, 3),
            "gb_per_s_median": round(
                num_bytes / statistics.median(t.wall for t in values) / 1e9, 3
            ),
            "processor_seconds_per_gb": round(
                statistics.median(t.processor for t in values) / num_bytes * 1e9, 3
            ),
        }
        for name, values in times.items()
    }
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": next(
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "cores": os.cpu_count(),
        "load_average": f"{os.getloadavg()[0]:.1f}",
        "kernel": platform.release(),
        "command": f"python benchmarks/slice.py {' '.join(sys.argv[1:])}".strip(),
        "file_system": file_system,
        "source_bytes": num_bytes,
        "source_is_cached": not options.cold,
        "processor_seconds_per_gb": costs,
        "bound_gb_per_s": round(len(os.sched_getaffinity(0)) / sum(costs.values()), 3),
        "results": rates,
        "slice_over": {
            name: round(rates["slice"]["gb_per_s_best"] / rate["gb_per_s_best"], 2)
            for name, rate in rates.items()
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"slice{'-cold' if options.cold else ''}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
