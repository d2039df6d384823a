"""The model's own chat template, for calibration on chat turns.

It is a Jinja program that comes with the checkpoint, so it runs in Jinja's sandbox, set up as
transformers does, except for the date: equal jobs must write equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from exl3kit.checkpoint.jsonfile import read_json_object
from exl3kit.errors import CheckpointError

_TEMPLATE_FILE = "chat_template.jinja"
_TODAY = datetime(2026, 1, 1)  # what templates that print the date are told


class ChatTemplate:
    """Renders chat turns to the text the model was trained on."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        """`source` is the Jinja text, `tokens` the special tokens by name, `where` for messages."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _TODAY.strftime
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"{where}: not a chat template: {error}") from error
        self._tokens, self._where = dict(tokens), where

    @classmethod
    def of(cls, model: Path) -> ChatTemplate:
        """The template of a model folder; CheckpointError where it has none."""
        path = model / _TEMPLATE_FILE
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), special_tokens(model), str(path))
        path = model / "tokenizer_config.json"
        found = read_json_object(path).get("chat_template") if path.is_file() else None
        if isinstance(found, list):  # several, by name
            found = next((t.get("template") for t in found if t.get("name") == "default"), None)
        if not isinstance(found, str):
            raise CheckpointError(
                f"{model}: expected a chat template in {_TEMPLATE_FILE} or {path.name}, found "
                "none; calibrate on a text field instead of chat turns"
            )
        return cls(found, special_tokens(model), str(path))

    def render(self, turns: Sequence[Mapping[str, Any]], where: str) -> str:
        """The text of `turns`; CheckpointError with the template's reason, at `where` of a file."""
        try:
            return self._template.render(
                messages=list(turns), add_generation_prompt=False, **self._tokens
            )
        except Exception as error:  # a template can fail in any way that Python can
            raise CheckpointError(f"{where}: {self._where} cannot render it: {error}") from error


def special_tokens(model: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like of a model folder's tokenizer_config.json."""
    path = model / "tokenizer_config.json"
    found = read_json_object(path) if path.is_file() else {}
    named = {name: value for name, value in found.items() if name.endswith("_token")}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> str:
    raise ValueError(message)
