"""Quality of the demo model at every rate: divergence from BF16 on its held-out text.

    python benchmarks/demo_quality.py [--bits 2 2.5 3 3.25 4 5 6] [--windows 40] [--work DIR]

Each case quantises the routed experts for two ranks (2.5 and 3.25: a mean shared out over experts)
and runs windows spread over held_out.txt through both models. Writes demo_quality.json, .md and
.png.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from facts import RESULTS, ROOT, bullet_list, facts, write_results
from rates import BITS, WINDOW, Bench, Case, tables

from exl3kit.evaluate.plot import plot_rates
from exl3kit.quantize.preflight import QuantizeOptions

MODEL = ROOT.parent / "examples" / "demo-model"
TP = 2


def markdown(header: dict[str, str], cases: list[Case]) -> str:
    """The result page."""
    return f"""# Quality of the quantised demo model

{bullet_list(header)}
Routed experts at the rate named, {TP} rank slices, the rest BF16; 2.5 and 3.25 are means over
experts. {tables(cases, "demo_quality.png")}"""


def main() -> None:
    """Measure all cases and write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=float, nargs="+", default=BITS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", type=int, default=40, help=f"of {WINDOW} tokens, at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="experts encoded together")
    parser.add_argument("--work", type=Path, help="keeps the quantised models here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    options = QuantizeOptions(0, TP, seed=args.seed, device=args.device, jobs=args.jobs)
    header = facts(args.device)

    def write(cases: list[Case]) -> None:
        rows = {case.bits: case.quality for case in cases}
        plot_rates(rows, "demo model, held-out text", args.out / "demo_quality.png")
        result = {**header, "seed": args.seed, "cases": [asdict(case) for case in cases]}
        write_results("demo_quality", result, markdown(header, cases), args.out)

    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        bench = Bench(MODEL, MODEL / "held_out.txt", args.windows, work, options)
        bench.measure_all(args.bits, write)


if __name__ == "__main__":
    main()
