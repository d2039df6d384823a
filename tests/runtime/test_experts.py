"""Slices and rate tiers: routes, maps, and the sum against the whole experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from exl3kit.errors import UnsupportedError
from exl3kit.runtime.experts import RateTier, TierWeights, exl3_experts, expand_routes, rate_tiers
from exl3kit.runtime.reference import reference_linear, reference_moe
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from tests.kernels.cases import Experts, random_experts, random_routing, random_rows

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
    kernel = exl3_experts(x, weights, ids, [TierWeights(*parts)], "mcg", slices)
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
    found = exl3_experts(x, weights, ids, [TierWeights(*rows)], "mcg", 3)
    assert_three_gates(found, expected, "float32")


def tiered(
    rates: Sequence[tuple[int, int]], slices: int = 1
) -> tuple[list[TierWeights], list[Experts]]:
    """Experts of the given (gate and up, down) bits in tiers, and each by itself as E = 1."""
    alone = [
        Experts(
            *(
                tensor.narrow(expert_dim(name), e, 1)
                for name, tensor in random_experts(len(rates), H, S, b13, b2)._asdict().items()
            )
        )
        for e, (b13, b2) in enumerate(rates)
    ]
    tiers = []
    for tier in rate_tiers([(b13, b13, b2) for b13, b2 in rates]):
        own = [sliced(alone[e], slices) for e in tier.experts]
        stacked = (
            torch.cat(tensors, expert_dim(name)).contiguous()
            for name, tensors in zip(Experts._fields, zip(*own, strict=True), strict=True)
        )
        tiers.append(TierWeights(*stacked, expert_map=tier.make_map(len(rates), slices)))
    return tiers, alone


def expected_sum(
    alone: list[Experts], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The experts one by one in float64."""
    return sum(
        (
            reference_moe(
                x, weights * (ids == e), torch.zeros_like(ids), *expert, "mcg", dtype=torch.float64
            )
            for e, expert in enumerate(alone)
        ),
        torch.zeros(x.shape, dtype=torch.float64),
    )


MIXES = [
    [(3, 3), (4, 4), (3, 3), (3, 3), (3, 3)],  # a tier of one expert
    [(2, 2), (6, 6), (4, 4), (2, 2), (4, 4)],  # three tiers
    [(3, 4), (3, 5), (3, 4), (4, 4), (3, 4)],  # down differs from gate and up
    [(3, 3)] * 5,  # one tier, with a map all the same
]


@pytest.mark.parametrize("rates", MIXES)
@pytest.mark.parametrize("slices", [1, 2])
def test_tiers_add_up_to_the_experts(rates: list[tuple[int, int]], slices: int) -> None:
    tiers, alone = tiered(rates, slices)
    x, (weights, ids) = random_rows(TOKENS, H), random_routing(TOKENS, TOP_K, E)
    expected = expected_sum(alone, x, weights, ids)
    found = exl3_experts(x, weights, ids, tiers, "mcg", slices)
    assert_three_gates(found, expected, "float32")
    narrow = exl3_experts(x.bfloat16(), weights, ids, tiers, "mcg", slices)
    expected = expected_sum(alone, x.bfloat16().float(), weights, ids)
    assert_three_gates(narrow, expected, "bfloat16")  # rounded once, not once a tier


def test_all_routes_to_one_tier_and_none_to_another() -> None:
    tiers, alone = tiered(MIXES[1])
    x, weights = random_rows(3, H), torch.rand(3, 2)
    for first, second in ((2, 4), (0, 3), (1, 1)):
        ids = torch.tensor([[first, second]] * 3)
        found = exl3_experts(x, weights, ids, tiers, "mcg")
        assert_three_gates(found, expected_sum(alone, x, weights, ids), "float32")


def test_ids_outside_the_model_and_no_tokens() -> None:
    tiers, _ = tiered(MIXES[0], 2)
    x, weights = random_rows(2, H), torch.rand(2, 2)
    nowhere = exl3_experts(x, weights, torch.tensor([[-1, E], [E + 3, -7]]), tiers, "mcg", 2)
    assert_bitwise_equal(nowhere, torch.zeros(2, H))
    none = exl3_experts(x[:0], weights[:0], torch.zeros(0, 2, dtype=torch.int64), tiers, "mcg", 2)
    assert none.shape == (0, H)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    tiers, _ = tiered(MIXES[1], 2)
    x, (weights, ids) = random_rows(TOKENS, H), random_routing(TOKENS, TOP_K, E)
    together = exl3_experts(x, weights, ids, tiers, "mcg", 2)
    alone = exl3_experts(x[3:4], weights[3:4], ids[3:4], tiers, "mcg", 2)
    assert_bitwise_equal(alone[0], together[3])


def gate_and_up_differ() -> tuple[TierWeights, torch.Tensor]:
    """Experts with 3 bits in gate and 4 in up, of which the model has one more, and a map."""
    three, four = random_experts(E, H, S, 3, 2), random_experts(E, H, S, 4, 2)
    pair = three.w13_trellis[0], four.w13_trellis[1]
    return TierWeights(pair, *three[1:]), torch.tensor([4, 3, -1, 2, 1, 0], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_and_up_of_different_rates(dtype: torch.dtype) -> None:
    tier, expert_map = gate_and_up_differ()
    assert isinstance(tier.w13_trellis, tuple)
    x, (weights, ids) = random_rows(TOKENS, H, dtype), random_routing(TOKENS, TOP_K, E + 1)
    expected = torch.zeros(TOKENS, H, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(TOKENS), torch.arange(TOP_K)):
        expert = int(expert_map[ids[token, slot]])
        if expert < 0:
            continue

        def linear(x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
            trellis, suh, svh = parts
            return reference_linear(x, trellis, suh, svh, "mcg", dtype=torch.float64)

        gate, up = (
            linear(x[token], packed[expert], tier.w13_suh[side, expert], tier.w13_svh[side, expert])
            for side, packed in enumerate(tier.w13_trellis)
        )
        product = torch.nn.functional.silu(gate) * up
        down = linear(product, tier.w2_trellis[expert], tier.w2_suh[expert], tier.w2_svh[expert])
        expected[token] += weights[token, slot] * down
    found = exl3_experts(x, weights, ids, [replace(tier, expert_map=expert_map)], "mcg")
    assert_three_gates(found, expected, str(dtype).removeprefix("torch."))


def test_gate_and_up_of_different_rates_need_a_cpu() -> None:
    tier, _ = gate_and_up_differ()
    x, (weights, ids) = random_rows(1, H), random_routing(1, TOP_K, E)
    with pytest.raises(UnsupportedError, match="same bits on a device"):
        exl3_experts(x.to("meta"), weights.to("meta"), ids.to("meta"), [tier], "mcg")


def test_opcheck() -> None:
    tier, expert_map = gate_and_up_differ()
    assert isinstance(tier.w13_trellis, tuple)
    rest = tier.w13_suh, tier.w13_svh, tier.w2_trellis, tier.w2_suh, tier.w2_svh, "mcg", expert_map
    arguments = random_rows(3, H), *random_routing(3, 2, E + 1), *tier.w13_trellis, *rest
    torch.library.opcheck(torch.ops.exl3.moe_by_expert.default, arguments)


def test_tiers_and_maps() -> None:
    three, four = (3, 3, 3), (4, 4, 4)
    low, high = rate_tiers([three, four, three])
    assert low == RateTier(three, (0, 2)) and high == RateTier(four, (1,))
    assert low.make_map(3).tolist() == [0, -1, 1]
    assert low.make_map(3, 2).tolist() == [0, 1, -1, -1, 2, 3]
    assert high.make_map(3, 2).tolist() == [-1, -1, 0, 1, -1, -1]
    assert low.make_map(3).dtype == torch.int32


def test_compiled_equals_eager() -> None:
    """No graph break over slices and tiers, for any number of tokens."""
    tiers, _ = tiered(MIXES[0], 2)

    def step(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return exl3_experts(x, weights, ids, tiers, "mcg", 2)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 2, 17):
        arguments = random_rows(tokens, H), *random_routing(tokens, TOP_K, E)
        assert_bitwise_equal(compiled(*arguments), step(*arguments))
