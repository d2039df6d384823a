from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from exl3kit.checkpoint.manifest import SHARED_H
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.errors import CheckpointError, Exl3Error, FormatError
from exl3kit.models.registry import model_map
from exl3kit.testing.generate import make_rank_sliced, random_exl3

GATE = "model.layers.1.mlp.experts.0.gate_proj.rank0"


def write(path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    with CheckpointWriter(path) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        return writer.finish({"architectures": ["Glm4MoeForCausalLM"], **config})


def test_plain(plain_folder: Path) -> None:
    checkpoint = open_checkpoint(str(plain_folder))
    assert (checkpoint.dialect, checkpoint.tp, checkpoint.bits) == ("plain", None, None)
    assert checkpoint.manifest is None and checkpoint.exl3_prefixes() == []
    assert checkpoint.architecture == "Glm4MoeForCausalLM"
    assert "model.layers.0.self_attn.q_proj" in checkpoint.linears()
    assert "model.norm" not in checkpoint.linears()


def test_rank_sliced(sliced_folder: Path) -> None:
    checkpoint = open_checkpoint(sliced_folder)
    assert (checkpoint.dialect, checkpoint.tp, checkpoint.bits) == ("rank-sliced", 2, 3.75)
    assert len(checkpoint.exl3_prefixes()) == 3 * 4 * 3 * 2
    assert GATE in checkpoint.exl3_prefixes() and GATE in checkpoint.linears()
    linear = checkpoint.exl3(GATE)
    assert (linear.in_features, linear.out_features, linear.bits) == (256, 128, 3)
    assert linear.codebook == "mcg" and linear.name == GATE
    info = checkpoint.info(f"{GATE}.trellis")
    assert (info.dtype, info.shape) == (torch.int16, (16, 8, 48))


def test_shared_vectors_are_found(plain_folder: Path, tmp_path: Path) -> None:
    out = make_rank_sliced(plain_folder, tmp_path / "out", 3, 2, (1, 1), rotation_layout=SHARED_H)
    checkpoint = open_checkpoint(out)
    stem = "model.layers.1.mlp.experts"
    assert not checkpoint.has(f"{stem}.3.gate_proj.rank1.suh")
    for proj, field in (("gate_proj", "suh"), ("up_proj", "suh"), ("down_proj", "svh")):
        shared = checkpoint.tensor(f"{stem}.shared_h.{proj}.rank1.{field}")
        own = getattr(checkpoint.exl3(f"{stem}.3.{proj}.rank1"), field)
        assert torch.equal(own, shared)


@pytest.mark.parametrize("codebook, bits", [("3inst", 2), ("mcg", 4), ("mul1", 2.5)])
def test_ordinary_dialect_by_tensors_or_by_config(
    tmp_path: Path, codebook: str, bits: float
) -> None:
    linear = random_exl3(128, 256, bits, codebook)
    tensors = {f"lm_head.{field}": tensor for field, tensor in linear.tensors().items()}
    checkpoint = open_checkpoint(write(tmp_path / "a", tensors))
    assert (checkpoint.dialect, checkpoint.bits) == ("ordinary", bits)
    assert checkpoint.exl3("lm_head").codebook == codebook
    claimed = write(
        tmp_path / "b", {"x": torch.ones(1)}, quantization_config={"quant_method": "exl3"}
    )
    assert open_checkpoint(claimed).dialect == "ordinary"


def test_legacy_signs(tmp_path: Path) -> None:
    """Bit i of word j belongs to element 16 j + i; a set bit is -1."""
    linear = random_exl3(128, 128, 2, "3inst")
    words = torch.zeros(8, dtype=torch.int16)
    words[0], words[3] = 0b101, -0x8000
    tensors = {"a.trellis": linear.trellis, "a.su": words, "a.svh": linear.svh}
    found = open_checkpoint(write(tmp_path / "m", tensors)).exl3("a")
    assert (found.suh == -1).nonzero().flatten().tolist() == [0, 2, 63]
    assert torch.equal(found.svh, linear.svh)


def test_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        open_checkpoint(tmp_path)


def test_folder_that_cannot_be_looked_at(
    plain_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pathlib answers "no" to what is not there; any other error of the system it hands on."""
    for call in (open_checkpoint, lambda path: verify_checkpoint(path, model_map)):
        with pytest.raises(CheckpointError, match="aaa: cannot read: File name too long"):
            call(tmp_path / ("a" * 300))

    def refuse(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=f"{plain_folder}: cannot read: Permission denied"):
        open_checkpoint(plain_folder)


def test_architecture_must_be_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m", {"x": torch.ones(1)}, architectures=[]))
    with pytest.raises(CheckpointError, match="architectures"):
        _ = checkpoint.architecture


def test_mixed_map_missing(sliced_folder: Path) -> None:
    (sliced_folder / "tier_bitmap.json").unlink()
    with pytest.raises(CheckpointError, match=r"tier_bitmap.json.*missing"):
        open_checkpoint(sliced_folder)


MARKER = torch.tensor(-877912083, dtype=torch.int32)
BROKEN: list[tuple[str, torch.Tensor | None, type[Exl3Error], str]] = [
    ("mcg", None, CheckpointError, f"'{GATE}.mcg' is missing"),
    ("mcg", torch.tensor(5, dtype=torch.int32), FormatError, "0x00000005"),
    ("mul1", torch.tensor(-2082680531, dtype=torch.int32), CheckpointError, "0x83DCD12D"),
    ("trellis", None, CheckpointError, f"'{GATE}.trellis' is missing"),
    ("suh", torch.ones(128, dtype=torch.float16), FormatError, f"{GATE}.suh"),
    ("svh", torch.full((128,), float("nan"), dtype=torch.float16), FormatError, "finite"),
    ("trellis", torch.zeros(16, 8, 50, dtype=torch.int16), FormatError, "got 50"),
]


@pytest.mark.parametrize("field, tensor, kind, text", BROKEN)
def test_errors_name_the_tensor(
    sliced_folder: Path,
    tmp_path: Path,
    field: str,
    tensor: torch.Tensor | None,
    kind: type[Exl3Error],
    text: str,
) -> None:
    source = open_checkpoint(sliced_folder)
    tensors = {name: source.tensor(name) for name in source.names() if name.startswith(GATE)}
    tensors.pop(f"{GATE}.{field}", None)
    if tensor is not None:
        tensors[f"{GATE}.{field}"] = tensor
    block = {**source.config["hybrid_tr3_tail"], "bits": 3}
    path = write(tmp_path / "m", tensors, hybrid_tr3_tail=block)
    with pytest.raises(kind) as error:
        open_checkpoint(path).exl3(GATE)
    assert text in str(error.value) and GATE in str(error.value)


def test_shim_config_is_rank_sliced(sliced_folder: Path) -> None:
    config = json.loads((sliced_folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (sliced_folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(sliced_folder).dialect == "rank-sliced"
