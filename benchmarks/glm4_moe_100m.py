"""A Glm4Moe of 100 M parameters, trained, quantised at every rate and measured in one sitting.

    python examples/train_data_large.py --work .train --out .train/large
    python benchmarks/glm4_moe_100m.py --data .train/large --work DIR [--seconds 140]

Trains by the clock with examples/train_tiny.py's loop (a model that DIR already holds is used as it
is), quantises the routed experts with calibration rows of the training text, and compares with
BF16 on documents that were held out whole. Writes glm4_moe_100m.json, .md and .png.
`--small` is the same with two layers of four experts, for a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from facts import RESULTS, ROOT, bullet_list, facts, write_results
from rates import BITS, WINDOW, Bench, Case, tables

from exl3kit.evaluate.plot import plot_rates
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.quantize.report import REPORT_NAME

sys.path.insert(0, str(ROOT.parent / "examples"))
from tiny_glm4_moe import TinyConfig, TinyGlm4Moe
from train_tiny import Recipe, train, write_checkpoint

CONFIG = TinyConfig(
    vocab_size=16_000,
    hidden_size=512,
    intermediate_size=1536,
    moe_intermediate_size=256,
    n_routed_experts=32,
    num_experts_per_tok=4,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
)
SMALL = replace(CONFIG, num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2)
# Documents are long: windows that begin with them are soon known by heart (1.2 nats in training,
# 2.9 on held-out text, with half of them and a decay of 0.1).
RECIPE = Recipe(
    steps=100_000, batch=64, peak_rate=1.5e-3, warmup=200, weight_decay=1.0, from_start=0.0
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def make_model(config: TinyConfig, recipe: Recipe, data: Path, out: Path, device: str) -> None:
    """Train and write the checkpoint to `out`; train_log.json, last, says that it is whole."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    model = TinyGlm4Moe(config).to(device)
    log = train(model, data, recipe, out, save_every=recipe.steps)
    write_checkpoint(model, out)
    for name in TOKENIZER_FILES:
        (out / name).write_bytes((data / name).read_bytes())
    counts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "routed": sum(p.numel() for n, p in model.named_parameters() if ".mlp.experts." in n),
    }
    facts = {"recipe": asdict(recipe), "config": asdict(config), **counts, "log": log}
    (out / "train_log.json").write_text(json.dumps(facts))


def coverage(folder: Path) -> dict[str, Any]:
    """What the experts of a quantised model were calibrated on."""
    report = json.loads((folder / REPORT_NAME).read_text(encoding="utf-8"))
    tokens = [n for layer in report["tokens_by_expert"].values() for n in layer]
    found = {kind: n for kind, n in report["calibration"]["experts_by_hessian"].items() if n}
    return {"experts_by_hessian": found, "fewest_tokens": min(tokens), "most_tokens": max(tokens)}


def markdown(
    header: dict[str, str],
    training: dict[str, Any],
    sources: list[dict[str, Any]],
    calibrated: dict[str, Any],
    cases: list[Case],
) -> str:
    """The result page."""
    config, last = TinyConfig(**training["config"]), training["log"][-1]
    recipe = Recipe(**training["recipe"])
    seen = (last["step"] + 1) * recipe.batch * recipe.length
    packages = "".join(
        f"| {s['package']} | {s['licence']} | {s['text_bytes'] / 1e6:.1f} | {s['sha256'][:16]} |\n"
        for s in sources
    )
    kinds = ", ".join(f"{n} {kind}" for kind, n in calibrated["experts_by_hessian"].items())
    return f"""# Quality of a quantised Glm4Moe of 100 M parameters

{bullet_list(header)}
Glm4Moe with {training["parameters"] / 1e6:.1f} M parameters, {training["routed"] / 1e6:.1f} M of
them in routed experts: {config.num_hidden_layers} layers
({config.first_k_dense_replace} dense) and a next-token layer, hidden {config.hidden_size},
{config.n_routed_experts} experts of {config.moe_intermediate_size} with
{config.num_experts_per_tok} chosen and one shared, vocabulary {config.vocab_size:,}. Trained for
{last["seconds"]:.0f} s: {last["step"] + 1:,} steps, {seen / 1e6:.1f} M tokens, loss
{last["train"]:.3f} at the end, {last["held_out"]:.3f} nats on held-out documents.

Routed experts of all layers, the next-token layer's too, at the rate named; the rest BF16; 2.5 and
3.25 are means over experts. Hessians: {kinds} (experts by where theirs come from; the fewest tokens
that an expert was sent are {calibrated["fewest_tokens"]:,}, the most
{calibrated["most_tokens"]:,}). {tables(cases, "glm4_moe_100m.png")}
The text, from Debian 12 and PyPI; one document in fifty is held out whole:

| package | licence | MB taken | SHA-256 of the archive |
| --- | --- | --- | --- |
{packages}"""


def main() -> None:
    """Train, measure, and write the result files; the pages are rewritten after each rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="of train_data_large.py")
    parser.add_argument("--work", type=Path, required=True, help="keeps model and quantisations")
    parser.add_argument("--seconds", type=float, default=140, help="of training")
    parser.add_argument("--steps", type=int, default=RECIPE.steps, help="of training, at most")
    parser.add_argument("--bits", type=float, nargs="+", default=BITS)
    parser.add_argument("--windows", type=int, default=80, help=f"of {WINDOW} tokens, at most")
    parser.add_argument("--rows", type=int, default=256, help=f"calibration rows of {WINDOW}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=32, help="experts encoded together")
    parser.add_argument("--small", action="store_true", help="two layers of four experts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    header, model = facts(args.device), args.work / "model"
    if not (model / "train_log.json").exists():
        recipe = replace(RECIPE, steps=args.steps, seconds=args.seconds)
        if args.small:
            recipe = replace(recipe, batch=4)
        config = SMALL if args.small else CONFIG
        make_model(config, recipe, args.data, model, args.device)
    training = json.loads((model / "train_log.json").read_text(encoding="utf-8"))
    sources = json.loads((args.data / "sources.json").read_text(encoding="utf-8"))

    options = QuantizeOptions(
        0, tp=1, rows=args.rows, cols=WINDOW, mtp="trellis", device=args.device, jobs=args.jobs
    )
    calibration = [args.data / "calibration.txt"]
    bench = Bench(model, args.data / "held_out.txt", args.windows, args.work, options, calibration)

    def write(cases: list[Case]) -> None:
        rows = {case.bits: case.quality for case in cases}
        plot_rates(rows, "Glm4Moe, 100 M, held-out text", args.out / "glm4_moe_100m.png")
        calibrated = coverage(bench.folder(cases[0].bits))
        result = {
            **header,
            "training": training,
            "sources": sources,
            "calibrated": calibrated,
            "cases": [asdict(case) for case in cases],
        }
        page = markdown(header, training, sources, calibrated, cases)
        write_results("glm4_moe_100m", result, page, args.out)

    bench.measure_all(args.bits, write)


if __name__ == "__main__":
    main()
