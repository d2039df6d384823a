from __future__ import annotations

from typing import Any

import pytest
import torch

import exl3kit
from exl3kit.errors import Exl3Error, FormatError
from exl3kit.format.spec import Codebook, check_bits, marker_value
from exl3kit.format.tensors import Exl3Tensor, make_marker


def fields(**changes: Any) -> dict[str, Any]:
    """A valid 128 x 256 mcg linear of 3 bits, with fields replaced."""
    valid = {
        "trellis": torch.zeros(8, 16, 48, dtype=torch.int16),
        "suh": torch.ones(128, dtype=torch.float16),
        "svh": torch.ones(256, dtype=torch.float16),
        "mcg": make_marker(Codebook.MCG),
    }
    return valid | changes


def test_properties_and_public_name() -> None:
    linear = exl3kit.Exl3Tensor(**fields(bias=torch.zeros(256)))
    assert (linear.in_features, linear.out_features, linear.bits) == (128, 256, 3)
    assert linear.codebook == "mcg"
    assert linear.bias is not None and linear.bias.dtype == torch.float16
    assert sorted(linear.tensors()) == ["bias", "mcg", "suh", "svh", "trellis"]
    assert linear.tensors()["mcg"].shape == ()


def test_marker_values() -> None:
    assert marker_value(Codebook.MCG) == -877912083
    assert marker_value(Codebook.MUL1) == -2082680531
    assert marker_value(Codebook.THREE_INST) is None


def test_no_marker_is_3inst_and_half_rates_need_mul1() -> None:
    assert Exl3Tensor(**fields(mcg=None)).codebook is Codebook.THREE_INST
    half = torch.zeros(8, 16, 24, dtype=torch.int16)
    mul1 = make_marker(Codebook.MUL1)
    assert Exl3Tensor(**fields(trellis=half, mcg=None, mul1=mul1)).bits == 1.5
    with pytest.raises(FormatError, match=r"1\.5 exists with codebook mul1 only"):
        Exl3Tensor(**fields(trellis=half))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trellis": torch.zeros(8, 16, 48)}, r"trellis: expected torch\.int16 with 3"),
        ({"trellis": torch.zeros(8, 48, dtype=torch.int16)}, "3 dimensions"),
        ({"trellis": torch.zeros(8, 16, 50, dtype=torch.int16)}, "got 50"),
        ({"trellis": torch.zeros(4, 16, 48, dtype=torch.int16)}, "in-features.*128, got 64"),
        ({"trellis": torch.zeros(8, 0, 48, dtype=torch.int16)}, "out-features.*128, got 0"),
        ({"suh": torch.ones(256, dtype=torch.float16)}, r"suh: expected .*\(128,\), got .*256"),
        ({"svh": torch.ones(256)}, r"svh: expected torch\.float16"),
        ({"svh": torch.full((256,), float("nan")).half()}, "svh: expected finite.*nan at 0"),
        ({"suh": torch.full((128,), float("inf")).half()}, "suh: expected finite.*inf at 0"),
        ({"mcg": torch.tensor(7, dtype=torch.int32)}, "0xCBAC1FED, got 0x00000007"),
        ({"mcg": torch.tensor([1, 2], dtype=torch.int32)}, "one int32 element"),
        ({"mcg": torch.tensor(-877912083)}, r"one int32 element, got torch\.int64"),
        ({"mul1": make_marker(Codebook.MUL1)}, "at most one codebook marker"),
        ({"bias": torch.zeros(128, dtype=torch.float16)}, r"bias: expected .*\(256,\)"),
    ],
)
def test_bad_fields_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Exl3Tensor(**fields(**changes))


def test_name_is_in_front_of_the_field() -> None:
    with pytest.raises(FormatError, match=r"^layer\.7\.suh: "):
        Exl3Tensor(**fields(suh=torch.ones(1)), name="layer.7")


@pytest.mark.parametrize("bits", [0, 9, 4.5, 3.25, True, "3", float("nan")])
def test_rates_the_format_lacks(bits: Any) -> None:
    with pytest.raises(FormatError, match="expected one of"):
        check_bits(bits, "mul1")


def test_errors_are_both_kinds() -> None:
    assert issubclass(FormatError, ValueError) and issubclass(FormatError, Exl3Error)
