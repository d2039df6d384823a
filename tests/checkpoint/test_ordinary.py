"""Ordinary EXL3 as exllamav3 0.0.x to 1.6.5 writes it: what is read, from tensors alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3kit.checkpoint.inventory import stored_tensors
from exl3kit.checkpoint.modules import dense_weight, exl3_parts
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import CheckpointError
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.models.registry import model_map
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary, write_unaligned
from exl3kit.testing.tiny_configs import MODEL_TYPES, MTP_TYPES, tiny_config_of


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_every_architecture_opens_and_reads(tmp_path: Path, name: str) -> None:
    """Every linear the model has is there at the model's sizes, rounded up to 128."""
    mtp = 1 if name in MTP_TYPES else 0
    config = tiny_config_of(name, num_experts=2, mtp_layers=mtp)
    checkpoint = open_checkpoint(write_ordinary(tmp_path / "m", config))
    assert (checkpoint.dialect, checkpoint.tp) == ("ordinary", None)
    assert 3 <= (checkpoint.bits or 0) < 3.5  # the head has 6
    model = model_map(checkpoint.config)
    for layer in model.layers:
        for spec in model.linears(layer):
            if checkpoint.has(f"{spec.name}.weight"):
                assert checkpoint.info(f"{spec.name}.weight").shape == spec.weight_shape
                continue
            linear = checkpoint.exl3(spec.name)
            assert 0 <= linear.in_features - spec.in_features < 128
            assert 0 <= linear.out_features - spec.out_features < 128
    head = checkpoint.exl3("lm_head")
    assert (head.bits, head.in_features, head.out_features) == (6, 256, 384)
    assert head.dequantize()[:, 320:].abs().max() == 0


CODEBOOKS = [("3inst", 2), ("mcg", 4), ("mul1", 1), ("mul1", 1.5), ("mul1", 2.5), ("mul1", 3.5)]


@pytest.mark.parametrize("codebook, bits", CODEBOOKS)
def test_codebook_and_rate_come_from_the_tensors(
    tmp_path: Path, codebook: str, bits: float
) -> None:
    """The config's own claims are for people; here they are wrong."""
    options = OrdinaryOptions(bits=bits, codebook=codebook, head_bits=None)
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama"), options)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= {"bits": 7.0, "codebook": "nonsense", "head_bits": 8}
    (path / "config.json").write_text(json.dumps(config))
    linear = open_checkpoint(path).exl3("model.layers.0.mlp.up_proj")
    assert (linear.codebook, linear.bits) == (codebook, bits)
    assert open_checkpoint(path).bits == bits


STORAGE = {
    "right": {"stored_tensors": {"x.trellis": {"shape": [8, 8, 48]}}, "bits_per_weight": 3},
    "wrong": {"stored_tensors": {"model.layers.0.mlp.up_proj.trellis": {"shape": [1, 1, 32]}}},
}


@pytest.mark.parametrize("storage", [None, *STORAGE.values()], ids=["none", *STORAGE])
def test_tensor_storage_is_not_needed_and_not_believed(
    tmp_path: Path, storage: dict[str, Any] | None
) -> None:
    """quantization_config.json, which exllamav3 writes beside the config for other loaders."""
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama"))
    if storage is not None:
        text = json.dumps({"quant_method": "exl3", "tensor_storage": {"model.x": storage}})
        (path / "quantization_config.json").write_text(text)
    assert verify_checkpoint(path, model_map).faults == ()
    checkpoint = open_checkpoint(path)
    assert checkpoint.exl3("model.layers.0.mlp.up_proj").bits == 3
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    (path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(path).dialect == "ordinary"  # by its tensors alone


def test_packed_signs_of_the_first_versions(tmp_path: Path) -> None:
    config = tiny_config_of("llama")
    new = open_checkpoint(write_ordinary(tmp_path / "new", config))
    options = OrdinaryOptions(has_packed_signs=True, version="0.0.1")
    old = open_checkpoint(write_ordinary(tmp_path / "old", config, options))
    name = "model.layers.1.self_attn.q_proj"
    assert old.has(f"{name}.su") and not old.has(f"{name}.suh")
    assert torch.equal(old.exl3(name).suh, new.exl3(name).suh.sign())


@pytest.mark.parametrize(
    "storage",
    [None, "{", {"tensor_storage": {"model.layers.0.mlp.up_proj": {"stored_tensors": 3}}}],
)
def test_quantization_config_json_does_not_matter(tmp_path: Path, storage: Any) -> None:
    """It is optional, may list other tensors, and may be damaged."""
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama"))
    expected = open_checkpoint(path).names()
    if storage is not None:
        text = storage if isinstance(storage, str) else json.dumps(storage)
        (path / "quantization_config.json").write_text(text)
    assert open_checkpoint(path).names() == expected


def test_data_at_odd_addresses(tmp_path: Path) -> None:
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama"))
    checkpoint = open_checkpoint(path)
    starts = [checkpoint.info(name).start for name in checkpoint.names()]
    assert any(start % 2 for start in starts), "the fixture must have unaligned data"
    assert checkpoint.exl3("lm_head").codebook == "mul1"


def test_both_sides_are_padded(tmp_path: Path) -> None:
    """200 to 256 inside and out; what is added decodes to 0."""
    config = tiny_config_of("llama") | {"hidden_size": 200, "intermediate_size": 200}
    path = write_ordinary(tmp_path / "m", config | {"head_dim": 64})
    assert verify_checkpoint(path, model_map).faults == ()
    checkpoint = open_checkpoint(path)
    linear = checkpoint.exl3("model.layers.0.mlp.up_proj")
    assert (linear.in_features, linear.out_features) == (256, 256)
    weight = dense_weight(checkpoint, "model.layers.0.mlp.up_proj")
    assert weight[200:].abs().max() == 0 and weight[:200, :200].std() > 0.01


def test_shards_without_an_index(tmp_path: Path) -> None:
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama"), OrdinaryOptions(num_shards=3))
    assert len(list(path.glob("*.safetensors"))) == 3 and not list(path.glob("*.index.json"))
    assert open_checkpoint(path).exl3("lm_head").bits == 6
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing shards: model-00002-of-00003"):
        open_checkpoint(path)


def test_wide_mlps_in_slices(tmp_path: Path) -> None:
    """512 channels as 384 and the remaining 128, side by side along the intermediate side."""
    path = write_ordinary(tmp_path / "m", tiny_config_of("qwen3"), OrdinaryOptions(slice_width=384))
    checkpoint = open_checkpoint(path)
    for proj, shape, dim in (("up_proj", (512, 256), 0), ("down_proj", (256, 512), 1)):
        module = f"model.layers.0.mlp.{proj}"
        assert exl3_parts(checkpoint, module) == [f"{module}.slice.0", f"{module}.slice.1"]
        weight = ModuleWeights(checkpoint)[f"{module}.weight"]
        assert tuple(weight.shape) == shape
        second = checkpoint.exl3(f"{module}.slice.1").dequantize().T
        assert torch.equal(weight.narrow(dim, 384, 128), second)


def test_tied_head_with_its_own_trellis(tmp_path: Path) -> None:
    """Files of 1.4.1 say tied although the head is quantised by itself; the tensor counts."""
    config = tiny_config_of("llama") | {"tie_word_embeddings": True}
    checkpoint = open_checkpoint(write_ordinary(tmp_path / "a", tiny_config_of("llama")))
    assert not checkpoint.is_head_tied
    own = write_ordinary(tmp_path / "b", tiny_config_of("llama"))
    (own / "config.json").write_text(json.dumps(config))
    assert not open_checkpoint(own).is_head_tied
    without = write_ordinary(tmp_path / "c", config, OrdinaryOptions(head_bits=None))
    assert open_checkpoint(without).is_head_tied


def test_embedding_as_a_row_table(tmp_path: Path) -> None:
    options = OrdinaryOptions(embedding_bits=4)
    checkpoint = open_checkpoint(write_ordinary(tmp_path / "m", tiny_config_of("llama"), options))
    assert checkpoint.row_tables() == ["model.embed_tokens"]
    assert "model.embed_tokens" not in checkpoint.exl3_prefixes()
    table = checkpoint.row_table("model.embed_tokens")
    assert table.bits == 4 and tuple(table.dequantize(slice(0, 5)).shape) == (5, 256)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.suh"):
        checkpoint.exl3("model.embed_tokens")
    with pytest.raises(CheckpointError, match=r"lm_head\.signs"):
        checkpoint.row_table("lm_head")


def test_ngram_tables_are_listed(tmp_path: Path) -> None:
    """`ngram_embedding.safetensors` of 1.6.5, which no index names: rings of 160, no signs."""
    path = write_ordinary(tmp_path / "m", tiny_config_of("llama"))
    name = "model.ngram.shard_0"
    table = {f"{name}.trellis": torch.zeros(7, 1 + 10 * 4, dtype=torch.int16)}
    write_unaligned(path / "ngram_embedding.safetensors", table)
    checkpoint = open_checkpoint(path)
    assert checkpoint.row_tables() == [name] and checkpoint.bits == pytest.approx(3.1, abs=0.2)
    (stored,) = [t for t in stored_tensors(checkpoint) if t.name.startswith(name)]
    assert stored.num_weights == 7 * 160
    with pytest.raises(CheckpointError, match=r"shard_0\.signs"):
        checkpoint.row_table(name)


def test_newer_version_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Row 27 of the public failures: both versions are named. It is read all the same."""
    for number, version in enumerate(("2.0.1", "2.0.1", "1.6.5", "0.0.3", "odd")):
        options = OrdinaryOptions(version=version)
        path = write_ordinary(tmp_path / str(number), tiny_config_of("llama"), options)
        assert open_checkpoint(path).dialect == "ordinary"
    (record,) = [r for r in caplog.records if "exllamav3" in r.message]
    assert "2.0.1" in record.message and "1.6.5" in record.message


def test_module_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_ordinary(tmp_path / "m", tiny_config_of("llama")))
    with pytest.raises(CheckpointError, match=r"'x.weight' nor 'x.trellis'"):
        dense_weight(checkpoint, "x")
