"""What an engine does around a model, with EXL3 in it: compilation, chunks, caches, drafts, forms.

One start for all of it. The file is cut for two ranks and runs on one, its experts have several
rates, and its next-token layer, EXL3 too, drafts: the most there is to get wrong.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model
from tests.integrations.vllm.engine import (
    EngineFailed,
    Generation,
    assert_same_tokens,
    generate,
    run_job,
)

pytestmark = pytest.mark.vllm

RATES = {1: [3, 4, 3, 3], 2: [4, 4, 4, 4], 3: [2, 3, 6, 2]}
SPEC = TinyGlm4Moe(hidden_size=128, num_experts=4, mtp_layers=1, dtype=torch.float32)
# A token is a byte: longer than the token budget of 128, and than a block of the cache (128).
PROMPTS = [f"{number} " + "The quick brown fox jumps over the lazy dog. " * 6 for number in (1, 2)]
FORM = r"(yes|no): [0-9]{3}"
ENGINE = {"enforce_eager": False, "max_num_batched_tokens": 128, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def sliced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("features")
    plain = write_tiny_model(folder / "plain", SPEC)
    return make_rank_sliced(plain, folder / "sliced", RATES, 2, (1, 3))


@pytest.fixture(scope="module")
def expected(sliced: Path) -> Generation:
    """What the decoded weights answer, without compilation."""
    return generate(write_dense_twin(sliced, sliced.parent / "d"), PROMPTS)


# vLLM's own choice on a CPU is inductor; under VLLM_CPU_CI_ENV graphs are traced and run eagerly.
@pytest.mark.parametrize("env", [{"VLLM_CPU_CI_ENV": "1"}, {}], ids=["traced", "inductor"])
def test_compiled_in_chunks_cached_drafted_and_in_a_form(
    sliced: Path, expected: Generation, env: dict[str, str]
) -> None:
    job = {"model": str(sliced), "prompts": PROMPTS, "drafts": 1, "regex": FORM, "engine": ENGINE}
    results = run_job({**job, "env": env})
    first, again, formed = (Generation(**result) for result in results)
    assert_same_tokens(first, expected)
    assert first.drafted > 0 and first.cached == 0
    # The model is one graph (vLLM leaves its draft alone); its function that counts log
    # probabilities is compiled by inductor in either case.
    assert (first.graphs == 2 and first.lowered == 1) if env else first.lowered >= 2
    assert_same_tokens(again, first)
    assert again.cached >= 256  # a block of each prompt
    assert all(re.fullmatch(FORM, text) for text in formed.texts), formed.texts


def test_lora_is_refused(sliced: Path) -> None:
    with pytest.raises(EngineFailed, match="LoRA adapters are not supported with EXL3"):
        run_job({"model": str(sliced), "prompts": PROMPTS, "engine": {"enable_lora": True}})
