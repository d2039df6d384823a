"""Quality and time of quantising the demo model: perplexity and KL divergence on its held-out text.

    python benchmarks/demo_quality.py [--bits 2 3 4] [--seeds 0] [--out benchmarks/results]

Each case quantises the model for two ranks, and compares the file's next-token distribution with
that of BF16: perplexity over the whole text, KL divergence over its first 48 windows of 512 tokens.
KL is the finer measure: on this model perplexity moves more with the seed than with a bit. The
last table is what one scale g a layer costs against a search of every slice. Writes
demo_quality.json and demo_quality.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.evaluate.perplexity import perplexity
from exl3kit.format.spec import Codebook
from exl3kit.models.base import ShardKind
from exl3kit.models.forward import forward_model
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize.calibration import encode_text
from exl3kit.quantize.experts import layer_scale
from exl3kit.quantize.job import quantize_checkpoint
from exl3kit.quantize.layout import Layout
from exl3kit.quantize.preflight import QuantizeOptions
from exl3kit.quantize.tensor import quantize_tensors

ROOT = Path(__file__).parent
MODEL = ROOT.parent / "examples" / "demo-model"
WINDOWS, WINDOW = 48, 512
TP = 2


@dataclass(frozen=True)
class Case:
    """One quantisation. `kl` in nats a token; `seconds` of wall clock and of all threads' CPU."""

    bits: int
    seed: int
    perplexity: float
    ratio: float
    kl: float
    proxy_error: float
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class ScaleCost:
    """Mean proxy error of one projection's slices with the layer's g and with a g of their own."""

    layer: int
    projection: str
    pooled: float
    own: float

    @property
    def excess(self) -> float:
        """What pooling adds to the error, as a share of it."""
        return self.pooled / self.own - 1


@torch.inference_mode()
def log_probabilities(checkpoint: Checkpoint, text: str) -> Tensor:
    """Of the next token, (WINDOWS, WINDOW, V)."""
    model = forward_model(checkpoint.config)
    tokens = encode_text(text, checkpoint.path, model.vocab_size)
    tokens = tokens[: WINDOWS * WINDOW].view(WINDOWS, WINDOW)
    weights = ModuleWeights(checkpoint)
    x = model.embed(tokens, weights["model.embed_tokens.weight"])
    for layer in range(model.num_hidden_layers):
        own = ModuleWeights(checkpoint, f"model.layers.{layer}.")
        x = model.decoder_layer(x, own, layer)
    norm, head = weights["model.norm.weight"], weights["lm_head.weight"]
    return model.logits(x, norm, head).log_softmax(-1)


def measure(bits: int, seed: int, text: str, base: Tensor, base_perplexity: float) -> Case:
    """Quantise, then compare with BF16's log-probabilities `base`."""
    with tempfile.TemporaryDirectory() as folder:
        start, cpu = time.perf_counter(), time.process_time()
        out = Path(folder) / "out"
        report = quantize_checkpoint(MODEL, out, QuantizeOptions(bits, TP, seed=seed))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        checkpoint = open_checkpoint(out)
        reached = perplexity(checkpoint, text).perplexity
        kl = float((base.exp() * (base - log_probabilities(checkpoint, text))).sum(-1).mean())
    error = report.mean_proxy_error
    ratio = reached / base_perplexity
    return Case(bits, seed, reached, ratio, kl, error, seconds, cpu_seconds)


@torch.inference_mode()
def scale_costs(bits: int, layer: int, experts: range) -> list[ScaleCost]:
    """Quantise slices of one layer twice, without Hessian: the scale is all that differs."""
    checkpoint = open_checkpoint(MODEL)
    weights = ModuleWeights(checkpoint, f"model.layers.{layer}.")
    layout, num_experts = Layout(TP), checkpoint.config["n_routed_experts"]
    costs = []
    for projection in PROJECTIONS:
        kind = ShardKind.ROW if projection == "down_proj" else ShardKind.COLUMN
        dense = [weights[f"mlp.experts.{expert}.{projection}.weight"].T for expert in experts]
        slices = [piece for weight in dense for piece, _ in layout.split(weight, None, kind)]
        scale = layer_scale(weights, num_experts, projection, layout, bits, Codebook.MCG, 0)
        errors = [
            [
                stats.proxy_error
                for _, stats in quantize_tensors(slices, [None] * len(slices), bits, scales=fixed)
            ]
            for fixed in ([scale] * len(slices), None)
        ]
        pooled, own = (sum(e) / len(e) for e in errors)
        costs.append(ScaleCost(layer, projection, pooled, own))
    return costs


def facts() -> dict[str, str]:
    """Where, when and how this was measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name"))
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": next(names, "unknown"),
        "cores": str(os.cpu_count()),
        "load_average": f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "commit": commit,
        "command": f"python benchmarks/demo_quality.py {' '.join(sys.argv[1:])}".strip(),
    }


def markdown(header: dict[str, str], base: float, cases: list[Case], costs: list[ScaleCost]) -> str:
    """The result page."""
    lines = ["# Quality of the quantised demo model", ""]
    lines += [f"- {key}: {value}" for key, value in header.items()]
    lines += [
        "",
        f"BF16 perplexity {base:.4f}. {TP} rank slices, experts quantised, rest BF16.",
        "",
    ]
    lines += [
        "| bits | seed | perplexity | x BF16 | KL | mean proxy error | seconds | CPU seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {c.bits} | {c.seed} | {c.perplexity:.4f} | {c.ratio:.4f} | {c.kl:.4f} | "
        f"{c.proxy_error:.5f} | {c.seconds:.0f} | {c.cpu_seconds:.0f} |"
        for c in cases
    ]
    lines += [
        "",
        "One g a layer and projection against a g for every slice, relative squared error:",
        "",
        "| layer | projection | one g | own g | cost |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {c.layer} | {c.projection} | {c.pooled:.6f} | {c.own:.6f} | {c.excess:+.2%} |"
        for c in costs
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write both result files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    text = (MODEL / "held_out.txt").read_text(encoding="utf-8")
    checkpoint, header = open_checkpoint(MODEL), facts()
    base, distribution = perplexity(checkpoint, text), log_probabilities(checkpoint, text)
    cases = []
    for bits in options.bits:
        for seed in options.seeds:
            cases.append(measure(bits, seed, text, distribution, base.perplexity))
            print(cases[-1], flush=True)
    costs = scale_costs(3, 2, range(0, 8, 3))
    result = {
        **header,
        "bf16": asdict(base),
        "cases": [asdict(case) for case in cases],
        "scale_costs": [asdict(cost) for cost in costs],
    }
    (options.out / "demo_quality.json").write_text(json.dumps(result, indent=2) + "\n")
    page = markdown(header, base.perplexity, cases, costs)
    (options.out / "demo_quality.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
