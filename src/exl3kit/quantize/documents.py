"""Calibration files to text: a UTF-8 text as it is, or JSON lines in the layouts of HF datasets.

A line of a `.jsonl` file is one document: a string field, or chat turns, which the model's own chat
template renders. Documents are joined by the tokenizer's end-of-text token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from exl3kit.errors import Exl3Error
from exl3kit.quantize.chat_template import ChatTemplate, special_tokens

# Fields taken when none is named, in this order; the last two hold chat turns.
DEFAULT_FIELDS = ("text", "messages", "conversations")
_JSONL = (".jsonl", ".ndjson")
# ShareGPT's names of the roles, whose turns are {"from": ..., "value": ...}.
_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system"}
_SHOWN = 8


class TextError(Exl3Error, ValueError):
    """A text, or the token rows made from it, cannot be used; the message names the file."""


def read_text(path: Path) -> str:
    """The content of a UTF-8 text file; TextError names the first byte that is not UTF-8."""
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise TextError(f"{path}: cannot be read: {error.strerror}") from error


def has_lines(path: Path) -> bool:
    """Whether the name says that the file holds JSON lines."""
    return path.suffix in _JSONL


def read_documents(path: Path, model: Path, field: str | None, max_chars: int, seed: int) -> str:
    """The text of a calibration file for the model folder `model`.

    `field` names what holds a JSON line's text or chat turns; by default the first of
    DEFAULT_FIELDS that the line has. Of JSON lines with more than `max_chars` characters a draw by
    `seed` keeps as many whole documents as fit (at least one), in file order. TextError names file
    and line.
    """
    if path.suffix == ".json":
        raise TextError(
            f"{path}: expected a text or one JSON object a line in a .jsonl file; "
            f"a list becomes one with: jq -c '.[]' {path.name}"
        )
    if not has_lines(path):
        return read_text(path)
    documents = _thinned(list(_json_documents(path, model, field)), max_chars, seed)
    if not documents:
        raise TextError(f"{path}: expected at least one JSON line, got none")
    end = special_tokens(model).get("eos_token") or "\n\n"
    return end.join(documents) + end


def _json_documents(path: Path, model: Path, field: str | None) -> Iterator[str]:
    template: ChatTemplate | None = None
    try:
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, 1):
                where = f"{path}: line {number}"
                line = _decode(raw, where).strip()
                if not line:
                    continue
                name, value = _content(line, field, where)
                if not isinstance(value, str):
                    template = template or ChatTemplate.of(model)
                    value = template.render(_turns(value, f"{where}: field {name!r}"), where)
                yield _encodable(value, where)
    except OSError as error:
        raise TextError(f"{path}: cannot be read: {error.strerror}") from error


def _content(line: str, field: str | None, where: str) -> tuple[str, Any]:
    """The name and the value of the field that holds a line's text or turns."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise TextError(f"{where}: expected a JSON object, got {type(row).__name__}")
    for name in (field,) if field else DEFAULT_FIELDS:
        if name in row:
            return name, row[name]
    wanted = repr(field) if field else f"one of {', '.join(DEFAULT_FIELDS)}"
    raise TextError(
        f"{where}: expected the field {wanted}, got {', '.join(list(row)[:_SHOWN]) or 'no field'}; "
        "name the field that holds the text"
    )


def _turns(value: Any, where: str) -> list[dict[str, Any]]:
    """Chat turns as {"role", "content", ...} from a list of those or of ShareGPT's."""
    if not isinstance(value, list) or not value or not all(isinstance(t, dict) for t in value):
        raise TextError(
            f"{where}: expected a string or a list of chat turns, got {type(value).__name__}"
        )
    turns = [_turn(turn) for turn in value]
    if bad := [turn for turn in turns if "role" not in turn or "content" not in turn]:
        raise TextError(
            f"{where}: expected turns with role and content, got {', '.join(bad[0]) or 'none'}"
        )
    return turns


def _turn(turn: dict[str, Any]) -> dict[str, Any]:
    if "from" not in turn or "value" not in turn:
        return turn
    role = turn["from"]
    known = _SHAREGPT.get(role) if isinstance(role, str) else None
    return {"role": known or role, "content": turn["value"]}


def _thinned(documents: list[str], max_chars: int, seed: int) -> list[str]:
    """As many whole documents, in order, as a seeded draw fits into `max_chars`."""
    if sum(map(len, documents)) <= max_chars:
        return documents
    generator = torch.Generator().manual_seed(seed)
    kept, total = [], 0
    for index in torch.randperm(len(documents), generator=generator).tolist():
        total += len(documents[index])
        if kept and total > max_chars:
            break
        kept.append(index)
    return [documents[index] for index in sorted(kept)]


def _encodable(text: str, where: str) -> str:
    """The text; TextError for half of a surrogate pair, which JSON can name and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"{where}: character {error.start}: expected Unicode text, got half of a surrogate "
            f"pair (\\u{ord(text[error.start]):04x})"
        ) from error
    return text


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{where}: byte {error.start}: expected UTF-8 text, got 0x{raw[error.start]:02x}; "
            "convert it, e.g. with iconv -t utf-8"
        ) from error
