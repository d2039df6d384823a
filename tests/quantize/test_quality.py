"""How close the quantised demo model stays to BF16 on text it was not calibrated on.

Bounds are 15 to 20 % above what benchmarks/results/demo_quality.md has; another seed moves the
divergence at three bits by one per cent.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.evaluate.compare import compare_states
from exl3kit.evaluate.metrics import Quality, summarize
from exl3kit.evaluate.states import final_states, text_windows
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions

MODEL = Path(__file__).parents[2] / "examples" / "demo-model"
STEP = 4  # of 113 windows: chat and prose lie in different parts
MOST_KLD = {2: 0.135, 2.5: 0.077, 3: 0.037, 4: 0.0112}
LEAST_AGREEMENT = {2: 0.84, 2.5: 0.88, 3: 0.91, 4: 0.945}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[float, Quality]:
    """Quality at each rate, 2.5 being a mean shared out over experts."""
    text = (MODEL / "held_out.txt").read_text(encoding="utf-8")
    plain, folder = open_checkpoint(MODEL), tmp_path_factory.mktemp("quality")
    tokens = text_windows(text, MODEL, plain.config["vocab_size"], 512)[::STEP]
    reference, measured = final_states(plain, tokens), {}
    for bits in MOST_KLD:
        out = folder / f"k{bits}"
        quantize_checkpoint(MODEL, out, QuantizeOptions(bits, tp=2, jobs=8))
        states = final_states(open_checkpoint(out), tokens)
        measured[bits] = summarize(compare_states(states, reference, tokens))
    return measured


@pytest.mark.parametrize("bits", MOST_KLD)
def test_divergence_and_agreement_keep_their_bounds(
    found: dict[float, Quality], bits: float
) -> None:
    assert 0 < found[bits].kld_mean < MOST_KLD[bits]
    assert found[bits].top1_agreement > LEAST_AGREEMENT[bits]


@pytest.mark.parametrize("name", ["kld_mean", "kld_median", "kld_p99"])
def test_every_step_in_bits_takes_the_divergence_down(
    found: dict[float, Quality], name: str
) -> None:
    values = [getattr(found[bits], name) for bits in sorted(found)]
    assert all(low > 1.3 * high for low, high in pairwise(values))
    agreement = [found[bits].top1_agreement for bits in sorted(found)]
    assert agreement == sorted(agreement)


def test_shared_out_bits_beat_the_line_between_their_rates(found: dict[float, Quality]) -> None:
    # Half of the experts at each rate, drawn at random, is at 0.98 of the middle; measured: 0.89
    middle = (found[2].kld_mean + found[3].kld_mean) / 2
    assert found[2.5].kld_mean < 0.95 * middle
