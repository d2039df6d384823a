"""Every refusal of the slicer: what it says, and that nothing was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.errors import CheckpointError, Exl3Error, FormatError, SliceError
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.testing.generate import make_ordinary, make_rank_sliced, random_exl3
from exl3kit.testing.tiny_model import TinyGlm4Moe, write_tiny_model
from tests.slicing.conftest import Tensors, rewrite

EXPERT = "model.layers.1.mlp.experts.1"
UP = f"{EXPERT}.up_proj"


def refused(source: Path, out: Path, options: SliceOptions, match: str) -> Exl3Error:
    with pytest.raises(Exl3Error, match=match) as caught:
        slice_checkpoint(source, out, options)
    assert not out.exists()
    return caught.value


@pytest.mark.parametrize("codebook, found", [("mul1", r"got mul1 \(tensor '.*\.mul1'\)"),
                                             ("3inst", r"got 3inst \(no '.*\.mcg'\)")])  # fmt: skip
def test_other_codebooks(plain: Path, tmp_path: Path, codebook: str, found: str) -> None:
    source = make_ordinary(plain, tmp_path / "m", 3, codebook)
    error = refused(source, tmp_path / "o", SliceOptions(2), found)
    assert isinstance(error, SliceError)
    assert "exllamav3 >= 1.0" in str(error) and "--codebook mcg" in str(error)


def test_half_bits_are_mul1(plain: Path, tmp_path: Path) -> None:
    source = make_ordinary(plain, tmp_path / "m", 3, encode=_encoder(2.5, "mul1"))
    refused(source, tmp_path / "o", SliceOptions(2), "codebook mcg only, got mul1")


@pytest.mark.parametrize("bits", [1, 8])
def test_bits_the_format_lacks(plain: Path, tmp_path: Path, bits: int) -> None:
    source = make_ordinary(plain, tmp_path / "m", bits)
    text = rf"experts\.0\.gate_proj\.trellis': a rank-sliced expert has 2 to 6 bits, got {bits}"
    refused(source, tmp_path / "o", SliceOptions(2), text)


@pytest.mark.parametrize(
    "tp, text",
    [
        (3, r"512 / tp 3 = 170.667 must be a multiple of 128; tp values that work: 1, 2, 4"),
        (8, r"512 / tp 8 = 64 must be a multiple"),
        (0, r"tp: expected an integer 1..4096, got 0"),
        (-2, r"tp: expected an integer 1..4096, got -2"),
        (2**70, r"tp: expected an integer 1..4096"),
        (True, r"got True"),
        ("2", r"got '2'"),
        (2.0, r"got 2.0"),
        (None, r"got None"),
    ],
)
def test_tp_that_cannot_be(ordinary: Path, tmp_path: Path, tp: Any, text: str) -> None:
    assert isinstance(refused(ordinary, tmp_path / "o", SliceOptions(tp), text), SliceError)


@pytest.mark.parametrize("key", ["layout", "shim"])
def test_option_that_is_none(ordinary: Path, tmp_path: Path, key: str) -> None:
    wrong: dict[str, Any] = {key: "foo"}
    refused(
        ordinary, tmp_path / "o", SliceOptions(2, **wrong), f"{key}: expected one of None, .*foo"
    )


def test_plain_and_unknown_sources(plain: Path, ordinary: Path, tmp_path: Path) -> None:
    error = refused(
        plain, tmp_path / "o", SliceOptions(2), "expected an EXL3 checkpoint, got a plain one"
    )
    assert "exl3kit quantize" in str(error)
    refused(tmp_path / "x", tmp_path / "o", SliceOptions(2), "found none")
    other = rewrite(ordinary, tmp_path / "m", config={"architectures": ["Nothing"]})
    refused(other, tmp_path / "o", SliceOptions(2), "got 'Nothing'")


def test_exl3_outside_the_experts_only(plain: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj"

    def change(tensors: Tensors) -> None:
        del tensors[f"{name}.weight"]
        linear = random_exl3(256, 256, 4, name=name)
        tensors |= {f"{name}.{field}": tensor for field, tensor in linear.tensors().items()}

    source = rewrite(plain, tmp_path / "m", change)
    refused(source, tmp_path / "o", SliceOptions(2), "none of its routed experts is EXL3")


def test_nothing_to_change(ordinary: Path, tmp_path: Path) -> None:
    slice_checkpoint(ordinary, tmp_path / "two", SliceOptions(2))
    text = r"already cut for tp 2 in layout per_expert_v1; nothing to do"
    refused(tmp_path / "two", tmp_path / "o", SliceOptions(2), text)
    refused(tmp_path / "two", tmp_path / "o", SliceOptions(2, "per_expert"), text)


def test_slices_quantised_one_by_one_cannot_be_merged(plain: Path, tmp_path: Path) -> None:
    source = make_rank_sliced(plain, tmp_path / "m", 3, 4, (1, 2))
    error = refused(source, tmp_path / "o", SliceOptions(2), "cannot be joined")
    first = "model.layers.1.mlp.experts.0.gate_proj"
    assert str(error).startswith(
        f"tensor '{first}.rank1.suh' differs from '{first}.rank0.suh': slices that were quantised"
    )
    assert "as it is: with --tensor-parallel-size 1, 2, 4 a rank" in str(error)
    assert "expansion" in str(error)
    assert "quantise the model again with --tp 2" in str(error)


def test_one_vector_that_differs_is_enough(ordinary: Path, tmp_path: Path) -> None:
    """The last of all: every expert is looked at."""
    slice_checkpoint(ordinary, tmp_path / "four", SliceOptions(4))
    name = "model.layers.2.mlp.experts.2.down_proj.rank3.svh"

    def change(tensors: Tensors) -> None:
        tensors[name][-1] = torch.nextafter(tensors[name][-1], torch.tensor(9.0).half())

    source = rewrite(tmp_path / "four", tmp_path / "m", change)
    refused(source, tmp_path / "o", SliceOptions(2), f"tensor '{name}' differs")


def test_shared_layout_needs_equal_vectors(ordinary: Path, tmp_path: Path) -> None:
    error = refused(ordinary, tmp_path / "o", SliceOptions(2, "shared_h"), "use layout per_expert")
    assert "experts.1.gate_proj.suh' differs from" in str(error)


MOVED = random_exl3(512, 256, 5, seed=3)
BAD: list[tuple[str, Callable[[Tensors], object], type[Exl3Error], str]] = [
    ("missing", lambda t: t.pop(f"{UP}.svh"), CheckpointError, rf"1 tensors are missing: {UP}.svh"),
    ("extra", lambda t: t.update({f"{UP}.su": torch.ones(2)}), CheckpointError,
     rf"1 tensors that no EXL3 expert has, first '{UP}.su'"),
    ("bias", lambda t: t.update({f"{UP}.bias": torch.ones(512).half()}), SliceError, "has no bias"),
    ("dtype", lambda t: t.update({f"{UP}.suh": torch.ones(256)}), CheckpointError,
     rf"{UP}.suh': expected torch.float16 \[256\], got torch.float32"),
    ("shape", lambda t: t.update({f"{UP}.suh": torch.ones(128).half()}), CheckpointError,
     rf"{UP}.suh': expected torch.float16 \[256\], got torch.float16 \[128\]"),
    ("marker", lambda t: t.update({f"{UP}.mcg": torch.tensor(7, dtype=torch.int32)}), FormatError,
     rf"{UP}.mcg: expected marker value 0xCBAC1FED, got 0x00000007"),
    ("both markers", lambda t: t.update({f"{UP}.mul1": t[f"{UP}.mcg"]}), SliceError, "got mul1"),
    ("no marker", lambda t: t.pop(f"{UP}.mcg"), SliceError, f"got 3inst .no '{UP}.mcg'"),
    ("bits in an expert", lambda t: t.update({f"{EXPERT}.down_proj.trellis": MOVED.trellis}),
     SliceError, rf"{EXPERT}: .* one bitrate, got gate_proj 4, up_proj 4, down_proj 5"),
    ("half a layer", lambda t: t.pop(f"{UP}.trellis"), SliceError,
     rf"layer 1: 1 of 9 expert linears are not EXL3, first '{UP}'"),
]  # fmt: skip


@pytest.mark.parametrize("case, change, kind, text", BAD, ids=[case[0] for case in BAD])
def test_bad_tensors(
    ordinary: Path,
    tmp_path: Path,
    case: str,
    change: Callable[[Tensors], object],
    kind: type[Exl3Error],
    text: str,
) -> None:
    source = rewrite(ordinary, tmp_path / "m", change)
    assert isinstance(refused(source, tmp_path / "o", SliceOptions(2), text), kind)


def test_layers_with_a_gap(tmp_path: Path) -> None:
    spec = TinyGlm4Moe(moe_intermediate_size=256, num_experts=1, top_k=1, num_layers=4)
    plain = write_tiny_model(tmp_path / "plain", spec)
    source = make_ordinary(plain, tmp_path / "whole", 2)
    dense, stem = open_checkpoint(plain), "model.layers.2.mlp.experts."

    def change(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith(stem)]:
            del tensors[name]
        tensors |= {n: dense.tensor(n) for n in dense.names() if n.startswith(stem)}

    gap = rewrite(source, tmp_path / "m", change)
    refused(gap, tmp_path / "o", SliceOptions(2), "must be contiguous, got 1 to 3 without 2")


def test_layers_that_have_no_experts_in_the_model(ordinary: Path, tmp_path: Path) -> None:
    """As when the next-token layer was struck from the config; verify refuses such a file too."""
    slice_checkpoint(ordinary, tmp_path / "two", SliceOptions(2))
    source = rewrite(tmp_path / "two", tmp_path / "m", config={"num_nextn_predict_layers": 0})
    with pytest.raises(SliceError, match=r"moe_layers: layers \[2\] have no routed experts"):
        slice_checkpoint(source, tmp_path / "o", SliceOptions(4))
    assert not (tmp_path / "o").exists()


def test_map_that_disagrees_with_the_trellises(ordinary: Path, tmp_path: Path) -> None:
    slice_checkpoint(ordinary, tmp_path / "m", SliceOptions(2))
    table = tmp_path / "m" / "tier_bitmap.json"
    table.write_text(table.read_text().replace("4", "3"))
    text = r"experts\.1\.gate_proj\.rank0\.trellis': expected torch.int16 \[16, 16, 48\], got"
    refused(tmp_path / "m", tmp_path / "o", SliceOptions(4), text)


def test_output_that_is_taken(ordinary: Path, tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "mine").write_text("keep")
    with pytest.raises(CheckpointError, match="found mine; name another folder"):
        slice_checkpoint(ordinary, tmp_path / "o", SliceOptions(2))
    with pytest.raises(CheckpointError, match="expected an empty or new output folder"):
        slice_checkpoint(ordinary, ordinary, SliceOptions(2))
    assert (tmp_path / "o" / "mine").read_text() == "keep"


def _encoder(bits: float, codebook: str) -> Callable[[torch.Tensor, str], Exl3Tensor]:
    def encode(weight: torch.Tensor, name: str) -> Exl3Tensor:
        return random_exl3(weight.shape[0], weight.shape[1], bits, codebook, name=name)

    return encode
