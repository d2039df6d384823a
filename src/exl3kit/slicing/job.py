"""`slice_checkpoint`: an EXL3 checkpoint cut for tensor parallelism; bytes are moved, none decoded.

Only experts are cut. Every other tensor, dense EXL3 linears included, keeps its bytes, dtype and
name. Weights go from file to file through small buffers: memory is the table of tensors and one
gate or up trellis.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3kit.checkpoint.atomic import check_free_space
from exl3kit.checkpoint.bits_map import parse_reference
from exl3kit.checkpoint.fp8 import BLOCK_SIZE_KEY
from exl3kit.checkpoint.manifest import BLOCK_KEY
from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.writer import DEFAULT_SHARD_BYTES, CheckpointWriter
from exl3kit.slicing.plan import SHIM, SliceOptions, SlicePlan, plan_slice

SOURCE_QUANTIZATION_KEY = "source_quantization_config"

_MIN_SHARD_BYTES = 2**26

Progress = Callable[[int, int], None]  # bytes written, bytes in all


@dataclass(frozen=True)
class SliceReport:
    """What was written; `num_slices` counts one linear of one rank."""

    path: Path
    tp: int
    rotation_layout: str
    moe_layers: tuple[int, int]
    num_slices: int
    num_copied: int
    num_bytes: int


def slice_checkpoint(
    src: str | Path,
    out: str | Path,
    options: SliceOptions,
    progress: Progress | None = None,
) -> SliceReport:
    """Write the checkpoint `src` into the new folder `out`, its experts cut for `options.tp` ranks.

    Whatever `plan_slice`, the disk or the output folder rule out is refused, as an Exl3Error,
    before anything is written; a run that fails later, as when the source changed while it was
    read, leaves no model behind, and the next one into the same folder starts clean.
    """
    plan = plan_slice(open_checkpoint(src), options)
    total = plan.num_bytes
    check_free_space(Path(out), total)
    done = 0

    def count(written: int) -> None:
        nonlocal done
        done = min(done + written, total)  # headers are written too
        if progress is not None:
            progress(done, total)

    with CheckpointWriter(Path(out), _shard_bytes(total)) as writer:
        writer.copy_side_files(
            plan.source.checkpoint.path
        )  # small: what cannot be read fails first
        _write_map(plan, writer)
        writer.copy(plan.tensors(), count)
        plan.source.checkpoint.check_unchanged()
        writer.finish(output_config(plan))
    manifest = plan.manifest
    experts = len(manifest.moe_layers) * manifest.experts_per_layer
    return SliceReport(
        path=Path(out),
        tp=manifest.tp,
        rotation_layout=manifest.rotation_layout,
        moe_layers=(manifest.first_layer, manifest.last_layer),
        num_slices=3 * experts * manifest.tp,
        num_copied=len(plan.copied),
        num_bytes=total,
    )


def _shard_bytes(total: int) -> int:
    """Enough shards to write several at once, by size alone: the same input, the same files."""
    return min(max(total // 16, _MIN_SHARD_BYTES), DEFAULT_SHARD_BYTES)


def output_config(plan: SlicePlan) -> dict[str, Any]:
    """The source's config.json with `hybrid_tr3_tail` set.

    An ordinary source's `quantization_config` describes whole experts: it is replaced and kept as
    `source_quantization_config`. A rank-sliced one's stays, unless the shim is asked for.
    """
    source = plan.source.checkpoint.config
    block = plan.manifest.to_config()
    config = {**source, BLOCK_KEY: block}
    nested = source.get("text_config")
    if isinstance(nested, dict) and BLOCK_KEY in nested:  # readers demand that both are equal
        config["text_config"] = {**nested, BLOCK_KEY: block}
    if plan.source.is_whole or plan.options.shim:
        config["quantization_config"] = _quantization(plan)
        if old := source.get("quantization_config"):
            config.setdefault(SOURCE_QUANTIZATION_KEY, old)
            if isinstance(old, dict) and BLOCK_SIZE_KEY in old:  # of FP8 linears, which are copied
                config["quantization_config"][BLOCK_SIZE_KEY] = old[BLOCK_SIZE_KEY]
    return config


def _quantization(plan: SlicePlan) -> dict[str, Any]:
    if plan.options.shim:
        return {
            "quant_method": SHIM,
            "quant_algo": "NVFP4",
            "exclude_modules": copied_modules(plan),
        }
    bits = plan.manifest.to_config()["bits"]
    return {"quant_method": "exl3", "bits": bits, "codebook": "mcg"}


def copied_modules(plan: SlicePlan) -> list[str]:
    """Patterns for every module that is not a cut expert, for readers that go by exclusion lists.

    A layer whose experts were not cut is excluded as a whole; of all others, next-token layers
    included, each module by itself, so that no pattern covers a cut expert.
    """
    patterns: set[str] = set()
    for info in plan.copied:
        module = info.name.rpartition(".")[0]
        if ".mlp.experts." in module:
            patterns.add(module.partition(".mlp.experts.")[0] + "*")
        else:
            patterns.add(re.sub(r"(\.layers)\.[0-9]+\.", r"\1.*.", module))
    return sorted(patterns)


def _write_map(plan: SlicePlan, writer: CheckpointWriter) -> None:
    """The bitrate map: bits do not change, so a rank-sliced source's file is copied as it is."""
    reference = plan.manifest.bits_per_expert
    if reference is None:
        return
    if table := plan.manifest.map_file() if plan.source.is_whole else None:
        writer.write_json(*table)
        return
    file, _ = parse_reference(reference, BLOCK_KEY)
    writer.copy_file(plan.source.checkpoint.path / file)
