"""Damaged checkpoints by the thousand: `python -m exl3kit.testing.fuzz`.

For each input one file of a small valid checkpoint is damaged; then it is opened, verified and
inspected, every EXL3 tensor is read and a cut is planned. Allowed are success, faults in the
report, and `Exl3Error`. Not allowed: any other exception, more than 5 s of processor time, an
allocation of more than twice the folder (and 16 MiB), a message that names nothing, is unprintable
or endless. Input n of seed s is the same for ever, so a failure is repeated with
`--seed s --only n`.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from exl3kit.checkpoint.manifest import SHARED_H
from exl3kit.checkpoint.modules import dense_weight
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.cli.inspect_facts import checkpoint_summary
from exl3kit.cli.inspect_plan import PlanOptions, plan_summary
from exl3kit.errors import Exl3Error, SliceError
from exl3kit.models.registry import model_map
from exl3kit.slicing.plan import SliceOptions, plan_slice
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary, write_plain, write_r7
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.mutate import mutate
from exl3kit.testing.tiny_configs import tiny_config_of

FIXED_SEED = 20261201
MAX_SECONDS = 5.0
OUTCOMES = ("accepted", "faults", "refused")
_FLOOR_BYTES = 16 * 2**20  # two read buffers of 8 MiB, however small the folder is
_MAX_MESSAGE = 20_000
_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "vocab_size": 64,
    "num_attention_heads": 2,
}
_PLAN = PlanOptions(1, 2**30, 512, 1, 512, 132, False)
# What a message says of the thing it names: what was wanted, or what is wrong with what was found.
_CLAIM = re.compile(
    r"expected|must|missing|truncated|not valid|not finite|cannot|claim|does not have|describes|"
    r"twice|nested|are in both|overlaps|hole|are also|no longer|of them|disagree|differ|stale|"
    r"not allowed|is not|not in|outside|no routed experts|unlike|constant|zero|needs|says|takes|"
    r"values are|every word|neither|median|has [0-9]|beyond|already|nothing to|got "
)


class Failure(AssertionError):
    """Something that must never happen; the text says what."""


class _Sizes(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


def make_corpus(folder: Path) -> list[Path]:
    """Small valid checkpoints of every dialect and layout below `folder`."""

    def small(name: str, **keys: int) -> dict[str, Any]:
        return tiny_config_of(name, num_experts=2, **keys) | _SMALL

    mcg = OrdinaryOptions(codebook="mcg")
    legacy = OrdinaryOptions(codebook="3inst", has_packed_signs=True, num_shards=2)
    table = OrdinaryOptions(bits=2.5, embedding_bits=4, slice_width=128)
    plain = write_plain(folder / "plain", small("glm4_moe", mtp_layers=1))
    corpus = [
        plain,
        write_plain(folder / "fp8", small("deepseek_v3"), fp8=True),
        write_ordinary(folder / "ordinary", small("glm_moe_dsa", mtp_layers=1), mcg),
        write_ordinary(folder / "legacy", small("llama"), legacy),
        write_ordinary(folder / "table", small("qwen3"), table),
        write_r7(folder / "r7", small("qwen3_moe")),
        make_rank_sliced(plain, folder / "sliced", (3, 4), 2, (1, 2), shard_bytes=300_000),
        make_rank_sliced(plain, folder / "shared", 2, 2, (1, 1), rotation_layout=SHARED_H),
    ]
    for source in corpus:  # this also loads what torch loads late, which is not to be counted
        with _Sizes():
            if {step(source) for step in STEPS} != {"accepted"}:
                raise Failure(f"{source.name}: the checkpoint is not valid before it is damaged")
    return corpus


def run_input(sources: list[Path], work: Path, seed: int, number: int) -> str:
    """Damage a copy of one of `sources` in `work` and use it; the outcome in a word.

    Failure, with seed and number, if something happens that must not.
    """
    random = Random(f"{seed}:{number}")
    source = random.choice(sources)
    folder = work / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    what = "nothing"
    try:
        what = mutate(folder, random)
        return _use(folder)
    except Exception as error:
        raise Failure(
            f"seed {seed}, input {number}: {source.name}: {what[:200]}: "
            f"{type(error).__name__}: {str(error)[:500]}"
        ) from error


def _use(folder: Path) -> str:
    """Open, verify, inspect and read everything, each by itself, within time and memory."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    outcomes = set()
    tracemalloc.start()
    try:
        with _time_limit(), _Sizes() as sizes:
            for step in STEPS:
                outcomes.add(_attempt(step, folder))
        largest = max(sizes.largest, tracemalloc.get_traced_memory()[1] - size)
    finally:
        tracemalloc.stop()
    if largest > 2 * size + _FLOOR_BYTES:
        raise Failure(f"allocated {largest} bytes for a folder of {size}")
    return "refused" if "refused" in outcomes else max(outcomes)


def _attempt(step: Callable[[Path], str], folder: Path) -> str:
    try:
        return step(folder)
    except Exl3Error as error:
        _check_message(str(error))
        return "refused"


def _verify(folder: Path) -> str:
    faults = verify_checkpoint(folder, model_map).faults
    for fault in faults:
        _check_message(fault)
    return "faults" if faults else "accepted"


def _inspect_and_read(folder: Path) -> str:
    checkpoint = open_checkpoint(folder)
    readers = [(checkpoint.exl3, checkpoint.exl3_prefixes())]
    readers += [(checkpoint.row_table, checkpoint.row_tables())]
    readers += [(lambda m: dense_weight(checkpoint, m), ["model.layers.0.self_attn.o_proj"])]
    plan = replace(_PLAN, tp=checkpoint.tp or 1)
    readers += [(lambda _: plan_summary(checkpoint_summary(checkpoint)[0], plan), ["the plan"])]
    outcome = "accepted"
    for read, names in readers:
        for name in names:
            try:
                read(name)
            except Exl3Error as error:
                _check_message(str(error))
                outcome = "refused"
    return outcome


def _slice(folder: Path) -> str:
    """Plan a cut for two ranks; that a checkpoint cannot be cut is no damage, but must be said."""
    try:
        plan = plan_slice(open_checkpoint(folder), SliceOptions(2, "per_expert"))
    except SliceError as error:
        _check_message(str(error))
        return "accepted"
    if (planned := sum(tensor.nbytes for tensor in plan.tensors())) != plan.num_bytes:
        raise Failure(f"planned {planned} bytes, announced {plan.num_bytes}")
    return "accepted"


def _check_message(message: str) -> None:
    if len(message) > _MAX_MESSAGE:
        raise Failure(f"a message of {len(message)} characters: {message[:200]}")
    if not message.isprintable():
        raise Failure(f"an unprintable message: {message!r}")
    if not re.search(r"['\"/_.:]", message) or not _CLAIM.search(message):
        raise Failure(f"a message that names nothing or claims nothing: {message}")


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise Failure(f"took more than {MAX_SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


STEPS: tuple[Callable[[Path], str], ...] = (_verify, _inspect_and_read, _slice)


def run(seed: int, numbers: range) -> tuple[Counter[str], list[str]]:
    """Outcomes of the inputs `numbers` of `seed`, and the failures."""
    outcomes: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        sources = make_corpus(Path(folder) / "corpus")
        for number in numbers:
            try:
                outcomes[run_input(sources, Path(folder), seed, number)] += 1
            except Failure as failure:
                failures.append(str(failure))
    return outcomes, failures


def main() -> int:
    """Half of the inputs from the fixed seed, half from a random one that is printed."""
    parser = argparse.ArgumentParser(description="Damaged checkpoints, by the thousand.")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, help="take all inputs from this seed")
    parser.add_argument("--only", type=int, help="run this one input")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    seeds = [FIXED_SEED, secrets.randbits(32)] if options.seed is None else [options.seed]
    numbers = range(options.inputs // len(seeds))
    if options.only is not None:
        numbers = range(options.only, options.only + 1)
    num_failures = 0
    quiet = (logging.WARNING,)  # thousands of stale indexes
    with ProcessPoolExecutor(
        options.jobs, get_context("spawn"), initializer=logging.disable, initargs=quiet
    ) as pool:
        for seed in seeds:
            outcomes: Counter[str] = Counter()
            failures: list[str] = []
            for counted, failed in pool.map(partial(run, seed), _parts(numbers, options.jobs)):
                outcomes += counted
                failures += failed
            print(f"seed {seed}: {len(numbers)} inputs: {dict(outcomes)}, {len(failures)} failures")
            for failure in failures:
                print(failure)
            num_failures += len(failures)
    return 1 if num_failures else 0


def _parts(numbers: range, count: int) -> list[range]:
    return [part for i in range(count) if len(part := numbers[i::count])]


if __name__ == "__main__":
    sys.exit(main())
