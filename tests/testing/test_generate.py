from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from exl3kit.checkpoint.manifest import PER_EXPERT, SHARED_H
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.format.spec import SUPPORTED_BITS, TILE
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.models.registry import model_map
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.generate import make_rank_sliced, random_exl3
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinyGlm4Moe(num_experts=2, mtp_layers=1)
    return write_tiny_model(tmp_path_factory.mktemp("generate") / "plain", spec)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_random_linears_keep_the_size_of_their_input(bits: float) -> None:
    linear = random_exl3(512, 256, bits, "mul1", seed=1)
    assert linear.trellis.shape == (512 // TILE, 256 // TILE, 16 * bits)
    y = torch.randn(64, 512) @ linear.dequantize()
    assert 0.7 < y.std() < 1.4


def test_seed_decides_everything() -> None:
    one, same, other = (random_exl3(128, 128, 3, seed=seed) for seed in (5, 5, 6))
    assert all(torch.equal(one.tensors()[f], same.tensors()[f]) for f in one.tensors())
    assert not torch.equal(one.trellis, other.trellis)


@pytest.mark.parametrize("layout", [PER_EXPERT, SHARED_H])
@pytest.mark.parametrize("tp", [1, 2])
def test_twin_holds_the_decoded_slices_side_by_side(
    plain: Path, tmp_path: Path, layout: str, tp: int
) -> None:
    sliced = make_rank_sliced(plain, tmp_path / "exl3", (3, 4), tp, (1, 3), rotation_layout=layout)
    twin = open_checkpoint(write_dense_twin(sliced, tmp_path / "dense"))
    source, original = open_checkpoint(sliced), open_checkpoint(plain)
    assert twin.dialect == "plain" and twin.names() == original.names()
    assert not {"hybrid_tr3_tail", "quantization_config"} & twin.config.keys()
    prefix = "model.layers.3.mlp.experts.1"
    for proj, dim in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 0)):
        parts = [source.exl3(f"{prefix}.{proj}.rank{r}").dequantize() for r in range(tp)]
        found = twin.tensor(f"{prefix}.{proj}.weight")
        assert found.dtype == torch.float32
        assert torch.equal(found.T, torch.cat(parts, dim))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert twin.tensor(name).dtype == torch.float32
    assert torch.equal(twin.tensor(name), original.tensor(name))


def test_encode_sees_each_slice_of_the_weight(plain: Path, tmp_path: Path) -> None:
    seen: dict[str, torch.Tensor] = {}

    def encode(weight: torch.Tensor, name: str) -> Exl3Tensor:
        seen[name] = weight
        return random_exl3(weight.shape[0], weight.shape[1], 2, name=name)

    out = make_rank_sliced(plain, tmp_path / "m", 2, 2, (2, 2), encode)
    assert len(seen) == 2 * 3 * 2
    original = open_checkpoint(plain)
    prefix = "model.layers.2.mlp.experts.0"
    gate = original.tensor(f"{prefix}.gate_proj.weight").float()
    down = original.tensor(f"{prefix}.down_proj.weight").float()
    assert torch.equal(seen[f"{prefix}.gate_proj.rank1"], gate[128:].T)
    assert torch.equal(seen[f"{prefix}.down_proj.rank0"], down[:, :128].T)
    assert verify_checkpoint(out, model_map).faults == ()


def test_twin_crops_the_padding_of_an_ordinary_linear(plain: Path, tmp_path: Path) -> None:
    """A head of 320 tokens is stored with 384 output channels."""
    source = open_checkpoint(plain)
    head = random_exl3(256, 384, 6, "mul1")
    with CheckpointWriter(tmp_path / "ordinary") as writer:
        for name in source.names():
            if name != "lm_head.weight":
                writer.add(name, source.tensor(name))
        for field, tensor in head.tensors().items():
            writer.add(f"lm_head.{field}", tensor)
        writer.finish(source.config)
    assert verify_checkpoint(tmp_path / "ordinary", model_map).faults == ()
    twin = open_checkpoint(write_dense_twin(tmp_path / "ordinary", tmp_path / "d", torch.bfloat16))
    expected = head.dequantize().T[:320].bfloat16()
    assert torch.equal(twin.tensor("lm_head.weight"), expected)
    assert json.loads((tmp_path / "d/config.json").read_text())["dtype"] == "bfloat16"
