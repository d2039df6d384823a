"""Perplexity against transformers on the same windows, and through decoded rank slices."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.errors import UnsupportedError
from exl3kit.evaluate.perplexity import perplexity
from exl3kit.quantize.calibration import encode_text
from exl3kit.quantize.documents import TextError
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
SPEC = TinyGlm4Moe(num_experts=4, num_layers=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_tiny_model(tmp_path_factory.mktemp("tiny"), SPEC))


def test_equals_transformers(tiny: Checkpoint) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32)
    tokens = encode_text(TEXT, tiny.path, 320)
    windows = tokens[: len(tokens) // 64 * 64].view(-1, 64)
    with torch.inference_mode():
        losses = [float(model(row[None], labels=row[None]).loss) for row in windows]
    result = perplexity(tiny, TEXT, window=64)
    assert result.windows == len(windows) == 4
    assert result.predicted_tokens == 4 * 63
    assert result.nll == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.nll))


def test_rank_sliced_equals_its_decoded_twin(tiny: Checkpoint, tmp_path: Path) -> None:
    sliced = make_rank_sliced(tiny.path, tmp_path / "sliced", (2, 3, 4, 3), 2, (1, 1))
    twin = write_dense_twin(sliced, tmp_path / "twin")
    reached = perplexity(open_checkpoint(sliced), TEXT, window=64)
    assert reached == perplexity(open_checkpoint(twin), TEXT, window=64)
    assert reached.nll != pytest.approx(perplexity(tiny, TEXT, window=64).nll, rel=1e-3)


def test_progress_counts_layers(tiny: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    perplexity(tiny, TEXT, window=128, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 2), (2, 2)]


def test_text_shorter_than_a_window_is_refused(tiny: Checkpoint) -> None:
    with pytest.raises(TextError, match=r"4 tokens, expected at least one window of 512"):
        perplexity(tiny, "four")
    with pytest.raises(TextError, match="window: expected at least 2"):
        perplexity(tiny, "four", window=1)


def test_other_architectures_are_refused(tiny: Checkpoint) -> None:
    other = Checkpoint(
        tiny.path, {**tiny.config, "architectures": ["OlmoForCausalLM"]}, "plain", tiny.infos, None
    )
    with pytest.raises(UnsupportedError, match="OlmoForCausalLM"):
        perplexity(other, TEXT)
