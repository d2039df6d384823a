"""Fused routed experts against the float64 reference: routing corners, and bitwise properties."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.spec import Codebook
from exl3kit.kernels.moe import moe
from exl3kit.runtime.reference import reference_moe
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from tests.golden import COMBINATIONS
from tests.kernels.cases import (
    DTYPES,
    MIXED_RATES,
    TOKENS,
    Experts,
    Routing,
    linears_of,
    mixed_experts,
    random_experts,
    random_routing,
    random_rows,
    shifted,
    true_sum,
)

E, H, S, TOP_K = 5, 256, 128, 3
EXPERTS = random_experts(E, H, S)


def run(
    x: torch.Tensor,
    routing: Routing,
    isa: int,
    experts: Experts = EXPERTS,
    codebook: str = "mcg",
    expert_map: torch.Tensor | None = None,
    threads: int = 1,
) -> torch.Tensor:
    """The kernel on stacked experts."""
    return moe(x, *routing, *experts, codebook, expert_map, isa=isa, threads=threads)


def truth(x: torch.Tensor, routing: Routing, **options: torch.Tensor) -> torch.Tensor:
    """The float64 reference of EXPERTS."""
    return reference_moe(x, *routing, *EXPERTS, "mcg", dtype=torch.float64, **options)


@cache
def truth_of_rows(dtype: str) -> torch.Tensor:
    """The reference for the most tokens; its first rows are those of fewer."""
    return truth(random_rows(max(TOKENS), H, DTYPES[dtype]), random_routing(max(TOKENS), TOP_K, E))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_tokens(dtype: str, isa: int) -> None:
    for tokens in TOKENS:
        x, routing = random_rows(tokens, H, DTYPES[dtype]), random_routing(tokens, TOP_K, E)
        y = run(x, routing, isa)
        assert y.dtype == x.dtype and y.shape == (tokens, H)
        assert_three_gates(y, truth_of_rows(dtype)[:tokens], dtype, f"{tokens} tokens")


@cache
def small_case(bits: int | float, codebook: Codebook) -> tuple[Experts, torch.Tensor]:
    """Two experts whose down has another rate than gate and up, and the reference of 3 tokens."""
    experts = random_experts(2, 128, 256, bits, 4 if bits == 3 else 3, codebook)
    x, routing = random_rows(3, 128), random_routing(3, 2, 2)
    return experts, reference_moe(x, *routing, *experts, codebook, dtype=torch.float64)


@pytest.mark.parametrize(("bits", "codebook"), COMBINATIONS)
def test_every_rate_and_codebook(bits: int | float, codebook: Codebook, isa: int) -> None:
    experts, expected = small_case(bits, codebook)
    x, routing = random_rows(3, 128), random_routing(3, 2, 2)
    assert_three_gates(run(x, routing, isa, experts, codebook), expected, "float32")


def test_all_tokens_on_one_expert(isa: int) -> None:
    """600 rows of one expert are two chunks; the other experts have none."""
    x = random_rows(200, H)
    routing = Routing(torch.rand(200, TOP_K), torch.full((200, TOP_K), 2))
    assert_three_gates(run(x, routing, isa), truth(x, routing), "float32")


def test_same_expert_twice_counts_twice(isa: int) -> None:
    x = random_rows(4, H)
    once = Routing(torch.ones(4, 1), torch.full((4, 1), 3))
    twice = Routing(torch.ones(4, 2), torch.full((4, 2), 3))
    assert_bitwise_equal(run(x, twice, isa), 2 * run(x, once, isa))


def test_expert_map(isa: int) -> None:
    """Eight model experts of which five are here, in another order: the rest add nothing."""
    here = torch.tensor([-1, 4, 0, -1, 2, 1, -1, 3], dtype=torch.int32)
    x, routing = random_rows(17, H), random_routing(17, TOP_K, 8)
    y = run(x, routing, isa, expert_map=here)
    assert_three_gates(y, truth(x, routing, expert_map=here), "float32")
    weights = routing.weights * (here[routing.ids] >= 0)
    local = Routing(weights, here[routing.ids].clamp_min(0).long())
    assert_bitwise_equal(y, run(x, local, isa))


@pytest.mark.parametrize("absent", ["map", "weight", "id"])
def test_absent_routes_add_exactly_zero(absent: str, isa: int) -> None:
    """Even where the expert would give NaN; a batch without any route is zeros."""
    x = random_rows(6, H)
    x[2] = torch.nan
    weights, ids = random_routing(6, TOP_K, E)
    here = None
    if absent == "map":
        here = torch.full((E,), -1, dtype=torch.int32)
    elif absent == "weight":
        weights = torch.zeros_like(weights)
    else:
        ids = torch.tensor([[-1, E, 1 << 30]]).expand(6, 3).contiguous()
    y = run(x, Routing(weights, ids), isa, expert_map=here)
    assert_bitwise_equal(y, torch.zeros(6, H))


def test_no_slots_add_exactly_zero(isa: int) -> None:
    """top_k = 0: the size of a launch is not divided by it."""
    routing = Routing(torch.empty(6, 0), torch.empty(6, 0, dtype=torch.int64))
    assert_bitwise_equal(run(random_rows(6, H), routing, isa), torch.zeros(6, H))


def test_id_dtypes_agree(isa: int) -> None:
    x, routing = random_rows(33, H), random_routing(33, TOP_K, E)
    narrow = Routing(routing.weights, routing.ids.int())
    assert_bitwise_equal(run(x, narrow, isa), run(x, routing, isa))


def test_a_row_does_not_see_its_batch(isa: int) -> None:
    x, routing = random_rows(145, H, torch.bfloat16), random_routing(145, TOP_K, E)
    together = run(x, routing, isa)
    for part in (*(slice(row, row + 1) for row in (0, 1, 77, 128, 144)), slice(20, 60)):
        alone = run(x[part], Routing(routing.weights[part], routing.ids[part]), isa)
        assert_bitwise_equal(alone, together[part], str(part))


def test_threads_and_launches_do_not_show(isa: int) -> None:
    x, routing = random_rows(145, H), random_routing(145, TOP_K, E)
    expected = run(x, routing, isa)
    for threads in (2, 3, 7):
        assert_bitwise_equal(run(x, routing, isa, threads=threads), expected)
    for budget in (1, 100_000):
        cut = moe(x, *routing, *EXPERTS, "mcg", isa=isa, threads=2, workspace_bytes=budget)
        assert_bitwise_equal(cut, expected, f"launches of {budget} bytes")


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_stays_in_its_row(poison: float, isa: int) -> None:
    x, routing = random_rows(9, H), random_routing(9, TOP_K, E)
    clean = run(x, routing, isa)
    x[4, 77] = poison
    y = run(x, routing, isa)
    assert_three_gates(y, truth(x, routing), "float32")
    others = [row for row in range(9) if row != 4]
    assert_bitwise_equal(y[others], clean[others])


def test_hostile_ids(isa: int) -> None:
    """Any integer as an id, or below -1 in the map: the route adds nothing and changes none."""
    x, routing = random_rows(40, H), random_routing(40, TOP_K, E)
    wild = torch.tensor([-(1 << 63), (1 << 63) - 1, E, -1, 1 << 32, -(1 << 31)]).repeat(20)
    hit = torch.arange(120).view(40, 3) % 2 == 0
    clean = Routing(routing.weights * ~hit, routing.ids)
    ids = routing.ids.where(~hit, wild.view(40, 3))
    here = torch.tensor([3, -(1 << 31), 0, 1, -2], dtype=torch.int32)
    for expert_map in (None, here):
        expected = run(x, clean, isa, expert_map=expert_map)
        wide = run(x, Routing(routing.weights, ids), isa, expert_map=expert_map, threads=3)
        assert_bitwise_equal(wide, expected)
        narrow = Routing(routing.weights, ids.clamp(-(1 << 31), (1 << 31) - 1).int())
        assert_bitwise_equal(run(x, narrow, isa, expert_map=expert_map), expected)


def test_unaligned(isa: int) -> None:
    """Every tensor starts where its element size allows, on no boundary of a vector."""
    x, routing = random_rows(40, H), random_routing(40, TOP_K, E)
    there = Routing(shifted(routing.weights), shifted(routing.ids))
    y = run(shifted(x), there, isa, Experts(*map(shifted, EXPERTS)))
    assert_bitwise_equal(y, run(x, routing, isa))


def test_map_to_an_expert_that_is_not_there(isa: int) -> None:
    x, routing = random_rows(2, H), random_routing(2, TOP_K, E)
    with pytest.raises(FormatError, match="expert_map"):
        run(x, routing, isa, expert_map=torch.full((E,), E, dtype=torch.int32))


@pytest.mark.parametrize("codebook", ["mcg", "mul1"])
def test_experts_of_several_rates(codebook: str, isa: int) -> None:
    """Gate differs from up too; one launch, rounded once."""
    rates = MIXED_RATES if codebook == "mcg" else (*MIXED_RATES[:4], (2.5, 1.5, 3.5))
    weights, matrices = mixed_experts(rates, H, S, codebook)
    linears = linears_of(rates, H, S, codebook)
    for tokens in (1, 9, 33):
        x, routing = random_rows(tokens, H, torch.bfloat16), random_routing(tokens, TOP_K, E)
        y = moe(x, *routing, *weights, codebook, None, matrices, isa=isa, threads=2)
        assert_three_gates(y, true_sum(x, routing, linears), "bfloat16", f"{tokens} tokens")


def test_shared_vectors_equal_expanded(isa: int) -> None:
    """Of six experts, every second has the same vectors of the hidden side; gate's are not up's."""
    experts = random_experts(6, H, S)
    shared = experts._replace(
        w13_suh=experts.w13_suh[:, :2].contiguous(), w2_svh=experts.w2_svh[:2].contiguous()
    )
    expanded = experts._replace(
        w13_suh=shared.w13_suh.repeat(1, 3, 1), w2_svh=shared.w2_svh.repeat(3, 1)
    )
    x, routing = random_rows(9, H), random_routing(9, TOP_K, 6)
    assert_bitwise_equal(run(x, routing, isa, shared), run(x, routing, isa, expanded))
