"""The quantised demo model answers alike in transformers and in vLLM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exl3kit import quantize_tensor
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.integrations.transformers.generate import Generator
from exl3kit.testing.generate import make_rank_sliced
from tests.integrations.vllm.engine import assert_same_tokens, generate

DEMO = Path(__file__).parents[3] / "examples" / "demo-model"
PROMPTS = ["What is a lighthouse?", "What is a river?", "Give a synonym of big.", "The sea is"]
TOKENS = 48


def quantise(weight: torch.Tensor, name: str) -> Exl3Tensor:
    """The real quantiser with an identity Hessian and a given scale: seconds, not minutes."""
    tensor, _ = quantize_tensor(weight, torch.eye(weight.shape[0]), 3, scale=1.0)
    return Exl3Tensor(**tensor.tensors(), name=name)


@pytest.mark.vllm
@pytest.mark.slow
def test_greedy_tokens_of_the_demo_model(tmp_path: Path) -> None:
    """A file for two ranks on one: both engines take each slice for an expert of its own."""
    checkpoint = make_rank_sliced(DEMO, tmp_path / "demo", 3, 2, (2, 3), encode=quantise)
    ours = Generator(checkpoint, "float32")
    wrapped = [ours.tokenizer.decode(ours.encode(prompt)[0]) for prompt in PROMPTS]
    ours.model.generation_config.eos_token_id = None  # the other engine goes on after it too
    found = []
    for text in wrapped:
        ids = ours.encode(text, is_raw=True)
        answer = ours.model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        found.append(answer[0, ids.shape[1] :].tolist())
    theirs = generate(checkpoint, wrapped, max_tokens=TOKENS)
    assert [len(tokens) for tokens in found] == [TOKENS] * len(PROMPTS)
    assert_same_tokens(replace(theirs, tokens=found), theirs)
    assert "tower" in ours.tokenizer.decode(theirs.tokens[0])
