"""Comparisons that say where and by how much: bitwise, and three gates against float64 truth.

Every tolerance of the test suite is a row of `TOLERANCES`, with its reason; docs/numerics.md is
the same table for readers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """A bound per element, |a - b| <= absolute * RMS(b) + relative * |b|, and 1 - cosine.

    The RMS is that of the whole expected tensor: an element of a dot product carries the rounding
    of all its terms, so a bound relative to the element alone would fail at near-cancellations.
    """

    absolute: float
    relative: float
    cosine: float
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance(1e-12, 0, 1e-14, "the same sums in another order, k <= 8192"),
    "float32": Tolerance(
        2e-5, 2e-6, 1e-10, "fp32 sums and two 7-level transforms: about 1e-6 RMS, 20x head-room"
    ),
    "bfloat16": Tolerance(2e-5, 2**-8, 1e-5, "the float32 bound and one rounding, half an ulp"),
    "float16": Tolerance(2e-5, 2**-11, 1e-6, "the float32 bound and one rounding, half an ulp"),
    "bfloat_panel_float32": Tolerance(
        2.5e-2, 2e-6, 2e-5, "H(x * suh), What and the product in bf16: 2.9e-3 RMS, 8 deviations"
    ),
    "bfloat_panel_bfloat16": Tolerance(2.5e-2, 2**-8, 2e-5, "bfloat_panel_float32, one rounding"),
    "bfloat_panel_float16": Tolerance(2.5e-2, 2**-11, 2e-5, "bfloat_panel_float32, one rounding"),
    "bfloat_panel_moe_float32": Tolerance(
        5e-2, 2e-6, 5e-5, "two products one after the other, as bfloat_panel_float32: 5e-3 RMS"
    ),
    "bfloat_panel_moe_bfloat16": Tolerance(
        5e-2, 2**-8, 5e-5, "bfloat_panel_moe_float32, one rounding"
    ),
    "bfloat_panel_moe_float16": Tolerance(
        5e-2, 2**-11, 5e-5, "bfloat_panel_moe_float32, one rounding"
    ),
    "cuda_float32": Tolerance(
        3e-3, 2e-6, 1e-6, "H(x * suh) in fp16, 3inst and mcg not: 3.7e-4 RMS, 8 deviations"
    ),
    "cuda_bfloat16": Tolerance(3e-3, 2**-8, 1e-5, "cuda_float32 and one rounding, half an ulp"),
    "cuda_float16": Tolerance(3e-3, 2**-11, 1e-6, "cuda_float32 and one rounding, half an ulp"),
    "cuda_moe_float32": Tolerance(
        6e-3, 2e-6, 1e-6, "two products one after the other, each as cuda_float32: 5.8e-4 RMS"
    ),
    "cuda_moe_bfloat16": Tolerance(6e-3, 2**-8, 1e-5, "cuda_moe_float32 and one rounding"),
    "cuda_moe_float16": Tolerance(6e-3, 2**-11, 1e-6, "cuda_moe_float32 and one rounding"),
    "golden_gemm": Tolerance(
        6e-3, 2e-3, 1e-6, "exllamav3 rounds x * suh, H(x) and y to fp16: 3.3e-4 to 5.4e-4 RMS"
    ),
    "golden_dense": Tolerance(
        6e-3, 2e-3, 1e-6, "exllamav3 rounds to fp16 after each transform: 4e-4 to 5e-4 RMS"
    ),
}


def _coordinate(flat_index: int, shape: torch.Size) -> tuple[int, ...]:
    where = []
    for size in reversed(shape):
        where.append(flat_index % size)
        flat_index //= size
    return tuple(reversed(where))


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Same dtype, shape and bytes (NaN payloads included); names the first difference."""
    assert actual.dtype == expected.dtype, f"{what} dtype: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{what} shape: {actual.shape} != {expected.shape}"
    left = actual.contiguous().reshape(-1)
    right = expected.contiguous().reshape(-1)
    size = left.element_size()
    differs = (left.view(torch.uint8) != right.view(torch.uint8)).reshape(-1, size).any(dim=1)
    if not differs.any():
        return
    first = int(differs.nonzero()[0])
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {left.numel()} differ, first at "
        f"{_coordinate(first, actual.shape)}: got {left[first].item()}, "
        f"expected {right[first].item()}"
    )


def assert_three_gates(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: str, what: str = ""
) -> None:
    """NaN and Inf in the same places, every element within bound, cosine on the whole.

    `expected` is the float64 ground truth (or the coarser of two results), `tolerance` a key of
    `TOLERANCES`.
    """
    rule = TOLERANCES[tolerance]
    assert actual.shape == expected.shape, f"{what} shape: {actual.shape} != {expected.shape}"
    a, b = actual.double().reshape(-1), expected.double().reshape(-1)
    for name, test in (("NaN", torch.isnan), ("Inf", torch.isinf)):
        places = test(a) != test(b)
        assert not places.any(), f"{what}: {name} in {int(places.sum())} places not shared"
    finite = torch.isfinite(b)
    a, b = a[finite], b[finite]
    if b.numel() == 0:
        return
    bound = rule.absolute * b.square().mean().sqrt() + rule.relative * b.abs()
    excess = (a - b).abs() - bound
    worst = int(excess.argmax())
    assert float(excess[worst]) <= 0, (
        f"{what}: |{a[worst]:.8g} - {b[worst]:.8g}| = {abs(a[worst] - b[worst]):.3g} at finite "
        f"element {worst}, allowed {bound[worst]:.3g} ({tolerance}: {rule.reason})"
    )
    norm = float(a.norm() * b.norm())
    gap = 1.0 - float(a @ b) / norm if norm > 0 else float(a.norm() + b.norm())
    assert gap <= rule.cosine, f"{what}: 1 - cosine = {gap:.3g}, allowed {rule.cosine:g}"
