"""What sharing out a mean number of bits over experts gains on the demo model.

    python benchmarks/demo_quality.py --bits 2 3 4 --work DIR
    python benchmarks/allocation.py --work DIR [--windows 20]

Experts of the three uniform files are put together by each allocation, in memory, and the model is
compared with BF16 on held-out text. `random` gives the extra bit to experts drawn by a seed. What a
job at 2.5 or 3.25 bits reaches differs a little, since later layers are calibrated on mixed ones.
Writes allocation.json and allocation.md.
"""

from __future__ import annotations

import argparse
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

import torch
from demo_quality import MODEL
from facts import RESULTS, bullet_list, facts, write_results
from rates import WINDOW, spread
from torch import Tensor

from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.evaluate.compare import compare_states
from exl3kit.evaluate.states import FinalStates, final_states, text_windows
from exl3kit.models.forward import Carry, forward_model
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize.allocate import Expert, allocate
from exl3kit.quantize.bit_plan import Bits
from exl3kit.quantize.calibration import calibration_rows
from exl3kit.quantize.sensitivity import measure_experts

BUDGETS, RATES = (2.5, 3.25), (2, 3, 4)
SEEDS = range(4)


class Mixer:
    """The demo model with experts of several rates."""

    def __init__(self, work: Path, windows: int, device: str) -> None:
        checkpoint, self._device = open_checkpoint(MODEL), torch.device(device)
        self.model = forward_model(checkpoint.config)
        text = (MODEL / "held_out.txt").read_text(encoding="utf-8")
        self._tokens = spread(text_windows(text, MODEL, self.model.vocab_size, WINDOW), windows)
        self._reference = final_states(checkpoint, self._tokens, device=device)
        self._embedding = checkpoint.tensor("model.embed_tokens.weight")
        layers = range(self.model.num_hidden_layers)
        self._plain = [self._weights(checkpoint, layer) for layer in layers]
        self.experts = [
            (layer, expert)
            for layer in filter(self.model.is_moe, layers)
            for expert in range(self.model.num_experts)
        ]
        self._decoded = {bits: self._decode(work / f"k{bits}-seed0") for bits in RATES}
        rows = calibration_rows(MODEL, self.model.vocab_size).rows
        moe_layers = sorted({layer for layer, _ in self.experts})
        self.weights = measure_experts(checkpoint, self.model, rows, moe_layers, self._device)
        self.tokens = self._count_tokens(rows[:32])

    def _weights(self, checkpoint: Checkpoint, layer: int) -> dict[str, Tensor]:
        return dict(ModuleWeights(checkpoint, f"model.layers.{layer}.", self._device))

    def _decode(self, folder: Path) -> dict[Expert, dict[str, Tensor]]:
        checkpoint, decoded = open_checkpoint(folder), {}
        for layer, expert in self.experts:
            names = [f"mlp.experts.{expert}.{name}.weight" for name in PROJECTIONS]
            weights = ModuleWeights(checkpoint, f"model.layers.{layer}.", self._device)
            decoded[layer, expert] = {name: weights[name] for name in names}
        return decoded

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens, self._embedding).to(self._device)

    @torch.inference_mode()
    def _count_tokens(self, rows: Tensor) -> dict[Expert, float]:
        x, carry, found = self._embedded(rows), Carry(), {}
        for layer, weights in enumerate(self._plain):
            after = self.model.attention_block(x, weights, layer, carry)
            if self.model.is_moe(layer):
                tokens = self.model.mlp_input(after, weights).flatten(0, 1)
                counts = self.model.route(tokens, weights).counts(self.model.num_experts)
                found |= {(layer, expert): float(n) for expert, n in enumerate(counts)}
            x = self.model.mlp_block(after, weights, layer)
        return found

    @torch.inference_mode()
    def divergence(self, bits: Mapping[Expert, Bits]) -> float:
        """Mean KL divergence, nats a token, with every expert at its bits."""
        x, carry = self._embedded(self._tokens), Carry()
        for layer, plain in enumerate(self._plain):
            own = [self._decoded[int(k)][e] for e, k in bits.items() if e[0] == layer]
            x = self.model.decoder_layer(x, ChainMap(*own, plain), layer, carry)
        states = FinalStates(self.model, x, self._reference.norm, self._reference.head)
        return float(compare_states(states, self._reference, self._tokens).kld.mean())


def by_layer(weights: Mapping[Expert, float], budget: float) -> dict[Expert, Bits]:
    """The same mean in every layer."""
    found: dict[Expert, Bits] = {}
    for layer in sorted({layer for layer, _ in weights}):
        own = {expert: weight for expert, weight in weights.items() if expert[0] == layer}
        found |= allocate(own, budget, "mcg")
    return found


def drawn(experts: list[Expert], budget: float, seed: int) -> dict[Expert, Bits]:
    """The same numbers of experts at the two rates, at random."""
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(seed)).tolist()
    places = {expert: float(place + 1) for expert, place in zip(experts, order, strict=True)}
    return allocate(places, budget, "mcg")


def measure(mixer: Mixer, budget: float) -> dict[str, float]:
    """Divergence by allocation, for one mean."""
    random = [mixer.divergence(drawn(mixer.experts, budget, seed)) for seed in SEEDS]
    found = {
        "measured weights": allocate(mixer.weights, budget, "mcg"),
        "measured weights, mean kept in each layer": by_layer(mixer.weights, budget),
        "measured weights, rates 2 to 4": allocate(mixer.weights, budget, "mcg", RATES),
        "tokens routed": allocate(mixer.tokens, budget, "mcg"),
        "tokens routed, mean kept in each layer": by_layer(mixer.tokens, budget),
    }
    return {
        "random, mean of 4": mean(random),
        "random, standard deviation": stdev(random),
        "random, best of 4": min(random),
        **{name: mixer.divergence(bits) for name, bits in found.items()},
    }


def markdown(
    header: dict[str, str], uniform: dict[int, float], found: dict[float, dict[str, float]]
) -> str:
    """The result page."""
    lines = "".join(
        f"| {name} | {' | '.join(f'{found[b][name]:.5f}' for b in found)} |\n"
        for name in found[BUDGETS[0]]
    )
    rates = ", ".join(f"{bits} bits {kld:.5f}" for bits, kld in uniform.items())
    return f"""# What sharing out bits over experts gains

{bullet_list(header)}
Demo model, 24 experts, mean KL divergence from BF16 in nats a token on held-out text. Uniform:
{rates}.

| allocation | {" | ".join(f"{b} bits" for b in found)} |
| --- | --- | --- |
{lines}"""


def main() -> None:
    """Measure and write both result files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="--work of demo_quality.py")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    header = facts(options.device)
    mixer = Mixer(options.work, options.windows, options.device)
    uniform = {k: mixer.divergence(dict.fromkeys(mixer.experts, k)) for k in RATES}
    print(uniform, flush=True)
    found = {}
    for budget in BUDGETS:
        found[budget] = measure(mixer, budget)
        print(budget, found[budget], flush=True)
    result = {**header, "windows": options.windows, "uniform": uniform, "mixed": found}
    write_results("allocation", result, markdown(header, uniform, found), options.out)


if __name__ == "__main__":
    main()
