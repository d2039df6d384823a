from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import SliceError
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.slicing.prove import source_faults
from tests.slicing.conftest import Tensors, rewrite

SLICE = "model.layers.1.mlp.experts.1"


@pytest.fixture(scope="module")
def sliced(ordinary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sliced") / "m"
    slice_checkpoint(ordinary, out, SliceOptions(2))
    return out


def prove(path: Path, source: Path, jobs: int = 1) -> list[str]:
    return source_faults(open_checkpoint(path), open_checkpoint(source), jobs)


def _flip(name: str) -> Callable[[Tensors], object]:
    """The last bit of the last value."""

    def change(tensors: Tensors) -> None:
        tensors[name].reshape(-1)[-1:].view(torch.uint8)[0] ^= 1

    return change


def _swap(tensors: Tensors) -> None:
    one, other = f"{SLICE}.gate_proj.rank0.svh", f"{SLICE}.gate_proj.rank1.svh"
    tensors[one], tensors[other] = tensors[other], tensors[one]


NORM = "model.norm.weight"
UP1 = f"{SLICE}.up_proj.rank1"
CHANGES: list[tuple[str, Callable[[Tensors], object], list[str]]] = [
    (
        "column trellis",
        _flip(f"{SLICE}.up_proj.rank1.trellis"),
        [f"'{SLICE}.up_proj.rank1.trellis': is not the cut"],
    ),
    (
        "row trellis",
        _flip(f"{SLICE}.down_proj.rank0.trellis"),
        [f"'{SLICE}.down_proj.rank0.trellis': is not the cut"],
    ),
    (
        "hidden side",
        _flip(f"{SLICE}.down_proj.rank1.svh"),
        [f"'{SLICE}.down_proj.rank1.svh': differs from the source's '{SLICE}.down_proj.svh'"],
    ),
    ("swapped ranks", _swap, [f"gate_proj.rank{r}.svh': is not the cut" for r in (0, 1)]),
    ("copied", _flip(NORM), [f"'{NORM}': differs from the source at byte 510"]),
    ("cast", lambda t: t.update({NORM: t[NORM].float()}), [f"'{NORM}': expected the source's"]),
    ("extra", lambda t: t.update({"x": torch.ones(1)}), ["'x': the source has none"]),
    ("missing", lambda t: t.pop(NORM), [f"'{NORM}' of the source is missing"]),
    (
        "dtype of one rank, which torch does not join with another's",
        lambda t: t.update({f"{UP1}.trellis": t[f"{UP1}.trellis"].view(torch.uint16)}),
        [f"'{UP1}.trellis': expected torch.int16"],
    ),
    (
        "shape of one rank",
        lambda t: t.update({f"{UP1}.trellis": t[f"{UP1}.trellis"][1:]}),
        [f"'{UP1}.trellis': expected torch.int16"],
    ),
    (
        "missing slice",
        lambda t: t.pop(f"{SLICE}.up_proj.rank1.suh"),
        [f"'{SLICE}.up_proj.rank1.suh' is missing"],
    ),
]


@pytest.mark.parametrize("case, change, texts", CHANGES, ids=[case[0] for case in CHANGES])
def test_any_change_is_found_and_named(
    ordinary: Path,
    sliced: Path,
    tmp_path: Path,
    case: str,
    change: Callable[[Tensors], object],
    texts: list[str],
) -> None:
    found = prove(rewrite(sliced, tmp_path / "m", change), ordinary)
    assert len(found) == len(texts)
    for fault, text in zip(found, texts, strict=True):
        assert text in fault


def test_another_config_is_another_model(ordinary: Path, sliced: Path, tmp_path: Path) -> None:
    """The weights are the source's; what is computed with them is not."""
    other = {"rope_theta": 5.0, "text_config": {"x": 1}}
    found = prove(rewrite(sliced, tmp_path / "m", config=other), ordinary)
    assert [fault.split(": ")[1] for fault in found] == ["rope_theta", "text_config"]
    assert "expected the source's 1" in found[0] and "got 5.0" in found[0]


def test_another_tokenizer_is_another_model(ordinary: Path, sliced: Path, tmp_path: Path) -> None:
    source, path = rewrite(ordinary, tmp_path / "source"), rewrite(sliced, tmp_path / "m")
    for folder, files in (
        (source, {"tokenizer.json": "a", "merges.txt": "a", "LICENSE": "a", "README.md": "a"}),
        (path, {"tokenizer.json": "b", "chat_template.jinja": "b", "LICENSE": "a"}),
    ):
        for name, text in files.items():
            (folder / name).write_text(text)
    assert prove(path, source) == [
        "chat_template.jinja: the source has no file of that name",
        "merges.txt: the source's file is missing",
        "tokenizer.json: differs from the source's file",
    ]


def test_tensors_below_the_experts_that_are_none_of_theirs(
    ordinary: Path, sliced: Path, tmp_path: Path
) -> None:
    """A second form of a weight in the source is not in the cut of it."""
    names = f"{SLICE}.up_proj.weight", f"{SLICE}.up_proj.rank2.suh"
    source = rewrite(ordinary, tmp_path / "source", lambda t: t.update({names[0]: torch.ones(1)}))
    path = rewrite(sliced, tmp_path / "m", lambda t: t.update({names[1]: torch.ones(1)}))
    assert prove(path, source) == [
        f"{path}: tensor {names[1]!r} belongs to no EXL3 expert",
        f"{source}: tensor {names[0]!r} belongs to no EXL3 expert",
    ]


def test_negative_zero_is_not_zero(ordinary: Path, tmp_path: Path) -> None:
    """Equal as numbers, different as bytes."""
    name = f"{SLICE}.gate_proj.suh"
    source = rewrite(ordinary, tmp_path / "source", lambda t: t[name][:1].fill_(0.0))
    slice_checkpoint(source, tmp_path / "o", SliceOptions(2))
    minus = f"{SLICE}.gate_proj.rank1.suh"
    changed = rewrite(tmp_path / "o", tmp_path / "m", lambda t: t[minus][:1].fill_(-0.0))
    assert prove(tmp_path / "o", source) == []
    (fault,) = prove(changed, source)
    assert minus in fault


def test_threads_and_progress(ordinary: Path, sliced: Path) -> None:
    seen: list[tuple[int, int]] = []
    pair = open_checkpoint(sliced), open_checkpoint(ordinary)
    assert source_faults(*pair, jobs=3, progress=lambda *step: seen.append(step)) == []
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)


def test_what_cannot_be_compared(plain: Path, ordinary: Path, sliced: Path, tmp_path: Path) -> None:
    with pytest.raises(SliceError, match="expected a rank-sliced checkpoint to compare"):
        prove(ordinary, ordinary)
    with pytest.raises(SliceError, match="a plain one"):
        prove(sliced, plain)
    other = rewrite(sliced, tmp_path / "m")
    table = other / "tier_bitmap.json"
    table.write_text(json.dumps({layer: {"k": [4, 4, 3]} for layer in ("1", "2")}))
    (fault,) = prove(other, ordinary)
    assert fault.startswith("layers and bits:")
