"""The facts that `exl3kit inspect` shows, as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3kit.checkpoint.inventory import (
    KindRow,
    StoredTensor,
    by_kind,
    by_layer,
    stored_tensors,
)
from exl3kit.checkpoint.jsonfile import read_json_object
from exl3kit.checkpoint.manifest import MAX_BITS, MIN_BITS
from exl3kit.checkpoint.modules import exl3_parts
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.errors import CheckpointError, UnsupportedError
from exl3kit.models.decoder import DecoderMap
from exl3kit.models.registry import model_map
from exl3kit.runtime.memory import planned_tensors


@dataclass(frozen=True)
class Subject:
    """What is to be planned for: `model` is None, with a `note` why, where no plan is possible."""

    model: DecoderMap | None
    note: str | None
    tensors: Sequence[StoredTensor]
    file_tp: int | None
    is_exl3: Callable[[str], bool]


def folder_summary(path: Path, bits: int | None) -> tuple[Subject, dict[str, Any]]:
    """What is in a checkpoint folder. CheckpointError if it cannot be opened."""
    if bits is not None:
        raise CheckpointError(f"--bits {bits}: only with a config.json; {path} has its own bits")
    return checkpoint_summary(open_checkpoint(path))


def checkpoint_summary(checkpoint: Checkpoint) -> tuple[Subject, dict[str, Any]]:
    """What is in an open checkpoint; CheckpointError names a wrong value in its config."""
    tensors = stored_tensors(checkpoint)
    model, note = _known_model(checkpoint.config)
    subject = Subject(
        model, note, tensors, checkpoint.tp, lambda module: bool(exl3_parts(checkpoint, module))
    )
    return subject, _facts(checkpoint) | _totals(tensors)


def config_summary(path: Path, bits: int | None, tp: int) -> tuple[Subject, dict[str, Any]]:
    """What a model would take with its experts as EXL3 of `bits`, the rest in BF16."""
    if path.suffix != ".json":
        raise CheckpointError(f"{path}: expected a checkpoint folder or a config.json")
    if bits is None or not MIN_BITS <= bits <= MAX_BITS:
        raise CheckpointError(
            f"{path}: a plan from a config alone needs --bits {MIN_BITS} to {MAX_BITS}, "
            f"the bits of the routed experts, got {bits}"
        )
    config = read_json_object(path)
    model = model_map(config)
    tensors = planned_tensors(model, bits, tp)
    subject = Subject(model, None, tensors, None, lambda module: ".mlp.experts." in module)
    facts = {"path": str(path), "dialect": "rank-sliced, planned", **_model_facts(config)}
    return subject, facts | {"tp": tp, "exl3_bits": float(bits)} | _totals(tensors)


def _known_model(config: dict[str, Any]) -> tuple[DecoderMap | None, str | None]:
    try:
        return model_map(config), None
    except UnsupportedError as error:
        return None, f"names and shapes are not checked, and nothing can be planned: {error}"


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest, r7 = checkpoint.manifest, checkpoint.r7
    block = manifest or r7
    quantization = checkpoint.config.get("quantization_config")
    source = quantization if isinstance(quantization, dict) else {}
    return {
        "path": str(checkpoint.path),
        "dialect": checkpoint.dialect,
        **_model_facts(checkpoint.config),
        "made_by_version": source.get("version"),
        "tp": checkpoint.tp,
        "exl3_moe_layers": [block.first_layer, block.last_layer] if block else None,
        "experts_per_layer": manifest.experts_per_layer if manifest else None,
        "rotation_layout": manifest.rotation_layout if manifest else None,
        "exl3_linears": len(checkpoint.exl3_prefixes()),
        "exl3_bits": checkpoint.bits,
        "row_tables": checkpoint.row_tables() or None,
        "has_tied_head": checkpoint.is_head_tied,
        "bytes_by_dtype": _bytes_by_dtype(checkpoint),
    }


def _model_facts(config: dict[str, Any]) -> dict[str, Any]:
    names = config.get("architectures")
    return {
        "architecture": names[0] if isinstance(names, list) and names else None,
        "num_hidden_layers": config.get("num_hidden_layers"),
        "num_mtp_layers": config.get("num_nextn_predict_layers") or 0,
    }


def _bytes_by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    totals: dict[str, int] = {}
    for info in checkpoint.infos.values():
        name = str(info.dtype).removeprefix("torch.")
        totals[name] = totals.get(name, 0) + info.nbytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _totals(tensors: Sequence[StoredTensor]) -> dict[str, Any]:
    layers = by_layer(tensors)
    kinds = by_kind(layers)
    return {
        "tensors": sum(row.num_tensors for row in kinds),
        "bytes": sum(row.num_bytes for row in kinds),
        "kinds": [_row(row) for row in kinds],
        "layers": [{"layer": row.layer, **_row(row)} for row in layers],
    }


def _row(row: KindRow) -> dict[str, Any]:
    trellis = row.trellis_bits
    return {
        "kind": row.kind,
        "tensors": row.num_tensors,
        "bytes": row.num_bytes,
        "weights": row.num_weights,
        "bits_per_weight": round(row.bits_per_weight, 4),
        "trellis_bits": None if trellis is None else round(trellis, 4),
        "matrices_by_bits": {f"{bits:g}": row.rates[bits] for bits in sorted(row.rates)},
    }
