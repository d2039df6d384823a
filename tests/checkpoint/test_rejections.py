"""Every row of the rejection table, R1 to R22, and what goes with it, through public entries only.

An entry is what a user or an engine calls: `open_checkpoint`, `verify_checkpoint`, whose faults are
joined here, `slice_checkpoint`, and `check_runtime`, which an engine asks before it loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3kit import open_checkpoint
from exl3kit.checkpoint.manifest import SHARED_H, SHARED_H_SCHEMA
from exl3kit.checkpoint.runtime_checks import RuntimeLayout, check_runtime
from exl3kit.checkpoint.verify import verify_checkpoint
from exl3kit.errors import Exl3Error
from exl3kit.models.registry import model_map
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.testing.checkpoints import write_r7
from exl3kit.testing.generate import make_rank_sliced
from exl3kit.testing.tiny_configs import tiny_config_of
from tests.checkpoint.test_r7 import BLOCK_KEY as R7_KEY
from tests.checkpoint.test_r7 import WRONG as WRONG_R7
from tests.checkpoint.test_verify import edit

Entry = Callable[[Path], object]
Change = Callable[[Path], object]

STEM = "model.layers.2.mlp.experts"
GATE = f"{STEM}.1.gate_proj.rank0"
VECTOR = torch.ones(256, dtype=torch.float16)
MUL1 = torch.tensor(-2082680531, dtype=torch.int32)


def block(drop: tuple[str, ...] = (), **changes: Any) -> Change:
    """A change of `hybrid_tr3_tail`."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        old = config["hybrid_tr3_tail"]
        new = {key: value for key, value in old.items() if key not in drop} | changes
        path.write_text(json.dumps(config | {"hybrid_tr3_tail": new}))

    return change


def config(**changes: Any) -> Change:
    """A change of config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def table(text: str | None) -> Change:
    """Another bitrate map, or none."""

    def change(folder: Path) -> None:
        path = folder / "tier_bitmap.json"
        path.unlink()
        if text is not None:
            path.write_text(text)

    return change


def tensor(name: str, value: torch.Tensor | None) -> Change:
    """A tensor more, another, or less, in the shard of GATE."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    return lambda folder: edit(folder, f"{GATE}.svh", change)


def nothing(folder: Path) -> None:
    """The checkpoint is right; the engine's or the user's wish is not."""


def opened(folder: Path) -> object:
    return open_checkpoint(folder)


def verified(folder: Path) -> object:
    """ValueError with all faults, so that one kind of test fits both."""
    faults = verify_checkpoint(folder, model_map).faults
    if faults:
        raise ValueError("; ".join(faults))
    return None


def sliced(tp: int) -> Entry:
    return lambda folder: slice_checkpoint(folder, folder / "out", SliceOptions(tp))


LAYOUT = RuntimeLayout(
    tp_size=2,
    moe_tp_size=2,
    num_experts=4,
    hidden_size=256,
    intermediate_size=256,
    dtype=torch.bfloat16,
    max_num_batched_tokens=2048,
    device_type="cuda",
)


def run(**changes: Any) -> Entry:
    """Ask for an engine like LAYOUT with these changes."""

    def entry(folder: Path) -> None:
        manifest = open_checkpoint(folder).manifest
        assert manifest is not None
        check_runtime(manifest, replace(LAYOUT, **changes))

    return entry


@dataclass(frozen=True)
class Case:
    """A row of the table, what is done to a valid checkpoint, and what its refusal must say."""

    row: str
    change: Change
    texts: tuple[str, ...]
    entries: tuple[Entry, ...] = (opened, verified)
    kind: type[Exception] = ValueError


def engine(row: str, texts: tuple[str, ...], kind: type[Exception], **changes: Any) -> Case:
    return Case(row, nothing, texts, (run(**changes),), kind)


def found(row: str, change: Change, *texts: str) -> Case:
    """What lies in tensors, which `open_checkpoint` does not look at."""
    return Case(row, change, texts, (verified,))


TEXT, NONE = ValueError, NotImplementedError
CASES = [
    Case("R1", block(drop=("tp", "bits", "codebook")), ("missing keys: bits, codebook, tp",)),
    Case("R2", block(codebook="mul1"), ("'mul1'", "'mcg'")),
    Case("R3", block(moe_layers=[3, 1]), ("[3, 1]", "[first, last]")),
    Case("R4", block(tensor_schema="layers.{L}.ffn.w1"), ("layers.{L}.ffn.w1",)),
    Case("R5", block(rotation_layout="shared_v2"), ("shared_v2", "per_expert_v1", "shared_h_v1")),
    Case("R6", block(rotation_layout=SHARED_H), ("rotation_layout", "shared_h_tensor_schema")),
    Case("R6", block(shared_h_tensor_schema=SHARED_H_SCHEMA), ("per_expert_v1", "absent")),
    Case("R7", block(bits=3.25), ("3.25", "2..6")),
    Case("R7", block(bits=7), ("got 7", "2..6")),
    Case("R8", block(drop=("k_values",)), ("k_values", "None", "2..6")),
    Case("R8", block(k_values=[3, 3.5]), ("3.5", "2..6")),
    Case("R9", block(drop=("bits_per_expert",)), ("bits_per_expert", "None")),
    Case("R9", block(bits_per_expert="../x.json:k"), ("'../x.json:k'", "bare file name")),
    Case("R10", table(None), ("tier_bitmap.json", "missing")),
    Case("R10", table('{"1": {"k": [3, 3, 3, 3]}}'), ("layer 2", "expected an object, got None")),
    Case("R10", table('{"1": {"k": [3, 3]}}'), ("layer 1", "k must list 4", "got 2 entries")),
    Case("R10", table('{"1": {"k": [3, 3, 3, 6]}}'), ("layer 1", "[6]", "[3, 4, 5]")),
    engine("R11", ("cut for 2", "runs 4", "slice"), TEXT, tp_size=4, moe_tp_size=4),
    engine("R12", ("has 4", "has 16"), TEXT, num_experts=16),
    engine("R13", ("expert parallelism",), NONE, ep_size=2, moe_tp_size=1),
    engine("R13", ("EPLB",), NONE, use_eplb=True),
    engine("R13", ("expert_map",), NONE, has_expert_map=True),
    engine("R13", ("bias",), NONE, has_bias=True),
    engine("R13", ("router weight on input",), NONE, router_weight_on_input=True),
    engine("R13", ("'gelu'",), NONE, activation="gelu"),
    engine("R14", ("max_num_batched_tokens",), TEXT, max_num_batched_tokens=None),
    engine("R15", ("384 / tp 2 = 192", "128", "1, 3"), TEXT, intermediate_size=384),
    engine("R15", ("hidden_size 200", "128"), TEXT, hidden_size=200),
    Case("R15", nothing, ("256 / tp 3", "128", "1, 2"), (sliced(3),)),
    found("R15", config(moe_intermediate_size=384), "384 / tp 2 = 192", "128", "1, 3"),
    found("R16", tensor(f"{STEM}.1.gate_proj.rank2.suh", VECTOR), "rank2.suh", "tp = 2, got 2"),
    found("R16", tensor(f"{STEM}.1.gate_proj.rank01.suh", VECTOR), "rank01.suh", "leading zeros"),
    found("R17", tensor(f"{GATE}.suh", None), "layer 2: 1 tensors are missing", f"{GATE}.suh"),
    found("R18", tensor(f"{GATE}.suh", VECTOR[:128]), f"{GATE}.suh", "[256]", "got", "[128]"),
    found("R18", tensor(f"{GATE}.suh", VECTOR.float()), "float16", "got torch.float32"),
    found("R19", tensor(f"{GATE}.mcg", None), f"{GATE}.mcg", "missing"),
    found("R19", tensor(f"{GATE}.mul1", MUL1), f"{GATE}.mul1", "0x83DCD12D"),
    found("R19", tensor(f"{GATE}.mcg", MUL1), f"{GATE}.mcg", "0x83DCD12D", "0xCBAC1FED"),
    found("R20", tensor(f"{STEM}.shared_h.up_proj.rank0.suh", VECTOR), "shared_h.up_proj.rank0",
          "not allowed with rotation_layout 'per_expert_v1'"),
    engine("R21", ("torch.float32", "bfloat16"), TEXT, dtype=torch.float32),
    found("R22", tensor("model.mtp.mlp.experts.0.up_proj.rank0.suh", VECTOR),
          "model.mtp.mlp.experts.0.up_proj.rank0.suh", "layer index", "found none"),
    # What the table leaves out and the format demands all the same.
    Case("multiplier", block(mcg_multiplier=1), ("mcg_multiplier", "3417055213", "got 1")),
    Case("format", block(format="exl3-trellis-v2"), ("'exl3-trellis-v2'",)),
    Case("types", block(tp=True), ("tp must be an integer", "True")),
    Case("types", block(experts_per_layer="4"), ("experts_per_layer must be an integer", "'4'")),
    Case("two configs", config(text_config={"hybrid_tr3_tail": {}}), ("text_config differ",)),
    engine("data parallel", ("4 ranks", "data parallelism"), NONE, moe_tp_size=4),
    found("experts", block(experts_per_layer=2, bits=3), "has 2", "has 4"),
    found("layers", block(moe_layers=[0, 3], bits=3), "layers [0] have no routed experts"),
    Case("nothing to do", nothing, ("already cut for tp 2",), (sliced(2),)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.row)
def test_row_is_reached(sliced_folder: Path, case: Case) -> None:
    case.change(sliced_folder)
    for entry in case.entries:
        with pytest.raises(case.kind) as error:
            entry(sliced_folder)
        assert entry is verified or isinstance(error.value, Exl3Error)
        assert all(text in str(error.value) for text in case.texts), str(error.value)


def test_every_row_has_a_case() -> None:
    assert {f"R{number}" for number in range(1, 23)} <= {case.row for case in CASES}


def test_nothing_else_is_refused(sliced_folder: Path) -> None:
    """The checkpoint that the cases change passes every entry they use."""
    opened(sliced_folder)
    verified(sliced_folder)
    run()(sliced_folder)
    with pytest.raises(Exl3Error):  # its slices were made one by one
        sliced(1)(sliced_folder)


def test_own_vectors_beside_shared_ones(plain_folder: Path, tmp_path: Path) -> None:
    """R20, the other way round."""
    folder = make_rank_sliced(plain_folder, tmp_path / "m", 3, 2, (1, 3), rotation_layout=SHARED_H)
    tensor(f"{GATE}.suh", VECTOR)(folder)
    with pytest.raises(ValueError, match=rf"'{GATE}.suh'.*'shared_h_v1' stores it once"):
        verified(folder)


@pytest.mark.parametrize("wrong, text", WRONG_R7)
def test_r7_blocks(tmp_path: Path, wrong: Any, text: str) -> None:
    """The other dialect's metadata: refused when opened, and one fault among others."""
    folder = write_r7(tmp_path / "m", tiny_config_of("glm4_moe", num_experts=2))
    quantization = {"quant_method": "modelopt", R7_KEY: wrong}
    config(quantization_config=quantization)(folder)
    for entry in (opened, verified):
        with pytest.raises(ValueError) as error:
            entry(folder)
        assert text in str(error.value)
