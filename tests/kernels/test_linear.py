"""The fused linear against float64 ground truth, and what must hold bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import torch

from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.kernels.linear import linear
from exl3kit.runtime.reference import reference_linear
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from exl3kit.testing.generate import random_exl3
from tests import golden
from tests.kernels.cases import DTYPES, TOKENS, random_rows, shifted, true_linear

cached_weights = cache(random_exl3)
WEIGHTS = cached_weights(256, 384, 3, "mcg")


def run(x: torch.Tensor, weights: Exl3Tensor, isa: int, threads: int = 1) -> torch.Tensor:
    """The kernel on the tensors of one linear."""
    return linear(
        x, weights.trellis, weights.suh, weights.svh, weights.codebook, weights.bias,
        isa=isa, threads=threads,
    )  # fmt: skip


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS)
def test_every_rate_and_codebook(bits: int | float, codebook: Codebook, isa: int) -> None:
    weights = cached_weights(256, 384, bits, codebook)
    x = random_rows(5, 256)
    assert_three_gates(run(x, weights, isa), true_linear(x, weights), "float32")


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS)
def test_one_token_at_every_rate(bits: int | float, codebook: Codebook, isa: int) -> None:
    """Its product is another function on most tiers, which sums in the same order."""
    weights = cached_weights(256, 384, bits, codebook)
    x = random_rows(5, 256)
    assert_bitwise_equal(run(x[3:4], weights, isa), run(x, weights, isa)[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens(dtype: str, isa: int) -> None:
    for tokens in TOKENS:
        x = random_rows(tokens, 256, DTYPES[dtype])
        y = run(x, WEIGHTS, isa)
        assert y.dtype == x.dtype and y.shape == (tokens, 384)
        assert_three_gates(y, true_linear(x, WEIGHTS), dtype, f"{tokens} tokens")


@pytest.mark.parametrize(("k", "n"), [(128, 128), (8192, 128), (128, 1152)])
def test_shapes(k: int, n: int, isa: int) -> None:
    weights = cached_weights(k, n, 2.5, "mul1")
    x = random_rows(3, k)
    assert_three_gates(run(x, weights, isa), true_linear(x, weights), "float32")


@pytest.mark.parametrize(("bits", "codebook"), golden.COMBINATIONS)
def test_exllamav3_outputs(bits: int | float, codebook: Codebook, isa: int) -> None:
    weights = golden.exl3_tensor(bits, codebook)
    for tokens in (1, 5, 33):
        x = golden.tensors()["A.x"][:tokens].contiguous()
        stored = golden.tensors()[f"A.{golden.tag(bits, codebook)}.y{tokens}"]
        y = run(x, weights, isa)
        assert_three_gates(y, stored, "golden_gemm", f"{tokens} tokens")
        error = (y.double() - stored.double()).norm() / stored.double().norm()
        assert error < 6e-4, "exllamav3's own distance from float64 is 3.3e-4 to 5.4e-4"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_see_its_batch(dtype: str, isa: int) -> None:
    """Alone, among few (strips) and many (panels), in a full chunk and in the one after it."""
    x = random_rows(521, 256, DTYPES[dtype])
    together = run(x, WEIGHTS, isa)
    for row in (0, 1, 5, 6, 11, 12, 31, 32, 511, 512, 520):
        alone = run(x[row : row + 1], WEIGHTS, isa)
        assert_bitwise_equal(alone, together[row : row + 1], f"row {row}")
    for part in (slice(3, 22), slice(3, 34), slice(3, 35), slice(7, 152)):
        assert_bitwise_equal(run(x[part], WEIGHTS, isa), together[part], str(part))


def test_threads_do_not_show(isa: int) -> None:
    x = random_rows(521, 256)  # 3 blocks of columns: 7 threads share a chunk of tokens
    expected = run(x, WEIGHTS, isa)
    for threads in (2, 3, 7):
        assert_bitwise_equal(run(x, WEIGHTS, isa, threads), expected, f"{threads} threads")


def test_callers_on_several_threads(isa: int) -> None:
    """The interpreter's lock is released during a call; each caller has its own helpers."""
    x = random_rows(17, 256)
    expected = run(x, WEIGHTS, isa)
    with ThreadPoolExecutor(4) as callers:
        for y in callers.map(lambda threads: run(x, WEIGHTS, isa, threads), [1, 2, 3, 2] * 5):
            assert_bitwise_equal(y, expected)


@pytest.mark.parametrize("power", [-40, 30])
def test_float32_passes_through_no_narrower_type(power: int, isa: int) -> None:
    """Scaling by a power of two is exact in float32 and would over- or underflow in float16."""
    x = random_rows(2, 256)
    expected = run(x, WEIGHTS, isa) * 2.0**power
    assert_bitwise_equal(run(x * 2.0**power, WEIGHTS, isa), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("power", [-24, -8, 0, 15])
def test_half_types_are_rounded_once(dtype: str, power: int, isa: int) -> None:
    """Through subnormal halves, ordinary values and overflow to infinity."""
    narrow = (random_rows(4, 256) * 2.0**power).to(DTYPES[dtype])
    expected = run(narrow.float(), WEIGHTS, isa).to(DTYPES[dtype])
    assert_bitwise_equal(run(narrow, WEIGHTS, isa), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias(dtype: str, isa: int) -> None:
    bias = random_rows(1, 384, DTYPES[dtype])[0]
    x = random_rows(3, 256)
    plain = run(x, WEIGHTS, isa)
    parts = (WEIGHTS.trellis, WEIGHTS.suh, WEIGHTS.svh, "mcg", bias)
    assert_three_gates(linear(x, *parts, isa=isa), plain.double() + bias.double(), "float32")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_stays_in_its_row(poison: float, dtype: str, isa: int) -> None:
    x = random_rows(9, 256, DTYPES[dtype])
    clean = run(x, WEIGHTS, isa)
    x[4, 77] = poison
    y = run(x, WEIGHTS, isa)
    parts = (WEIGHTS.trellis, WEIGHTS.suh, WEIGHTS.svh, "mcg")
    assert_three_gates(y, reference_linear(x, *parts, dtype=torch.float64), dtype)
    others = [row for row in range(9) if row != 4]
    assert_bitwise_equal(y[others], clean[others])


def test_unaligned(isa: int) -> None:
    """Every tensor starts where its element size allows, on no boundary of a vector."""
    x = random_rows(40, 256)
    w = WEIGHTS
    y = linear(shifted(x), shifted(w.trellis), shifted(w.suh), shifted(w.svh), w.codebook, isa=isa)
    assert_bitwise_equal(y, run(x, w, isa))


def test_many_tokens(isa: int) -> None:
    """Eight full chunks, shared out between threads."""
    weights = cached_weights(128, 128, 3, "mcg")
    x = random_rows(512, 128).repeat(8, 1)
    y = run(x, weights, isa, threads=3)
    assert_bitwise_equal(y, run(x[:512], weights, isa).repeat(8, 1))
