"""Allocation reaches the budget, is optimal, and depends on nothing but its arguments."""

from __future__ import annotations

import itertools

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import Codebook
from exl3kit.quantize.allocate import RATE_ERROR, adjacent_rates, allocate
from exl3kit.quantize.viterbi import encode

WEIGHTS = {(layer, e): 1.0 + (7 * e + 3 * layer) % 11 for layer in (1, 2) for e in range(4)}


def damage(
    weights: dict[tuple[int, int], float], bits: dict[tuple[int, int], int | float]
) -> float:
    errors = RATE_ERROR[Codebook.MCG]
    return sum(weights[e] * errors[k] for e, k in bits.items())


@pytest.mark.parametrize(("budget", "total"), [(2, 16), (2.5, 20), (3.25, 26), (3.3, 26), (6, 48)])
def test_the_budget_is_met_or_just_not(budget: float, total: int) -> None:
    bits = allocate(WEIGHTS, budget, "mcg")
    assert sum(bits.values()) == total
    assert bits.keys() == WEIGHTS.keys()
    assert set(bits.values()) <= set(adjacent_rates(budget, "mcg"))


def test_no_other_allocation_does_less_damage() -> None:
    weights = dict(itertools.islice(WEIGHTS.items(), 6)) | {(1, 0): 0.01, (1, 1): 300.0}
    rates = (2, 3, 4)
    found = allocate(weights, 2.5, "mcg", rates)
    assert set(found.values()) == {2, 3, 4}
    least = min(
        damage(weights, dict(zip(weights, choice, strict=True)))
        for choice in itertools.product(rates, repeat=len(weights))
        if sum(choice) <= 2.5 * len(weights)
    )
    assert damage(weights, found) == pytest.approx(least)


def test_ties_go_to_the_lower_expert_whatever_the_order() -> None:
    even = dict.fromkeys([(2, 1), (1, 1), (2, 0), (1, 0)], 1.0)
    expected = {(1, 0): 3, (1, 1): 3, (2, 0): 2, (2, 1): 2}
    assert allocate(even, 2.5, "mcg") == expected
    assert allocate(dict(reversed(even.items())), 2.5, "mcg") == expected
    assert list(allocate(even, 2.5, "mcg")) == sorted(even)


def test_an_expert_that_no_token_reaches_gets_the_least() -> None:
    bits = allocate({(1, 0): 0.0, (1, 1): 1e-9}, 2.5, "mcg")
    assert bits == {(1, 0): 2, (1, 1): 3}


def test_mul1_steps_by_halves() -> None:
    assert adjacent_rates(2.75, "mul1") == (2.5, 3)
    bits = allocate(WEIGHTS, 2.75, "mul1")
    assert sum(bits.values()) == 22 and set(bits.values()) == {2.5, 3}
    mixed = allocate(WEIGHTS, 4.25, "mul1", (3, 3.5, 4, 5))
    assert sum(mixed.values()) == 34


def test_rates_next_to_a_budget() -> None:
    assert adjacent_rates(3.25, "mcg") == (3, 4)
    assert adjacent_rates(3, "mcg") == (3,)
    assert adjacent_rates(2.5, "mul1") == (2.5,)


@pytest.mark.parametrize("budget", [0.5, 8.5, float("nan")])
def test_budgets_no_rate_reaches(budget: float) -> None:
    with pytest.raises(FormatError, match="bits: expected 1 to 8, got"):
        allocate(WEIGHTS, budget, "mcg")
    with pytest.raises(FormatError, match="mean within the rates 2, 3, got"):
        allocate(WEIGHTS, budget, "mcg", (2, 3))


@pytest.mark.parametrize(("codebook", "bits"), [("mcg", 3), ("mul1", 2.5), ("3inst", 4)])
def test_the_error_table_is_what_the_encoder_reaches(codebook: str, bits: float) -> None:
    tiles = torch.randn(24, 256, generator=torch.Generator().manual_seed(1)).double()
    tiles /= tiles.square().mean().sqrt()
    values = codebook_values(Codebook(codebook)).double()
    reached = []
    for scale in (1.0, 1.1, 1.2):
        states = encode((tiles * scale).float(), bits, codebook)
        reached.append(float((values[states.long()] / scale - tiles).square().mean()))
    assert min(reached) == pytest.approx(RATE_ERROR[Codebook(codebook)][bits], rel=0.08)
