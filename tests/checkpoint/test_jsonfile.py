"""JSON of a checkpoint: what takes many times its size in memory is refused before it does."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from exl3kit.checkpoint.jsonfile import MAX_VALUES, json_members, parse_json
from exl3kit.errors import CheckpointError


@pytest.mark.parametrize("text", [b"[],", b"{},", b"0,"])
def test_too_many_values(text: bytes) -> None:
    blob = b"[" + text * MAX_VALUES + b"0]"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=f"x.json: expected at most {MAX_VALUES} values"):
            parse_json(blob, "x.json")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_members_are_those_of_the_whole() -> None:
    """White space, escapes, characters of two, three and four bytes, every type."""
    value = {"": 1, "a b": [1, {"c": 2.5}], 'q"\\\n': None, "ü€𝄞": "ü€𝄞", "n": {}, "t": True}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=3), "{ }"):
        members = dict(json_members(f"{text} \n".encode(), "x", lambda key: 100))
        assert members == json.loads(text)


def test_a_member_has_its_own_bound() -> None:
    text = b'{"a":"12345","b":"12345"}'
    members = json_members(text, "x.json", {"a": 7, "b": 6}.__getitem__)
    assert next(members) == ("a", "12345")
    with pytest.raises(CheckpointError, match=r"x.json: 'b': not valid JSON of at most 6 char"):
        next(members)
