"""One job in a process of its own: python -m tests.quantize.memory_run SRC OUT SPILL.

Prints by how many bytes the peak of memory rose during the job, and the formula's bound.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.memory import peak_bytes
from exl3kit.quantize.preflight import QuantizeOptions, plan_job
from tests.quantize import quick


def memory(kind: str) -> int:
    """Bytes this process holds now (VmRSS), or held at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{kind}:"))
    return 1024 * int(line.split()[1])


def main() -> None:
    """See above."""
    src, out, spill = (Path(argument) for argument in sys.argv[1:])
    options = QuantizeOptions(bits=2, tp=2, rows=4, cols=128, dense={"attention": 3}, spill=spill)
    with pytest.MonkeyPatch.context() as patch:
        quick.install(patch)
        Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is this job's
        before = memory("VmRSS")
        quantize_checkpoint(src, out, options)
        print(memory("VmHWM") - before, peak_bytes(plan_job(open_checkpoint(src), options)))


if __name__ == "__main__":
    main()
