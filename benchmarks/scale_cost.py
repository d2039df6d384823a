"""What one scale g a layer and projection costs against a search of every slice's own.

    python benchmarks/scale_cost.py [--bits 3]

Slices of one layer of the demo model are quantised twice, without Hessian: the scale is all that
differs. Writes scale_cost.json and scale_cost.md.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass

import torch
from facts import ROOT, bullet_list, facts, write_results

from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.format.spec import Codebook
from exl3kit.models.base import ShardKind
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize.experts import layer_scale
from exl3kit.quantize.layout import Layout
from exl3kit.quantize.tensor import quantize_tensors

MODEL = ROOT.parent / "examples" / "demo-model"
TP = 2
LAYER, EXPERTS = 2, range(0, 8, 3)


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
def scale_costs(bits: int) -> list[ScaleCost]:
    """One entry a projection."""
    checkpoint = open_checkpoint(MODEL)
    weights = ModuleWeights(checkpoint, f"model.layers.{LAYER}.")
    layout, num_experts = Layout(TP), checkpoint.config["n_routed_experts"]
    costs = []
    for projection in PROJECTIONS:
        kind = ShardKind.ROW if projection == "down_proj" else ShardKind.COLUMN
        dense = [weights[f"mlp.experts.{expert}.{projection}.weight"].T for expert in EXPERTS]
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
        costs.append(ScaleCost(LAYER, projection, pooled, own))
    return costs


def markdown(header: dict[str, str], bits: int, costs: list[ScaleCost]) -> str:
    """The result page."""
    lines = "".join(
        f"| {c.layer} | {c.projection} | {c.pooled:.6f} | {c.own:.6f} | {c.excess:+.2%} |\n"
        for c in costs
    )
    return f"""# One scale g a layer

{bullet_list(header)}
Relative squared error at {bits} bits with the g that a layer's projection shares, and with one
searched for every slice:

| layer | projection | one g | own g | cost |
| --- | --- | --- | --- | --- |
{lines}"""


def main() -> None:
    """Measure and write both result files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bits", type=int, default=3)
    bits = parser.parse_args().bits
    header, costs = facts(), scale_costs(bits)
    result = {**header, "bits": bits, "scale_costs": [asdict(cost) for cost in costs]}
    write_results("scale_cost", result, markdown(header, bits, costs))


if __name__ == "__main__":
    main()
