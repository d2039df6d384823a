"""A candidate against its reference, and pairs that cannot be compared."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.errors import CheckpointError
from exl3kit.evaluate.compare import compare
from exl3kit.evaluate.metrics import summarize
from exl3kit.evaluate.perplexity import perplexity
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 4
SPEC = TinyGlm4Moe(num_experts=4, num_layers=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_tiny_model(tmp_path_factory.mktemp("tiny"), SPEC))


@pytest.fixture(scope="module")
def sliced(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    out = tmp_path_factory.mktemp("sliced") / "out"
    return open_checkpoint(make_rank_sliced(tiny.path, out, (2, 3, 4, 3), 2, (1, 1)))


def test_figures_agree_with_transformers(tiny: Checkpoint, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    other = open_checkpoint(
        write_tiny_model(tmp_path, TinyGlm4Moe(num_experts=4, num_layers=2, seed=1))
    )
    found = compare(other, tiny, TEXT, window=64)
    logs = []
    for checkpoint in (tiny, other):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=torch.float32
        )
        tokens = transformers.AutoTokenizer.from_pretrained(checkpoint.path)(
            TEXT, add_special_tokens=False, return_tensors="pt"
        ).input_ids[0]
        rows = tokens[: len(tokens) // 64 * 64].view(-1, 64)
        with torch.inference_mode():
            logs.append(model(rows).logits[:, :-1].double().log_softmax(-1))
    log_p, log_q = logs
    kld = (log_p.exp() * (log_p - log_q)).sum(-1)
    torch.testing.assert_close(found.kld, kld, rtol=1e-3, atol=1e-6)
    assert torch.equal(found.agrees == 1, log_p.argmax(-1) == log_q.argmax(-1))


def test_both_perplexities_are_those_of_each_alone(tiny: Checkpoint, sliced: Checkpoint) -> None:
    quality = summarize(compare(sliced, tiny, TEXT, window=64))
    assert quality.perplexity == perplexity(sliced, TEXT, window=64).perplexity
    assert quality.reference_perplexity == perplexity(tiny, TEXT, window=64).perplexity
    assert quality.kld_max >= quality.kld_p99 >= quality.kld_median > 0
    assert (quality.windows, quality.predicted_tokens) == (4, 4 * 63)


def test_a_checkpoint_against_itself(tiny: Checkpoint) -> None:
    quality = summarize(compare(tiny, tiny, TEXT, window=64))
    assert quality.kld_max == 0 and quality.top1_agreement == 1 and quality.perplexity_ratio == 1


def test_progress_counts_the_layers_of_both(tiny: Checkpoint) -> None:
    seen: list[tuple[int, int]] = []
    compare(tiny, tiny, TEXT, 128, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_another_tokenizer_or_vocabulary_is_refused(tiny: Checkpoint, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny.path, other)
    spec = json.loads((other / "tokenizer.json").read_text())
    vocab = spec["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    (other / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(CheckpointError, match=r"other: tokenizer\.json: expected the tokens of"):
        compare(open_checkpoint(other), tiny, TEXT, window=64)
    config = json.loads((other / "config.json").read_text()) | {"vocab_size": 384}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vocab_size 384: expected the reference's 320"):
        compare(open_checkpoint(other), tiny, TEXT, window=64)
