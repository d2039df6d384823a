from __future__ import annotations

import pytest
import torch

from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates


def test_bitwise_names_first_difference() -> None:
    a = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    b = a.clone()
    b[1, 2] = torch.nextafter(b[1, 2], torch.tensor(100.0))
    assert_bitwise_equal(a, a.clone())
    with pytest.raises(AssertionError, match=r"1 of 12 differ, first at \(1, 2\)"):
        assert_bitwise_equal(a, b)
    with pytest.raises(AssertionError, match="dtype"):
        assert_bitwise_equal(a, a.double())


def test_each_gate_can_fail() -> None:
    truth = torch.randn(1000, dtype=torch.float64)
    assert_three_gates(truth.float(), truth, "float32")
    with_nan = truth.clone()
    with_nan[3] = float("nan")
    with pytest.raises(AssertionError, match="NaN in 1 places"):
        assert_three_gates(with_nan, truth, "float32")
    one_off = truth.clone()
    one_off[7] += 1e-3
    with pytest.raises(AssertionError, match="finite element 7"):
        assert_three_gates(one_off, truth, "float32")
    # Inside every element's bound, yet far off as a whole.
    with pytest.raises(AssertionError, match="1 - cosine"):
        assert_three_gates(truth + 5e-3 * torch.sign(torch.randn(1000)), truth, "golden_gemm")
