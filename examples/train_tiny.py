"""Train a small Glm4Moe from scratch and write it as a Hugging Face checkpoint.

    python examples/train_tiny.py --data .train --out examples/demo-model --device cuda

DATA is the folder that train_data.py wrote. AdamW on float32 weights under bf16 autocast, linear
warm-up, cosine decay over the steps, or over the seconds of a run that is given a time. Every batch
is drawn from a generator seeded by --seed; half of its windows start where a document starts, as a
chat does. Written to OUT, the weights also every --save-every steps: config.json, two safetensors
shards with index, train_log.json, loss_curve.svg. benchmarks/glm4_moe_100m.py trains its model of
100 M parameters with the same functions.
Needs torch 2.6 or newer, numpy and safetensors; no transformers.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_glm4_moe import TinyConfig, TinyGlm4Moe
from torch import Tensor, nn

END_ID = 0


@dataclass(frozen=True)
class Recipe:
    """What determines a run, besides the data. With `seconds` it ends then, if not before.

    The clock starts behind the first step, which compiles, and the rate decays by it; such a run
    depends on the machine.
    """

    steps: int
    seconds: float | None = None
    batch: int = 128
    length: int = 512
    peak_rate: float = 3e-3
    warmup: int = 300
    weight_decay: float = 2.0
    mtp_weight: float = 0.3
    balance_rate: float = 1e-3
    from_start: float = 0.5  # share of windows that begin where a document does
    seed: int = 0


class Windows:
    """Draws (batch, length + 2) token windows; a share starts at a document, others anywhere."""

    def __init__(self, tokens: np.ndarray, recipe: Recipe, device: torch.device):
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self.offsets = torch.arange(recipe.length + 2, device=device)
        self.last = len(tokens) - recipe.length - 2
        starts = np.flatnonzero(tokens[: self.last] == END_ID) + 1
        self.document_starts = torch.from_numpy(starts)
        self.batch, self.at_start = recipe.batch, round(recipe.batch * recipe.from_start)
        self.random = torch.Generator().manual_seed(recipe.seed)

    def draw(self) -> Tensor:
        """The next batch, int64 on the device."""
        count, starts = self.at_start, self.document_starts
        chosen = torch.randint(len(starts), (count,), generator=self.random)
        anywhere = torch.randint(self.last, (self.batch - count,), generator=self.random)
        begin = torch.cat([starts[chosen], anywhere]).to(self.tokens.device)
        return self.tokens[begin[:, None] + self.offsets].long()


def progress(step: int, seconds: float, recipe: Recipe) -> float:
    """The share of the run that is done, from 0 to 1."""
    by_steps = step / recipe.steps
    return by_steps if recipe.seconds is None else min(1.0, max(by_steps, seconds / recipe.seconds))


def learning_rate(step: int, done: float, recipe: Recipe) -> float:
    """Linear warm-up of so many steps, while `done` of the run goes a cosine to zero."""
    warm = min(1.0, (step + 1) / recipe.warmup)
    return recipe.peak_rate * warm * 0.5 * (1 + math.cos(math.pi * done))


def half_precision(device: torch.device) -> torch.autocast:
    """bf16 products on a GPU; on a CPU without them they would take minutes a step."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def load_tokens(path: Path) -> np.ndarray:
    """The uint16 tokens that train_data.py wrote."""
    with lzma.open(path) as file:
        return np.load(io.BytesIO(file.read()))


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Weight decay on the matrices, none on norms and embeddings."""
    named = list(model.named_parameters())
    plain = [p for n, p in named if p.ndim < 2 or "embed" in n]
    decayed = [p for n, p in named if p.ndim >= 2 and "embed" not in n]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), fused=True)


@torch.no_grad()
def held_out_loss(
    model: TinyGlm4Moe, tokens: np.ndarray, length: int, windows: int = 256
) -> dict[str, float]:
    """Mean losses in nats over the first non-overlapping windows of the held-out stream."""
    size = length + 2
    windows = min(windows, len(tokens) // size)
    device = model.lm_head.weight.device
    block = (
        torch.from_numpy(tokens[: windows * size].astype(np.int64)).view(windows, size).to(device)
    )
    sums = [0.0, 0.0]
    for part in block.split(32):
        with half_precision(device):
            losses = model.losses(part)
        sums = [s + float(loss) * len(part) for s, loss in zip(sums, losses, strict=True)]
    return {"held_out": sums[0] / windows, "held_out_mtp": sums[1] / windows}


def write_checkpoint(model: TinyGlm4Moe, out: Path, shards: int = 2) -> None:
    """config.json, safetensors shards of about equal size and their index."""
    tensors = dict(model.checkpoint())
    total = sum(t.nbytes for t in tensors.values())
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    size = 0
    for name, tensor in tensors.items():
        parts[min(shards - 1, size * shards // total)][name] = tensor
        size += tensor.nbytes
    weight_map = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file(part, out / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (out / "config.json").write_text(json.dumps(model.config.to_config(), indent=2) + "\n")


def write_curve(log: list[dict[str, float]], path: Path) -> None:
    """The losses over the steps as a small SVG: training, held out, held out of the MTP layer."""
    curves = {"train": "#888", "held_out": "#06c", "held_out_mtp": "#c60"}
    values = [row[name] for row in log for name in curves if name in row]
    low, high, last = math.floor(min(values)), math.ceil(max(values)), log[-1]["step"]
    style = 'viewBox="0 0 640 360" font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {style}>']

    def height(loss: float) -> float:
        return round(320 - 290 * (loss - low) / (high - low), 1)

    for nat in range(low, high + 1):
        y = height(nat)
        parts.append(
            f'<path d="M50 {y:.1f}H620" stroke="#ddd"/><text x="25" y="{y + 4:.1f}">{nat}</text>'
        )
    for i, (name, color) in enumerate(curves.items()):
        points = [
            f"{50 + 570 * row['step'] / last:.1f},{height(row[name])}" for row in log if name in row
        ]
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}"/>')
        parts.append(
            f'<text x="480" y="{50 + 18 * i}" fill="{color}">{name.replace("_", " ")}</text>'
        )
    parts.append(f'<text x="50" y="345">loss in nats a token over {int(last)} steps</text></svg>')
    path.write_text("\n".join(parts) + "\n")


def train(
    model: TinyGlm4Moe, data: Path, recipe: Recipe, out: Path, save_every: int
) -> list[dict[str, float]]:
    """Run the recipe; returns (and keeps printing) the log, one row every 50 steps."""
    device = model.lm_head.weight.device
    windows = Windows(load_tokens(data / "train.npy.xz"), recipe, device)
    held_out = load_tokens(data / "held_out.npy.xz")
    optimizer = make_optimizer(model, recipe)
    losses_of = torch.compile(model.losses) if device.type == "cuda" else model.losses
    log: list[dict[str, float]] = []
    start = time.time()
    for step in range(recipe.steps):
        if step == 1:
            start = time.time()
        done = progress(step, time.time() - start, recipe) if step else 0.0
        is_last = done == 1 or step == recipe.steps - 1
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, done, recipe)
        with half_precision(device):
            loss, mtp_loss = losses_of(windows.draw())
        (loss + recipe.mtp_weight * mtp_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if done < 0.9:  # the last tenth trains with the routing that is shipped
            for router in model.routers().values():
                router.balance(recipe.balance_rate)
        if step % 50 == 0 or is_last:
            row = {"step": step, "seconds": round(time.time() - start, 1)}
            row |= {"train": round(loss.item(), 4), "train_mtp": round(mtp_loss.item(), 4)}
            if step % 500 == 0 or is_last:
                row |= {
                    k: round(v, 4) for k, v in held_out_loss(model, held_out, recipe.length).items()
                }
                loads = [r.load for r in model.routers().values()]
                row |= {"least_load": round(float(min(x.min() for x in loads)), 4)}
            log.append(row)
            print(json.dumps(row), flush=True)
        if (step + 1) % save_every == 0:
            write_checkpoint(model, out)
        if is_last:
            break
    return log


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train.npy.xz and held_out.npy.xz"
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument(
        "--batch", type=int, default=Recipe.batch, help="windows of 512 tokens a step"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    recipe = Recipe(steps=args.steps, batch=args.batch, seed=args.seed)
    model = TinyGlm4Moe(TinyConfig()).to(args.device)
    log = train(model, args.data, recipe, args.out, args.save_every)
    write_checkpoint(model, args.out)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    run = {"recipe": asdict(recipe), "device": device, "torch": torch.__version__, "log": log}
    (args.out / "train_log.json").write_text(json.dumps(run, indent=1) + "\n")
    write_curve(log, args.out / "loss_curve.svg")


if __name__ == "__main__":
    main()
