"""Whole engines: a model answers the same however its experts are stored and cut.

fp32 throughout. The unsliced EXL3 model is served at TP 1, its slices at TP 2 and, by expansion, on
fewer ranks than they were cut for; an R7 file against its decoded weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3kit import quantize_tensor
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.testing.checkpoints import write_ordinary, write_r7
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.generate import make_ordinary, make_rank_sliced
from exl3kit.testing.tiny_configs import tiny_config_of
from exl3kit.testing.tiny_model import TinyGlm4Moe, tiny_config, write_tiny_model, write_tokenizer
from tests.integrations.vllm.engine import assert_same_tokens, generate

pytestmark = pytest.mark.vllm

DEMO = Path(__file__).parents[3] / "examples" / "demo-model"
QUESTIONS = ["What is a lighthouse?", "What is a river?", "A sonnet is"]
PROMPTS = [f"{number} is {chr(65 + number)}" for number in range(8)]
TOKENS = 48


def encode(weight: torch.Tensor, name: str) -> Exl3Tensor:
    """The real quantiser at 3 bits, without error feedback and search of the scale."""
    tensor, _ = quantize_tensor(weight, None, 3, scale=1.0)
    return Exl3Tensor(**tensor.tensors(), name=name)


def test_the_demo_model_cut_for_two_on_two_and_on_one(tmp_path: Path) -> None:
    """All experts quantised whole, the draft's too; on one rank all of them are slices."""
    whole = make_rank_sliced(DEMO, tmp_path / "whole", 3, 1, (1, 4), encode=encode)
    cut = slice_checkpoint(whole, tmp_path / "tp2", SliceOptions(tp=2)).path
    expected = generate(whole, QUESTIONS, max_tokens=TOKENS)
    assert_same_tokens(generate(cut, QUESTIONS, max_tokens=TOKENS, tp=2), expected)
    expanded = generate(cut, QUESTIONS, max_tokens=TOKENS, drafts=1)
    assert_same_tokens(expanded, expected)
    assert 0 < expanded.drafted < 4 * expanded.accepted


def test_a_model_cut_for_four_on_two_and_on_one(tmp_path: Path) -> None:
    spec = TinyGlm4Moe(hidden_size=128, moe_intermediate_size=512, num_experts=4, num_kv_heads=4)
    plain = write_tiny_model(tmp_path / "plain", spec)
    whole = make_ordinary(plain, tmp_path / "whole", 3)
    cut = slice_checkpoint(whole, tmp_path / "tp4", SliceOptions(tp=4)).path
    expected = generate(whole, PROMPTS, max_tokens=TOKENS)
    for tp in (2, 1):
        assert_same_tokens(generate(cut, PROMPTS, max_tokens=TOKENS, tp=tp), expected)


def test_r7_with_rates_of_each_projection_on_two(tmp_path: Path) -> None:
    spec = TinyGlm4Moe(hidden_size=128, num_experts=4, num_kv_heads=4)
    r7 = write_r7(tmp_path / "r7", tiny_config(spec), (3, 4))
    write_tokenizer(r7)
    expected = generate(write_dense_twin(r7, tmp_path / "dense"), PROMPTS, max_tokens=TOKENS)
    assert_same_tokens(generate(r7, PROMPTS, max_tokens=TOKENS, tp=2), expected)


def test_a_dense_model_with_a_quantised_head(tmp_path: Path) -> None:
    """Attention, MLPs and head as most public EXL3 files have them, against decoded weights."""
    exl3 = write_ordinary(tmp_path / "exl3", tiny_config_of("qwen3"))
    write_tokenizer(exl3)
    expected = generate(write_dense_twin(exl3, tmp_path / "dense"), PROMPTS, max_tokens=TOKENS)
    assert_same_tokens(generate(exl3, PROMPTS, max_tokens=TOKENS), expected)
