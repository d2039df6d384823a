"""Runs a vLLM engine in a process of its own, so that every test starts from a clean state.

`generate(...)` is what tests call. The same file is the program of the child process: it reads one
job as JSON from stdin and writes its result to the file named on its command line (stdout belongs
to vLLM's workers too).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# TP2 on two cores: without the last three a decode step takes ten times as long.
CPU_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
}

MAX_GAP = 1e-3  # between the two best logits where two runs may part


@dataclass(frozen=True)
class Generation:
    """What one engine answered, per prompt: text, token ids, each token's (id, logprob) top two.

    The counts are of the engine's life so far; `cached` counts prompt tokens, `graphs` what dynamo
    traced in this process, where the engine of one rank lives, `lowered` what inductor compiled.
    """

    texts: list[str]
    tokens: list[list[int]]
    top: list[list[list[tuple[int, float]]]]
    drafted: int
    accepted: int
    cached: int
    graphs: int
    lowered: int


class EngineFailed(RuntimeError):
    """The engine did not start or did not answer; the text is the end of its log."""


def run_job(job: dict[str, Any], timeout: float = 400) -> list[dict[str, Any]]:
    """Run `job` in a child process and return one result per generation it asks for.

    Beside what `generate` takes, `engine` has arguments of vLLM's LLM and `env` variables; `swaps`
    are files to put in before a reload and an answer each; with `regex` the prompts are answered
    once more as they are and once in that form.
    """
    in_process = job.get("tp", 1) == 1
    env = {**os.environ, **CPU_ENV, **job.get("env", {})}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        child = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), str(answer)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            env=env,
            timeout=timeout,
        )
        if child.returncode != 0:
            raise EngineFailed((child.stdout + child.stderr)[-20000:])
        return json.loads(answer.read_text())


def generate(model: Path, prompts: list[str], **job: Any) -> Generation:
    """Greedy tokens of `prompts`; `job` may set tp, max_tokens, dtype, drafts, quantization."""
    result = run_job({"model": str(model), "prompts": prompts, **job})[0]
    return Generation(**result)


def assert_same_tokens(found: Generation, expected: Generation) -> None:
    """Equal tokens; where a prompt departs, the two best logits must be closer than MAX_GAP."""
    for prompt, (ours, theirs) in enumerate(zip(found.tokens, expected.tokens, strict=True)):
        pairs = enumerate(zip(ours, theirs, strict=True))
        step = next((step for step, (one, other) in pairs if one != other), None)
        if step is not None:
            (_, best), (_, second) = expected.top[prompt][step]
            assert best - second < MAX_GAP, f"prompt {prompt} departs at token {step}"


def _serve(job: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import LLM

    options: dict[str, Any] = {
        "model": job["model"],
        "tensor_parallel_size": job.get("tp", 1),
        "dtype": job.get("dtype", "float32"),
        "quantization": job.get("quantization"),
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "disable_log_stats": False,
        **job.get("engine", {}),
    }
    if drafts := job.get("drafts", 0):
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    llm = LLM(**options)
    results = [_answer(llm, job)]
    for name, source in job.get("swaps", []):
        (Path(job["model"]) / name).write_bytes(Path(source).read_bytes())
        llm.collective_rpc("reload_weights")
        results.append(_answer(llm, job))
    if regex := job.get("regex"):
        results += [_answer(llm, job), _answer(llm, job, regex)]
    return results


def _answer(llm: Any, job: dict[str, Any], regex: str | None = None) -> dict[str, Any]:
    from torch._dynamo.utils import counters as dynamo
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(
        temperature=0,
        max_tokens=job.get("max_tokens", 32),
        ignore_eos=regex is None,
        logprobs=2,
        structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
    )
    outputs = [completion.outputs[0] for completion in llm.generate(job["prompts"], params)]
    counters = {
        metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
    }
    answer = Generation(
        texts=[output.text for output in outputs],
        tokens=[list(output.token_ids) for output in outputs],
        top=[[_top_two(step) for step in output.logprobs] for output in outputs],
        drafted=int(counters.get("vllm:spec_decode_num_draft_tokens", 0)),
        accepted=int(counters.get("vllm:spec_decode_num_accepted_tokens", 0)),
        cached=int(counters.get("vllm:prefix_cache_hits", 0)),
        graphs=dynamo["stats"]["unique_graphs"],
        lowered=sum(dynamo["inductor"][f"fxgraph_cache_{x}"] for x in ("hit", "miss", "bypass")),
    )
    return asdict(answer)


def _top_two(step: dict[int, Any]) -> list[tuple[int, float]]:
    ranked = sorted(step.items(), key=lambda item: item[1].logprob, reverse=True)
    return [(token, entry.logprob) for token, entry in ranked[:2]]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_serve(json.loads(sys.stdin.read()))))
