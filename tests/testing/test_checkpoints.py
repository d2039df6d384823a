"""Random checkpoints of every dialect and architecture open, verify, and can be inspected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from exl3kit.checkpoint.inventory import by_kind, by_layer, stored_tensors
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.cli.inspect_facts import folder_summary
from exl3kit.cli.inspect_plan import PlanOptions, plan_summary
from exl3kit.models.registry import model_map
from exl3kit.testing.checkpoints import (
    OrdinaryOptions,
    write_ordinary,
    write_plain,
    write_r7,
    write_unaligned,
)
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_configs import MODEL_TYPES, MOE_TYPES, MTP_TYPES, tiny_config_of

PLAN = PlanOptions(1, 2**30, 512, 1, 512, 132, False)


def check(path: Path, dialect: str) -> None:
    """It verifies, the inventories add up to it, and a plan can be made."""
    report = verify_checkpoint(path, model_map)
    assert (report.faults, report.dialect) == ((), dialect)
    tensors = stored_tensors(open_checkpoint(path))
    for rows in (by_layer(tensors), by_kind(by_layer(tensors))):
        assert sum(row.num_bytes for row in rows) == report.num_bytes
        assert sum(row.num_tensors for row in rows) == report.num_tensors
    subject, summary = folder_summary(path, None)
    plan = plan_summary(subject, PLAN)["plan"]
    skipped = sum(t.num_bytes for t in tensors if ".shared_head.head." in t.name)
    assert summary["bytes"] == plan["weights_bytes"] + skipped
    assert json.dumps(summary)


CASES = [(name, dialect) for name in MODEL_TYPES for dialect in ("plain", "fp8", "ordinary")]
CASES += [(name, dialect) for name in MOE_TYPES for dialect in ("rank-sliced", "r7")]


@pytest.mark.parametrize("name, dialect", CASES)
def test_every_dialect_of_every_architecture(tmp_path: Path, name: str, dialect: str) -> None:
    config = tiny_config_of(name, num_experts=2, mtp_layers=1 if name in MTP_TYPES else 0)
    if dialect == "ordinary":
        return check(write_ordinary(tmp_path / "m", config), "ordinary")
    if dialect == "r7":
        return check(write_r7(tmp_path / "m", config), "r7")
    plain = write_plain(tmp_path / "plain", config, fp8=dialect == "fp8")
    if dialect == "rank-sliced":
        layers = model_map(config).moe_layers
        ends = (layers[0], layers[-1])
        return check(make_rank_sliced(plain, tmp_path / "m", (3, 4), 1, ends), dialect)
    return check(plain, "plain")


OPTIONS = {
    "mcg": OrdinaryOptions(bits=4, codebook="mcg"),
    "3inst": OrdinaryOptions(bits=2, codebook="3inst"),
    "half rate": OrdinaryOptions(bits=2.5),
    "packed signs": OrdinaryOptions(codebook="3inst", has_packed_signs=True, version="0.0.1"),
    "slices": OrdinaryOptions(slice_width=384),
    "row table": OrdinaryOptions(embedding_bits=5),
    "dense head": OrdinaryOptions(head_bits=None),
    "shards": OrdinaryOptions(num_shards=4),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_kind_of_ordinary_file(tmp_path: Path, options: OrdinaryOptions) -> None:
    check(write_ordinary(tmp_path / "m", tiny_config_of("qwen3"), options), "ordinary")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain_files_in_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write_plain(tmp_path / "m", tiny_config_of("glm4_moe", num_experts=2), dtype)
    check(path, "plain")
    assert open_checkpoint(path).tensor("model.layers.1.mlp.gate.weight").dtype == dtype


TWINS = {
    "slices": lambda out: write_ordinary(out, tiny_config_of("qwen3"), OPTIONS["slices"]),
    "row table": lambda out: write_ordinary(out, tiny_config_of("llama"), OPTIONS["row table"]),
    "r7": lambda out: write_r7(out, tiny_config_of("qwen3_moe", num_experts=2)),
    "fp8": lambda out: write_plain(out, tiny_config_of("llama"), fp8=True),
}


@pytest.mark.parametrize("write", TWINS.values(), ids=TWINS)
def test_dense_twins_are_plain_and_complete(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    twin = write_dense_twin(write(tmp_path / "m"), tmp_path / "twin")
    check(twin, "plain")
    assert open_checkpoint(twin).tensor("model.layers.0.self_attn.q_proj.weight").std() > 0.01


def test_biases_have_the_padded_length(tmp_path: Path) -> None:
    config = tiny_config_of("llama") | {"attention_bias": True, "intermediate_size": 448}
    path = write_ordinary(tmp_path / "m", config | {"mlp_bias": True})
    check(path, "ordinary")
    bias = open_checkpoint(path).exl3("model.layers.0.mlp.up_proj").bias
    assert bias is not None and len(bias) == 512 and bias[448:].abs().max() == 0


def test_unaligned_files_are_what_the_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file  # its torch reader wants aligned data

    tensors = {"a": torch.tensor(7, dtype=torch.int32), "odd": torch.arange(5).half()}
    loaded = load_file(write_unaligned(tmp_path / "x.safetensors", tensors))
    assert all((torch.from_numpy(loaded[n]) == t).all() for n, t in tensors.items())


DAMAGE = [
    ("slices", "model.layers.0.mlp.up_proj.slice.1.trellis", "must be 512 channels"),
    ("slices", "model.layers.0.mlp.up_proj.slice.0.svh", "up_proj.slice.0.svh' is missing"),
    ("row table", "model.embed_tokens.signs", "embed_tokens.signs' is missing"),
    ("mcg", "model.layers.1.self_attn.o_proj.suh", "o_proj.suh' is missing"),
]


@pytest.mark.parametrize("kind, dropped, text", DAMAGE)
def test_a_missing_part_is_a_fault(tmp_path: Path, kind: str, dropped: str, text: str) -> None:
    path = write_ordinary(tmp_path / "m", tiny_config_of("qwen3"), OPTIONS[kind])
    checkpoint = open_checkpoint(path)
    kept = {name: checkpoint.tensor(name) for name in checkpoint.names() if name != dropped}
    write_unaligned(path / "model.safetensors", kept)
    faults = verify_checkpoint(path, model_map).faults
    assert faults and text in " ".join(faults)


def test_wrong_fp8_scales_are_faults(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "m", tiny_config_of("llama"), fp8=True)
    checkpoint = open_checkpoint(path)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    for changed in (
        tensors | {name: torch.ones(4, 3)},
        {n: tensors[n] for n in tensors if n != name},
    ):
        (path / "model.safetensors.index.json").unlink(missing_ok=True)
        write_unaligned(path / "model-00001-of-00001.safetensors", changed)
        assert any(name in fault for fault in verify_checkpoint(path, model_map).faults)
