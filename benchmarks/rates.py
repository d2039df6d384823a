"""One model quantised at several rates, each compared with what it was made from."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from torch import Tensor

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.evaluate.compare import compare_states
from exl3kit.evaluate.metrics import Quality, summarize
from exl3kit.evaluate.report import quality_table
from exl3kit.evaluate.states import FinalStates, final_states, text_windows
from exl3kit.models.registry import model_map
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.quantize.report import REPORT_NAME

BITS = (2, 2.5, 3, 3.25, 4, 5, 6)
WINDOW = 512
FIGURES = ("perplexity", "kld_mean", "kld_median", "kld_p99", "kld_max", "top1_agreement")


@dataclass(frozen=True)
class Case:
    """One quantisation; `proxy_error` is the mean over its matrices, `seconds` None if reused."""

    bits: float
    quality: Quality
    proxy_error: float
    seconds: float | None


class Bench:
    """The model on a text, and quantisations by `options` measured against it."""

    def __init__(
        self,
        model: Path,
        text: Path,
        windows: int,
        work: Path,
        options: QuantizeOptions,
        calibration: Sequence[Path] = (),
    ) -> None:
        """At most `windows` windows, spread over `text`; quantised models are kept in `work`."""
        self._model, self._work, self._options = model, work, options
        self._calibration = calibration
        checkpoint = open_checkpoint(model)
        vocab_size = model_map(checkpoint.config).vocab_size
        rows = text_windows(text.read_text(encoding="utf-8"), model, vocab_size, WINDOW)
        self._tokens = spread(rows, windows)
        self._reference: FinalStates = final_states(checkpoint, self._tokens, device=options.device)

    def folder(self, bits: float) -> Path:
        """Where the model quantised at `bits` lies."""
        return self._work / f"k{bits:g}-seed{self._options.seed}"

    def measure(self, bits: float) -> Case:
        """Quantise, unless that was done before, and compare."""
        out, seconds = self.folder(bits), None
        if not (out / "config.json").exists():
            begun = time.monotonic()
            rate = int(bits) if bits == int(bits) else bits
            quantize_checkpoint(
                self._model, out, replace(self._options, bits=rate), self._calibration
            )
            seconds = time.monotonic() - begun
        errors = json.loads((out / REPORT_NAME).read_text(encoding="utf-8"))["proxy_error"]
        states = final_states(open_checkpoint(out), self._tokens, device=self._options.device)
        quality = summarize(compare_states(states, self._reference, self._tokens))
        return Case(bits, quality, mean(errors.values()), seconds)

    def measure_all(self, rates: Sequence[float], write: Callable[[list[Case]], None]) -> None:
        """`write` the cases so far, in order of bits, after each rate.

        One that fails stops no other; SystemExit says at the end which did.
        """
        cases, faults = [], []
        for rate in rates:
            try:
                cases.append(self.measure(rate))
            except Exception as error:
                traceback.print_exc()
                faults.append(f"{rate:g} bits: {type(error).__name__}: {error}")
                continue
            print(cases[-1], flush=True)
            write(sorted(cases, key=lambda case: case.bits))
        if faults:
            raise SystemExit("\n".join(faults))


def spread(rows: Tensor, most: int) -> Tensor:
    """At most that many token rows, evenly from all: kinds of text lie in different parts."""
    return rows[:: -(-len(rows) // most)]


def is_monotone(cases: list[Case], name: str) -> bool:
    """Whether a figure of the cases, in order of bits, gets better at every step."""
    values = [getattr(case.quality, name) for case in cases]
    return values == sorted(values, reverse=name != "top1_agreement")


def tables(cases: list[Case], plot: str) -> str:
    """What the figures are, whether they get better with bits, the figures, and proxy errors."""
    first = cases[0].quality
    low, high = first.intervals["reference_perplexity"]
    rows = {f"{case.bits:g}": case.quality for case in cases}
    errors = "".join(f"| {c.bits:g} | {c.proxy_error:.6f} | {_seconds(c)} |\n" for c in cases)
    return f"""Against the BF16 model, perplexity {first.reference_perplexity:.4f} ({low:.3f} to
{high:.3f}), on {first.predicted_tokens:,} held-out tokens in {first.windows} windows of {WINDOW}.
KLD in nats a token; in brackets 95 % intervals over windows. Better at every step in bits:
{", ".join(name for name in FIGURES if is_monotone(cases, name)) or "none"}. Not at every step:
{", ".join(name for name in FIGURES if not is_monotone(cases, name)) or "none"}.

{quality_table(rows, "bits")}
![divergence, agreement and perplexity over the bits]({plot})

| bits | mean proxy error | seconds to quantise |
| --- | --- | --- |
{errors}"""


def _seconds(case: Case) -> str:
    return "" if case.seconds is None else f"{case.seconds:.1f}"
