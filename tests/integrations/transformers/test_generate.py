"""The generator behind `exl3kit generate`, on the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from exl3kit.errors import UnsupportedError
from exl3kit.integrations.transformers.generate import Generator, Timing, median

DEMO = Path(__file__).parents[3] / "examples" / "demo-model"
QUESTION = "What is a lighthouse?"


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(DEMO, "float32")


def test_pieces_are_the_text_of_generate(generator: Generator) -> None:
    ids = generator.encode(QUESTION)
    pieces: list[str] = []
    timing = generator.run(ids, 40, emit=pieces.append)
    whole = generator.model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    text = generator.tokenizer.decode(whole, skip_special_tokens=True)
    assert "".join(pieces) == text and text.startswith("A lighthouse is a tower with a light")
    assert len(pieces) > 10
    assert (timing.prompt_tokens, timing.new_tokens) == (ids.shape[1], len(whole))


def test_template_wraps_the_prompt_unless_raw(generator: Generator) -> None:
    decode = generator.tokenizer.decode
    assert decode(generator.encode("Hi")[0]) == "<|user|>Hi<|assistant|>"
    assert decode(generator.encode("Hi", is_raw=True)[0]) == "Hi"
    template, generator.tokenizer.chat_template = generator.tokenizer.chat_template, None
    assert decode(generator.encode("Hi")[0]) == "Hi"
    generator.tokenizer.chat_template = template


@pytest.mark.parametrize("top_k, expected", [(None, 0), (7, 7)])
def test_only_the_checkpoint_itself_cuts_sampling(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, top_k: int | None, expected: int
) -> None:
    """transformers would take the 50 likeliest tokens where generation_config.json says nothing."""
    seen: dict[str, Any] = {}

    def generate(ids: torch.Tensor, streamer: Any, **options: Any) -> None:
        seen.update(options)
        streamer.put(ids)
        streamer.put(ids[0, :1])

    monkeypatch.setattr(generator.model, "generate", generate)
    monkeypatch.setattr(generator.model.generation_config, "top_k", top_k)
    generator.run(generator.encode(QUESTION), 1, temperature=1.0)
    assert (seen["do_sample"], seen["temperature"], seen["top_k"]) == (True, 1.0, expected)


def test_bench_goes_on_after_the_end(generator: Generator) -> None:
    ids = generator.encode(QUESTION)
    assert generator.run(ids, 60).new_tokens < 60
    timings = generator.bench(ids, 60, runs=2)
    assert [timing.new_tokens for timing in timings] == [60, 60]
    assert generator.peak_bytes() > 20 * 2**20  # the weights alone


def test_speeds() -> None:
    timing = Timing(prompt_tokens=10, new_tokens=5, prompt_seconds=0.5, decode_seconds=0.1)
    assert (timing.prompt_speed, timing.decode_speed) == (20, pytest.approx(40))
    assert Timing(10, 1, 0.5, 0.0).decode_speed == 0
    slower = Timing(10, 5, 0.5, 0.2)
    assert median([timing, slower, slower], "decode_speed") == (20, 20, pytest.approx(40))


def test_what_does_not_fit_is_refused(generator: Generator) -> None:
    with pytest.raises(UnsupportedError, match=r"at most 1024 tokens.*got 4 \+ 1021"):
        generator.run(torch.zeros(1, 4, dtype=torch.int64), 1021)
    with pytest.raises(UnsupportedError, match="at least one token"):
        generator.run(torch.zeros(1, 0, dtype=torch.int64), 1)
