"""A stopped job goes on: after SIGKILL, a full disk, a failure; and never mixes with another."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exl3kit.checkpoint.header import read_header
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import CheckpointError
from exl3kit.models.registry import model_map
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.journal import read_log
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.quantize.store import Step
from exl3kit.testing.tiny_model import write_tiny_model
from tests.quantize import quick

OPTIONS = QuantizeOptions(bits=2, tp=2, rows=4, cols=64)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source"), quick.SPEC)


@pytest.fixture(autouse=True)
def quick_encoder(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    quick.install(monkeypatch)


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file; of the log, whose lines have times, all but those."""
    found = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        if path.name == "quantization_log.jsonl":
            data = "\n".join(sorted(map(_without_times, data.splitlines()))).encode()
        found[path.name] = hashlib.sha256(data).hexdigest()
    return found


def _without_times(line: bytes) -> str:
    return json.dumps({k: v for k, v in json.loads(line).items() if k != "seconds"})


class Stop(Exception):
    """Ends a run at a chosen matrix."""


def stop_after(count: int) -> Any:
    """A progress callback that ends the run after `count` matrices."""

    def progress(step: Step) -> None:
        if step.done == count:
            raise Stop

    return progress


@pytest.mark.slow
def test_runs_killed_anywhere_end_in_the_bytes_of_an_unbroken_one(
    source: Path, tmp_path: Path
) -> None:
    arguments = [str(source), str(tmp_path), "7"]
    command = [sys.executable, "-m", "tests.quantize.killed_runs", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = [line.split() for line in done.stdout.splitlines()]
    total = int(first[1])
    expected = digests(tmp_path / "whole")
    assert not verify_checkpoint(tmp_path / "whole", model_map).faults
    assert len(lines) == 7
    for point, killed, again, finished in lines:
        assert killed == again == "-9", point
        assert digests(tmp_path / point) == expected, point
        if int(point) > 3 * total // 4:  # late kills leave little to do
            assert int(finished) < total // 2, point


def test_a_stopped_run_stores_nothing_twice(source: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "out", list[Step]()
    with pytest.raises(Stop):
        quantize_checkpoint(source, out, OPTIONS, progress=stop_after(15))
    assert not (out / "config.json").exists()
    quantize_checkpoint(source, out, OPTIONS, progress=seen.append)
    assert seen[0].done == 15
    assert [step.done for step in seen[1:]] == [*range(16, 25)]
    quantize_checkpoint(source, tmp_path / "whole", OPTIONS)
    assert digests(out) == digests(tmp_path / "whole")


def test_bytes_that_never_reached_the_disk_are_made_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stop):
        quantize_checkpoint(source, out, OPTIONS, progress=stop_after(20))
    newest = max(out.glob("*.part"))
    size = newest.stat().st_size
    with newest.open("r+b") as file:  # as a power cut leaves it: the log is there, pages are not
        file.seek(size // 2)
        file.write(b"\0" * (size // 4))
    quantize_checkpoint(source, out, OPTIONS)
    quantize_checkpoint(source, tmp_path / "whole", OPTIONS)
    whole = digests(tmp_path / "whole")
    found = digests(out)
    assert {k: v for k, v in found.items() if not k.endswith("jsonl")} == {
        k: v for k, v in whole.items() if not k.endswith("jsonl")
    }


def test_a_marker_that_never_reached_the_disk_is_written_again(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Stop):
        quantize_checkpoint(source, out, OPTIONS, progress=stop_after(20))
    newest = max(out.glob("*.part"))
    markers = [info for info in read_header(newest).tensors.values() if info.name.endswith(".mcg")]
    with newest.open("r+b") as file:
        for info in markers:
            file.seek(info.start)
            file.write(b"\0" * info.nbytes)
    quantize_checkpoint(source, out, OPTIONS)
    assert not verify_checkpoint(out, model_map).faults


@pytest.mark.parametrize("damage", [b"\0" * 40, b"[1]", b'{"name": 1}', b"\xff\xfe{"])
def test_a_damaged_line_of_the_log_is_skipped_and_its_matrix_made_again(
    source: Path, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    log, seen = tmp_path / "quantization_log.jsonl", list[Step]()
    with pytest.raises(Stop):
        quantize_checkpoint(source, tmp_path, OPTIONS, progress=stop_after(15))
    lines = log.read_bytes().splitlines()
    log.write_bytes(b"\n".join([*lines[:-2], damage, lines[-1]]) + b"\n")
    quantize_checkpoint(source, tmp_path, OPTIONS, progress=seen.append)
    assert seen[0].done == 14
    assert f"{log}: line {len(lines) - 1} is damaged" in caplog.text
    assert not verify_checkpoint(tmp_path, model_map).faults
    assert len(read_log(tmp_path)) == 24


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quantization_log.jsonl", r"expected a line of 'model\.layers\.1\.mlp\.experts\.0"),
        ("shard-00002.part", r"shard-00002\.part: expected this shard"),
        (".exl3kit-job/state.json", r"state\.json: expected the state of a job"),
    ],
)
def test_what_a_complete_layer_has_lost_is_named(
    source: Path, tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(Stop):  # layer 0 is copied, 1 and 2 have 12 matrices each
        quantize_checkpoint(source, tmp_path, OPTIONS, progress=stop_after(14))
    path = tmp_path / name
    path.unlink()
    if path.suffix != ".part":
        path.write_text("{}\n")
    with pytest.raises(CheckpointError, match=words):
        quantize_checkpoint(source, tmp_path, OPTIONS)
    assert not (tmp_path / "config.json").exists()


def test_a_run_killed_while_it_cleans_up_leaves_a_finished_output(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(work: Path) -> None:
        (work / "state.json").unlink()
        raise Stop

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(Stop):
        quantize_checkpoint(source, tmp_path, OPTIONS)
    before = digests_of_parts(tmp_path)
    with pytest.raises(CheckpointError, match="expected an empty or new output folder"):
        quantize_checkpoint(source, tmp_path, OPTIONS)
    assert digests_of_parts(tmp_path) == before == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 3}, r"bits\.experts\.1: begun with \[2, 2\], now \[3, 3\]"),
        ({"tp": 1}, "tp: begun with 2, now 1"),
        ({"tp": None}, "tp: begun with 2, now None"),
        ({"slice_mode": "cut"}, "slice_mode: begun with 'independent', now 'cut'"),
        ({"cols": 32}, r"calibration\.size: begun with \[4, 64\], now \[4, 32\]"),
        ({"seed": 1}, "seed: begun with 0, now 1"),
        ({"dense": {"attention": 3}}, r"self_attn\.q_proj: begun with None, now 3"),
    ],
)
def test_another_job_is_refused_with_what_differs(
    source: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(Stop):
        quantize_checkpoint(source, tmp_path, OPTIONS, progress=stop_after(1))
    before = digests_of_parts(tmp_path)
    with pytest.raises(CheckpointError, match=f"differs from this one: .*{words}"):
        quantize_checkpoint(source, tmp_path, replace(OPTIONS, **change))
    assert digests_of_parts(tmp_path) == before


def digests_of_parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.part")}


def test_a_changed_source_or_text_is_refused(source: Path, tmp_path: Path) -> None:
    src, out, text = tmp_path / "src", tmp_path / "out", tmp_path / "text.txt"
    shutil.copytree(source, src)
    text.write_text("Call me Ishmael. " * 100)
    with pytest.raises(Stop):
        quantize_checkpoint(src, out, OPTIONS, [text], progress=stop_after(1))
    text.write_text("Call me Ahab, you. " * 100)
    with pytest.raises(CheckpointError, match=r"calibration\.sha256: begun with"):
        quantize_checkpoint(src, out, OPTIONS, [text])
    text.write_text("Call me Ishmael. " * 100)
    os.utime(src / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"source\.model\.safetensors: .*now '.*at 1 ns'"):
        quantize_checkpoint(src, out, OPTIONS, [text])


def test_a_source_that_changes_under_the_run_is_refused(source: Path, tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    shutil.copytree(source, src)

    def touch(step: Step) -> None:
        os.utime(src / "model.safetensors", ns=(step.done, step.done))

    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        quantize_checkpoint(src, out, OPTIONS, progress=touch)
    assert not (out / "config.json").exists()


def test_a_second_process_is_locked_out(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        quantize_checkpoint(source, tmp_path, OPTIONS, progress=stop_after(1))
    with (tmp_path / ".exl3kit-job" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} is writing this folder"):
            quantize_checkpoint(source, tmp_path, OPTIONS)
    quantize_checkpoint(source, tmp_path, OPTIONS)  # the lock went with its holder
    assert (tmp_path / "config.json").exists()


def test_a_finished_output_is_not_begun_again(source: Path, tmp_path: Path) -> None:
    quantize_checkpoint(source, tmp_path, OPTIONS)
    before = digests(tmp_path)
    with pytest.raises(CheckpointError, match="expected an empty or new output folder"):
        quantize_checkpoint(source, tmp_path, OPTIONS)
    assert digests(tmp_path) == before


@pytest.mark.parametrize("after", [3, 40])
def test_a_disk_that_fills_up_loses_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    out, written = tmp_path / "out", 0
    pwrite = os.pwrite

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += 1
        if written > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"disk full .* bytes are free; free space"):
            quantize_checkpoint(source, out, OPTIONS)
    assert not (out / "config.json").exists()
    quantize_checkpoint(source, out, OPTIONS)
    quantize_checkpoint(source, tmp_path / "whole", OPTIONS)
    assert digests(out) == digests(tmp_path / "whole")


def test_a_layer_that_finds_no_room_stops_before_its_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Step] = []
    allocated: list[int] = []

    def full(descriptor: int, offset: int, size: int) -> None:
        allocated.append(size)
        if len(allocated) == 4:  # two layers and the hidden states behind the first had room
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="disk full"):
        quantize_checkpoint(source, tmp_path, OPTIONS, progress=seen.append)
    assert seen[-1].layer_done == seen[-1].layer_total
