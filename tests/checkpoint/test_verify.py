from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3kit.checkpoint.manifest import SHARED_H
from exl3kit.checkpoint.verify import VerifyReport, verify_checkpoint
from exl3kit.checkpoint.writer import CHECKSUMS_NAME, CheckpointWriter
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models.registry import model_map
from exl3kit.testing.checkpoints import write_plain
from exl3kit.testing.generate import make_rank_sliced, random_exl3
from exl3kit.testing.tiny_configs import tiny_config_of

EXPERT = "model.layers.2.mlp.experts.1"
Tensors = dict[str, torch.Tensor]


def verify(path: Path) -> VerifyReport:
    return verify_checkpoint(path, model_map)


def edit(folder: Path, name: str, change: Callable[[Tensors], object]) -> None:
    """Change the shard that holds `name`, and drop the digests that would notice."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    (folder / "model.safetensors.index.json").unlink()
    (folder / CHECKSUMS_NAME).unlink()


def test_good_checkpoints_have_no_faults(plain_folder: Path, sliced_folder: Path) -> None:
    plain, sliced = verify(plain_folder), verify(sliced_folder)
    assert plain.faults == () and plain.dialect == "plain"
    assert sliced.faults == () and sliced.is_ok
    assert sliced.num_exl3_linears == 72 and sliced.num_files > 1
    assert sliced.num_digests == sliced.num_files + 6  # index, config, map, three tokenizer files


@pytest.mark.parametrize("bits", [3, (2, 6, 2, 2)])
def test_shared_layout_has_no_faults(
    plain_folder: Path, tmp_path: Path, bits: int | tuple[int, ...]
) -> None:
    out = make_rank_sliced(plain_folder, tmp_path / "m", bits, 2, (1, 3), rotation_layout=SHARED_H)
    assert verify(out).faults == ()


def test_ordinary_linears_may_stand_for_dense_ones(plain_folder: Path, tmp_path: Path) -> None:
    """Decided module by module: one attention linear as EXL3."""
    name = "model.layers.0.self_attn.q_proj"
    source = load_file(plain_folder / "model.safetensors")
    del source[f"{name}.weight"]
    linear = random_exl3(256, 256, 2.5, "mul1", name=name)
    config = json.loads((plain_folder / "config.json").read_text())
    with CheckpointWriter(tmp_path / "m") as writer:
        for key, tensor in source.items():
            writer.add(key, tensor)
        for field, tensor in linear.tensors().items():
            writer.add(f"{name}.{field}", tensor)
        writer.finish(config)
    report = verify(tmp_path / "m")
    assert (report.dialect, report.faults) == ("ordinary", ())
    edit(tmp_path / "m", f"{name}.svh", lambda t: t.update({f"{name}.svh": torch.ones(128).half()}))
    (fault,) = verify(tmp_path / "m").faults
    assert f"{name}.svh" in fault and "[256]" in fault and "[128]" in fault


def _set(name: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


NAN_VECTOR = torch.ones(256, dtype=torch.float16)
NAN_VECTOR[7] = math.inf
GATE = f"{EXPERT}.gate_proj.rank0"
FAULTS: list[tuple[str, Callable[[Tensors], object], list[str]]] = [
    ("missing", lambda t: t.pop(f"{GATE}.svh"), ["layer 2: 1 tensors", f"{GATE}.svh"]),
    ("no marker", lambda t: t.pop(f"{GATE}.mcg"), [f"{GATE}.mcg"]),
    ("extra", _set("model.stray", torch.ones(2)), ["1 tensors that the model", "model.stray"]),
    ("nan", _set(f"{GATE}.suh", NAN_VECTOR), [f"{GATE}.suh", "inf at 7"]),
    ("dtype", _set(f"{GATE}.suh", torch.ones(256)), [f"{GATE}.suh", "float16", "float32"]),
    (
        "bits",
        _set(f"{GATE}.trellis", torch.zeros(16, 8, 48, dtype=torch.int16)),
        [f"{GATE}.trellis", "[16, 8, 64]", "[16, 8, 48]"],
    ),
    ("marker", _set(f"{GATE}.mcg", torch.tensor(3, dtype=torch.int32)), ["0x00000003"]),
    (
        "integers for a norm",
        _set("model.norm.weight", torch.ones(256).long()),
        ["'model.norm.weight': expected one of torch.bfloat16", "got torch.int64"],
    ),
    (
        "exponents for a norm",
        _set("model.norm.weight", torch.ones(256).to(torch.float8_e8m0fnu)),
        ["'model.norm.weight': expected one of torch.bfloat16", "got torch.float8_e8m0fnu"],
    ),
    ("rank", _set(f"{EXPERT}.gate_proj.rank2.suh", NAN_VECTOR), ["rank2.suh"]),
]


@pytest.mark.parametrize("case, change, texts", FAULTS, ids=[case[0] for case in FAULTS])
def test_faults_name_the_tensor(
    sliced_folder: Path, case: str, change: Callable[[Tensors], object], texts: list[str]
) -> None:
    edit(sliced_folder, f"{GATE}.svh", change)
    text = "\n".join(verify(sliced_folder).faults)
    assert all(part in text for part in texts), text


def test_fp8_scales_are_no_integers(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "m", tiny_config_of("deepseek_v3"), fp8=True)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    edit(folder, name, lambda t: t.update({name: t[name].int() + 1}))
    (fault,) = verify(folder).faults
    assert fault == f"tensor {name!r}: expected floating-point scales, got torch.int32"


def test_plain_tensors_are_checked_too(sliced_folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit(sliced_folder, name, lambda t: t.update({name: torch.ones(512, 128)}))
    (fault,) = verify(sliced_folder).faults
    assert name in fault and "[512, 256]" in fault and "[512, 128]" in fault


def test_all_faults_are_listed(sliced_folder: Path) -> None:
    def break_three(tensors: Tensors) -> None:
        tensors[f"{GATE}.suh"] = NAN_VECTOR
        tensors[f"{GATE}.mcg"] = torch.tensor(1, dtype=torch.int32)
        del tensors[f"{GATE}.svh"]

    edit(sliced_folder, f"{GATE}.svh", break_three)
    assert len(verify(sliced_folder).faults) == 3


def test_changed_byte_is_found_by_digest(sliced_folder: Path) -> None:
    file = next(sliced_folder.glob("model-00002-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (fault,) = verify(sliced_folder).faults
    assert file.name in fault and "sha256" in fault


@pytest.mark.parametrize("how", ["binary", "upper", "carriage returns"])
def test_digests_as_other_tools_write_them(sliced_folder: Path, how: str) -> None:
    path = sliced_folder / CHECKSUMS_NAME
    lines = path.read_text().splitlines()
    if how == "binary":
        lines = [line.replace("  ", " *") for line in lines]
    elif how == "upper":
        lines = [line[:64].upper() + line[64:] for line in lines]
    path.write_bytes(("\r\n" if how == "carriage returns" else "\n").join(lines).encode())
    report = verify(sliced_folder)
    assert report.is_ok and report.num_digests == len(lines)
    path.write_text("0" * 63 + "  config.json\n")
    (fault,) = verify(sliced_folder).faults
    assert "expected '<sha256>  <file>' lines" in fault


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nowhere"])
def test_digests_that_are_no_file(sliced_folder: Path, kind: str) -> None:
    """Something is there that was meant to hold them: not the same as no digests."""
    path = sliced_folder / CHECKSUMS_NAME
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
    (fault,) = verify(sliced_folder).faults
    assert fault.startswith(f"{path}: cannot read")


@pytest.mark.parametrize("name", ["tokenizer.json", CHECKSUMS_NAME])
def test_file_that_cannot_be_read_is_a_fault(sliced_folder: Path, name: str) -> None:
    (sliced_folder / name).unlink()
    (sliced_folder / name).symlink_to("/proc/self/mem")  # a file whose first byte is none
    (fault,) = verify(sliced_folder).faults
    assert fault.startswith(f"{sliced_folder / name}: cannot read")


def test_truncated_and_missing_shards(sliced_folder: Path) -> None:
    first, second = sorted(sliced_folder.glob("*.safetensors"))[:2]
    first.write_bytes(first.read_bytes()[:-5])
    second.unlink()
    text = "\n".join(verify(sliced_folder).faults)
    assert f"{first}: truncated" in text and f"missing shards: {second.name}" in text


@pytest.mark.parametrize(
    "key, value, texts",
    [
        ("experts_per_layer", 2, ["manifest has 2", "model has 4"]),
        ("moe_layers", [0, 3], ["layers [0]"]),
        ("codebook", "mul1", ["'mul1'"]),
    ],
)
def test_metadata_that_contradicts_the_model(
    sliced_folder: Path, key: str, value: object, texts: list[str]
) -> None:
    path = sliced_folder / "config.json"
    config = json.loads(path.read_text())
    config["hybrid_tr3_tail"] |= {"bits": 3, key: value}
    path.write_text(json.dumps(config))
    text = "\n".join(verify(sliced_folder).faults)
    assert all(part in text for part in texts), text
    assert "does not have" not in text  # one cause, not a list of its consequences


def test_width_that_cannot_be_cut(sliced_folder: Path) -> None:
    path = sliced_folder / "config.json"
    config = json.loads(path.read_text()) | {"moe_intermediate_size": 384}
    path.write_text(json.dumps(config))
    text = "\n".join(verify(sliced_folder).faults)
    assert "moe_intermediate_size 384 / tp 2 = 192" in text and "1, 3" in text


def test_draft_layer_that_was_left_out(plain_folder: Path, tmp_path: Path) -> None:
    """Tools that load through the transformers class drop it without a word."""
    tensors = load_file(plain_folder / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.startswith("model.layers.3.")}
    with CheckpointWriter(tmp_path / "m") as writer:
        for name, tensor in kept.items():
            writer.add(name, tensor)
        writer.finish(json.loads((plain_folder / "config.json").read_text()))
    (fault,) = verify(tmp_path / "m").faults
    assert fault.startswith(f"layer 3: {len(tensors) - len(kept)} tensors are missing")


def test_absurd_model_is_one_fault_not_a_list(sliced_folder: Path) -> None:
    path = sliced_folder / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 4096, "n_routed_experts": 4096}
    path.write_text(json.dumps(config))
    text = "\n".join(verify(sliced_folder).faults)
    assert "describes at least 50" in text and "missing:" not in text


def test_what_cannot_be_judged_raises(tmp_path: Path, sliced_folder: Path) -> None:
    with pytest.raises(CheckpointError):
        verify(tmp_path / "nowhere")
    path = sliced_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["Llama"]}))
    with pytest.raises(UnsupportedError, match="Glm4MoeForCausalLM"):
        verify(sliced_folder)


_PEAK = """
import resource, sys
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.models.registry import model_map
report = verify_checkpoint(sys.argv[1], model_map, jobs=4)
assert report.num_digests == 3, report
print(report.num_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_memory_is_bounded_whatever_the_size(tmp_path: Path) -> None:
    """2 GiB in three files at once, holes but for the headers: below 1 GiB, torch included."""
    rows = 2**20
    (tmp_path / "config.json").write_text(json.dumps(tiny_config_of("llama")))
    sparse: list[tuple[str, str, list[int]]] = [
        ("model.embed_tokens.weight", "BF16", [rows, 512]),
        ("lm_head.trellis", "I16", [512 // 16, rows // 16, 16 * 8]),
        ("model.layers.0.mlp.up_proj.weight", "F32", [rows // 2, 256]),
    ]
    sums = []
    for number, (name, dtype, shape) in enumerate(sparse):
        size = math.prod(shape) * (4 if dtype == "F32" else 2)
        header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}})
        file = tmp_path / f"big-{number}.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
        os.truncate(file, 8 + len(header) + size)
        sums.append(f"{'0' * 64}  {file.name}\n")
    (tmp_path / CHECKSUMS_NAME).write_text("".join(sums))
    command = [sys.executable, "-c", _PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_bytes, peak = map(int, done.stdout.split())
    assert num_bytes == 2 * 2**30 and peak < 2**30
