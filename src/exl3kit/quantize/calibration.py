"""Calibration text to token rows: the model's own tokenizer.json, fixed rows, chosen by a seed.

A text is encoded as one stream without special tokens and cut into windows of `cols` tokens that do
not overlap; when all texts together have more than `rows`, a seeded draw picks which, so the rows
spread over all of the text instead of its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from exl3kit.errors import CheckpointError
from exl3kit.log import get_logger
from exl3kit.quantize.documents import TextError, has_lines, read_documents

_log = get_logger(__name__)

DEFAULT_ROWS = 64
DEFAULT_COLS = 512
BUNDLED = "bundled"  # the name of the package's own text in metadata
# Characters of JSON lines read for each token wanted: of English eight times what it takes, so the
# draw has a choice, and encoding a dataset of gigabytes (0.6 MB/s a core) stays out of it.
_CHARS_READ = 32


@dataclass(frozen=True)
class Calibration:
    """Token `rows` (R, cols) int64, and the names of the texts they were drawn from."""

    rows: Tensor
    texts: tuple[str, ...]


def calibration_rows(
    model: Path,
    vocab_size: int,
    files: Sequence[Path] = (),
    rows: int = DEFAULT_ROWS,
    cols: int = DEFAULT_COLS,
    seed: int = 0,
    text_field: str | None = None,
) -> Calibration:
    """Rows for the model folder `model`, drawn from all `files` together, the bundled text if none.

    A file is UTF-8 text or JSON lines (see `documents`, also for `text_field`). Every file has
    windows in proportion to its length; no window spans two files. TextError names a file that
    cannot be read or fills no window, or a `text_field` without JSON lines; CheckpointError a
    tokenizer or chat template that is missing.
    """
    _check_counts(rows, cols)
    if text_field and not any(map(has_lines, files)):
        given = ", ".join(file.name for file in files) or "none"
        raise TextError(
            f"text_field {text_field!r}: expected a calibration file of JSON lines (.jsonl), "
            f"got {given}"
        )
    limit = rows * cols * _CHARS_READ
    texts = [(f.name, read_documents(f, model, text_field, limit, seed)) for f in files]
    windows = []
    for name, text in texts or [(BUNDLED, bundled_text())]:
        windows.append(token_windows(encode_text(text, model, vocab_size), cols, name))
    names = tuple(name for name, _ in texts) or (BUNDLED,)
    return Calibration(draw_rows(torch.cat(windows), rows, seed, ", ".join(names)), names)


def bundled_text() -> str:
    """The calibration text that ships with the package (origin in data/ORIGIN.md)."""
    return resources.files("exl3kit").joinpath("data/calibration.txt").read_text("utf-8")


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


def token_windows(tokens: Tensor, cols: int, name: str = "text") -> Tensor:
    """All windows of `cols` tokens, in text order, out of tokens (N,): (N // cols, cols) int64.

    TextError, with the text's `name`, when not even one can be filled.
    """
    available = len(tokens) // cols
    if available == 0:
        raise TextError(
            f"{name}: {len(tokens)} tokens, expected at least one window of {cols}; "
            "give a longer text or a smaller window"
        )
    return tokens[: available * cols].view(available, cols)


def draw_rows(windows: Tensor, rows: int, seed: int, name: str = "text") -> Tensor:
    """Up to `rows` of the windows (N, cols), in text order; the same seed gives the same rows."""
    available = len(windows)
    if available <= rows:
        if available < rows:
            _log.info("%s fills %d of %d calibration rows", name, available, rows)
        return windows
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(available, generator=generator)[:rows].sort().values
    return windows[chosen]


def _check_counts(rows: int, cols: int) -> None:
    for label, value in (("rows", rows), ("cols", cols)):
        if value < 1:
            raise TextError(f"calibration {label}: expected at least 1, got {value}")
