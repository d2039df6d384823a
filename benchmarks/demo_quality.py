"""Quality of the demo model at every rate: divergence from BF16 on its held-out text.

    python benchmarks/demo_quality.py [--bits 2 2.5 3 3.25 4 5 6] [--windows 40] [--work DIR]

Each case quantises the routed experts for two ranks (2.5 and 3.25: a mean shared out over experts)
and runs windows spread over held_out.txt through both models. Writes demo_quality.json, .md and
.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from facts import RESULTS, ROOT, bullet_list, facts, write_results
from torch import Tensor

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.evaluate.compare import compare_states
from exl3kit.evaluate.metrics import Quality, summarize
from exl3kit.evaluate.plot import plot_rates
from exl3kit.evaluate.report import quality_table
from exl3kit.evaluate.states import FinalStates, final_states, text_windows
from exl3kit.models.registry import model_map
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.quantize.report import REPORT_NAME

MODEL = ROOT.parent / "examples" / "demo-model"
BITS = (2, 2.5, 3, 3.25, 4, 5, 6)
WINDOW = 512
TP = 2
FIGURES = ("perplexity", "kld_mean", "kld_median", "kld_p99", "kld_max", "top1_agreement")


@dataclass(frozen=True)
class Case:
    """One quantisation; `proxy_error` is the mean over its matrices."""

    bits: float
    quality: Quality
    proxy_error: float


class Bench:
    """The reference on the held-out text, and the cases measured against it."""

    def __init__(self, seed: int, windows: int, work: Path) -> None:
        self._seed, self._work = seed, work
        checkpoint = open_checkpoint(MODEL)
        text = (MODEL / "held_out.txt").read_text(encoding="utf-8")
        vocab_size = model_map(checkpoint.config).vocab_size
        self._tokens = spread(text_windows(text, MODEL, vocab_size, WINDOW), windows)
        self._reference: FinalStates = final_states(checkpoint, self._tokens)

    def measure(self, bits: float) -> Case:
        """Quantise into the work folder, unless that was done before, and compare."""
        rate = int(bits) if bits == int(bits) else bits
        out = self._work / f"k{rate}-seed{self._seed}"
        if not (out / "config.json").exists():
            quantize_checkpoint(MODEL, out, QuantizeOptions(rate, TP, seed=self._seed))
        errors = json.loads((out / REPORT_NAME).read_text(encoding="utf-8"))["proxy_error"]
        states = final_states(open_checkpoint(out), self._tokens)
        quality = summarize(compare_states(states, self._reference, self._tokens))
        return Case(bits, quality, mean(errors.values()))


def spread(rows: Tensor, most: int) -> Tensor:
    """At most that many token rows, evenly from all: chat and prose lie in different parts."""
    return rows[:: -(-len(rows) // most)]


def is_monotone(cases: list[Case], name: str) -> bool:
    """Whether a figure of the cases, in order of bits, gets better at every step."""
    values = [getattr(case.quality, name) for case in cases]
    return values == sorted(values, reverse=name != "top1_agreement")


def markdown(header: dict[str, str], cases: list[Case]) -> str:
    """The result page."""
    first = cases[0].quality
    low, high = first.intervals["reference_perplexity"]
    rows = {f"{case.bits:g}": case.quality for case in cases}
    errors = "".join(f"| {c.bits:g} | {c.proxy_error:.6f} |\n" for c in cases)
    return f"""# Quality of the quantised demo model

{bullet_list(header)}
Routed experts at the rate named, {TP} rank slices, the rest BF16; 2.5 and 3.25 are means over
experts. Against the BF16 model, perplexity {first.reference_perplexity:.4f} ({low:.3f} to
{high:.3f}), on {first.predicted_tokens:,} held-out tokens in {first.windows} windows of {WINDOW}.
KLD in nats a token; in brackets 95 % intervals over windows. Better at every step in bits:
{", ".join(name for name in FIGURES if is_monotone(cases, name)) or "none"}. Not at every step:
{", ".join(name for name in FIGURES if not is_monotone(cases, name)) or "none"}.

{quality_table(rows, "bits")}
![divergence, agreement and perplexity over the bits](demo_quality.png)

| bits | mean proxy error |
| --- | --- |
{errors}"""


def run(bits: list[float], seed: int, windows: int, work: Path, out: Path) -> None:
    """Measure all cases and write the three files."""
    header, bench, cases = facts(), Bench(seed, windows, work), []
    for rate in sorted(bits):
        cases.append(bench.measure(rate))
        print(cases[-1], flush=True)
    rows = {case.bits: case.quality for case in cases}
    plot_rates(rows, "demo model, held-out text", out / "demo_quality.png")
    result = {**header, "seed": seed, "cases": [asdict(case) for case in cases]}
    write_results("demo_quality", result, markdown(header, cases), out)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=float, nargs="+", default=BITS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=40, help=f"of {WINDOW} tokens, at most")
    parser.add_argument("--work", type=Path, help="keeps the quantised models here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        run(options.bits, options.seed, options.windows, work, options.out)


if __name__ == "__main__":
    main()
