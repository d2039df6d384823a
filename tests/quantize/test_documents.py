"""Calibration files in the layouts people have, and each bad line named by file and number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from exl3kit.errors import CheckpointError
from exl3kit.quantize.documents import TextError, read_documents, read_text

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
LIMIT = 10**6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"eos_token": {"content": "<end>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(folder: Path, *rows: Mapping[str, Any] | str) -> Path:
    path = folder / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_text_is_taken_as_it_is(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("{}\nCall me Ishmael.", encoding="utf-8")
    assert read_documents(path, model, None, LIMIT, 0) == "{}\nCall me Ishmael."


def test_lines_are_joined_by_the_end_token(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"id": 1, "text": "one"}, "", {"text": "zwölf"})
    assert read_documents(path, model, None, LIMIT, 0) == "one<end>zwölf<end>"


def test_without_an_end_token_a_blank_line_joins(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"text": "one"}, {"text": "two"})
    assert read_documents(path, tmp_path, None, LIMIT, 0) == "one\n\ntwo\n\n"


def test_a_named_field_wins(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"text": "one", "content": "two"})
    assert read_documents(path, model, "content", LIMIT, 0) == "two<end>"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
    ],
)
def test_chat_turns_pass_the_models_template(
    model: Path, tmp_path: Path, row: dict[str, Any]
) -> None:
    path = write_lines(tmp_path, row)
    assert read_documents(path, model, None, LIMIT, 0) == "<|user|>Hi<|assistant|>Yes<end>"


def test_a_long_file_is_thinned_to_whole_documents(model: Path, tmp_path: Path) -> None:
    words = [f"w{i:03}" for i in range(100)]
    path = write_lines(tmp_path, *({"text": word} for word in words))
    kept = read_documents(path, model, None, 41, 0).split("<end>")[:-1]
    assert len(kept) == 10 and kept == sorted(kept) and set(kept) < set(words)
    assert kept[-1] > "w050"
    assert kept == read_documents(path, model, None, 41, 0).split("<end>")[:-1]
    assert kept != read_documents(path, model, None, 41, 1).split("<end>")[:-1]
    assert read_documents(path, model, None, 1, 0).count("<end>") == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, got list"),
        (
            {"prompt": "a", "answer": "b"},
            "one of text, messages, conversations, got prompt, answer",
        ),
        ({"text": 3}, "field 'text': expected a string or a list of chat turns, got int"),
        ({"messages": []}, "field 'messages': expected a string or a list"),
        ({"messages": [{"role": "user", "body": "a"}]}, "role and content, got role, body"),
        ({"text": "half \ud83d"}, r"character 5: .*half of a surrogate pair \(.ud83d\)"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_named(
    model: Path, tmp_path: Path, row: dict[str, Any] | str, words: str
) -> None:
    path = write_lines(tmp_path, {"text": "fine"}, row)
    with pytest.raises(TextError, match=rf"data\.jsonl: line 2: .*{words}"):
        read_documents(path, model, None, LIMIT, 0)


def test_a_role_of_the_wrong_type_is_left_to_the_template(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"conversations": [{"from": ["human"], "value": "Hi"}]})
    assert read_documents(path, model, None, LIMIT, 0) == "<|['human']|>Hi<end>"


def test_an_absent_named_field_is_refused_with_what_there_is(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"text": "one"})
    with pytest.raises(TextError, match="line 1: expected the field 'body', got text"):
        read_documents(path, model, "body", LIMIT, 0)


def test_files_that_are_no_text(model: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(TextError, match=r"latin\.txt: byte 3: expected UTF-8 text, got 0xe9"):
        read_text(tmp_path / "latin.txt")
    (tmp_path / "latin.jsonl").write_bytes(b'\n{"text": "caf\xe9"}\n')
    with pytest.raises(TextError, match=r"line 2: byte 13: expected UTF-8 text, got 0xe9"):
        read_documents(tmp_path / "latin.jsonl", model, None, LIMIT, 0)
    for name in ("absent.txt", "absent.jsonl"):
        with pytest.raises(TextError, match=r"absent.*: cannot be read"):
            read_documents(tmp_path / name, model, None, LIMIT, 0)
    with pytest.raises(TextError, match=r"list\.json: .*jq -c"):
        read_documents(tmp_path / "list.json", model, None, LIMIT, 0)
    with pytest.raises(TextError, match="expected at least one JSON line"):
        read_documents(write_lines(tmp_path), model, None, LIMIT, 0)


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(CheckpointError, match="expected a chat template"):
        read_documents(path, tmp_path, None, LIMIT, 0)
