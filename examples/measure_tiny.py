"""Measure the demo model on a CPU: perplexity, the experts' part in it, drafts, chat samples.

    python examples/measure_tiny.py examples/demo-model

float32 arithmetic on the stored BF16 weights. Perplexity is exp of the mean cross entropy over
windows of 512 tokens of held_out.txt without overlap; a window's first token is not counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_glm4_moe import Experts, MoE, TinyConfig, TinyGlm4Moe
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

WINDOW = 512
NOISE_ENERGY = 0.015  # of the squared norm of a matrix: what 3-bit trellis quantisation leaves
QUESTIONS = [
    "What is a lighthouse?",
    "What is a telescope?",
    "What is music?",
    "What does it mean to run?",
    "What is the opposite of hot?",
    "What is a river?",
    "What is a ship?",
    "What is a clock?",
    "Use the word brave in a sentence.",
    "Who are you?",
]


def load_model(path: Path) -> TinyGlm4Moe:
    """The checkpoint in the training script's own module, float32."""
    config = json.loads((path / "config.json").read_text())
    model = TinyGlm4Moe(TinyConfig(**{f.name: config[f.name] for f in fields(TinyConfig)}))
    stored: dict[str, Tensor] = {}
    for file in sorted(path.glob("model-*.safetensors")):
        stored |= {name: tensor.float() for name, tensor in load_file(file).items()}
    experts = range(model.config.n_routed_experts)

    def stack(prefix: str, part: str) -> Tensor:
        return torch.stack([stored.pop(f"{prefix}.{e}.{part}_proj.weight").t() for e in experts])

    for prefix in [name for name, m in model.named_modules() if isinstance(m, Experts)]:
        gate_up = torch.stack([stack(prefix, "gate"), stack(prefix, "up")], dim=1)
        stored[f"{prefix}.gate_up"] = gate_up.permute(2, 0, 1, 3).contiguous()
        stored[f"{prefix}.down"] = stack(prefix, "down")
    model.load_state_dict(stored)
    return model.eval()


def expert_matrices(model: TinyGlm4Moe) -> Iterator[Tensor]:
    """Gate, up and down matrix of every routed expert as views, the MTP layer's left out."""
    for block in model.blocks()[: model.config.num_hidden_layers]:
        if isinstance(block.mlp, MoE):
            stacked = block.mlp.experts
            for e in range(model.config.n_routed_experts):
                yield from (stacked.gate_up[:, e, 0], stacked.gate_up[:, e, 1], stacked.down[e])


@torch.no_grad()
def perplexity(model: TinyGlm4Moe, tokens: Tensor) -> float:
    """Perplexity of (n,) tokens in windows of WINDOW."""
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    total = 0.0
    for part in windows.split(16):
        logits = model(part)[:, :-1]
        total += float(
            F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        )
    return float(torch.tensor(total / (windows.shape[0] * (WINDOW - 1))).exp())


@torch.no_grad()
def changed_perplexity(model: TinyGlm4Moe, tokens: Tensor, noise_energy: float | None) -> float:
    """With Gaussian noise of that relative energy on all routed experts; None: with them zero."""
    generator = torch.Generator().manual_seed(0)
    kept = [matrix.clone() for matrix in expert_matrices(model)]
    for matrix in expert_matrices(model):
        if noise_energy is None:
            matrix.zero_()
        else:
            noise = torch.randn(matrix.shape, generator=generator)
            matrix += noise * (matrix.norm() / noise.norm() * noise_energy**0.5)
    result = perplexity(model, tokens)
    for matrix, original in zip(expert_matrices(model), kept, strict=True):
        matrix.copy_(original)
    return result


@torch.no_grad()
def loads_and_drafts(model: TinyGlm4Moe, tokens: Tensor) -> tuple[dict[int, list[float]], float]:
    """(layer -> share of each expert in the assignments, share of drafts the model agrees to)."""
    windows = tokens[: 64 * WINDOW].view(-1, WINDOW)
    hidden = model.hidden(windows)
    drafted = model.lm_head(model.drafted(windows[:, 1:], hidden[:, :-1]))
    agreement = (drafted.argmax(-1) == model.lm_head(hidden[:, 1:]).argmax(-1)).float().mean()
    loads = {i: [round(float(x), 3) for x in r.load] for i, r in model.routers().items()}
    return loads, float(agreement)


@torch.no_grad()
def answer(model: TinyGlm4Moe, tokenizer: Tokenizer, question: str, limit: int = 64) -> str:
    """Greedy answer to one chat question, up to the first end token."""
    ends = {tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|user|>")}
    ids = tokenizer.encode(f"<|user|>{question}<|assistant|>").ids
    start = len(ids)
    while len(ids) < start + limit:
        token = int(model(torch.tensor([ids]))[0, -1].argmax())
        if token in ends:
            break
        ids.append(token)
    return tokenizer.decode(ids[start:])


def main() -> None:
    """Command line entry: prints one JSON object."""
    parser = argparse.ArgumentParser(description="Measure the demo model.")
    parser.add_argument(
        "path", type=Path, help="checkpoint folder with tokenizer.json and held_out.txt"
    )
    args = parser.parse_args()
    model = load_model(args.path)
    tokenizer = Tokenizer.from_file(str(args.path / "tokenizer.json"))
    tokens = torch.tensor(tokenizer.encode((args.path / "held_out.txt").read_text()).ids)
    total = sum(p.numel() for p in model.parameters())
    mtp = sum(p.numel() for p in model.blocks()[-1].parameters())
    routed = sum(m.numel() for m in expert_matrices(model))
    layers = model.config.num_hidden_layers - model.config.first_k_dense_replace
    base = perplexity(model, tokens)
    loads, agreement = loads_and_drafts(model, tokens)
    report = {
        "parameters": total,
        "routed_share": routed * (layers + 1) / layers / total,
        "routed_share_without_mtp": routed / (total - mtp),
        "held_out_tokens": len(tokens),
        "perplexity": base,
        "zeroed_experts_ratio": changed_perplexity(model, tokens, None) / base,
        "noise_ratio": changed_perplexity(model, tokens, NOISE_ENERGY) / base,
        "mtp_agreement": agreement,
        "loads": loads,
        "answers": {q: answer(model, tokenizer, q) for q in QUESTIONS},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
