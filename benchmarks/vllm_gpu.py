"""Stock vLLM on a GPU serving EXL3, against the same weights decoded to bf16.

    python benchmarks/vllm_gpu.py --out results.json [--models glm4_moe deepseek_v3 glm_moe_dsa]

Random models of three architectures are made, and each engine lives in a process of its own, forked
after vLLM is imported. Greedy tokens of every EXL3 engine are held against those of the dense one:
where the first difference of a prompt lies, the gap of the dense model's two best logits is noted,
in steps of bf16 at their size, and the prompt goes on from there with the dense model's token, so
that every token is compared.

One engine serves a model with a single expert exchanged, and must be found out.

Counted besides: bytes that stay resident for experts, kernels loaded and graphs traced after the
start, what the allocator takes from the driver in a second round of the same work, and the peak of
a round against that of the pass in which vLLM sizes its cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TOKENS, LONG_TOKENS = 24, 16
NEAR = 2.0  # steps of bf16 within which two logits count as equal
_LONG = 8000  # tokens of the long prompts, prefilled in chunks of _CHUNK
_CHUNK = 2048
_KV_BYTES = 2 << 30
_AT_ONCE = 8  # engines side by side, of about 4 GiB and a core or two


@dataclass(frozen=True)
class Engine:
    """One engine to run: a checkpoint of one model, and how."""

    model_type: str
    checkpoint: str  # a key of `write_served`
    eager: bool = True
    drafts: int = 0

    @property
    def label(self) -> str:
        """What results call it."""
        mode = "eager" if self.eager else "graphs"
        return f"{self.model_type}, {self.checkpoint}, {mode}{', draft' if self.drafts else ''}"


def engines_of(model_type: str) -> list[Engine]:
    """The dense engine first, then those that are held against it."""
    drafts = 1 if model_type == "glm4_moe" else 0
    found = [
        Engine(model_type, "dense"),
        Engine(model_type, "ordinary", eager=False, drafts=drafts),
        Engine(model_type, "tp1", drafts=drafts),
    ]
    if model_type == "glm4_moe":
        found += [Engine(model_type, "tp2", eager=False), Engine(model_type, "damaged", False)]
    return found


def prompts() -> list[tuple[list[int], int]]:
    """Token ids and the number of tokens to answer: 48 short prompts and two of 8000 tokens."""
    source = random.Random(6)
    short = [[source.randrange(256) for _ in range(5 + 2 * n)] for n in range(48)]
    long = [[source.randrange(256) for _ in range(_LONG)] for _ in range(2)]
    return [(ids, TOKENS) for ids in short] + [(ids, LONG_TOKENS) for ids in long]


def bf16_steps(best: float, second: float) -> float:
    """The gap between two logits in steps of bf16 at the size of the larger."""
    import math

    size = max(abs(best), abs(second))
    return (best - second) / 2.0 ** (math.floor(math.log2(size)) - 7) if size else 0.0


def start(path: Path, engine: Engine) -> Any:
    """vLLM's engine in this process."""
    from vllm import LLM

    options: dict[str, Any] = {}
    if engine.drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": engine.drafts}
    if not engine.eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
    return LLM(
        str(path),
        dtype="bfloat16",
        enforce_eager=engine.eager,
        max_model_len=_LONG + 192,
        max_num_seqs=32,
        max_num_batched_tokens=_CHUNK,
        gpu_memory_utilization=0.15,
        kv_cache_memory_bytes=_KV_BYTES,  # measuring would see the engines beside this one
        enable_prefix_caching=False,
        logprobs_mode="raw_logits",
        disable_log_stats=False,
        **options,
    )


def answer(llm: Any, work: list[tuple[list[int], int]], logits: bool = False) -> list[Any]:
    """Greedy completions."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, logprobs=2 if logits else None
        )
        for _, count in work
    ]
    inputs = [{"prompt_token_ids": ids} for ids, _ in work]
    return [output.outputs[0] for output in llm.generate(inputs, parameters, use_tqdm=False)]


def reference(llm: Any) -> list[dict[str, Any]]:
    """The dense engine's tokens and its two best logits at each."""
    found = []
    for output in answer(llm, prompts(), logits=True):
        top = [sorted((e.logprob for e in step.values()), reverse=True) for step in output.logprobs]
        found.append({"tokens": list(output.token_ids), "top": [pair[:2] for pair in top]})
    return found


def compare(llm: Any, expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Every token of the reference against this engine's after the same tokens before it."""
    pending = [(index, 0) for index in range(len(expected))]
    compared, differing = 0, []
    while pending:
        work = []
        for index, done in pending:
            ids, tokens = prompts()[index][0], expected[index]["tokens"]
            work.append((ids + tokens[:done], len(tokens) - done))
        rest = []
        for (index, done), output in zip(pending, answer(llm, work), strict=True):
            tokens = expected[index]["tokens"]
            pairs = zip(output.token_ids, tokens[done:], strict=True)
            step = next((n for n, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            if step is None:
                compared += len(tokens) - done
                continue
            compared += step + 1
            at = done + step
            gap = bf16_steps(*expected[index]["top"][at])
            differing.append({"prompt": index, "token": at, "steps": round(gap, 3)})
            if at + 1 < len(tokens):
                rest.append((index, at + 1))
        pending = rest
    return {
        "compared": compared,
        "near_ties": [place for place in differing if place["steps"] <= NEAR],
        "wrong": [place for place in differing if place["steps"] > NEAR],
    }


def resident_experts(path: Path) -> dict[str, Any]:
    """Bytes of storage behind the parameters of all experts, of target and draft."""
    from exl3kit.checkpoint.open import open_checkpoint
    from exl3kit.integrations.vllm import compat

    gc.unfreeze()  # vLLM hides what it made from the collector
    layers = [one for one in gc.get_objects() if issubclass(type(one), compat.ExpertsLayer)]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in layers
        for tensor in (*layer.parameters(), *layer.buffers())
    }
    checkpoint = open_checkpoint(path)
    trellis = sum(
        checkpoint.info(name).nbytes
        for name in checkpoint.names()
        if ".experts." in name and name.endswith(".trellis")
    )
    return {
        "layers": len(layers),
        "resident_bytes": sum(storages.values()),
        "trellis_bytes": trellis,
    }


def counts() -> dict[str, int]:
    """What must not grow while an engine serves."""
    import torch
    from torch._dynamo.utils import counters

    from exl3kit.jit import launch

    stats = torch.cuda.memory_stats()
    return {
        "kernels": launch._load.cache_info().misses,
        "graphs": counters["stats"]["unique_graphs"],
        "segments": stats["segment.all.allocated"],
        "reserved_bytes": stats["reserved_bytes.all.current"],
    }


def growth(before: dict[str, int]) -> dict[str, int]:
    """How far `counts` have risen."""
    return {name: value - before[name] for name, value in counts().items()}


def peak(run: Any) -> int:
    """Bytes that `run` allocates at its peak, over what was allocated before."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def steady(llm: Any) -> dict[str, Any]:
    """A second round of the reference's work: peak and growth; and the sizing pass once more."""
    before = counts()
    in_round = peak(lambda: answer(llm, prompts()))
    grown = growth(before)
    core = llm.llm_engine.engine_core.engine_core.model_executor
    runner = core.driver_worker.worker.model_runner
    return {
        "growth": grown,
        "peak_of_a_round": in_round,
        "peak_of_the_sizing_pass": peak(runner.profile_run),
    }


def wait_for(path: Path) -> dict[str, Any]:
    """The result that another engine's process writes."""
    while not path.exists():
        time.sleep(0.2)
    found = json.loads(path.read_text())
    if "error" in found:
        raise RuntimeError(f"{found['label']} failed, nothing to compare with")
    return found


def run_engine(engine: Engine, folder: Path, out: Path) -> None:
    """The whole life of one engine; its result, or the error, goes to `out`."""
    sys.stdout = sys.stderr = (out.with_suffix(".log")).open("w", buffering=1)
    os.dup2(sys.stderr.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    path = folder / engine.model_type / engine.checkpoint
    result: dict[str, Any] = {**asdict(engine), "label": engine.label}
    try:
        began = time.monotonic()
        llm = start(path, engine)
        result["start_seconds"] = round(time.monotonic() - began, 1)
        if engine.checkpoint == "dense":
            result["reference"] = reference(llm)
        else:
            before = counts()
            dense = wait_for(out.parent / f"{engine.model_type}-0.json")
            result |= compare(llm, dense["reference"])
            result["growth_in_first_round"] = growth(before)
            result |= resident_experts(path)
            counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
            result["drafted"] = counters.get("vllm:spec_decode_num_draft_tokens", 0)
            result["accepted"] = counters.get("vllm:spec_decode_num_accepted_tokens", 0)
            result |= steady(llm)
        result["seconds"] = round(time.monotonic() - began, 1)
    except BaseException:
        result["error"] = traceback.format_exc()[-4000:]
    unfinished = out.with_suffix(".part")  # others wait for the whole file
    unfinished.write_text(json.dumps(result))
    unfinished.rename(out)
    os._exit(0)  # vLLM's own end takes seconds and has nothing left to do


def write_models(folder: Path, model_types: list[str]) -> None:
    """The checkpoints of all models, a process each; vLLM is imported meanwhile."""
    from exl3kit.testing.served_models import write_served

    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_served, args=(folder / m, m)) for m in model_types]
    for writer in writers:
        writer.start()
    import vllm  # noqa: F401  once, before the engines' processes part

    for writer in writers:
        writer.join()
        if writer.exitcode:
            raise SystemExit("the models could not be written; see above")


def run_all(folder: Path, model_types: list[str]) -> list[dict[str, Any]]:
    """Run every engine, at most `_AT_ONCE` side by side: dense ones, eager ones, then the rest."""
    context = multiprocessing.get_context("fork")
    results = folder / "results"
    results.mkdir()
    waiting = [
        (engine, results / f"{model}-{number}.json")
        for model in model_types
        for number, engine in enumerate(engines_of(model))
    ]
    # Dense ones are waited for, so they must not be left behind by those that wait.
    waiting.sort(key=lambda job: (job[0].checkpoint != "dense", not job[0].eager))
    outs = [out for _, out in waiting]
    running: list[Any] = []
    while waiting or running:
        for process, engine, out in running:
            if not process.is_alive() and not out.exists():
                died = f"process ended with {process.exitcode}"
                out.write_text(json.dumps({**asdict(engine), "label": engine.label, "error": died}))
        running = [job for job in running if job[0].is_alive()]
        while waiting and len(running) < _AT_ONCE:
            engine, out = waiting.pop(0)
            process = context.Process(target=run_engine, args=(engine, folder, out))
            process.start()
            running.append((process, engine, out))
        time.sleep(0.2)
    return [json.loads(out.read_text()) for out in outs]


def is_right(result: dict[str, Any]) -> bool:
    """True if the engine ran and answered like the dense one, or, damaged, did not."""
    if "error" in result or result["checkpoint"] == "dense":
        return "error" not in result
    return bool(result["wrong"]) == (result["checkpoint"] == "damaged")


def report(results: list[dict[str, Any]]) -> str:
    """A line an engine."""
    lines = []
    for result in results:
        if "error" in result:
            lines.append(f"{result['label']}: FAILED {result['error'].splitlines()[-1]}")
        elif result["checkpoint"] != "dense":
            ratio = result["resident_bytes"] / result["trellis_bytes"]
            lines.append(
                f"{result['label']}: {result['compared']} tokens, {len(result['near_ties'])} near "
                f"ties, {len(result['wrong'])} wrong; experts {ratio:.3f} x trellis; start "
                f"{result['start_seconds']} s; drafts {result['accepted']}/{result['drafted']}"
            )
    return "\n".join(lines)


def main() -> None:
    """Run and write the results; exit status 1 if an engine failed or a token was wrong."""
    from exl3kit.testing.served_models import SERVED_TYPES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SERVED_TYPES, default=list(SERVED_TYPES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="where models and logs are kept")
    options = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        write_models(folder, options.models)
        results = run_all(folder, options.models)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(report(results))
    raise SystemExit(not all(map(is_right, results)))


if __name__ == "__main__":
    main()
