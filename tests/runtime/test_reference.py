"""The reference itself, against the dense matrices of the format and a loop written out."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.decode import decode_dense
from exl3kit.format.spec import Codebook
from exl3kit.runtime.reference import local_expert_ids, reference_linear, reference_moe
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from exl3kit.testing.generate import random_exl3
from tests.kernels.cases import random_experts, random_routing, random_rows, true_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_is_x_times_the_dense_matrix(dtype: torch.dtype) -> None:
    weights = random_exl3(256, 384, 3)
    x, bias = random_rows(7, 256), random_rows(1, 384)[0]
    y = reference_linear(x, weights.trellis, weights.suh, weights.svh, "mcg", bias, dtype)
    assert y.dtype == dtype
    expected = true_linear(x, weights) + bias.double()
    assert_three_gates(y, expected, str(dtype).removeprefix("torch."))


def test_moe_is_a_loop_over_tokens_and_slots() -> None:
    experts = random_experts(3, 128, 256)
    x, (weights, ids) = random_rows(4, 128).double(), random_routing(4, 2, 3)
    expected = torch.zeros(4, 128, dtype=torch.float64)
    for token in range(4):
        for slot in range(2):
            e = int(ids[token, slot])
            gate, up = (
                x[token]
                @ decode_dense(
                    experts.w13_trellis[side, e],
                    experts.w13_suh[side, e],
                    experts.w13_svh[side, e],
                    Codebook.MCG,
                    torch.float64,
                )
                for side in (0, 1)
            )
            down = decode_dense(
                experts.w2_trellis[e],
                experts.w2_suh[e],
                experts.w2_svh[e],
                Codebook.MCG,
                torch.float64,
            )
            hidden = gate / (1 + torch.exp(-gate)) * up
            expected[token] += weights[token, slot] * (hidden @ down)
    y = reference_moe(x, weights, ids, *experts, "mcg", dtype=torch.float64)
    assert_three_gates(y, expected, "float64")


def test_local_expert_ids() -> None:
    ids = torch.tensor([[0, 1, 2], [3, -1, 9]])
    weights = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    here = torch.tensor([1, 0, -1, 0], dtype=torch.int32)
    expected = torch.tensor([[1, -1, -1], [0, -1, -1]])
    assert_bitwise_equal(local_expert_ids(weights, ids, 2, here), expected)
    with pytest.raises(FormatError, match="expert_map: expected local ids below 1"):
        local_expert_ids(weights, ids, 1, here)
