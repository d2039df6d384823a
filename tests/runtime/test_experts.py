"""Slices and rates: routes, tables, and the sum against the whole experts."""

from __future__ import annotations

import pytest
import torch

from exl3kit.runtime.experts import (
    ExpertWeights,
    exl3_experts,
    expand_routes,
    is_uniform,
    matrix_table,
)
from exl3kit.runtime.reference import reference_moe
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from tests.kernels.cases import (
    MIXED_RATES,
    Experts,
    MixedExperts,
    linears_of,
    mixed_experts,
    random_experts,
    random_routing,
    random_rows,
    true_sum,
)

E, H, S = 5, 128, 512
TOKENS, TOP_K = 7, 3


def sliced(whole: Experts, slices: int) -> Experts:
    """The cut of whole experts: row e * slices + j has part j of the intermediate channels."""

    def parts(tensor: torch.Tensor, expert_dim: int, dim: int) -> torch.Tensor:
        return torch.stack(tensor.chunk(slices, dim), expert_dim + 1).flatten(
            expert_dim, expert_dim + 1
        )

    def same(tensor: torch.Tensor, expert_dim: int) -> torch.Tensor:
        return tensor.repeat_interleave(slices, expert_dim)

    return Experts(
        w13_trellis=parts(whole.w13_trellis, 1, 3).contiguous(),
        w13_suh=same(whole.w13_suh, 1),
        w13_svh=parts(whole.w13_svh, 1, 2).contiguous(),
        w2_trellis=parts(whole.w2_trellis, 0, 1).contiguous(),
        w2_suh=parts(whole.w2_suh, 0, 1).contiguous(),
        w2_svh=same(whole.w2_svh, 0),
    )


def test_routes() -> None:
    weights, ids = torch.tensor([[0.5, 0.25]]), torch.tensor([[3, -1]], dtype=torch.int32)
    wide_weights, wide_ids = expand_routes(weights, ids, 2)
    assert wide_ids.dtype == torch.int32 and wide_ids.is_contiguous()
    assert wide_ids.tolist() == [[6, 7, -2, -1]]
    assert wide_weights.tolist() == [[0.5, 0.5, 0.25, 0.25]]
    assert expand_routes(weights, ids, 1) == (weights, ids)
    assert expand_routes(weights[:0], ids[:0], 4)[1].shape == (0, 8)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_slices_add_up_to_the_whole_in_float64(slices: int) -> None:
    whole = random_experts(E, H, S)
    x, (weights, ids) = random_rows(TOKENS, H), random_routing(TOKENS, TOP_K, E)
    expected = reference_moe(x, weights, ids, *whole, "mcg", dtype=torch.float64)
    routes = expand_routes(weights, ids, slices)
    parts = sliced(whole, slices)
    assert parts.w2_suh.shape == (E * slices, S // slices)
    found = reference_moe(x, *routes, *parts, "mcg", dtype=torch.float64)
    assert_three_gates(found, expected, "float64")
    kernel = exl3_experts(x, weights, ids, ExpertWeights(*parts), "mcg", slices)
    assert_three_gates(kernel, expected, "float32")


def expert_dim(name: str) -> int:
    return 1 if name.startswith("w13") else 0


def test_slices_that_were_quantised_one_by_one() -> None:
    """Each with vectors of its own, which no merge could join: the sum of the ranks' own sums."""
    first = random_experts(E, H, 128)
    ranks = [Experts(*(tensor.roll(rank, -1) for tensor in first)) for rank in range(3)]
    x, (weights, ids) = random_rows(TOKENS, H), random_routing(TOKENS, TOP_K, E)
    expected = sum(
        (reference_moe(x, weights, ids, *rank, "mcg", dtype=torch.float64) for rank in ranks),
        torch.zeros(TOKENS, H, dtype=torch.float64),
    )
    rows = []
    for name, tensors in zip(Experts._fields, zip(*ranks, strict=True), strict=True):
        dim = expert_dim(name)
        rows.append(torch.stack(tensors, dim + 1).flatten(dim, dim + 1))
    found = exl3_experts(x, weights, ids, ExpertWeights(*rows), "mcg", 3)
    assert_three_gates(found, expected, "float32")


def repeated(experts: MixedExperts, slices: int) -> ExpertWeights:
    """Every expert `slices` times: what slices of the same contents would be."""
    weights, table = experts
    parts = [
        tensor if tensor.dim() == 1 else tensor.repeat_interleave(slices, expert_dim(name))
        for name, tensor in weights._asdict().items()
    ]
    return ExpertWeights(*parts, matrices=table.repeat_interleave(slices, 1))


@pytest.mark.parametrize("slices", [1, 2])
def test_experts_of_several_rates(slices: int) -> None:
    experts = repeated(mixed_experts(MIXED_RATES, H, S), slices)
    x, routing = random_rows(TOKENS, H), random_routing(TOKENS, TOP_K, E)
    expected = slices * true_sum(x, routing, linears_of(MIXED_RATES, H, S, "mcg"))
    found = exl3_experts(x, *routing, experts, "mcg", slices)
    assert_three_gates(found, expected, "float32")
    alone = exl3_experts(x[3:4], routing.weights[3:4], routing.ids[3:4], experts, "mcg", slices)
    assert_bitwise_equal(alone[0], found[3])


def test_reference_of_several_rates() -> None:
    """What runs where no compiler is found."""
    weights, table = mixed_experts(MIXED_RATES, H, S)
    x, routing = random_rows(TOKENS, H), random_routing(TOKENS, TOP_K, E)
    expected = true_sum(x, routing, linears_of(MIXED_RATES, H, S, "mcg"))
    found = reference_moe(x, *routing, *weights, "mcg", None, table, dtype=torch.float64)
    assert_three_gates(found, expected, "float64")


def test_ids_outside_the_model_and_no_tokens() -> None:
    experts = repeated(mixed_experts(MIXED_RATES, H, S), 2)
    x, weights = random_rows(2, H), torch.rand(2, 2)
    nowhere = exl3_experts(x, weights, torch.tensor([[-1, E], [E + 3, -7]]), experts, "mcg", 2)
    assert_bitwise_equal(nowhere, torch.zeros(2, H))
    none = exl3_experts(x[:0], weights[:0], torch.zeros(0, 2, dtype=torch.int64), experts, "mcg", 2)
    assert none.shape == (0, H)


def test_table() -> None:
    """Starts in words: 128 x 256 matrices of K bits take 2048 K of 16 bits."""
    table = matrix_table([(3, 4, 1.5), (2, 3, 8)], 128, 256)
    assert table.dtype == torch.int64
    assert table.tolist() == [
        [[0, 6], [6144, 4]],
        [[10240, 8], [18432, 6]],
        [[0, 3], [3072, 16]],
    ]


def test_tables_count_in_64_bits() -> None:
    table = matrix_table([(8, 8, 8)] * 300, 8192, 2048)
    assert int(table[1, -1, 0]) == 599 * 8192 * 2048 // 2 > 1 << 32


def test_uniform() -> None:
    assert is_uniform([(3, 3, 4)] * 2)
    assert not is_uniform([(3, 4, 3)] * 2) and not is_uniform([(3, 3, 3), (3, 3, 4)])


def test_opcheck() -> None:
    weights, table = mixed_experts(MIXED_RATES, H, S)
    arguments = random_rows(3, H), *random_routing(3, 2, E), *weights, "mcg", None, table
    torch.library.opcheck(torch.ops.exl3.moe.default, arguments)


def test_compiled_equals_eager() -> None:
    """No graph break over slices and rates, for any number of tokens."""
    experts = repeated(mixed_experts(MIXED_RATES, H, S), 2)

    def step(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return exl3_experts(x, weights, ids, experts, "mcg", 2)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 2, 17):
        arguments = random_rows(tokens, H), *random_routing(tokens, TOP_K, E)
        assert_bitwise_equal(compiled(*arguments), step(*arguments))
