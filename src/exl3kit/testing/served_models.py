"""Small EXL3 models for comparing engines token by token in bf16, where rounding must not decide.

Two engines round differently. With plainly random weights that shows twice: routers have ties, and
a token that takes another expert changes by a fifth; and the errors of layers add up. So here

* routers read the last `ROUTING` channels only, which no attention and no MLP writes: experts are
  chosen by the tokens, up to a common factor, and differ as much as random ones do;
* attention and MLPs write `BRANCH` of what they read, so that errors die out. In bf16 a wrong
  expert shows in a token of ten, and rounding moves the best one by two steps of bf16 at most (CPU:
  14 ties and no more in 1,152 tokens, and 130 real differences with one expert exchanged).

The second also makes a draft agree with its target, whose `eh_proj` takes the embedding alone.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.slicing.job import slice_checkpoint
from exl3kit.slicing.plan import SliceOptions
from exl3kit.testing.checkpoints import OrdinaryOptions, write_ordinary
from exl3kit.testing.dense import write_dense_twin
from exl3kit.testing.tiny_configs import tiny_config_of
from exl3kit.testing.tiny_model import write_tokenizer

ROUTING = 64
BRANCH = 0.4
_ROUTER_SCALE = 6.0  # sigmoids of logits of deviation 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Head sizes for which GPU kernels of latent attention exist.
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_parameters": _ROPE}
_SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "partial_rotary_factor": 0.5,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5},
    },
    "deepseek_v3": {**_LATENT, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "glm_moe_dsa": {**_LATENT, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32},
}
SERVED_TYPES = tuple(_SIZES)


def write_served(folder: Path, model_type: str) -> dict[str, Path]:
    """The same weights as checkpoints in `folder`, by name, about 10 MB each.

    `ordinary` has every linear and the head as EXL3; `tp1` and `tp2` its experts cut for one and
    two ranks; `dense` all of it decoded to bf16; `damaged` is `ordinary` with another down_proj in
    one expert, for a comparison that has to find it. `model_type` is one of SERVED_TYPES; a
    glm4_moe has a next-token layer.
    """
    config = tiny_config_of(model_type, 3, 8, 1 if model_type == "glm4_moe" else 0)
    config |= {"hidden_size": 512, "max_position_embeddings": 16384, **_SIZES[model_type]}
    random = write_ordinary(folder / "random", config, OrdinaryOptions(codebook="mcg"))
    paths = {"ordinary": _shaped(random, folder / "ordinary")}
    for tp in (1, 2):
        sliced = slice_checkpoint(paths["ordinary"], folder / f"tp{tp}", SliceOptions(tp=tp))
        paths[f"tp{tp}"] = sliced.path
    paths["dense"] = write_dense_twin(paths["ordinary"], folder / "dense", torch.bfloat16)
    paths["damaged"] = _damaged(paths["ordinary"], folder / "damaged")
    return paths


def _damaged(source: Path, out: Path) -> Path:
    shutil.copytree(source, out)
    info = open_checkpoint(out).info("model.layers.1.mlp.experts.0.down_proj.trellis")
    with info.file.open("r+b") as file:
        file.seek(info.start)
        words = file.read(info.nbytes)
        file.seek(info.start)
        file.write(bytes(255 - byte for byte in words))
    return out


def _shaped(source: Path, out: Path) -> Path:
    checkpoint = open_checkpoint(source)
    write_tokenizer(source)
    with CheckpointWriter(out) as writer:
        for name in checkpoint.names():
            writer.add(name, _shape(name, checkpoint.tensor(name)))
        writer.copy_side_files(source)
        return writer.finish(checkpoint.config)


def _shape(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name.endswith((".o_proj.svh", ".down_proj.svh")):
        tensor = tensor * BRANCH
        tensor[-ROUTING:] = 0
    elif name.endswith(".mlp.gate.weight"):
        tensor = tensor * _ROUTER_SCALE
        tensor[:, :-ROUTING] = 0
    elif name.endswith("embed_tokens.weight"):
        tensor = tensor * math.sqrt(tensor.shape[1])
    elif name.endswith(".eh_proj.weight"):
        tensor = torch.eye(*tensor.shape, dtype=tensor.dtype)
    elif name.endswith(("model.norm.weight", ".enorm.weight", ".shared_head.norm.weight")):
        tensor = torch.ones_like(tensor)
    return tensor
