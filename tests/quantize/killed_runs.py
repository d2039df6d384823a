"""Jobs that kill themselves, for test_resume: python -m tests.quantize.killed_runs SRC FOLDER N.

Prints how many disk operations an unbroken run makes, into FOLDER/whole. Then, for each of N points
spread over them, runs the same job in FOLDER/<point>: killed by SIGKILL in the middle of that
operation, begun again and killed a little further on, and begun a third time to its end. Prints the
signal or the exit code of each process.

Each run is a process of its own, forked before torch has started any thread.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions
from tests.quantize import quick

OPTIONS = QuantizeOptions(
    bits=2, tp=2, rows=4, cols=64, dense={"attention": 3, "head": 4}, mtp="trellis", jobs=2
)
_SECOND_LIFE = 5  # operations that the second run makes, more than it takes to open the folder


class Countdown:
    """Counts disk operations; at the last of `left` writes half of it and kills the process."""

    def __init__(self, left: int | None) -> None:
        self.count, self._left = 0, left
        self._pwrite, self._rename, self._replace = os.pwrite, Path.rename, Path.replace

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(os, "pwrite", self.pwrite)
        patch.setattr(Path, "rename", lambda path, to: self._move(self._rename, path, to))
        patch.setattr(Path, "replace", lambda path, to: self._move(self._replace, path, to))

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        if self._is_last():
            self._pwrite(descriptor, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return self._pwrite(descriptor, data, offset)

    def _move(self, move, path: Path, to: Path) -> Path:  # type: ignore[no-untyped-def]
        if self._is_last():
            os.kill(os.getpid(), signal.SIGKILL)
        return move(path, to)

    def _is_last(self) -> bool:
        self.count += 1
        return self.count == self._left


def run(src: Path, out: Path, left: int | None) -> str:
    """One run in a process of its own: "-9" if it was killed, else how many operations it made."""
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        counted = os.read(read, 32).decode()
        os.close(read)
        return counted if code == 0 else str(code)
    try:
        with pytest.MonkeyPatch.context() as patch:
            quick.install(patch)
            torch.set_num_threads(1)
            countdown = Countdown(left)
            countdown.install(patch)
            quantize_checkpoint(src, out, OPTIONS)
            os.write(write, str(countdown.count).encode())
        os._exit(0)
    except BaseException as error:
        print(f"failed: {error!r}", flush=True)
        os._exit(1)


def main() -> None:
    """See above."""
    src, folder, points = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    total = int(run(src, folder / "whole", None))
    print("whole", total, flush=True)
    for i in range(points):
        point = 2 + (total - 3) * i // (points - 1)
        out = folder / f"{point:05d}"
        results = [run(src, out, point), run(src, out, _SECOND_LIFE), run(src, out, None)]
        print(out.name, *results, flush=True)


if __name__ == "__main__":
    main()
