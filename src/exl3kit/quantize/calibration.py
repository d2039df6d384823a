"""Calibration text to token rows: the model's own tokenizer.json, fixed rows, chosen by a seed.

The text is encoded as one stream without special tokens and cut into windows of `cols` tokens that
do not overlap; when there are more than `rows`, a seeded draw picks which, so the rows spread over
the whole text instead of its beginning.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from exl3kit.errors import CheckpointError, Exl3Error
from exl3kit.log import get_logger

_log = get_logger(__name__)

DEFAULT_ROWS = 64
DEFAULT_COLS = 512


class TextError(Exl3Error, ValueError):
    """A text, or the token rows made from it, cannot be used; the message names the file."""


def bundled_text() -> str:
    """The calibration text that ships with the package (origin in data/ORIGIN.md)."""
    return resources.files("exl3kit").joinpath("data/calibration.txt").read_text("utf-8")


def read_text(path: Path) -> str:
    """The content of a UTF-8 text file; TextError names the first byte that is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise TextError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path}: byte {error.start}: expected UTF-8 text, "
            f"got 0x{error.object[error.start]:02x}; convert it, e.g. with iconv -t utf-8"
        ) from error


def encode_text(text: str, folder: Path, vocab_size: int) -> Tensor:
    """Token ids (N,) int64 of `text` by `folder`/tokenizer.json, no special tokens added.

    Raises CheckpointError when the tokenizer is missing or unreadable, or yields an id the model's
    embedding of `vocab_size` rows does not have.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a tokenizer file, found none")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False).ids, dtype=torch.int64)
    if ids.numel() and int(ids.max()) >= vocab_size:
        raise CheckpointError(
            f"{path}: token id {int(ids.max())}: expected ids below vocab_size {vocab_size}; "
            "the tokenizer belongs to another model"
        )
    return ids


def token_rows(tokens: Tensor, rows: int, cols: int, seed: int, name: str = "text") -> Tensor:
    """Up to `rows` windows of `cols` tokens out of tokens (N,), in text order: (R, cols) int64.

    The same tokens and seed give the same rows. `name` is the text's name in messages. TextError
    when not even one row can be filled or a count is not positive.
    """
    for label, value in (("rows", rows), ("cols", cols)):
        if value < 1:
            raise TextError(f"calibration {label}: expected at least 1, got {value}")
    available = len(tokens) // cols
    if available == 0:
        raise TextError(
            f"{name}: {len(tokens)} tokens, expected at least one row of {cols}; "
            "give a longer text or fewer columns"
        )
    windows = tokens[: available * cols].view(available, cols)
    if available <= rows:
        if available < rows:
            _log.info("%s fills %d of %d calibration rows", name, available, rows)
        return windows
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(available, generator=generator)[:rows].sort().values
    return windows[chosen]
