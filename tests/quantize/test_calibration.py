"""Token rows: deterministic, spread over the text, and refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.quantize.calibration import (
    calibration_rows,
    draw_rows,
    encode_text,
    token_windows,
)
from exl3kit.quantize.documents import TextError


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer: w0 .. w9 are ids 0 .. 9."""
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{i}": i for i in range(10)},
            "unk_token": "w0",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def test_encodes_with_the_models_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert encode_text("w3 w1\nw9 ", tmp_path, 10).tolist() == [3, 1, 9]


def test_token_outside_the_embedding_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"token id 9: expected ids below vocab_size 9"):
        encode_text("w3 w9", tmp_path, 9)


@pytest.mark.parametrize("content", [None, "{"])
def test_bad_tokenizer_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        encode_text("w1", tmp_path, 10)


def test_rows_are_windows_in_text_order_and_depend_on_the_seed_only() -> None:
    windows = token_windows(torch.arange(1000), 10)
    rows = draw_rows(windows, 8, seed=1)
    assert rows.shape == (8, 10)
    starts = rows[:, 0]
    assert torch.equal(rows, starts[:, None] + torch.arange(10))
    assert torch.equal(starts, starts.sort().values)
    assert (starts % 10 == 0).all()
    assert starts.max() > 500
    assert torch.equal(rows, draw_rows(windows, 8, seed=1))
    assert not torch.equal(rows, draw_rows(windows, 8, seed=2))


def test_short_text_fills_fewer_rows() -> None:
    windows = token_windows(torch.arange(25), 10)
    assert windows.tolist() == [list(range(10)), list(range(10, 20))]
    assert torch.equal(draw_rows(windows, 8, seed=0), windows)


def test_files_share_the_rows_and_no_row_spans_two(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file, word, count in zip(files, ("w1", "w2"), (22, 41), strict=True):
        file.write_text(f"{word} " * count)
    found = calibration_rows(tmp_path, 10, files, rows=8, cols=10)
    assert found.texts == ("a.txt", "b.txt")
    assert found.rows.tolist() == [[1] * 10] * 2 + [[2] * 10] * 4
    with pytest.raises(TextError, match=r"a\.txt: 22 tokens, expected at least one window of 30"):
        calibration_rows(tmp_path, 10, files, rows=8, cols=30)


def test_no_file_is_the_bundled_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    found = calibration_rows(tmp_path, 10, rows=2, cols=7)
    assert (found.texts, found.rows.shape) == (("bundled",), (2, 7))


@pytest.mark.parametrize(("names", "words"), [((), "got none"), (("a.txt",), r"got a\.txt")])
def test_a_field_without_json_lines_is_refused(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    with pytest.raises(TextError, match=f"text_field 'body': expected .*JSON lines.*{words}"):
        calibration_rows(tmp_path, 10, [tmp_path / n for n in names], text_field="body")


@pytest.mark.parametrize(("rows", "cols", "words"), [(0, 3, "rows"), (1, 0, "cols")])
def test_counts_below_one(tmp_path: Path, rows: int, cols: int, words: str) -> None:
    with pytest.raises(TextError, match=f"calibration {words}: expected at least 1, got 0"):
        calibration_rows(tmp_path, 10, rows=rows, cols=cols)
