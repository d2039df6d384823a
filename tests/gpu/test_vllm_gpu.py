"""Stock vLLM on a GPU: EXL3 models answer like their decoded weights, and serving stays steady.

Runs benchmarks/vllm_gpu.py, which says how tokens are compared: about four minutes for all engines.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "vllm_gpu.py"
MODELS = ("glm4_moe", "deepseek_v3", "glm_moe_dsa")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A row an engine; the dense ones are what the others were compared with."""
    out = tmp_path_factory.mktemp("vllm") / "results.json"
    command = [sys.executable, str(PROGRAM), "--out", str(out)]
    subprocess.run(command, timeout=900, check=False)
    rows = json.loads(out.read_text())
    assert not [row["error"] for row in rows if "error" in row]
    return rows


def exl3_rows(results: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    return [
        row
        for row in results
        if row["model_type"] == model and row["checkpoint"] not in ("dense", "damaged")
    ]


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_dense_model(results: list[dict[str, Any]], model: str) -> None:
    """Except where its two best logits lie within two steps of bf16."""
    rows = exl3_rows(results, model)
    assert {row["eager"] for row in rows} == {True, False}
    for row in rows:
        assert row["compared"] >= 1000
        assert row["wrong"] == [], row["label"]
        assert len(row["near_ties"]) < row["compared"] / 20


def test_one_exchanged_expert_is_found(results: list[dict[str, Any]]) -> None:
    (row,) = (row for row in results if row["checkpoint"] == "damaged")
    assert len(row["wrong"]) > 20


@pytest.mark.parametrize("model", MODELS)
def test_experts_stay_packed(results: list[dict[str, Any]], model: str) -> None:
    for row in exl3_rows(results, model):
        assert row["resident_bytes"] <= 1.15 * row["trellis_bytes"], row["label"]


def test_drafts_are_accepted(results: list[dict[str, Any]]) -> None:
    """A draft of the embedding alone agrees in part; each has a packed MoE layer of its own."""
    rows = [row for row in exl3_rows(results, "glm4_moe") if row["drafts"]]
    assert rows
    for row in rows:
        assert row["layers"] == 3
        assert 0 < row["accepted"] <= row["drafted"]


@pytest.mark.parametrize("model", MODELS)
def test_serving_is_steady(results: list[dict[str, Any]], model: str) -> None:
    """Nothing is compiled after the start, nothing taken from the driver in a second round, and
    the pass in which vLLM sizes its cache needs as much as the work does."""
    for row in exl3_rows(results, model):
        first, second = row["growth_in_first_round"], row["growth"]
        assert first["kernels"] == second["kernels"] == 0, row["label"]
        assert second["graphs"] == 0, row["label"]
        assert second["segments"] == 0 and second["reserved_bytes"] == 0, row["label"]
        assert row["peak_of_a_round"] <= row["peak_of_the_sizing_pass"], row["label"]
