"""Five hundred damaged checkpoints; `make fuzz` takes twenty thousand and a new seed each time."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from exl3kit.errors import CheckpointError
from exl3kit.testing import fuzz
from exl3kit.testing.mutate import mutate

BATCH = 50


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return fuzz.make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("start", range(0, 500, BATCH))
def test_damage_is_an_error_that_names_it(corpus: list[Path], tmp_path: Path, start: int) -> None:
    for number in range(start, start + BATCH):
        assert fuzz.run_input(corpus, tmp_path, fuzz.FIXED_SEED, number) in fuzz.OUTCOMES


def test_inputs_are_the_same_for_ever(corpus: list[Path], tmp_path: Path) -> None:
    """And nearly all of them are damaged: some bytes are replaced by themselves."""
    changed = 0
    for number in range(60):
        states = []
        for _ in range(2):
            folder = Path(shutil.copytree(corpus[number % len(corpus)], tmp_path / "m"))
            what = mutate(folder, Random(number))
            files = {p.name: p.is_file() and p.read_bytes() for p in folder.iterdir()}
            states.append((what, files))
            shutil.rmtree(folder)
        assert states[0] == states[1]
        source = {p.name: p.read_bytes() for p in corpus[number % len(corpus)].iterdir()}
        changed += states[0][1] != source
    assert changed > 50


def test_a_run_counts_outcomes_and_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, failures = fuzz.run(3, range(4))
    assert sum(outcomes.values()) == 4 and failures == []

    def fail(*arguments: object) -> str:
        raise fuzz.Failure(f"input {arguments[-1]}")

    monkeypatch.setattr(fuzz, "run_input", fail)
    assert fuzz.run(3, range(2)) == ({}, ["input 0", "input 1"])


def bare(folder: Path) -> str:
    raise CheckpointError("wrong")


def unprintable(folder: Path) -> str:
    raise CheckpointError("x.json: expected\x1b[31m 3")


def crash(folder: Path) -> str:
    raise KeyError("x")


def hang(folder: Path) -> str:
    while True:
        pass


def hog(folder: Path) -> str:
    bytearray(200 * 2**20)
    return "accepted"


@pytest.mark.parametrize(
    "step, text",
    [
        (bare, "names nothing"),
        (unprintable, "unprintable"),
        (crash, "KeyError"),
        (hang, "took more than"),
        (hog, "allocated 2"),
    ],
)
def test_what_must_not_happen_is_a_failure(
    corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: object, text: str
) -> None:
    """The judge itself: each step stands for a defect, and the report says how to repeat it."""
    if step is hang:  # alone: on a slow machine reading the input may itself take 0.2 s
        monkeypatch.setattr(fuzz, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(fuzz, "STEPS", (step,))
    with pytest.raises(fuzz.Failure, match=text) as failure:
        fuzz.run_input(corpus, tmp_path, 7, 3)
    assert "seed 7, input 3" in str(failure.value)
