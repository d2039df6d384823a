"""The main job, end to end, on a CPU: quantise, verify, measure, serve, ask.

Takes the bundled tiny GLM-MoE (examples/demo-model, BF16), writes a 3-bit EXL3 checkpoint sliced
for two tensor-parallel ranks, checks it, compares its perplexity with the source's, starts vLLM's
OpenAI server with it at TP2, asks one chat question and stops the server. Every step is a command
a user would type; finished steps are kept in build/demo and reused by the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT / "demo-model"
HELD_OUT = SOURCE / "held_out.txt"
BUILD = ROOT.parent / "build" / "demo"
QUANTISED = BUILD / "demo-model-exl3-3bit-tp2"
DEFAULT_PROMPT = "What is a lighthouse?"
SERVER_START_SECONDS = 240

# Two ranks on two cores: without the three thread settings they wait for each other spinning and
# decode far slower. The rest keeps vLLM offline and its KV cache at 1 GiB.
SERVER_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def run(*arguments: str | Path) -> str:
    """Run one exl3kit command as a user would, echo it, return its output; stop on failure."""
    print(f"\n$ exl3kit {' '.join(map(str, arguments))}", flush=True)
    command = [sys.executable, "-m", "exl3kit", *map(str, arguments)]
    capture = "--json" in arguments
    done = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True)
    if done.returncode:
        raise SystemExit(f"demo: the command above failed with exit code {done.returncode}")
    return done.stdout or ""


def source_digest() -> str:
    """sha256 over the package's and the model's files: what decides the quantised bytes."""
    digest = hashlib.sha256()
    package = ROOT.parent / "src" / "exl3kit"
    files = [*package.rglob("*.py"), *package.rglob("*.cpp"), *package.rglob("*.h")]
    for path in sorted([*files, *package.rglob("*.txt"), *SOURCE.glob("*.*")]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def quantise() -> None:
    """Write the EXL3 checkpoint, or reuse the one made from the same source by the same code."""
    stamp, digest = BUILD / "source.sha256", source_digest()
    if stamp.is_file() and stamp.read_text() == digest:  # written last, so the folder is whole
        print(f"reusing {QUANTISED}")
        return
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    run("quantize", SOURCE, QUANTISED, "--bits", "3", "--tp", "2")
    stamp.write_text(digest)


def perplexity(checkpoint: Path) -> float:
    """Perplexity on the held-out text, measured once per checkpoint."""
    stored = BUILD / f"perplexity-{checkpoint.name}.json"
    if stored.is_file():
        return json.loads(stored.read_text())["perplexity"]
    result = json.loads(run("eval", checkpoint, "--text", HELD_OUT, "--json"))
    stored.write_text(json.dumps(result))
    return result["perplexity"]


def shard_bytes(folder: Path) -> int:
    """Bytes of all weight files in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def request(url: str, body: dict[str, Any] | None = None, timeout: float = 5) -> bytes:
    """GET, or POST of a JSON body; returns the response body."""
    data = json.dumps(body).encode() if body is not None else None
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout) as r:
        return r.read()


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Return once the server answers its health check; stop with its log if it cannot."""
    deadline = time.monotonic() + SERVER_START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, OSError):
            request(f"{url}/health")
            return
        time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
    raise SystemExit(f"demo: the server did not start; the end of {log}:\n{tail}")


@contextlib.contextmanager
def serve() -> Iterator[str]:
    """vLLM's OpenAI server on the quantised model at TP2; yields its URL, stops it afterwards."""
    port, log = free_port(), BUILD / "server.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(QUANTISED), "--served-model-name", "demo"),
        *("--tensor-parallel-size", "2", "--dtype", "bfloat16", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "4", "--max-num-batched-tokens", "512"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    print(f"\n$ python {' '.join(command[1:])}", flush=True)
    environment = os.environ | SERVER_ENVIRONMENT
    with log.open("wb") as sink:
        server = subprocess.Popen(
            command, env=environment, stdout=sink, stderr=sink, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(server, url, log)
        yield url
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """Ask the server's process group to end, then make it."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=20)


def ask(url: str, prompt: str) -> tuple[str, int, float]:
    """One greedy chat completion: (answer, completion tokens, seconds)."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 96,
    }
    begin = time.monotonic()
    answer = json.loads(request(f"{url}/v1/chat/completions", body, timeout=180))
    seconds = time.monotonic() - begin
    return (
        answer["choices"][0]["message"]["content"],
        answer["usage"]["completion_tokens"],
        seconds,
    )


def main() -> None:
    """Run every step and print what came out."""
    parser = argparse.ArgumentParser(description="The main job, end to end, on a CPU.")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT)
    prompt = parser.parse_args().prompt

    quantise()
    run("verify", QUANTISED)
    before, after = perplexity(SOURCE), perplexity(QUANTISED)
    with serve() as url:
        ask(url, prompt)  # the first request also warms the engine up
        answer, tokens, seconds = ask(url, prompt)

    mebibyte = 2**20
    print(f"\nQ: {prompt}\nA: {answer.strip()}\n")
    print(f"speed            {tokens / seconds:.1f} tokens/s ({tokens} tokens, TP2 on CPU)")
    print(f"size, BF16       {shard_bytes(SOURCE) / mebibyte:.1f} MiB")
    print(f"size, EXL3       {shard_bytes(QUANTISED) / mebibyte:.1f} MiB (experts 3 bits)")
    print(f"perplexity, BF16 {before:.3f}")
    print(f"perplexity, EXL3 {after:.3f} ({after / before:.3f} x)")


if __name__ == "__main__":
    main()
