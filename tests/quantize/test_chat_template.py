"""Chat templates that checkpoints bring: rendered as transformers does, kept in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exl3kit.errors import CheckpointError
from exl3kit.quantize.chat_template import ChatTemplate

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
TURNS = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Yes"}]
# Blocks on lines of their own, loop control, JSON, special tokens: what published templates use.
FULL = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {% if loop.first %}
[{{ m | tojson }}]
    {% endif %}
<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}
{%- endfor %}"""


@pytest.mark.parametrize("template", [FULL, None])
def test_equals_transformers(tmp_path: Path, template: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    if template:
        (tmp_path / "chat_template.jinja").write_text(template)
    turns = [{"role": "system", "content": "x"}, *TURNS]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(turns, tokenize=False)
    assert ChatTemplate.of(tmp_path).render(turns, "here") == expected


def test_the_default_of_several_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.of(tmp_path).render(TURNS, "here") == "yes"


def test_the_date_is_fixed() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, "t")
    assert template.render(TURNS, "here") == "2026-01-01"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('no tools') }}", r"here: t cannot render it: no tools"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|safely"),
    ],
)
def test_a_template_that_fails_or_reaches_out(source: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ChatTemplate(source, {}, "t").render(TURNS, "here")


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(CheckpointError, match="t: not a chat template"):
        ChatTemplate("{% for %}", {}, "t")
