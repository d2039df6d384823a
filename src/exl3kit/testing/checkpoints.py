"""Random valid checkpoints of a few MB: every dialect but the rank-sliced one (see `generate`).

Names and shapes come from the model map, so any architecture works. Nothing is quantised: EXL3
tensors are random too. Ordinary EXL3 is written as exllamav3 writes it: the header is not padded
and tensors follow one another unaligned.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.fp8 import SCALE_FIELD
from exl3kit.checkpoint.header import DTYPE_NAMES
from exl3kit.checkpoint.r7 import BLOCK_KEY as R7_KEY
from exl3kit.checkpoint.r7 import R7Manifest, r7_shared_name
from exl3kit.checkpoint.widths import padded
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.format.row_table import GROUP
from exl3kit.format.spec import HADAMARD_BLOCK, TILE, words_per_tile
from exl3kit.models.base import LinearSpec, ShardKind
from exl3kit.models.decoder import DecoderMap
from exl3kit.models.registry import model_map
from exl3kit.testing.generate import random_exl3

_BLOCK = 128  # of FP8 scales
# What exllamav3 leaves alone (routers) and what engines need dense (vLLM's indexer, eh_proj).
_DENSE = (".mlp.gate", ".eh_proj", ".indexer.wk", ".indexer.weights_proj")


@dataclass(frozen=True)
class OrdinaryOptions:
    """How an ordinary EXL3 checkpoint looks.

    `codebook` 3inst has no marker. `has_packed_signs`: su and sv of exllamav3's first versions.
    `slice_width` cuts dense MLPs into `.slice.{i}` linears. `embedding_bits` makes the embedding a
    row table. `head_bits` None leaves the head dense. `num_shards` files, without an index.
    """

    bits: int | float = 3
    codebook: str = "mul1"
    head_bits: int | None = 6
    embedding_bits: int | None = None
    has_packed_signs: bool = False
    slice_width: int | None = None
    num_shards: int = 1
    version: str = "1.6.5"


def plain_tensors(
    config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every required tensor of the model `config` describes; the routers' biases stay fp32."""
    for spec in model_map(config).tensors():
        if spec.is_optional:
            continue
        random = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
        values = torch.randn(spec.shape, generator=random)
        if len(spec.shape) == 1:
            values = values * 0.1 + (0 if spec.name.endswith("bias") else 1)
        else:
            values = values / math.sqrt(spec.shape[1])
        is_routing = spec.name.endswith("e_score_correction_bias")
        yield spec.name, values if is_routing else values.to(dtype)


def write_plain(
    out: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, *, fp8: bool = False
) -> Path:
    """A checkpoint without EXL3; with `fp8` the linears are float8, a scale for each 128 x 128."""
    linears = {spec.name for spec in _linears(model_map(config)) if not _is_dense(spec)}
    with CheckpointWriter(out) as writer:
        for name, tensor in plain_tensors(config, dtype):
            if not fp8 or name.removesuffix(".weight") not in linears:
                writer.add(name, tensor)
                continue
            weight, scale = to_fp8(tensor)
            writer.add(name, weight)
            writer.add(f"{name.removesuffix('weight')}{SCALE_FIELD}", scale)
        extra: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        if fp8:
            block = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK]}
            extra["quantization_config"] = block
        return writer.finish({**config, **extra})


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, in) -> float8 e4m3 of the same shape, and float32 scales of its 128 x 128 blocks."""
    rows, columns = (-(-size // _BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * _BLOCK, columns * _BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    blocks = padded.view(rows, _BLOCK, columns, _BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448  # the largest e4m3 value
    scaled = (blocks / scale[:, None, :, None]).view(padded.shape)
    return scaled[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scale


def write_ordinary(
    out: Path, config: dict[str, Any], options: OrdinaryOptions | None = None
) -> Path:
    """An ordinary EXL3 checkpoint: all linears, experts and MTP layers quantised, by `options`."""
    chosen = options or OrdinaryOptions()
    model = model_map(config)
    specs = {spec.name: spec for spec in _linears(model) if not _is_dense(spec)}
    if chosen.head_bits is not None and not model.has_tied_head:
        head = LinearSpec("lm_head", model.hidden_size, model.vocab_size, ShardKind.COLUMN)
        specs[head.name] = head
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in plain_tensors(config, torch.float16):
        module, _, field = name.rpartition(".")
        if module in specs and field == "bias":
            tensors[name] = torch.nn.functional.pad(tensor, (0, -len(tensor) % HADAMARD_BLOCK))
        elif module in specs:
            tensors |= _ordinary_linear(specs[module], chosen)
        elif module == "model.embed_tokens" and chosen.embedding_bits is not None:
            tensors |= _row_table(module, tensor.shape, chosen.embedding_bits)
        else:
            tensors[name] = tensor
    out.mkdir(parents=True)
    _write_shards(out, tensors, chosen.num_shards)
    quantization = {
        "quant_method": "exl3",
        "version": chosen.version,
        "bits": float(chosen.bits),
        "head_bits": chosen.head_bits or 16,
        "codebook": chosen.codebook,
    }
    text = json.dumps({**config, "quantization_config": quantization})
    (out / "config.json").write_text(text, encoding="utf-8")
    return out


def write_r7(out: Path, config: dict[str, Any], k_values: tuple[int, ...] = (3, 4, 5)) -> Path:
    """A checkpoint of the r7 dialect: each projection of each expert takes the next rate."""
    model = model_map(config)
    layers = model.moe_layers
    experts = {
        spec.name: spec
        for layer in layers
        for expert in range(model.num_experts)
        for spec in model.expert_linears(layer, expert)
    }
    manifest = R7Manifest(layers[0], layers[-1], k_values)
    with CheckpointWriter(out) as writer:
        for name, tensor in plain_tensors(config):
            if name.removesuffix(".weight") not in experts:
                writer.add(name, tensor)
        shared: set[str] = set()
        for number, spec in enumerate(experts.values()):
            linear = _random_linear(spec, k_values[number % len(k_values)], "mcg")
            for field, tensor in linear.items():
                name = r7_shared_name(spec.name, field) or f"{spec.name}.{field}"
                if name not in shared:
                    writer.add(name, tensor)
                    shared.add(name)
        quantization = {"quant_method": "modelopt", R7_KEY: manifest.to_config()}
        return writer.finish({**config, "quantization_config": quantization})


def write_unaligned(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A safetensors file as exllamav3 writes it: tensors in this order, header without padding."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return path


def _linears(model: DecoderMap) -> Iterator[LinearSpec]:
    for layer in model.layers:
        yield from (spec for spec in model.linears(layer) if not spec.is_optional)
        if layer in model.moe_layers:
            for expert in range(model.num_experts):
                yield from model.expert_linears(layer, expert)


def _is_dense(spec: LinearSpec) -> bool:
    return spec.name.endswith(_DENSE)


def _random_linear(spec: LinearSpec, bits: int | float, codebook: str) -> dict[str, torch.Tensor]:
    seed = zlib.crc32(spec.name.encode())
    ins, outs = padded(spec.in_features), padded(spec.out_features)
    tensors = random_exl3(ins, outs, bits, codebook, seed).tensors()
    tensors["svh"][spec.out_features :] = 0  # padding decodes to zeros, as exllamav3 leaves it
    return tensors


def _ordinary_linear(spec: LinearSpec, options: OrdinaryOptions) -> dict[str, torch.Tensor]:
    is_head = spec.name == "lm_head" and options.head_bits is not None
    bits = options.head_bits if is_head else options.bits
    assert bits is not None
    is_mlp = ".mlp." in spec.name and ".experts." not in spec.name
    parts = _slices(spec, options.slice_width) if is_mlp and options.slice_width else [spec]
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        fields = _random_linear(part, bits, options.codebook)
        if options.has_packed_signs:
            fields |= {"su": _pack_signs(fields.pop("suh")), "sv": _pack_signs(fields.pop("svh"))}
        tensors |= {f"{part.name}.{field}": tensor for field, tensor in fields.items()}
    return tensors


def _slices(spec: LinearSpec, width: int) -> list[LinearSpec]:
    """`spec` cut along the intermediate side into linears of at most `width`."""
    side = "in_features" if spec.name.endswith("down_proj") else "out_features"
    total = getattr(spec, side)
    starts = range(0, total, width)
    return [
        replace(spec, name=f"{spec.name}.slice.{i}", **{side: min(width, total - start)})
        for i, start in enumerate(starts)
    ]


def _pack_signs(vector: torch.Tensor) -> torch.Tensor:
    """float16 (n,) to int16 (n/16,): bit i of word j is set where element 16 j + i is negative."""
    bits = (vector < 0).view(-1, TILE).to(torch.int32) << torch.arange(TILE, dtype=torch.int32)
    return bits.sum(dim=1).to(torch.int16)


def _row_table(module: str, size: torch.Size, bits: int) -> dict[str, torch.Tensor]:
    rows, width = size
    groups = -(-width // GROUP)
    random = torch.Generator().manual_seed(bits)
    shape = (rows, groups, 1 + words_per_tile(bits))
    words = torch.randint(-(1 << 15), 1 << 15, shape, generator=random, dtype=torch.int16)
    words[..., 0] = torch.full(shape[:2], 0.05, dtype=torch.float16).view(torch.int16)
    signs = torch.randint(0, 2, (groups, GROUP), generator=random).half() * 2 - 1
    return {f"{module}.trellis": words.flatten(1), f"{module}.signs": signs}


def _write_shards(out: Path, tensors: dict[str, torch.Tensor], count: int) -> None:
    names = list(tensors)
    size = -(-len(names) // count)
    for i in range(count):
        part = {name: tensors[name] for name in names[i * size : (i + 1) * size]}
        single = "model.safetensors"
        file = single if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        write_unaligned(out / file, part)
