"""The whole job on a tiny model: what is written, what is copied, what is refused."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3kit.checkpoint.names import expert_rules
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import CheckpointError, Exl3Error, FormatError, SliceError, UnsupportedError
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.models.registry import model_map
from exl3kit.quantize.bit_plan import BitPlan
from exl3kit.quantize.documents import TextError
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.quantize.report import QuantizeReport
from exl3kit.quantize.store import Step
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model
from tests.quantize import quick

# One MoE layer of 24 slices with 64 tiles each: about 4 s of encoding on two cores.
SPEC = TinyGlm4Moe(
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=256,
    num_experts=4,
    num_layers=2,
    mtp_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)
OPTIONS = QuantizeOptions(bits=2, tp=2, rows=4, cols=128, seed=3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("source"), SPEC)


@pytest.fixture(scope="module")
def done(
    source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Checkpoint, QuantizeReport, list[Step]]:
    """One finished job, its report and its progress calls."""
    seen: list[Step] = []
    out = tmp_path_factory.mktemp("job") / "out"
    report = quantize_checkpoint(source, out, OPTIONS, progress=seen.append)
    return open_checkpoint(out), report, seen


Done = tuple[Checkpoint, QuantizeReport, list[Step]]


@pytest.fixture
def quick_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    quick.install(monkeypatch)


def files(folder: Path) -> dict[str, bytes]:
    """Content of every file but the log, which has times in it."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    del found["quantization_log.jsonl"]
    return found


def edit_source(
    source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> Path:
    """A copy of `source` whose tensors and config `change` edits in place."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_are_dialect_a_and_all_else_is_copied(source: Path, done: Done) -> None:
    checkpoint, _, _ = done
    manifest = checkpoint.manifest
    assert manifest is not None
    assert (manifest.tp, list(manifest.moe_layers), manifest.experts_per_layer) == (2, [1], 4)
    rules = dict(expert_rules(manifest, 1, 128, 256))
    original = load_file(source / "model.safetensors")
    experts = {n for n in original if n.startswith("model.layers.1.mlp.experts.")}
    assert set(checkpoint.names()) == set(rules) | (set(original) - experts)
    for name, rule in rules.items():
        info = checkpoint.info(name)
        assert (info.dtype, info.shape) == (rule.dtype, rule.shape), name
        assert not name.endswith(".mcg") or checkpoint.tensor(name).item() == -877912083
    for name in set(original) - experts:
        copy = checkpoint.tensor(name)
        assert copy.dtype == original[name].dtype
        assert torch.equal(copy.view(torch.uint8), original[name].view(torch.uint8)), name
    bias = checkpoint.info("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.dtype == torch.float32
    assert not verify_checkpoint(checkpoint.path, model_map).faults


def test_metadata_and_side_files(source: Path, done: Done) -> None:
    checkpoint, report, _ = done
    config = checkpoint.config
    assert config["quantization_config"]["quant_method"] == "exl3"
    block = config["hybrid_tr3_tail"]
    assert (block["bits"], block["rotation_layout"]) == (2, "per_expert_v1")
    assert (block["source_format"], block["producer"]) == ("BF16", "exl3kit")
    assert (block["slicing"], block["calibration"]) == ("independent", report.calibration)
    assert report.calibration["tokens_per_layer"] == 4 * 128
    original = json.loads((source / "config.json").read_text())
    assert {k: v for k, v in config.items() if k in original} == original
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (checkpoint.path / name).read_bytes() == (source / name).read_bytes()
    assert not (checkpoint.path / ".exl3kit-job").exists()


def test_decoded_slices_are_the_source_weights_within_the_rate(source: Path, done: Done) -> None:
    checkpoint, report, _ = done
    dense = load_file(source / "model.safetensors")
    decoded = ModuleWeights(checkpoint)
    for projection in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.2.{projection}.weight"
        error = decoded[name] - dense[name].float()
        # 2 bits on Gaussian weights: 0.068 (mcg). Error feedback pays weight error for output
        # error: 0.111 to 0.120 here. Another matrix, or ranks in the wrong order, gives about 2.
        assert error.square().mean() / dense[name].float().square().mean() < 0.125
    for result in report.results:
        assert 0 < result.proxy_error < 0.075, result.name


def test_report_log_and_progress_cover_every_slice(done: Done) -> None:
    checkpoint, report, seen = done
    assert [step.done for step in seen] == [step.layer_done for step in seen] == [*range(1, 25)]
    assert {(step.total, step.layer_total) for step in seen} == {(24, 24)}
    stored = json.loads((checkpoint.path / "quantization_report.json").read_text())
    assert stored == json.loads(json.dumps(report.to_json()))
    (gate, up, down) = report.summaries()
    assert [line.module for line in (gate, up, down)] == ["gate_proj", "up_proj", "down_proj"]
    errors = [r.proxy_error for r in report.results if ".down_proj." in r.name]
    assert down.max_proxy_error == max(errors) == stored["proxy_error"][down.worst]
    assert down.mean_proxy_error == pytest.approx(sum(errors) / len(errors))

    log = (checkpoint.path / "quantization_log.jsonl").read_text().splitlines()
    lines = {line["name"]: line for line in map(json.loads, log)}
    assert [step.name for step in seen] == list(lines)
    for result in report.results:
        line = lines[result.name]
        assert (line["bits"], line["proxy_error"]) == (2, result.proxy_error)
        assert line["seconds"] > 0
        assert 0 <= line["tokens"] <= 4 * 128
    gates = [line["tokens"] for name, line in lines.items() if "gate_proj.rank0" in name]
    assert sum(gates) == 2 * 4 * 128  # two experts a token


def test_same_seed_writes_the_same_bytes_on_any_number_of_threads_and_experts_at_once(
    source: Path, done: Done, one_thread: None, tmp_path: Path
) -> None:
    quantize_checkpoint(source, tmp_path / "out", replace(OPTIONS, jobs=3))
    assert files(tmp_path / "out") == files(done[0].path)


def test_several_devices_write_the_same_bytes(
    source: Path, tmp_path: Path, quick_encoder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts 0 and 1 are encoded while 2 is, each call by a thread of its own, dense linears too.

    A call waits for company, so that this fails where calls come one after another.
    """
    together, threads = threading.Barrier(2), set()

    def met(*args: Any, **kwargs: Any) -> Any:
        if len(args[0]) in (4, 8):  # gates and ups, or downs, of two ranks of two experts
            together.wait(timeout=60)
        threads.add(threading.get_ident())
        return quick.quantize_tensors(*args, **kwargs)

    options = replace(OPTIONS, dense={"attention": 2}, jobs=2)
    quantize_checkpoint(source, tmp_path / "one", options)
    monkeypatch.setattr("exl3kit.quantize.linears.quantize_tensors", met)
    quantize_checkpoint(source, tmp_path / "two", replace(options, device="cpu,cpu"))
    assert files(tmp_path / "two") == files(tmp_path / "one")
    assert len(threads) >= 2 and threading.get_ident() not in threads


def test_devices_of_two_kinds_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UnsupportedError, match=r"one kind, as cuda:0,cuda:1, got 'cpu,cuda'"):
        quantize_checkpoint(source, tmp_path / "out", replace(OPTIONS, device="cpu,cuda"))


def test_starved_experts_are_quantised_counted_and_logged(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def prefer_two(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
        bias.copy_(torch.tensor([9.0, 9.0, 0.0, 0.0]))

    src = edit_source(source, tmp_path / "src", prefer_two)
    with caplog.at_level(logging.WARNING):
        report = quantize_checkpoint(src, tmp_path / "out", OPTIONS)
    counts = {"routed": 2, "mostly_layer": 0, "layer": 2, "all": 0, "none": 0}
    assert report.calibration["experts_by_hessian"] == counts
    assert "'layer': 2" in caplog.text
    starved = [r for r in report.results if ".experts.3." in r.name]
    assert len(starved) == 6
    assert all(r.coverage == "layer" and not r.tokens for r in starved)
    assert all(r.proxy_error < 0.08 for r in starved)


def test_all_tokens_for_every_expert(source: Path, tmp_path: Path, quick_encoder: None) -> None:
    report = quantize_checkpoint(source, tmp_path / "out", replace(OPTIONS, route_all=True))
    assert {(r.coverage, r.tokens) for r in report.results} == {("all", 4 * 128)}


def test_trellis_mtp_is_calibrated_by_its_own_forward(
    source: Path, tmp_path: Path, quick_encoder: None
) -> None:
    options = replace(OPTIONS, mtp="trellis", shim="modelopt")
    report = quantize_checkpoint(source, tmp_path / "out", options)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.config["hybrid_tr3_tail"]["moe_layers"] == [1, 2]
    assert checkpoint.has("model.layers.2.mlp.experts.3.down_proj.rank1.trellis")
    assert not checkpoint.has("model.layers.2.mlp.experts.3.down_proj.weight")
    assert checkpoint.has("model.layers.2.eh_proj.weight")
    gates = [r.tokens for r in report.results if r.name.endswith("gate_proj.rank0")]
    assert sum(gates[:4]) == 2 * 4 * 128
    assert sum(gates[4:]) == 2 * 4 * 127  # the last token of a row has no next one
    shim = checkpoint.config["quantization_config"]
    assert shim["quant_method"] == "modelopt"
    assert "model.layers.*.eh_proj" in shim["exclude_modules"]
    assert not any("experts" in name and "shared" not in name for name in shim["exclude_modules"])


def test_a_dead_layer_needs_no_hessian(source: Path, tmp_path: Path) -> None:
    def kill_inputs(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.1.post_attention_layernorm.weight"].zero_()

    src = edit_source(source, tmp_path / "src", kill_inputs)
    report = quantize_checkpoint(src, tmp_path / "out", OPTIONS)
    assert report.calibration["experts_by_hessian"]["none"] == 4
    assert all(0.05 < result.proxy_error < 0.08 for result in report.results)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"bits": 1.5}, FormatError, "bits: expected a whole number from 2 to 6 .*, got 1"),
        ({"bits": 6.5}, FormatError, "got 7"),
        ({"bits": 7}, FormatError, "got 7"),
        ({"tp": 3}, SliceError, "tp values that work: 1, 2"),
        ({"tp": 0}, SliceError, "tp: expected at least 1"),
        ({"codebook": "mul1"}, FormatError, "expected mcg for rank-sliced experts, got mul1"),
        ({"tp": None, "bits": 8.5}, FormatError, "bits: expected 1 to 8, got 8.5"),
        ({"tp": None, "shim": "modelopt"}, FormatError, "only rank-sliced files have one"),
        ({"tp": None, "slice_mode": "cut"}, FormatError, "slice_mode: 'cut' .*; give a tp"),
        ({"bits": BitPlan({1: (2,) * 4}, {"model.tpyo": 3})}, FormatError, "module 'model.tpyo'"),
        ({"jobs": 0}, FormatError, "jobs: expected at least 1"),
        ({"device": "abacus"}, UnsupportedError, "device: expected cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, UnsupportedError, r"device: expected one of \d+ CUDA devices"),
        ({"mtp": "trellis", "cols": 1}, FormatError, "cols: expected more than the 1 tokens"),
        ({"cols": 10**6}, TextError, "expected at least one window of 1000000"),
    ],
)
def test_options_that_cannot_work(
    source: Path, tmp_path: Path, change: dict[str, Any], error: type[Exl3Error], words: str
) -> None:
    with pytest.raises(error, match=words):
        quantize_checkpoint(source, tmp_path / "out", replace(OPTIONS, **change))
    assert not (tmp_path / "out").exists()


def _drop(name: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del tensors[name]

    return change


def _narrow(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    tensors[name] = tensors[name][:128].clone()


def _set(**keys: Any) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, config: config.update(keys)


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (_set(architectures=["PhiForCausalLM"]), {}, UnsupportedError, "PhiForCausalLM"),
        (
            _set(first_k_dense_replace=2),
            {},
            UnsupportedError,
            "none of its 2 layers has routed experts",
        ),
        (_set(hidden_size=192), {}, SliceError, "hidden_size 192"),
        (_set(quantization_config={"quant_method": "awq"}), {}, UnsupportedError, "'awq'"),
        (_set(quantization_config={"quant_method": "exl3"}), {}, CheckpointError, "already EXL3"),
        (
            _drop("model.layers.1.mlp.experts.1.up_proj.weight"),
            {},
            CheckpointError,
            r"experts\.1\.up_proj\.weight: missing",
        ),
        (_drop("model.norm.weight"), {}, CheckpointError, r"model\.norm\.weight: missing"),
        (_narrow, {}, CheckpointError, r"experts\.1\.up_proj\.weight.*expected .*\[256, 128\]"),
        (
            _set(num_nextn_predict_layers=0),
            {"mtp": "trellis"},
            CheckpointError,
            "mtp 'trellis'",
        ),
    ],
    ids=["arch", "no-moe", "hidden", "awq", "exl3", "expert", "norm", "shape", "mtp"],
)
def test_sources_that_cannot_work(
    source: Path,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None],
    options: dict[str, Any],
    error: type[Exl3Error],
    words: str,
) -> None:
    src = edit_source(source, tmp_path / "src", change)
    with pytest.raises(error, match=words):
        quantize_checkpoint(src, tmp_path / "out", replace(OPTIONS, **options))
    assert not (tmp_path / "out").exists()


def test_nan_weight_is_named_before_work(source: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"

    def poison(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[name][5, 7] = float("nan")

    src = edit_source(source, tmp_path / "src", poison)
    with pytest.raises(CheckpointError, match=rf"'{name}': expected finite values, got 1 NaN"):
        quantize_checkpoint(src, tmp_path / "out", OPTIONS)


def test_overflowing_activation_stops_at_its_layer(source: Path, tmp_path: Path) -> None:
    def overflow(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.0.mlp.down_proj.weight"].fill_(3e38)

    src = edit_source(source, tmp_path / "src", overflow)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp: output: expected finite"):
        quantize_checkpoint(src, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_matrix_that_cannot_be_quantised_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_encoder: None
) -> None:
    def refuse(*args: object, **keys: object) -> None:
        raise FormatError("suh: expected a largest magnitude that fp16 holds")

    monkeypatch.setattr("exl3kit.quantize.linears.quantize_tensors", refuse)
    name = r"model\.layers\.1\.mlp\.experts\.0\.gate_proj"
    with pytest.raises(FormatError, match=rf"one of {name}\.rank0, {name}\.rank1.*: suh: expect"):
        quantize_checkpoint(source, tmp_path / "out", OPTIONS)


def test_output_folder_must_be_new(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="expected an empty or new output folder"):
        quantize_checkpoint(source, tmp_path, OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_full_disk_is_refused_before_work(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="bytes of disk, 1000 are free"):
        quantize_checkpoint(source, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()


def test_pieces_of_rows_and_spilled_activations_change_no_byte_of_two_next_token_layers(
    tmp_path: Path, quick_encoder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = write_tiny_model(tmp_path / "src", replace(SPEC, mtp_layers=2))
    options = replace(OPTIONS, mtp="trellis", dense={"attention": 3})
    for module in ("activations", "experts"):
        monkeypatch.setattr(f"exl3kit.quantize.{module}.PIECE_TOKENS", 128)
    report = quantize_checkpoint(src, tmp_path / "out", options)
    spilled = replace(options, spill=tmp_path / "spill", jobs=4)
    quantize_checkpoint(src, tmp_path / "spilled", spilled)
    assert files(tmp_path / "out") == files(tmp_path / "spilled")
    seen = {r.name.split(".")[2]: r.tokens for r in report.results if "self_attn" in r.name}
    assert seen == {"0": 4 * 128, "1": 4 * 128, "2": 4 * 127, "3": 4 * 126}
