"""`save_pretrained` writes the checkpoint's own form back: same names, same bytes, loads again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import UnsupportedError
from exl3kit.models.registry import model_map
from exl3kit.testing.checkpoints import OrdinaryOptions, write_r7
from exl3kit.testing.compare import assert_bitwise_equal
from exl3kit.testing.tiny_configs import tiny_config_of
from tests.integrations.transformers.conftest import load, logits, tokens


def check_saved(
    source: Path, drafts: str = "no layer", dtype: torch.dtype = torch.bfloat16
) -> Checkpoint:
    """Load in the dtype of the plain tensors, save in small shards, compare all but `drafts`."""
    out = source.parent / "saved"
    model = load(source, dtype=dtype)
    model.save_pretrained(out, max_shard_size="100KB")
    before, after = open_checkpoint(source), open_checkpoint(out)
    kept = [name for name in before.names() if not name.startswith(drafts)]
    assert after.names() == kept
    for name in kept:
        assert_bitwise_equal(after.tensor(name), before.tensor(name), name)
    report = verify_checkpoint(out, model_map)
    assert report.is_ok, report.faults
    assert len(list(out.glob("*.safetensors"))) > 1
    expected = logits(model, tokens())
    shutil.rmtree(source)  # nothing of the copy may depend on it
    assert torch.equal(logits(load(out, dtype="auto"), tokens()), expected)
    return after


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_ordinary(model_type: str, ordinary: Callable[..., Path]) -> None:
    saved = check_saved(ordinary(model_type), dtype=torch.float16)
    assert saved.dialect == "ordinary"
    quantization = saved.config["quantization_config"]
    assert quantization["version"] == "1.6.5" and quantization["head_bits"] == 6


def test_packed_signs_stay_packed(ordinary: Callable[..., Path]) -> None:
    source = ordinary("qwen3_moe", OrdinaryOptions(has_packed_signs=True))
    assert check_saved(source, dtype=torch.float16).has("model.layers.0.self_attn.q_proj.su")


def test_r7(tmp_path: Path) -> None:
    config = tiny_config_of("glm4_moe", mtp_layers=1)
    saved = check_saved(write_r7(tmp_path / "r7", config), drafts="model.layers.2.")
    assert saved.r7 is not None and saved.r7.last_layer == 1


@pytest.mark.parametrize("rotation_layout", ["per_expert_v1", "shared_h_v1"])
def test_rank_sliced(rotation_layout: str, sliced: Callable[..., Path]) -> None:
    saved = check_saved(sliced("glm4_moe", 3, 2, (1, 1), rotation_layout=rotation_layout))
    assert saved.manifest is not None
    assert (saved.tp, saved.manifest.rotation_layout) == (2, rotation_layout)


def test_next_token_layers_are_gone_from_tensors_and_config(sliced: Callable[..., Path]) -> None:
    source = sliced("deepseek_v3", 3, 2, (1, 2), mtp_layers=1)
    saved = check_saved(source, drafts="model.layers.2.")
    assert saved.manifest is not None and saved.manifest.last_layer == 1
    assert saved.config["num_nextn_predict_layers"] == 0


def test_mixed_bits_are_refused_before_anything_is_written(sliced: Callable[..., Path]) -> None:
    """Their map is a file of its own, which transformers would leave behind."""
    source = sliced("glm4_moe", (3, 4, 3, 4), 2, (1, 1))
    out = source.parent / "saved"
    with pytest.raises(UnsupportedError, match=r"tier_bitmap\.json:k.*copy .*sliced"):
        load(source).save_pretrained(out)
    assert not out.exists()
