"""Token rows: deterministic, spread over the text, and refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.quantize.calibration import TextError, encode_text, read_text, token_rows


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
    tokens = torch.arange(1000)
    rows = token_rows(tokens, 8, 10, seed=1)
    assert rows.shape == (8, 10)
    starts = rows[:, 0]
    assert torch.equal(rows, starts[:, None] + torch.arange(10))
    assert torch.equal(starts, starts.sort().values)
    assert (starts % 10 == 0).all()
    assert starts.max() > 500
    assert torch.equal(rows, token_rows(tokens, 8, 10, seed=1))
    assert not torch.equal(rows, token_rows(tokens, 8, 10, seed=2))


def test_short_text_fills_fewer_rows() -> None:
    assert token_rows(torch.arange(25), 8, 10, seed=0).tolist() == [
        list(range(10)),
        list(range(10, 20)),
    ]


@pytest.mark.parametrize(
    ("length", "rows", "cols", "words"),
    [(9, 4, 10, "9 tokens, expected at least one row of 10"), (9, 0, 3, "rows"), (9, 1, 0, "cols")],
)
def test_rows_that_cannot_be_filled(length: int, rows: int, cols: int, words: str) -> None:
    with pytest.raises(TextError, match=words):
        token_rows(torch.arange(length), rows, cols, seed=0)


def test_text_that_is_not_utf8_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(TextError, match=r"latin\.txt: byte 3: expected UTF-8 text, got 0xe9"):
        read_text(path)
    with pytest.raises(TextError, match="absent"):
        read_text(tmp_path / "absent.txt")
