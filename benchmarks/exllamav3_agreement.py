"""Does exllamav3 load what exl3kit writes, and compute the same logits?

    for c in mcg mul1; do exl3kit quantize examples/demo-model OUT-$c --bits 3 --codebook $c \\
        --dense attention,mlp,shared_experts,head --rows 16 --device cuda --jobs 8; done
    python benchmarks/exllamav3_agreement.py OUT-mcg OUT-mul1

Both run the same random token rows: exl3kit in float32 on the CPU through the decoded weights,
exllamav3 on the GPU in fp16 through its own loader and kernels, its int8 activation path off. Where
they differ most, exl3kit's pass is repeated with the other choice of the router at the nearest tie:
if that is what exllamav3 computed, the tie was the difference.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from facts import RESULTS, bullet_list, facts, write_results
from torch import Tensor

import exl3kit
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.models.forward import Carry, ForwardModel, Routing, forward_model
from exl3kit.models.forward.routers import SigmoidRouter
from exl3kit.models.module_weights import ModuleWeights

ROWS, LENGTH = 3, 96
WORST = 3  # positions looked into
_GATE = "mlp.gate"

Place = tuple[int, int]  # layer with experts, counted from 0, and token of all rows


@dataclass
class WatchedRouter:
    """`router`, which notes how near each choice was, and takes the runner-up at `swapped`.

    `gaps` has a layer's (T,) differences between the last score chosen and the first left out.
    """

    router: SigmoidRouter
    swapped: frozenset[Place]
    gaps: list[Tensor]

    def __call__(self, x: Tensor, weights: Mapping[str, Tensor]) -> Routing:
        """Route tokens (T, H) as the router does, but for the swapped ones."""
        layer, count = len(self.gaps), self.router.top_k
        scores = torch.sigmoid(x @ weights[f"{_GATE}.weight"].T)
        ranked = (scores + weights[f"{_GATE}.e_score_correction_bias"]).topk(count + 1, dim=-1)
        self.gaps.append(ranked.values[:, -2] - ranked.values[:, -1])
        chosen = ranked.indices[:, :-1].clone()
        for place, token in self.swapped:
            if place == layer:
                chosen[token, -1] = ranked.indices[token, -1]
        return self._weighed(scores, chosen)

    def _weighed(self, scores: Tensor, chosen: Tensor) -> Routing:
        found = scores.gather(1, chosen)
        return Routing(chosen, found / found.sum(-1, keepdim=True) * self.router.scale)


@torch.inference_mode()
def our_logits(
    checkpoint: Checkpoint, tokens: Tensor, swapped: frozenset[Place] = frozenset()
) -> tuple[Tensor, Tensor]:
    """float32 (R, S - 1, V), and the gaps (layers with experts, R, S)."""
    model: ForwardModel = forward_model(checkpoint.config)
    assert isinstance(model.router, SigmoidRouter) and model.router.is_normalized
    watched = WatchedRouter(model.router, swapped, [])
    model, weights, carry = replace(model, router=watched), ModuleWeights(checkpoint), Carry()
    x = model.embed(tokens, weights["model.embed_tokens.weight"])
    for layer in range(model.num_hidden_layers):
        x = model.decoder_layer(
            x, ModuleWeights(checkpoint, f"model.layers.{layer}."), layer, carry
        )
    logits = model.logits(x[:, :-1], weights["model.norm.weight"], weights["lm_head.weight"])
    return logits, torch.stack(watched.gaps).view(-1, *tokens.shape)


def exllamav3_logits(folder: Path, tokens: Tensor) -> Tensor:
    """float32 (R, S - 1, V), padded vocabulary included."""
    library = importlib.import_module("exllamav3")
    model = library.Model.from_config(library.Config.from_directory(str(folder)))
    model.load("cuda:0", progressbar=False)
    rows = [model.forward(row[None], {"attn_mode": "flash_attn_nc"})[0] for row in tokens]
    return torch.stack([row.float().cpu() for row in rows])[:, :-1]


def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """KL(ours || theirs) in nats a position."""
    own, other = (torch.log_softmax(x.double(), dim=-1) for x in (ours, theirs))
    return (own.exp() * (own - other)).sum(dim=-1)


def compare(folder: Path) -> dict[str, Any]:
    """The figures of one checkpoint, and what the nearest ties do at the worst positions."""
    checkpoint = exl3kit.open_checkpoint(folder)
    generator = torch.Generator().manual_seed(0)
    vocab_size = int(checkpoint.config["vocab_size"])
    tokens = torch.randint(5, vocab_size, (ROWS, LENGTH), generator=generator)
    ours, gaps = our_logits(checkpoint, tokens)
    theirs = exllamav3_logits(folder, tokens)[..., : ours.shape[-1]]
    found, difference = divergence(ours, theirs), ours - theirs
    equal = ours.argmax(dim=-1) == theirs.argmax(dim=-1)
    return {
        "codebook": checkpoint.config["quantization_config"]["codebook"],
        "largest": float(difference.abs().max()),
        "rms": float(difference.norm() / ours.norm()),
        "equal": int(equal.sum()),
        "positions": equal.numel(),
        "kld_mean": float(found.mean()),
        "kld_max": float(found.max()),
        "worst": [
            look_into(checkpoint, tokens, theirs, found, gaps, int(at))
            for at in found.flatten().topk(WORST).indices
        ],
    }


def look_into(
    checkpoint: Checkpoint, tokens: Tensor, theirs: Tensor, found: Tensor, gaps: Tensor, at: int
) -> dict[str, Any]:
    """One position: the nearest tie among its own choices, and the KL with the other choice."""
    row, position = divmod(at, LENGTH - 1)
    layer = int(gaps[:, row, position].argmin())
    gap = gaps[layer, row, position]
    swap = frozenset({(layer, row * LENGTH + position)})
    swapped = divergence(our_logits(checkpoint, tokens, swap)[0], theirs)
    return {
        "row": row,
        "position": position,
        "kld": float(found[row, position]),
        "layer": layer,
        "gap": float(gap),
        "gap_rank": int((gaps[:, :, :-1] < gap).sum()) + 1,
        "kld_swapped": float(swapped[row, position]),
    }


def markdown(header: dict[str, str], found: list[dict[str, Any]]) -> str:
    """The result page."""
    lines = "".join(
        f"| {x['codebook']} | {x['largest']:.4f} | {x['rms']:.1e} | {x['equal']} of "
        f"{x['positions']} | {x['kld_mean']:.1e} | {x['kld_max']:.1e} |\n"
        for x in found
    )
    worst = "".join(
        f"| {x['codebook']} | {w['row']}, {w['position']} | {w['kld']:.1e} | {w['layer'] + 1} | "
        f"{w['gap']:.1e} | {w['gap_rank']} | {w['kld_swapped']:.1e} |\n"
        for x in found
        for w in x["worst"]
    )
    choices = 3 * ROWS * (LENGTH - 1)
    return f"""# exllamav3 on checkpoints that exl3kit wrote

{bullet_list(header)}
Demo model at 3 bits, attention, MLPs and head quantised too; logits of {ROWS} x {LENGTH - 1}
positions of random tokens, exl3kit in float32 against exllamav3 in fp16, its int8 activation path
off.

| codebook | largest difference | RMS, relative | top-1 equal | KL mean | KL max |
| --- | --- | --- | --- | --- | --- |
{lines}
The {WORST} worst positions of each: the layer where the position's own choice of experts was
nearest to a tie, the difference of the two scores there, its rank among all {choices} choices
(1: the nearest tie of all), and the KL once exl3kit takes the other expert at that one place.

| codebook | row, position | KL | layer | gap of scores | rank | KL with the other expert |
| --- | --- | --- | --- | --- | --- | --- |
{worst}"""


def main() -> None:
    """Compare and write both result files."""
    parser = argparse.ArgumentParser(description="Compare logits with exllamav3's.")
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["EXL3_INT8_GEMV"] = "0"
    version = importlib.import_module("exllamav3.version").__version__
    header = facts("cuda:0") | {"exllamav3": version}
    found = [compare(folder) for folder in options.checkpoints]
    result = {**header, "checkpoints": found}
    write_results("exllamav3_agreement", result, markdown(header, found), options.out)


if __name__ == "__main__":
    main()
