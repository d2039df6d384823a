"""Where, when and how a result was measured: the head of every result page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent
RESULTS = ROOT / "results"


def facts(device: str = "cpu") -> dict[str, str]:
    """Date, processor, load, the GPU if `device` is one, versions, commit and command, as text."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    script = Path(sys.argv[0]).name
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": next(names, "unknown"),
        "cores": str(os.cpu_count()),
        "load_average": f"{os.getloadavg()[0]:.1f}",
        **gpu,
        "torch": torch.__version__,
        "commit": commit,
        "command": f"python benchmarks/{script} {' '.join(sys.argv[1:])}".strip(),
    }


def bullet_list(header: dict[str, str]) -> str:
    """The facts as Markdown."""
    return "".join(f"- {key}: {value}\n" for key, value in header.items())


def write_results(name: str, result: dict[str, Any], page: str, out: Path = RESULTS) -> None:
    """Write `name`.json and `name`.md into the folder `out`, and print the page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / f"{name}.md").write_text(page)
    print(page)
