"""The part of an output folder that exists only while its job does: `.exl3kit-job/`.

job.json     what decides the output's bytes: options, bits, calibration text, source files. A run
             that finds another one there is refused with what differs, so two jobs never mix.
lock         held by the writing process; the kernel drops it when that process ends, however
state.json   shards that are complete, with their digests, and where the hidden states lie
hidden-*     the hidden states after the last complete stage

Each file appears whole or not at all, and only states things that are on the disk already.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl3kit.checkpoint.atomic import check_no_contents, disk_errors, write_file
from exl3kit.checkpoint.jsonfile import read_json_object
from exl3kit.checkpoint.keys import show
from exl3kit.errors import CheckpointError
from exl3kit.quantize.allocate import Expert

WORK_NAME = ".exl3kit-job"
_JOB, _LOCK, _STATE = "job.json", "lock", "state.json"
_SHOWN = 6


@contextmanager
def claimed(out: Path, identity: Mapping[str, Any]) -> Iterator[Path]:
    """Hold the output folder `out` for the job `identity` (JSON): gives its work folder.

    A new or empty folder is begun, one that the same job left unfinished is taken up. Else a
    CheckpointError, and nothing is touched: files of another origin, a job that differs, another
    process at work.
    """
    _check_free(out)
    work = out / WORK_NAME
    with disk_errors(out):
        work.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, out)
        _check_free(out)  # another process may have finished in between
        _match(out, json.loads(json.dumps(identity)))
        yield work
    finally:
        os.close(descriptor)


@dataclass
class State:
    """How far the job of the folder `work` is; `write` makes it last.

    `is_checked`: the source's values are known to be finite. `stages` are complete, from the first
    on; `digests` has the SHA-256 of each complete shard by its layer, None for the one outside the
    layers; `hidden` names the file with the hidden states after the last complete stage;
    `expert_weights` are what mean bits are shared out by, once they have been measured.
    """

    work: Path
    is_checked: bool = False
    stages: int = 0
    hidden: str | None = None
    digests: dict[int | None, str] = field(default_factory=dict)
    expert_weights: dict[Expert, float] | None = None

    @classmethod
    def read(cls, work: Path) -> State:
        """What was last written, or the state of a job that has done nothing.

        CheckpointError if the file holds anything else.
        """
        path = work / _STATE
        if not path.exists():
            return cls(work)
        stored = read_json_object(path)
        try:
            stored["digests"] = {layer: digest for layer, digest in stored["digests"]}
            if (weights := stored["expert_weights"]) is not None:
                stored["expert_weights"] = {(layer, expert): w for layer, expert, w in weights}
            return cls(work, **stored)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}: expected the state of a job, found something else; begin again in "
                "another folder"
            ) from None

    def write(self) -> None:
        """Replace state.json, then remove hidden states that it no longer names."""
        fields = {name: value for name, value in vars(self).items() if name != "work"}
        fields["digests"] = list(self.digests.items())
        if self.expert_weights is not None:
            fields["expert_weights"] = [[*place, w] for place, w in self.expert_weights.items()]
        data = json.dumps(fields).encode()
        with disk_errors(self.work):
            write_file(self.work / _STATE, data)
            for file in self.work.glob("hidden-*"):
                if file.name != self.hidden:
                    file.unlink()


def remove_work(work: Path) -> None:
    """End the job: the output is complete.

    job.json goes first: a kill in the middle must not leave a job that seems to have done nothing.
    """
    (work / _JOB).unlink()
    shutil.rmtree(work)


def _check_free(out: Path) -> None:
    """Refuse a file, a finished output, and any folder that no job of ours began."""
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out}: expected a folder to write to, found a file")
    if not out.exists() or (out / WORK_NAME / _JOB).exists():
        return
    check_no_contents(out, (item.name for item in out.iterdir() if item.name != WORK_NAME))


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown"
        raise CheckpointError(
            f"{out}: process {owner} is writing this folder; wait for it, or name another folder"
        ) from None
    with disk_errors(out):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)


def _match(out: Path, identity: dict[str, Any]) -> None:
    """Write job.json, or compare with the one that is there."""
    path = out / WORK_NAME / _JOB
    if not path.exists():
        with disk_errors(out):
            write_file(path, json.dumps(identity, indent=1).encode())
        return
    begun, now = dict(_leaves(read_json_object(path))), dict(_leaves(identity))
    changed = [key for key in {**begun, **now} if begun.get(key) != now.get(key)]
    if changed:
        lines = [
            f"{key}: begun with {show(begun.get(key))}, now {show(now.get(key))}"
            for key in changed[:_SHOWN]
        ]
        more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise CheckpointError(
            f"{out}: holds an unfinished job that differs from this one: {'; '.join(lines)}{more}. "
            "Repeat the command it was begun with, name another folder, or remove this one"
        )


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested objects; a list is a value."""
    if not isinstance(value, dict):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{prefix}.{key}" if prefix else key)
