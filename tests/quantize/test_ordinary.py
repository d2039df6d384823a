"""Ordinary EXL3 output: names, markers and metadata as exllamav3 has them, and `slice` of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import UnsupportedError
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.models.registry import model_map
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.testing.tiny_model import write_tiny_model
from tests.quantize import quick

DENSE = {"attention": 3, "mlp": 4, "shared_experts": 5, "head": 6}
OPTIONS = QuantizeOptions(bits=2, rows=4, cols=64)
EXPERT = "model.layers.1.mlp.experts.1.down_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source"), quick.SPEC)


@pytest.fixture(autouse=True)
def quick_encoder(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    quick.install(monkeypatch)


def quantised(source: Path, out: Path, **change: Any) -> Checkpoint:
    """A verified checkpoint made with OPTIONS but for `change`."""
    quantize_checkpoint(source, out, replace(OPTIONS, **change))
    assert not verify_checkpoint(out, model_map).faults
    return open_checkpoint(out)


def test_experts_are_exl3_under_their_own_names_and_all_else_is_copied(
    source: Path, tmp_path: Path
) -> None:
    checkpoint = quantised(source, tmp_path / "out")
    original = load_file(source / "model.safetensors")
    experts = {n for n in original if ".mlp.experts." in n and ".layers.3." not in n}  # 3 is MTP
    modules = {name.removesuffix(".weight") for name in experts}
    stored = {f"{name}.{f}" for name in modules for f in ("trellis", "suh", "svh", "mcg")}
    assert set(checkpoint.names()) == stored | (set(original) - experts)
    assert checkpoint.dialect == "ordinary"
    assert checkpoint.bits == 2
    for name in set(original) - experts:
        assert torch.equal(checkpoint.tensor(name), original[name]), name


def test_metadata_is_exllamav3s(source: Path, tmp_path: Path) -> None:
    checkpoint = quantised(source, tmp_path / "out", dense=DENSE, mtp="trellis")
    config = checkpoint.config["quantization_config"]
    assert {k: config[k] for k in ("quant_method", "version", "codebook", "out_scales")} == {
        "quant_method": "exl3",
        "version": "1.6.5",
        "codebook": "mcg",
        "out_scales": "always",
    }
    assert config["calibration"] == {"rows": 4, "cols": 64}
    assert config["producer"]["name"] == "exl3kit"  # a bare string stops vLLM
    h, i, qkvo = 128, 256, 128 * (128 + 64 + 64 + 128)
    dense_mlp, shared, experts = 3 * h * i, 3 * h * i, 2 * 3 * h * i
    budget = 3 * qkvo + dense_mlp + 2 * shared + 2 * experts  # one dense and two MoE layers
    spent = 3 * 3 * qkvo + 4 * dense_mlp + 2 * 5 * shared + 2 * 2 * experts
    assert config["bits"] == round(spent / budget, 2)
    mtp = (3 * qkvo + 5 * shared + 2 * experts) / (qkvo + shared + experts)
    assert (config["head_bits"], config["mtp_bits"]) == (6, round(mtp, 2))

    stored = json.loads((checkpoint.path / "quantization_config.json").read_text())
    storage = stored.pop("tensor_storage")
    assert stored == config
    listed = {
        name: t for module in storage.values() for name, t in module["stored_tensors"].items()
    }
    assert set(listed) == {n for n in checkpoint.names() if ".layers.3." not in n}  # not the MTP
    for name, entry in listed.items():
        info = checkpoint.info(name)
        expected = {"shape": [*info.shape], "n_bytes": info.nbytes, "dtype": str(info.dtype)}
        assert entry == expected, name
    keys = {key: storage[EXPERT][key] for key in storage[EXPERT] if key != "stored_tensors"}
    assert keys == {"quant_format": "exl3", "bits_per_weight": 2, "mcg_multiplier": 3417055213}
    assert storage["lm_head"]["bits_per_weight"] == 6
    assert storage["model.norm"].keys() == {"stored_tensors"}


def test_slices_of_the_whole_are_what_mode_cut_writes(source: Path, tmp_path: Path) -> None:
    quantised(source, tmp_path / "whole", dense={"attention": 3})
    slice_checkpoint(tmp_path / "whole", tmp_path / "sliced", SliceOptions(tp=2))
    options = {"dense": {"attention": 3}, "tp": 2, "slice_mode": "cut"}
    cut = quantised(source, tmp_path / "cut", **options)
    sliced = open_checkpoint(tmp_path / "sliced")
    assert cut.names() == sliced.names()
    for name in cut.names():
        assert torch.equal(cut.tensor(name), sliced.tensor(name)), name
    merged = slice_checkpoint(tmp_path / "cut", tmp_path / "merged", SliceOptions(tp=1))
    assert merged.tp == 1  # cut parts share their hidden-side vectors, so they can be joined


@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 2.5), ("mul1", 4), ("3inst", 1)])
def test_other_codebooks(source: Path, tmp_path: Path, codebook: str, bits: int | float) -> None:
    checkpoint = quantised(source, tmp_path / "out", codebook=codebook, bits=bits)
    linear = checkpoint.exl3(EXPERT)
    assert (linear.codebook, linear.bits) == (codebook, bits)
    storage = json.loads((tmp_path / "out" / "quantization_config.json").read_text())
    keys = storage["tensor_storage"][EXPERT].keys() - {"stored_tensors"}
    marker = {"mul1_multiplier"} if codebook == "mul1" else set()
    assert keys == {"quant_format", "bits_per_weight"} | marker


def test_what_engines_need_dense_stays_dense(source: Path, tmp_path: Path) -> None:
    checkpoint = quantised(source, tmp_path / "out", dense=DENSE, mtp="trellis")
    assert {name for name in checkpoint.linears() if not checkpoint.is_exl3(name)} == {
        "model.embed_tokens",
        "model.layers.1.mlp.gate",
        "model.layers.2.mlp.gate",
        "model.layers.3.mlp.gate",
        "model.layers.3.eh_proj",
    }


def test_next_token_layers_that_are_copied_are_copied_whole(source: Path, tmp_path: Path) -> None:
    checkpoint = quantised(source, tmp_path / "out", dense=DENSE)
    assert not any(".layers.3." in name for name in checkpoint.exl3_prefixes())
    assert "mtp_bits" not in checkpoint.config["quantization_config"]


def test_a_tied_head_is_quantised_from_the_embedding(source: Path, tmp_path: Path) -> None:
    src = edited(source, tmp_path / "src", {"tie_word_embeddings": True}, drop="lm_head.weight")
    checkpoint = quantised(src, tmp_path / "out", dense={"head": 8})
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.has("model.embed_tokens.weight")
    assert checkpoint.exl3("lm_head").out_features == 384  # 320 rows, padded
    left = quantised(src, tmp_path / "left")
    assert left.config["tie_word_embeddings"] is True
    assert not left.has("lm_head.weight")


def test_biases_go_with_their_linears(source: Path, tmp_path: Path) -> None:
    biases = {
        f"model.layers.{layer}.self_attn.{name}.bias": torch.randn(size).bfloat16()
        for layer in range(4)
        for name, size in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64))
    }
    src = edited(source, tmp_path / "src", {"attention_bias": True}, biases)
    checkpoint = quantised(src, tmp_path / "out", dense={"attention": 3})
    linear = checkpoint.exl3("model.layers.0.self_attn.k_proj")
    assert linear.bias is not None
    assert torch.equal(linear.bias[:64], biases["model.layers.0.self_attn.k_proj.bias"].half())
    assert linear.bias[64:].tolist() == [0] * 64
    copied = "model.layers.3.self_attn.k_proj.bias"
    assert torch.equal(checkpoint.tensor(copied), biases[copied])


def test_a_plan_without_work_is_refused(source: Path, tmp_path: Path) -> None:
    src = edited(source, tmp_path / "src", {"first_k_dense_replace": 3})
    with pytest.raises(UnsupportedError, match="none of its 3 layers has routed experts"):
        quantize_checkpoint(src, tmp_path / "out", OPTIONS)


def test_the_layers_behind_see_the_quantised_ones(source: Path, tmp_path: Path) -> None:
    """The log's Hessians cannot show it; the stand-in encoder's bytes depend on them."""
    alone = quantised(source, tmp_path / "alone")
    behind = quantised(source, tmp_path / "behind", dense={"attention": 3})
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert not torch.equal(ModuleWeights(alone)[name], ModuleWeights(behind)[name])


def edited(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor] | None = None,
    drop: str = "",
) -> Path:
    """A copy of `source` with other config keys, more tensors, or one less."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    stored = load_file(source / "model.safetensors") | (tensors or {})
    stored.pop(drop, None)
    save_file(stored, folder / "model.safetensors")
    changed = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(changed))
    return folder
