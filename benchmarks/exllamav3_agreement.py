"""Does exllamav3 load what exl3kit writes, and compute the same logits?

    exl3kit quantize examples/demo-model OUT --bits 3 --dense attention,mlp,shared_experts,head
    python benchmarks/exllamav3_agreement.py OUT

Both run the same random token rows: exl3kit in float32 on the CPU through the decoded weights,
exllamav3 on the GPU in fp16 through its own loader and kernels, its int8 activation path off.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

import torch

import exl3kit
from exl3kit.evaluate.states import final_states

ROWS, LENGTH = 3, 96


def our_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """float32 (R, S - 1, V)."""
    states = final_states(exl3kit.open_checkpoint(folder), tokens)
    return torch.stack([states.logits(row) for row in range(len(tokens))])


def exllamav3_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """float32 (R, S - 1, V), padded vocabulary included."""
    library = importlib.import_module("exllamav3")
    model = library.Model.from_config(library.Config.from_directory(str(folder)))
    model.load("cuda:0", progressbar=False)
    rows = [model.forward(row[None], {"attn_mode": "flash_attn_nc"})[0] for row in tokens]
    return torch.stack([row.float().cpu() for row in rows])[:, :-1]


def main() -> None:
    """Print the largest and the RMS difference, top-1 agreement and KL divergence."""
    parser = argparse.ArgumentParser(description="Compare logits with exllamav3's.")
    parser.add_argument("checkpoint", type=Path)
    folder = parser.parse_args().checkpoint
    os.environ["EXL3_INT8_GEMV"] = "0"
    vocab_size = int(exl3kit.open_checkpoint(folder).config["vocab_size"])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, vocab_size, (ROWS, LENGTH), generator=generator)
    ours = our_logits(folder, tokens)
    theirs = exllamav3_logits(folder, tokens)[..., : ours.shape[-1]]
    difference = ours - theirs
    own, other = (torch.log_softmax(x.double(), dim=-1) for x in (ours, theirs))
    divergence = (own.exp() * (own - other)).sum(dim=-1)
    equal = ours.argmax(dim=-1) == theirs.argmax(dim=-1)
    print(f"largest difference  {difference.abs().max():.4f}")
    print(f"RMS, relative       {difference.norm() / ours.norm():.2e}")
    print(f"top-1 equal         {int(equal.sum())} of {equal.numel()}")
    print(f"KL, mean and max    {divergence.mean():.2e} {divergence.max():.2e}")


if __name__ == "__main__":
    main()
