"""Random EXL3 that is valid: every bit pattern of a trellis decodes, so no quantiser is needed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from exl3kit.checkpoint.fp8 import SCALE_FIELD
from exl3kit.checkpoint.manifest import BLOCK_KEY, PER_EXPERT, SHARED_H, make_manifest
from exl3kit.checkpoint.modules import dense_weight
from exl3kit.checkpoint.names import shared_h_name
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.writer import DEFAULT_SHARD_BYTES, CheckpointWriter
from exl3kit.format.spec import (
    GAUSS_SCALE,
    TILE,
    Codebook,
    check_bits,
    check_codebook,
    words_per_tile,
)
from exl3kit.format.tensors import Exl3Tensor, make_marker
from exl3kit.models.base import LinearSpec, ShardKind
from exl3kit.models.registry import model_map
from exl3kit.slicing.apply import cut_dense
from exl3kit.slicing.axes import rank_range

Encode = Callable[[torch.Tensor, str], Exl3Tensor]


def random_exl3(
    in_features: int,
    out_features: int,
    bits: int | float,
    codebook: str = "mcg",
    seed: int = 0,
    name: str = "",
) -> Exl3Tensor:
    """Random linear whose decoded W has a deviation of about 1/sqrt(in_features).

    suh has magnitudes 0.75..1.25 / (1.24 sqrt(in)) and svh 0.75..1.25, with random signs: outputs
    are of the size of inputs, in fp16 too.
    """
    chosen = check_codebook(codebook)
    words = words_per_tile(check_bits(bits, chosen))
    random = torch.Generator().manual_seed(seed)
    shape = (in_features // TILE, out_features // TILE, words)
    trellis = torch.randint(-(1 << 15), 1 << 15, shape, generator=random, dtype=torch.int16)
    suh = _random_vector(in_features, random) / (GAUSS_SCALE * math.sqrt(in_features))
    svh = _random_vector(out_features, random)
    marker = make_marker(chosen)
    return Exl3Tensor(
        trellis,
        suh.half(),
        svh.half(),
        mcg=marker if chosen is Codebook.MCG else None,
        mul1=marker if chosen is Codebook.MUL1 else None,
        name=name,
    )


def make_rank_sliced(
    source: Path,
    out: Path,
    bits: int | Sequence[int] | Mapping[int, Sequence[int]],
    tp: int,
    moe_layers: tuple[int, int],
    encode: Encode | None = None,
    rotation_layout: str = PER_EXPERT,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write `source`, a plain checkpoint, with the routed experts of `moe_layers` as EXL3 slices.

    `bits` is one rate, or one an expert, the same in every layer, or by layer one an expert.
    `moe_layers` is (first, last), both included. `encode(weight (in, out) fp32, name)` makes each
    slice from its part of the weight; without it slices are random, seeded by their names.
    Everything else is copied.
    """
    plain = open_checkpoint(source)
    model = model_map(plain.config)
    layers = range(moe_layers[0], moe_layers[1] + 1)
    if not isinstance(bits, Mapping):
        rates = (bits,) * model.num_experts if isinstance(bits, int) else tuple(bits)
        bits = dict.fromkeys(layers, rates)
    layer_bits = {layer: tuple(rates) for layer, rates in bits.items()}
    manifest = make_manifest(tp, layer_bits, rotation_layout=rotation_layout)
    experts = [
        (layer, expert, spec)
        for layer in layers
        for expert in range(model.num_experts)
        for spec in model.expert_linears(layer, expert)
    ]
    with CheckpointWriter(out, shard_bytes) as writer:
        _copy_others(plain, {spec.name for _, _, spec in experts}, writer)
        for layer, expert, spec in experts:
            slices = _slices(plain, spec, manifest.tp, manifest.bits_of(layer, expert), encode)
            _add_slices(writer, slices, is_first=expert == 0, is_shared=rotation_layout == SHARED_H)
        writer.copy_side_files(source)
        if table := manifest.map_file():
            writer.write_json(*table)
        block = manifest.to_config()
        quantization = {"quant_method": "exl3", "bits": block["bits"]}
        config = {BLOCK_KEY: block, "quantization_config": quantization}
        return writer.finish({**plain.config, **config})


def make_ordinary(
    source: Path,
    out: Path,
    bits: int | Sequence[int],
    codebook: str = "mcg",
    dense_bits: float | None = None,
    encode: Encode | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write `source`, a plain checkpoint, as an ordinary EXL3 one: whole linears, no ranks.

    Routed experts of all layers take `bits`, one rate or one an expert; attention, dense MLP and
    shared experts take `dense_bits` if it is given. `encode` as in `make_rank_sliced`.
    """
    plain = open_checkpoint(source)
    model = model_map(plain.config)
    rates = (bits,) * model.num_experts if isinstance(bits, int) else tuple(bits)
    linears: dict[LinearSpec, float] = {}
    for layer in model.layers:
        if layer in model.moe_layers:
            for expert, rate in enumerate(rates):
                linears |= dict.fromkeys(model.expert_linears(layer, expert), rate)
        if dense_bits is not None:
            specs = (spec for spec in model.linears(layer) if spec.shard != ShardKind.REPLICATED)
            linears |= dict.fromkeys(specs, dense_bits)
    with CheckpointWriter(out, shard_bytes) as writer:
        _copy_others(plain, {spec.name for spec in linears}, writer)
        for spec, rate in linears.items():
            if encode is not None:
                tensor = encode(dense_weight(plain, spec.name).T, spec.name)
            else:
                seed = zlib.crc32(spec.name.encode())
                sides = spec.in_features, spec.out_features
                tensor = random_exl3(*sides, rate, codebook, seed, spec.name)
            for field, value in tensor.tensors().items():
                writer.add(f"{spec.name}.{field}", value)
        writer.copy_side_files(source)
        quantization = {"quant_method": "exl3", "version": "1.0.0", "bits": max(rates)}
        return writer.finish({**plain.config, "quantization_config": quantization})


def _copy_others(plain: Checkpoint, modules: set[str], writer: CheckpointWriter) -> None:
    """Copy what is no weight of `modules`, nor the block scale of one."""
    fields = ("weight", SCALE_FIELD)
    replaced = {f"{module}.{field}" for module in modules for field in fields}
    for name in plain.names():
        if name not in replaced:
            writer.add(name, plain.tensor(name))


def _slices(
    plain: Checkpoint, spec: LinearSpec, tp: int, bits: int, encode: Encode | None
) -> list[Exl3Tensor]:
    """One EXL3 linear a rank, for one projection of one expert."""
    is_row = spec.shard is ShardKind.ROW
    width = spec.in_features if is_row else spec.out_features
    ranges = [rank_range(spec.name, width, tp, rank) for rank in range(tp)]
    names = [f"{spec.name}.rank{rank}" for rank in range(tp)]
    if encode is not None:
        weight = dense_weight(plain, spec.name).T
        parts = [cut_dense(weight, spec.shard, channels).contiguous() for channels in ranges]
        return [encode(part, name) for part, name in zip(parts, names, strict=True)]
    ins = width // tp if is_row else spec.in_features
    outs = spec.out_features if is_row else width // tp
    return [
        random_exl3(ins, outs, bits, seed=zlib.crc32(name.encode()), name=name) for name in names
    ]


def _add_slices(
    writer: CheckpointWriter, slices: list[Exl3Tensor], *, is_first: bool, is_shared: bool
) -> None:
    """Write the slices; a vector the layout shares is written with the layer's first expert."""
    for tensor in slices:
        for field, value in tensor.tensors().items():
            shared = shared_h_name(tensor.name, field) if is_shared else None
            if shared is None or is_first:
                writer.add(shared or f"{tensor.name}.{field}", value)


def _random_vector(size: int, random: torch.Generator) -> torch.Tensor:
    signs = torch.randint(0, 2, (size,), generator=random) * 2 - 1
    return signs * (0.75 + 0.5 * torch.rand(size, generator=random))
