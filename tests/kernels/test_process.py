"""Forks, idle threads and memory of the kernels, each case in a process of its own."""

from __future__ import annotations

import os
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

# Workers of a server have torch's count lowered: no more threads may start.
FOLLOW = """
def tasks():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(1)
before = tasks()
assert torch.equal(run(None), expected) and tasks() == before
torch.set_num_threads(3)
assert torch.equal(run(None), expected) and tasks() == before + 2
"""

# OpenMP binds its threads, the caller among them, to a core each: the second must work on its own.
BOUND = """
def ticks():  # of processor time, by task
    stats = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        stats[int(task)] = int(fields[11]) + int(fields[12])
    return stats

weights = random_exl3(1024, 1024, 3)
x = random_rows(9, 1024)
run(2)
time.sleep(0.3)
before, start = ticks(), time.monotonic()
while time.monotonic() - start < 1:
    run(2)
used = {task: value - before.get(task, 0) for task, value in ticks().items()}
busy = [os.sched_getaffinity(task) for task, value in used.items() if value >= 5]
assert len(busy) == 2 and not set.intersection(*busy), (used, busy)
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


def run_python(body: str, variables: dict[str, str] | None = None) -> None:
    """Run PRELUDE and `body` in a python with `variables` set; its errors are the test's."""
    if cpu_library() is None:
        pytest.skip("no C++ compiler: the kernels do not exist here")
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + body],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | (variables or {}),
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "body",
    [FORK, IDLE, FOLLOW, MEMORY],
    ids=["fork", "idle threads sleep", "as many as torch", "memory beside the trellis"],
)
def test_process(body: str) -> None:
    run_python(body)


def test_threads_work_on_the_cores_they_are_bound_to() -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("one core")
    places = ",".join(f"{{{core}}}" for core in cores)
    run_python(BOUND, {"OMP_PROC_BIND": "close", "OMP_PLACES": places, "OMP_NUM_THREADS": "2"})
