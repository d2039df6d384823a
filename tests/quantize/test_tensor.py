"""`quantize_tensor`, the whole way: exllamav3's bytes and quality, properties, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import exl3kit
from exl3kit.errors import FormatError
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.quantize.stats import TensorStats, proxy_error
from exl3kit.quantize.tensor import quantize_tensor, quantize_tensors
from exl3kit.testing.compare import assert_bitwise_equal
from tests import golden
from tests.quantize import cases


def quantize_golden(
    bits: int | float, codebook: Codebook, scaled_hessian: bool
) -> tuple[Exl3Tensor, TensorStats]:
    """The golden matrix with the golden signs and g."""
    return quantize_tensor(
        cases.weight(),
        cases.hessian(),
        bits,
        codebook,
        signs=cases.signs(),
        scale=golden.combination(bits, codebook)["g_scale"],
        scaled_hessian=scaled_hessian,
    )


def same_bytes(left: Exl3Tensor, right: Exl3Tensor) -> None:
    for field, tensor in left.tensors().items():
        assert_bitwise_equal(tensor, right.tensors()[field], field)


@pytest.mark.parametrize(
    ("bits", "codebook"),
    [(1, Codebook.THREE_INST), (3, Codebook.MCG), (3, Codebook.MUL1), (2.5, Codebook.MUL1)],
)
def test_golden_linear_bit_for_bit(bits: int | float, codebook: Codebook) -> None:
    """With exllamav3's own feedback we write its bytes.

    From 3.5 bits up one target that rounds the other way changes all that follow, and the proxy
    error scatters around exllamav3's by 4 %: benchmarks/results/encode.md.
    """
    tensor, stats = quantize_golden(bits, codebook, scaled_hessian=False)
    same_bytes(tensor, golden.exl3_tensor(bits, codebook))
    expected = golden.combination(bits, codebook)["proxy_err"]
    assert stats.proxy_error == pytest.approx(expected, rel=1e-4)
    assert not stats.fallback


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS, ids=lambda v: str(v))
def test_golden_quality(bits: int | float, codebook: Codebook) -> None:
    """At exllamav3's signs and g our proxy error is a quarter and more below its."""
    tensor, stats = quantize_golden(bits, codebook, scaled_hessian=True)
    assert (tensor.bits, tensor.codebook) == (bits, codebook)
    assert stats.proxy_error < 0.8 * golden.combination(bits, codebook)["proxy_err"]


def test_stats_are_those_of_the_stored_tensor() -> None:
    weight, hessian = cases.random_case(128, 128)
    tensor, stats = quantize_tensor(weight, hessian, 2)
    dense = tensor.dequantize(torch.float64)
    assert stats.proxy_error == pytest.approx(proxy_error(weight, dense, hessian), rel=1e-9)
    assert stats["proxy_error"] == stats.proxy_error
    assert stats["scale"] == stats.scale
    with pytest.raises(KeyError):
        stats["keys"]


def test_public_name() -> None:
    assert exl3kit.quantize_tensor is quantize_tensor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_of_the_weight_does_not_matter(dtype: torch.dtype) -> None:
    weight, hessian = cases.random_case(128, 128)
    exact = weight.to(torch.float16).to(torch.bfloat16)  # held by all three
    tensor, _ = quantize_tensor(exact.to(dtype), hessian, 2, scale=1.0)
    same_bytes(tensor, quantize_tensor(exact.float(), hessian, 2, scale=1.0)[0])


@pytest.mark.parametrize("factor", [2.0**-11, 1 / 513, 1e12])
def test_scale_of_the_hessian_does_not_matter(factor: float) -> None:
    weight, hessian = cases.random_case(128, 128)
    _, one = quantize_tensor(weight, hessian.double(), 3, scale=1.0)
    _, other = quantize_tensor(weight, hessian.double() * factor, 3, scale=1.0)
    assert other.proxy_error == pytest.approx(one.proxy_error, rel=1e-3)


def test_seed_decides_the_signs_and_the_bytes() -> None:
    weight, hessian = cases.random_case(128, 128)
    first, again, other = (
        quantize_tensor(weight, hessian, 2, scale=1.0, seed=seed)[0] for seed in (1, 1, 2)
    )
    same_bytes(first, again)
    assert not torch.equal(first.suh.sign(), other.suh.sign())


def test_threads_do_not_change_the_bytes() -> None:
    weight, hessian = cases.random_case(128, 128)
    threads = torch.get_num_threads()
    try:
        made = []
        for count in (1, 3):
            torch.set_num_threads(count)
            made.append(quantize_tensor(weight, hessian, 3, scale=1.0)[0])
    finally:
        torch.set_num_threads(threads)
    same_bytes(*made)


def test_batch_gives_what_single_calls_give() -> None:
    """Also where only some matrices have a Hessian."""
    inputs = [cases.random_case(128, 128, seed) for seed in range(3)]
    weights = [weight for weight, _ in inputs]
    hessians = [inputs[0][1], None, inputs[2][1]]
    batch = quantize_tensors(weights, hessians, 2, seeds=[4, 5, 6])
    for i, (tensor, stats) in enumerate(batch):
        single, expected = quantize_tensor(weights[i], hessians[i], 2, seed=4 + i)
        same_bytes(tensor, single)
        assert stats == expected


def test_hessian_and_feedback_help() -> None:
    weight, hessian = cases.random_case(256, 128)
    with_hessian, _ = quantize_tensor(weight, hessian, 2, scale=1.0)
    without, stats = quantize_tensor(weight, None, 2, scale=1.0)
    assert stats.fallback
    errors = [proxy_error(weight, t.dequantize(), hessian) for t in (with_hessian, without)]
    assert errors[0] < 0.85 * errors[1]


def test_dead_hessian_is_no_hessian() -> None:
    weight, hessian = cases.random_case(128, 128)
    none, _ = quantize_tensor(weight, None, 2, scale=1.0)
    for dead in (torch.zeros_like(hessian), hessian * 1e-25):
        tensor, stats = quantize_tensor(weight, dead, 2, scale=1.0)
        assert stats.fallback
        same_bytes(tensor, none)


def test_padding() -> None:
    weight, hessian = cases.random_case(200, 130)
    tensor, stats = quantize_tensor(weight, hessian, 4)
    assert (tensor.in_features, tensor.out_features) == (256, 256)
    assert not tensor.svh[130:].any()
    dense = tensor.dequantize()
    assert not dense[200:].any()
    assert proxy_error(weight, dense[:200, :130], hessian) == pytest.approx(stats.proxy_error)
    assert stats.proxy_error < 0.005


def test_zero_channels_stay_exactly_zero() -> None:
    weight, hessian = cases.random_case(128, 128)
    weight[7], weight[:, 9] = 0, 0
    dense = quantize_tensor(weight, hessian, 3)[0].dequantize()
    assert not dense[7].any()
    assert not dense[:, 9].any()


@pytest.mark.parametrize("has_hessian", [True, False])
def test_zero_matrix(has_hessian: bool) -> None:
    _, hessian = cases.random_case(128, 128)
    tensor, stats = quantize_tensor(torch.zeros(128, 128), hessian if has_hessian else None, 3)
    assert not tensor.dequantize().any()
    assert stats.proxy_error == 0


@pytest.mark.parametrize("size", [1e-5, 1e5])
def test_small_and_large_weights_share_their_size_between_the_scales(size: float) -> None:
    """suh alone would be subnormal in fp16, or infinite."""
    weight, hessian = cases.random_case(128, 128)
    _, plain = quantize_tensor(weight, hessian, 4, scale=1.0)
    tensor, stats = quantize_tensor(weight * size, hessian, 4, scale=1.0)
    assert stats.proxy_error == pytest.approx(plain.proxy_error, rel=0.01)
    assert torch.isfinite(tensor.dequantize()).all()


def test_rank_deficient_hessian_without_damping() -> None:
    weight, _ = cases.random_case(128, 128)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    tensor, stats = quantize_tensor(weight, x.T @ x, 3, scale=1.0, sigma_reg=0.0)
    assert torch.isfinite(tensor.dequantize()).all()
    assert math.isfinite(stats.proxy_error)


def nan_at(tensor: torch.Tensor, row: int, column: int) -> torch.Tensor:
    changed = tensor.clone()
    changed[row, column] = float("nan")
    return changed


WEIGHT, HESSIAN = cases.random_case(128, 128)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": WEIGHT.to("meta")}, "weights: expected tensors on the CPU or.*got meta"),
        ({"hessian": HESSIAN.to("meta")}, "hessians: expected tensors on the CPU or.*got meta"),
        ({"weight": nan_at(WEIGHT, 1, 2)}, r"weight: expected finite values, got nan at \(1, 2\)"),
        ({"weight": WEIGHT * float("inf")}, "weight: expected finite values"),
        ({"weight": WEIGHT * 1e12}, "suh: expected a largest magnitude that fp16 holds"),
        ({"weight": WEIGHT * 1e-9}, "suh: expected a largest magnitude that fp16 holds"),
        ({"weight": WEIGHT[0]}, r"weight: expected a floating-point \(in, out\) matrix"),
        ({"weight": WEIGHT.int()}, "torch.int32"),
        ({"weight": WEIGHT[:, :0]}, r"\(128, 0\)"),
        ({"hessian": nan_at(HESSIAN, 3, 3)}, r"hessian: expected finite values.*\(3, 3\)"),
        ({"hessian": HESSIAN[:64, :64]}, r"hessian: expected shape \(128, 128\), got \(64, 64\)"),
        ({"bits": 2.5}, "2.5 exists with codebook mul1 only"),
        ({"bits": 9}, "bits: expected one of"),
        ({"codebook": "2mad"}, "codebook: expected one of"),
        ({"signs": (torch.ones(64), torch.ones(128))}, r"signs \(in\)"),
        ({"scale": 0.0}, "scale: expected a positive finite number, got 0.0"),
        ({"scale": float("nan")}, "scale: expected"),
        ({"sigma_reg": -1.0}, "sigma_reg: expected a finite number >= 0"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"weight": WEIGHT, "hessian": HESSIAN, "bits": 1, "scale": 1.0}
    with pytest.raises(FormatError, match=message):
        quantize_tensor(**(arguments | change))


def test_refused_batches() -> None:
    with pytest.raises(FormatError, match="at least one"):
        quantize_tensors([], [], 3)
    with pytest.raises(FormatError, match="hessians: expected 1, one a weight, got 2"):
        quantize_tensors([WEIGHT], [None, None], 3)
    with pytest.raises(FormatError, match="equal shapes"):
        quantize_tensors([WEIGHT, WEIGHT[:, :64]], [None, None], 3)
