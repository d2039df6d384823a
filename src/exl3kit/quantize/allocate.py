"""Which routed experts get more bits when the budget is not a whole rate.

Expected damage of an expert at K bits = its weight x the codebook's relative squared error at K.
The weight is measured (`sensitivity`); the error falls about fourfold a bit whatever the matrix,
because regularising makes all matrices Gaussian. All experts have one size, so giving the next step
to whoever gains most from it, until the budget is spent, is the optimum over all allocations.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

from exl3kit.errors import FormatError
from exl3kit.format.spec import Codebook, check_codebook, rates_of
from exl3kit.quantize.bit_plan import Bits

Expert = tuple[int, int]  # layer, expert

_STEPS = 2  # a bit, in the half bits that rates are counted in

# Squared error over variance of 64 Gaussian tiles, encoded here at the best of ten scales.
# Only the ratios between rates matter here.
RATE_ERROR: dict[Codebook, dict[Bits, float]] = {
    Codebook.THREE_INST: {
        1: 0.267, 2: 0.0692, 3: 0.0179, 4: 4.66e-3, 5: 1.22e-3, 6: 3.21e-4, 7: 8.6e-5, 8: 2.3e-5,
    },
    Codebook.MCG: {
        1: 0.267, 2: 0.0688, 3: 0.0175, 4: 4.60e-3, 5: 1.20e-3, 6: 3.17e-4, 7: 8.6e-5, 8: 2.3e-5,
    },
    Codebook.MUL1: {
        1: 0.272, 1.5: 0.137, 2: 0.0687, 2.5: 0.0349, 3: 0.0179, 3.5: 9.13e-3,
        4: 4.62e-3, 5: 1.18e-3, 6: 3.06e-4, 7: 8.0e-5, 8: 2.1e-5,
    },
}  # fmt: skip


def allocate(
    weights: Mapping[Expert, float],
    budget: float,
    codebook: str,
    rates: Sequence[Bits] | None = None,
) -> dict[Expert, Bits]:
    """Bits of each expert: their mean is `budget`, or just below it where steps do not come out.

    `weights` are the experts' sensitivities, at least 0; only their ratios matter. `rates` may be
    chosen from; by default the two next to the budget. Ties go to the lower layer, then expert, so
    equal weights give equal results. FormatError for a budget beyond the rates.
    """
    name = check_codebook(codebook)
    ladder = sorted(adjacent_rates(budget, name) if rates is None else rates)
    if not ladder or not ladder[0] <= budget <= ladder[-1]:
        shown = ", ".join(map(str, ladder))
        raise FormatError(f"bits: expected a mean within the rates {shown}, got {budget}")
    chosen = dict.fromkeys(sorted(weights), 0)  # places on the ladder
    gains = _gains_per_bit(ladder, RATE_ERROR[name])
    left = int(_STEPS * budget * len(weights) + 1e-9) - _STEPS * ladder[0] * len(weights)
    heap = [(-weights[expert] * gains[0], expert) for expert in chosen] if gains else []
    heapq.heapify(heap)
    while heap:
        _, expert = heapq.heappop(heap)
        place = chosen[expert]
        step = _STEPS * (ladder[place + 1] - ladder[place])
        if step > left:
            continue  # a smaller step of another expert may still fit
        left -= step
        chosen[expert] = place + 1
        if place + 1 < len(gains):
            heapq.heappush(heap, (-weights[expert] * gains[place + 1], expert))
    return {expert: ladder[place] for expert, place in chosen.items()}


def adjacent_rates(budget: float, codebook: str) -> tuple[Bits, ...]:
    """The codebook's rates next to `budget`: below and above it, or the one that it is."""
    known = rates_of(codebook)
    below = max((rate for rate in known if rate <= budget), default=None)
    above = min((rate for rate in known if rate >= budget), default=None)
    if below is None or above is None:
        raise FormatError(f"bits: expected {known[0]} to {known[-1]}, got {budget}")
    return tuple(sorted({below, above}))


def _gains_per_bit(ladder: Sequence[Bits], errors: Mapping[Bits, float]) -> list[float]:
    """What each step up the ladder takes off the relative error, per bit: falling."""
    return [(errors[low] - errors[high]) / (high - low) for low, high in pairwise(ladder)]
