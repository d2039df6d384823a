"""A whole engine with latent attention, every linear of it EXL3, against its decoded weights.

One prompt at a time: logits of vLLM's latent attention on a CPU depend on the batch (fp32, stock).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.served_models import write_served
from tests.integrations.vllm.engine import Generation, assert_same_tokens, generate, run_job

pytestmark = pytest.mark.vllm

PROMPTS = ["What is", "One, two", "xyz"]
# On a CPU with AMX vLLM would choose AMX_MLA, whose packed weights cannot be float32.
JOB = {"max_tokens": 32, "engine": {"max_num_seqs": 1, "attention_backend": "CPU_MLA"}}


def invert(source: Path, name: str, out: Path) -> Path:
    """The shard that holds trellis `name` with all its words inverted."""
    info = open_checkpoint(source).info(name)
    data = bytearray(info.file.read_bytes())
    part = slice(info.start, info.start + info.nbytes)
    data[part] = bytes(255 - byte for byte in data[part])
    out.write_bytes(data)
    return out


def test_fused_and_absorbed_linears_and_reloads(tmp_path: Path) -> None:
    """`kv_b_proj` is decoded when it is loaded, and each time that it is loaded again."""
    exl3 = write_served(tmp_path, "deepseek_v3")["ordinary"]
    expected = generate(write_dense_twin(exl3, tmp_path / "fp32"), PROMPTS, **JOB)
    name = "model.layers.1.self_attn.kv_b_proj.trellis"
    shard = open_checkpoint(exl3).info(name).file
    altered = invert(exl3, name, tmp_path / "altered")
    original = shutil.copy(shard, tmp_path / "original")
    swaps = [(shard.name, str(altered)), (shard.name, str(original))]
    job = {"model": str(exl3), "prompts": PROMPTS, "swaps": swaps, **JOB}
    before, changed, after = (Generation(**found) for found in run_job(job))
    assert_same_tokens(before, expected)
    assert changed.tokens != before.tokens
    assert_same_tokens(after, before)
