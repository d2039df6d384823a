from __future__ import annotations

import hashlib

import pytest
import torch

from exl3kit.format.decode import decode_inner
from exl3kit.format.spec import Codebook
from exl3kit.testing.compare import assert_three_gates
from tests import golden

DENSE = [(2, Codebook.MUL1), (3, Codebook.MCG), (4, Codebook.THREE_INST)]


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS)
def test_inner_matrix_has_the_digest_of_exllamav3(bits: float, codebook: Codebook) -> None:
    linear = golden.exl3_tensor(bits, codebook)
    assert (linear.bits, linear.codebook) == (bits, codebook)
    inner = decode_inner(linear.trellis, linear.codebook).contiguous().numpy()
    expected = golden.combination(bits, codebook)["inner_sha256"]
    assert hashlib.sha256(inner.astype("<f2").tobytes()).hexdigest() == expected


@pytest.mark.parametrize(("bits", "codebook"), DENSE)
def test_dense_weight_agrees_with_exllamav3(bits: int, codebook: Codebook) -> None:
    stored = golden.tensors()[f"A.{golden.tag(bits, codebook)}.w"]
    dense = golden.exl3_tensor(bits, codebook).dequantize(torch.float64)
    assert_three_gates(stored, dense, "golden_dense")


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS)
def test_product_with_dense_weight_agrees_with_exllamav3_gemm(
    bits: float, codebook: Codebook
) -> None:
    x = golden.tensors()["A.x"].double()
    dense = golden.exl3_tensor(bits, codebook).dequantize(torch.float64)
    rows = [m for m in (1, 5, 33) if f"A.{golden.tag(bits, codebook)}.y{m}" in golden.tensors()]
    assert rows
    for m in rows:
        stored = golden.tensors()[f"A.{golden.tag(bits, codebook)}.y{m}"]
        assert_three_gates(stored, x[:m] @ dense, "golden_gemm", f"y{m}")


def test_dequantize_dtypes_agree() -> None:
    linear = golden.exl3_tensor(3, Codebook.MCG)
    truth = linear.dequantize(torch.float64)
    for dtype, tolerance in (
        (torch.float32, "float32"),
        (torch.float16, "float16"),
        (torch.bfloat16, "bfloat16"),
    ):
        dense = linear.dequantize(dtype)
        assert dense.dtype == dtype
        assert_three_gates(dense, truth, tolerance)
