"""Everything that can refuse a quantisation, before the first weight is quantised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from exl3kit.checkpoint.atomic import check_free_space
from exl3kit.checkpoint.manifest import MAX_BITS, MIN_BITS
from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.checkpoint.open import PLAIN
from exl3kit.checkpoint.widths import check_cut
from exl3kit.checkpoint.writer import DEFAULT_SHARD_BYTES
from exl3kit.errors import CheckpointError, FormatError, SliceError, UnsupportedError
from exl3kit.log import get_logger
from exl3kit.models.base import ModelMap
from exl3kit.models.forward import ForwardModel, forward_model
from exl3kit.models.registry import model_map

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint

_log = get_logger(__name__)

_SOURCE_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SHOWN = 8


@dataclass(frozen=True)
class QuantizeOptions:
    """What the user chose. `bits` 2..6 for every expert, `tp` rank slices.

    Calibration is on `rows` rows of `cols` tokens; `seed` draws them and the sign vectors. `mtp`
    says what becomes of the experts of a next-token layer: copied (`bf16`) or quantised without
    calibration (`trellis`). `shim` writes quant_method `modelopt`, for tools that do not know EXL3.
    """

    bits: int
    tp: int
    rows: int = 64
    cols: int = 512
    seed: int = 0
    mtp: Literal["bf16", "trellis"] = "bf16"
    shim: Literal["modelopt"] | None = None


@dataclass(frozen=True)
class JobPlan:
    """A job that passed `plan_job`: the experts of `quantized_layers` become EXL3.

    `mtp_layers` are the next-token layers the source holds; `source_format` its experts' dtype.
    """

    options: QuantizeOptions
    model: ModelMap
    forward: ForwardModel
    quantized_layers: range
    mtp_layers: range
    source_format: str

    @property
    def num_slices(self) -> int:
        """Slices the job writes: layers x experts x 3 projections x tp."""
        experts = len(self.quantized_layers) * self.model.num_experts
        return experts * len(PROJECTIONS) * self.options.tp


def plan_job(checkpoint: Checkpoint, options: QuantizeOptions, out: Path) -> JobPlan:
    """Check source, options and disk; no weight is read.

    UnsupportedError: another architecture, no routed experts, a source that is quantised in some
    other format. CheckpointError: already EXL3, missing or misshapen tensors (all are counted), too
    little disk. FormatError: bits. SliceError: a tp or a hidden size that 128 does not allow.
    """
    model, forward = model_map(checkpoint.config), forward_model(checkpoint.config)
    _check_source(checkpoint)
    _check_bits(options.bits)
    if options.tp < 1:
        raise SliceError(f"tp: expected at least 1, got {options.tp}")
    check_cut("hidden_size", model.hidden_size, 1)
    check_cut("moe_intermediate_size", model.moe_intermediate_size, options.tp)
    mtp_layers = _stored_mtp_layers(checkpoint, model)
    if options.mtp == "trellis" and not mtp_layers:
        raise CheckpointError(
            f"{checkpoint.path}: mtp 'trellis': expected a next-token layer in the source, found "
            "none; use mtp 'bf16'"
        )
    layers = _layers_to_quantize(checkpoint, model, options, mtp_layers)
    _check_tensors(checkpoint, model, mtp_layers)
    first = model.expert_linears(layers[0], 0)[0].name
    plan = JobPlan(
        options,
        model,
        forward,
        layers,
        mtp_layers,
        _SOURCE_DTYPES[checkpoint.info(f"{first}.weight").dtype],
    )
    _check_disk(checkpoint, out, plan)
    return plan


def check_finite(checkpoint: Checkpoint) -> None:
    """Read every floating-point tensor once; CheckpointError names the first with NaN or infinity.

    One pass over the source costs minutes for the largest models, encoding them hours: better to
    stop here than in the middle.
    """
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r}: expected finite values, got {count} NaN or "
                f"infinite of {tensor.numel()}"
            )


def _check_source(checkpoint: Checkpoint) -> None:
    if checkpoint.dialect != PLAIN:
        raise CheckpointError(
            f"{checkpoint.path}: already EXL3 ({checkpoint.dialect}); quantise the model it was "
            "made from"
        )
    if quantization := checkpoint.config.get("quantization_config"):
        raise UnsupportedError(
            f"{checkpoint.path}: quantization_config {quantization.get('quant_method')!r}: "
            "expected an unquantised checkpoint"
        )


def _check_bits(bits: object) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not MIN_BITS <= bits <= MAX_BITS:
        raise FormatError(
            f"bits: expected an integer from {MIN_BITS} to {MAX_BITS} for rank-sliced experts, "
            f"got {bits}"
        )


def _stored_mtp_layers(checkpoint: Checkpoint, model: ModelMap) -> range:
    """The next-token layers that are there: transformers drops them when it saves a model."""
    names = checkpoint.names()
    if any(n.startswith(f"model.layers.{i}.") for i in model.mtp_layers for n in names):
        return model.mtp_layers
    if model.mtp_layers:
        _log.warning(
            "%s: config.json declares %d next-token layers, the files hold none",
            checkpoint.path,
            len(model.mtp_layers),
        )
    return range(model.mtp_layers.start, model.mtp_layers.start)


def _layers_to_quantize(
    checkpoint: Checkpoint, model: ModelMap, options: QuantizeOptions, mtp_layers: range
) -> range:
    """The layers whose experts become EXL3, contiguous from the first MoE layer on."""
    last = mtp_layers.start
    first = min([*model.moe_layers, last])
    if first >= last:
        raise UnsupportedError(
            f"{checkpoint.path}: none of its {last} layers has routed experts (the first "
            f"{first} are dense); a rank-sliced checkpoint needs them"
        )
    return range(first, mtp_layers.stop if options.mtp == "trellis" else last)


def _check_tensors(checkpoint: Checkpoint, model: ModelMap, mtp_layers: range) -> None:
    """Presence, shape and dtype of every tensor of the model, all faults in one error."""
    absent = tuple(f"model.layers.{i}." for i in model.mtp_layers if i not in mtp_layers)
    faults = []
    for spec in model.tensors():
        if checkpoint.has(spec.name):
            info = checkpoint.info(spec.name)
            if info.shape != spec.shape or info.dtype not in _SOURCE_DTYPES:
                wanted = f"a 16 or 32 bit float of shape {spec.shape}"
                faults.append(f"{spec.name}: expected {wanted}, got {info.dtype} {info.shape}")
        elif not spec.is_optional and not spec.name.startswith(absent):
            faults.append(f"{spec.name}: missing")
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(faults[:_SHOWN])}{more}")


def _check_disk(checkpoint: Checkpoint, out: Path, plan: JobPlan) -> None:
    """Room for the output and for the shard that the writer spools."""
    needed = _output_bytes(checkpoint, plan)
    needed += min(needed, DEFAULT_SHARD_BYTES)
    check_free_space(out, needed)


def _output_bytes(checkpoint: Checkpoint, plan: JobPlan) -> int:
    """Tensor bytes of the output: what is copied, and each slice's trellis, suh, svh and marker."""
    prefixes = tuple(f"model.layers.{layer}.mlp.experts." for layer in plan.quantized_layers)
    copied = sum(
        checkpoint.info(name).nbytes for name in checkpoint.names() if not name.startswith(prefixes)
    )
    hidden = plan.model.hidden_size
    width = plan.model.moe_intermediate_size // plan.options.tp
    one_slice = plan.options.bits * hidden * width // 8 + 2 * (hidden + width) + 4
    return copied + plan.num_slices * one_slice
