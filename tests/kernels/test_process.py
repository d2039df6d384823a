"""Forks, idle threads and memory of the kernels, each case in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from exl3kit.jit.cpu import cpu_library

PRELUDE = """
import os, resource, time
import torch
from exl3kit.kernels.linear import linear
from exl3kit.kernels.moe import moe
from exl3kit.testing.generate import random_exl3
from tests.kernels.cases import random_experts, random_routing, random_rows

weights = random_exl3(256, 512, 3)
x = random_rows(9, 256)
def run(threads):
    return linear(x, weights.trellis, weights.suh, weights.svh, "mcg", threads=threads)
expected = run(1)
"""

FORK = """
assert torch.equal(run(2), expected)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(run(2), expected) and torch.equal(run(3), expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(run(2), expected)
"""

IDLE = """
run(4)
before = time.process_time()
time.sleep(0.5)
used = time.process_time() - before
assert used < 0.1, f"idle threads used {used} s of 0.5"
"""

# Workers of a server have torch's count lowered: the pool must not start more.
FOLLOW = """
def tasks():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
before = tasks()
assert torch.equal(run(None), expected) and tasks() == before
torch.set_num_threads(3)
assert torch.equal(run(None), expected) and tasks() == before + 2
"""

# 64 experts of 3 x 1024 x 512 weights at 3 bits: 37.7 MB of trellis. Dense they would take 201 MB
# in half precision; one decoded expert in float32 is 6.3 MB, more than the 5.7 MB allowed.
MEMORY = """
def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(field))

E, H, S = 64, 1024, 512
def packed(*shape):
    return torch.empty(*shape, dtype=torch.int16).random_(-(1 << 15), 1 << 15)
w13, w2 = packed(2, E, H // 16, S // 16, 48), packed(E, S // 16, H // 16, 48)
ones = [torch.ones(*shape, dtype=torch.half) for shape in ((2, E, H), (2, E, S), (E, S), (E, H))]
experts = (w13, *ones[:2], w2, *ones[2:])
trellis_bytes = 2 * (w13.numel() + w2.numel())
cases = [(random_rows(tokens, H), *random_routing(tokens, 4, E)) for tokens in (1, 64)]
run(2)
before = status("VmRSS")
for case in cases:
    moe(*case, *experts, "mcg", threads=2)
peak = max(status("VmHWM") - before, status("VmRSS") - before)
assert status("VmHWM") > before
assert peak <= 0.15 * trellis_bytes, f"{peak} bytes beside {trellis_bytes} of trellis"
"""


@pytest.mark.parametrize(
    "body",
    [FORK, IDLE, FOLLOW, MEMORY],
    ids=["fork", "idle threads sleep", "as many as torch", "memory beside the trellis"],
)
def test_process(body: str) -> None:
    if cpu_library() is None:
        pytest.skip("no C++ compiler: the kernels do not exist here")
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + body], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
