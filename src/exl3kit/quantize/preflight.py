"""Everything that can refuse a quantisation, before the first weight is quantised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from exl3kit.checkpoint.atomic import check_free_space
from exl3kit.checkpoint.forms import stored_form
from exl3kit.checkpoint.fp8 import FP8_DTYPES
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.manifest import RankSlicedManifest, make_manifest
from exl3kit.checkpoint.open import ORDINARY, PLAIN, RANK_SLICED
from exl3kit.checkpoint.values import read_facts
from exl3kit.checkpoint.widths import check_cut
from exl3kit.errors import CheckpointError, FormatError, SliceError, UnsupportedError
from exl3kit.format.spec import Codebook, check_codebook
from exl3kit.log import get_logger
from exl3kit.models.decoder import DecoderMap
from exl3kit.models.forward import ForwardModel, forward_model
from exl3kit.models.registry import model_map
from exl3kit.quantize.allocate import Expert
from exl3kit.quantize.bit_plan import HEAD, BitPlan
from exl3kit.quantize.budget import is_budget, plan_bits
from exl3kit.quantize.contents import Contents, layer_of, total_bytes
from exl3kit.quantize.layout import WHOLE, Layout, SliceMode
from exl3kit.quantize.recipe import MtpMode, Recipe, Rule
from exl3kit.runtime.checks import check_device

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint

_log = get_logger(__name__)

_SOURCE_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SHOWN = 8


@dataclass(frozen=True)
class QuantizeOptions:
    """What the user chose.

    bits        of every routed expert, where no rate is that number their mean (see `budget`); or
                a plan of all that becomes EXL3
    dense       beside a number of bits: group of other linears -> bits (groups: `recipe.GROUPS`)
    rules       beside a number of bits: exceptions by module name (see `recipe`)
    tp          ranks to cut the experts for; None writes an ordinary checkpoint, experts whole
    slice_mode  whether a rank's part is quantised by itself or cut from the whole (see `layout`)
    codebook    "mcg", which rank-sliced files need; "mul1" and "3inst" in ordinary ones
    rows, cols  calibration rows and their tokens; `seed` draws them and the sign vectors
    route_all   experts' Hessians are made of all tokens, whatever the router says
    mtp         what becomes of next-token layers: copied, or quantised as the plan says
    shim        write quant_method `modelopt`, for tools that do not know EXL3
    device      where the forward pass and the encoder run; of several, separated by commas, the
                first has the forward pass and the Hessians, and all encode
    jobs        experts encoded together
    spill       folder for activations that do not fit in memory
    """

    bits: int | float | BitPlan
    tp: int | None = None
    slice_mode: SliceMode = "independent"
    codebook: str = "mcg"
    dense: Mapping[str, int | float] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    rows: int = 64
    cols: int = 512
    seed: int = 0
    route_all: bool = False
    mtp: MtpMode = "bf16"
    shim: Literal["modelopt"] | None = None
    device: str = "cpu"
    jobs: int = 1
    spill: Path | None = None

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices named."""
        return tuple(torch.device(name) for name in self.device.split(","))


@dataclass(frozen=True)
class JobPlan:
    """A job that passed `plan_job`. `mtp_layers` are the next-token layers the source holds;
    `source_format` is the dtype of the weights that are quantised; `expert_weights` are what a mean
    number of bits is shared out by."""

    options: QuantizeOptions
    forward: ForwardModel
    contents: Contents
    mtp_layers: range
    source_format: str
    expert_weights: Mapping[Expert, float] | None

    @property
    def needs_weights(self) -> bool:
        """Whether the bits are a mean, and the plan is not final until experts are weighed."""
        return is_budget(self.options.bits, self.options.codebook) and self.expert_weights is None

    @property
    def dialect(self) -> str:
        """ "ordinary" or "rank-sliced"."""
        return ORDINARY if self.options.tp is None else RANK_SLICED

    @property
    def num_matrices(self) -> int:
        """Matrices the job quantises."""
        return sum(len(self.contents.matrices(layer)) for layer in self.contents.layers)


def plan_job(
    checkpoint: Checkpoint,
    options: QuantizeOptions,
    expert_weights: Mapping[Expert, float] | None = None,
) -> JobPlan:
    """Check source and options; no weight is read.

    `expert_weights` are from `measure_experts`, for a mean number of bits; without them such a plan
    is provisional: enough to check the job by.

    UnsupportedError: an architecture or a config without a forward pass, a source quantised in
    another format, nothing to quantise. CheckpointError: already EXL3, missing or misshapen tensors
    (all are counted). FormatError: rates and codebooks the output cannot have. SliceError: a tp or
    a hidden size that 128 does not allow.
    """
    model = model_map(checkpoint.config)
    _check_source(checkpoint)
    forward = forward_model(checkpoint.config)
    _check_output(options, model)
    mtp_layers = stored_mtp_layers(checkpoint, model)
    bits = _bits(checkpoint, model, options, mtp_layers, expert_weights)
    _check_tensors(checkpoint, model, mtp_layers)
    layout = WHOLE if options.tp is None else Layout(options.tp, options.slice_mode)
    contents = Contents(checkpoint, model, bits, layout, Codebook(options.codebook))
    if options.tp is not None:
        rank_sliced_manifest(options.tp, bits)  # refuses layers that are not contiguous
    source_format = _source_format(checkpoint, contents)
    return JobPlan(options, forward, contents, mtp_layers, source_format, expert_weights)


def rank_sliced_manifest(
    tp: int, bits: BitPlan, extra: Mapping[str, Any] | None = None
) -> RankSlicedManifest:
    """The manifest of the plan's experts, whose rates `BitPlan.check` found whole."""
    experts = {layer: tuple(map(int, rates)) for layer, rates in bits.experts.items()}
    return make_manifest(tp, experts, extra)


def check_disk(out: Path, plan: JobPlan) -> None:
    """CheckpointError unless there is room for what `out` does not hold yet."""
    hidden = 4 * plan.options.rows * plan.options.cols * plan.contents.model.hidden_size
    parts = [*out.glob("*.part"), *out.glob("*.safetensors")] if out.is_dir() else ()
    there = sum(512 * path.stat().st_blocks for path in parts)
    check_free_space(out, max(0, total_bytes(plan.contents) + 2 * hidden - there))


def check_finite(checkpoint: Checkpoint) -> None:
    """Read every floating-point tensor once; CheckpointError names the first with NaN or infinity.

    One pass over the source costs minutes for the largest models, encoding them hours: better to
    stop here than in the middle.
    """
    files: dict[Path, list[TensorInfo]] = defaultdict(list)
    for info in checkpoint.infos.values():
        files[info.file].append(info)
    for file in sorted(files):
        facts = read_facts(file, files[file], use_digest=False, count=lambda size: None)
        for name, found in facts.tensors.items():
            if found.num_bad:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {name!r}: expected finite values, got "
                    f"{found.num_bad} NaN or infinite of {found.num_values}"
                )


def stored_mtp_layers(checkpoint: Checkpoint, model: DecoderMap) -> range:
    """The next-token layers that are there: transformers drops them when it saves a model."""
    stored = {layer_of(name) for name in checkpoint.names()}
    if any(layer in stored for layer in model.mtp_layers):
        return model.mtp_layers
    if model.mtp_layers:
        _log.warning(
            "%s: config.json declares %d next-token layers, the files hold none",
            checkpoint.path,
            len(model.mtp_layers),
        )
    return range(model.mtp_layers.start, model.mtp_layers.start)


def layers_to_quantize(model: DecoderMap, mtp: MtpMode, mtp_layers: range) -> tuple[int, ...]:
    """The layers whose routed experts become EXL3 where every layer's do."""
    target = range(model.num_hidden_layers)
    side = mtp_layers if mtp == "trellis" else ()
    return tuple(layer for layer in model.moe_layers if layer in target or layer in side)


def _check_source(checkpoint: Checkpoint) -> None:
    if checkpoint.dialect != PLAIN:
        raise CheckpointError(
            f"{checkpoint.path}: already EXL3 ({checkpoint.dialect}); quantise the model it was "
            "made from"
        )
    quantization = checkpoint.config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if quantization and method != "fp8":
        raise UnsupportedError(
            f"{checkpoint.path}: quantization_config {method!r}: expected a checkpoint in BF16, "
            "FP16, FP32, or FP8 with block scales"
        )


def _check_output(options: QuantizeOptions, model: DecoderMap) -> None:
    codebook = check_codebook(options.codebook)
    _check_devices(options)
    for name in ("rows", "cols", "jobs"):
        if getattr(options, name) < 1:
            raise FormatError(f"{name}: expected at least 1, got {getattr(options, name)}")
    if options.tp is None:
        if options.shim is not None:
            raise FormatError("shim: only rank-sliced files have one; give a tp")
        if options.slice_mode != "independent":
            raise FormatError(
                f"slice_mode: {options.slice_mode!r} says how ranks' parts are made; give a tp"
            )
        return
    if options.tp < 1:
        raise SliceError(f"tp: expected at least 1, got {options.tp}")
    if codebook is not Codebook.MCG:
        raise FormatError(
            f"codebook: expected mcg for rank-sliced experts, got {codebook}; leave out tp for an "
            "ordinary checkpoint"
        )
    if not model.num_experts:
        raise UnsupportedError(
            f"{model.architecture}: has no routed experts, which a rank-sliced checkpoint needs; "
            "leave out tp for an ordinary one"
        )
    check_cut("hidden_size", model.hidden_size, 1)
    check_cut("moe_intermediate_size", model.moe_intermediate_size, options.tp)


def _check_devices(options: QuantizeOptions) -> None:
    """All there, and of one kind: CPU and GPU do not sum in the same order."""
    for name in options.device.split(","):
        check_device(name)
    if len({device.type for device in options.devices}) > 1:
        raise UnsupportedError(
            f"device: expected several of one kind, as cuda:0,cuda:1, got {options.device!r}"
        )


def _bits(
    checkpoint: Checkpoint,
    model: DecoderMap,
    options: QuantizeOptions,
    mtp_layers: range,
    expert_weights: Mapping[Expert, float] | None,
) -> BitPlan:
    """The plan for what the source has: the one given, or made of bits, groups and rules.

    It is checked whole: what names no linear of the model is a mistake, what names one that the
    source happens to lack is left out.
    """
    if options.mtp == "trellis" and not mtp_layers:
        raise CheckpointError(
            f"{checkpoint.path}: mtp 'trellis': expected a next-token layer in the source, found "
            "none; use mtp 'bf16'"
        )
    if options.mtp == "trellis" and options.cols <= len(mtp_layers):
        raise FormatError(
            f"cols: expected more than the {len(mtp_layers)} tokens that next-token layers look "
            f"ahead, got {options.cols}"
        )
    layers = layers_to_quantize(model, options.mtp, mtp_layers)
    kept = set(model.mtp_layers) - set(mtp_layers if options.mtp == "trellis" else ())
    bits = options.bits
    if not isinstance(bits, BitPlan):
        recipe = Recipe(dense=options.dense, rules=options.rules)
        is_ordinary = options.tp is None  # exllamav3's fused kernels want one rate in a layer
        bits = plan_bits(
            recipe, model, layers, bits, options.codebook, expert_weights, by_layer=is_ordinary
        )
        recipe.check_used(model, kept)
    bits.check(model, ORDINARY if options.tp is None else RANK_SLICED, options.codebook)
    plan = BitPlan(
        {layer: rates for layer, rates in bits.experts.items() if layer not in kept},
        {n: k for n, k in bits.modules.items() if layer_of(n) not in kept and _has(checkpoint, n)},
    )
    if (not plan.experts and not plan.modules) or (options.tp is not None and not plan.experts):
        raise UnsupportedError(
            f"{checkpoint.path}: none of its {model.num_hidden_layers} layers has routed experts "
            "to quantise; other linears become EXL3 in an ordinary checkpoint, by --dense"
        )
    return plan


def _has(checkpoint: Checkpoint, module: str) -> bool:
    """Whether the source has the linear; a tied head is there as the embedding."""
    return checkpoint.has(f"{module}.weight") or module == HEAD


def _check_tensors(checkpoint: Checkpoint, model: DecoderMap, mtp_layers: range) -> None:
    """Presence, shape and dtype of every tensor of the model, all faults in one error."""
    absent = tuple(f"model.layers.{i}." for i in model.mtp_layers if i not in mtp_layers)
    faults = []
    for spec in model.tensors():
        form = stored_form(checkpoint, spec.name, spec.shape)
        if form is not None:
            faults += form.faults or _dtype_faults(checkpoint, spec.name)
        elif not spec.is_optional and not spec.name.startswith(absent):
            faults.append(f"{spec.name}: missing")
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise CheckpointError(f"{checkpoint.path}: {'; '.join(faults[:_SHOWN])}{more}")


def _dtype_faults(checkpoint: Checkpoint, name: str) -> list[str]:
    dtype = checkpoint.info(name).dtype
    if dtype in _SOURCE_DTYPES or dtype in FP8_DTYPES:
        return []
    return [f"tensor {name!r}: expected BF16, FP16, FP32 or FP8, got {dtype}"]


def _source_format(checkpoint: Checkpoint, contents: Contents) -> str:
    """The dtype of the first linear that becomes EXL3."""
    planned = (linear for layer in contents.layers for linear in contents.linears(layer))
    name = f"{next(planned).spec.name}.weight"
    dtype = checkpoint.info(name if checkpoint.has(name) else "model.embed_tokens.weight").dtype
    return "FP8" if dtype in FP8_DTYPES else _SOURCE_DTYPES[dtype]
