"""A whole job on a GPU: on one device and on several, to the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model

SPEC = TinyGlm4Moe(
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=256,
    num_experts=5,
    num_layers=2,
    mtp_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)


def files(folder: Path) -> dict[str, bytes]:
    """Content of every file but the log, which has times in it."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name != "quantization_log.jsonl"
    }


def test_two_threads_of_one_gpu_write_what_one_writes(tmp_path: Path) -> None:
    """Dense linears, experts in groups of two and a group of one, a next-token layer, mean bits."""
    source = write_tiny_model(tmp_path / "source", SPEC)
    options = QuantizeOptions(
        2.5,
        tp=2,
        dense={"attention": 3, "shared_experts": 2},
        rows=4,
        cols=128,
        mtp="trellis",
        device="cuda:0",
        jobs=2,
    )
    quantize_checkpoint(source, tmp_path / "one", options)
    quantize_checkpoint(source, tmp_path / "two", replace(options, device="cuda:0,cuda:0"))
    assert files(tmp_path / "two") == files(tmp_path / "one")
