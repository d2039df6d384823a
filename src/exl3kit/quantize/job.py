"""A BF16 MoE checkpoint becomes a rank-sliced EXL3 one, streamed layer by layer.

Calibration rows pass the model once. At each MoE layer the attention runs as it is, the experts are
quantised on the tokens routed to them, and the layer's output is that of the quantised experts:
what the next layer is calibrated on is what it will see. Resident are the hidden states of the
rows, one expert's dense weights and its Hessians. Every tensor that is not a routed expert is
copied with its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl3kit.checkpoint.open import open_checkpoint
from exl3kit.checkpoint.writer import CheckpointWriter
from exl3kit.format.tensors import Exl3Tensor
from exl3kit.log import get_logger
from exl3kit.models.forward import Carry
from exl3kit.models.module_weights import ModuleWeights
from exl3kit.quantize.calibration import calibration_rows
from exl3kit.quantize.experts import ExpertJob, quantize_layer, quantize_layer_blind
from exl3kit.quantize.hessian import Coverage, require_finite
from exl3kit.quantize.output import output_config
from exl3kit.quantize.preflight import JobPlan, QuantizeOptions, check_finite, plan_job
from exl3kit.quantize.report import REPORT_NAME, QuantizeReport, SliceResult, coverage_counts

if TYPE_CHECKING:
    from exl3kit.checkpoint.open import Checkpoint

_log = get_logger(__name__)

_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\..*")
_LAYER = re.compile(r"model\.layers\.(\d+)\..*")

# slices done, slices in all, name of the last one
Progress = Callable[[int, int, str], None]


@torch.inference_mode()
def quantize_checkpoint(
    src: Path,
    out: Path,
    options: QuantizeOptions,
    calibration: Path | None = None,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Quantise the routed experts of `src` into the new folder `out`; returns what was reached.

    `calibration` is a UTF-8 text file; None takes the text of the package. Refuses with an
    Exl3Error, before any weight is quantised, whatever `plan_job`, the text or the output folder
    rules out; a run that fails later leaves no model behind.
    """
    checkpoint = open_checkpoint(src)
    plan = plan_job(checkpoint, options, out)
    rows, text_name = _rows(checkpoint, plan, calibration)
    with CheckpointWriter(out) as writer:
        check_finite(checkpoint)
        report = _Run(checkpoint, plan, writer, progress).quantize(rows, text_name)
        writer.copy_side_files(checkpoint.path)
        writer.write_json(REPORT_NAME, report.to_json())
        writer.finish(output_config(checkpoint.config, plan, report))
    return report


def _rows(checkpoint: Checkpoint, plan: JobPlan, calibration: Path | None) -> tuple[Tensor, str]:
    """Calibration rows (R, cols) and the name their text goes by in metadata."""
    options, files = plan.options, () if calibration is None else (calibration,)
    where, vocab_size = checkpoint.path, plan.forward.vocab_size
    found = calibration_rows(where, vocab_size, files, options.rows, options.cols, options.seed)
    return found.rows, ", ".join(found.texts)


class _Run:
    """The state of one job: where tensors go and what has been quantised."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: JobPlan,
        writer: CheckpointWriter,
        progress: Progress | None,
    ) -> None:
        self._checkpoint, self._plan, self._writer = checkpoint, plan, writer
        self._progress = progress
        self._slices: list[SliceResult] = []
        options = plan.options
        self._experts = ExpertJob(options.bits, options.tp, options.seed, self._emit)

    def quantize(self, rows: Tensor, text_name: str) -> QuantizeReport:
        """Run all layers on token rows (R, cols)."""
        model, names = self._plan.forward, _names_by_layer(self._checkpoint.names())
        embedding = "model.embed_tokens.weight"
        self._copy([embedding])
        x = model.embed(rows, self._checkpoint.tensor(embedding))
        carry = Carry()
        for layer in range(model.num_hidden_layers):
            self._copy(names.pop(layer, []))
            x = self._layer(x, layer, carry)
        self._copy(name for name in names.pop(None) if name != embedding)
        for layer in sorted(key for key in names if key is not None):
            self._copy(names[layer])
            if layer in self._plan.quantized_layers:
                weights = ModuleWeights(self._checkpoint, f"model.layers.{layer}.")
                quantize_layer_blind(self._experts, layer, weights, model.num_experts)
        return QuantizeReport(tuple(self._slices), self._calibration(rows, text_name))

    def _layer(self, x: Tensor, layer: int, carry: Carry) -> Tensor:
        """Hidden states (R, S, H) through one decoder layer, whose experts it quantises."""
        model, name = self._plan.forward, f"model.layers.{layer}"
        weights = ModuleWeights(self._checkpoint, f"{name}.")
        x = model.attention_block(x, weights, layer, carry)
        require_finite(x, f"{name}.self_attn: output")
        if layer not in self._plan.quantized_layers:
            x = model.mlp_block(x, weights, layer)
        else:
            tokens = model.mlp_input(x, weights).flatten(0, 1)
            out = quantize_layer(self._experts, layer, tokens, weights, model)
            if model.has_shared_experts:
                out += model.shared_experts(tokens, weights)
            x = x + out.view_as(x)
        require_finite(x, f"{name}.mlp: output")
        return x

    def _copy(self, names: Iterable[str]) -> None:
        """Copy tensors as they are, except the routed experts of quantised layers."""
        for name in names:
            match = _EXPERT.fullmatch(name)
            if match is None or int(match[1]) not in self._plan.quantized_layers:
                self._writer.add(name, self._checkpoint.tensor(name))

    def _emit(self, tensor: Exl3Tensor, result: SliceResult) -> None:
        for field, value in tensor.tensors().items():
            self._writer.add(f"{result.name}.{field}", value)
        self._slices.append(result)
        if self._progress is not None:
            self._progress(len(self._slices), self._plan.num_slices, result.name)

    def _calibration(self, rows: Tensor, text_name: str) -> dict[str, Any]:
        """The `calibration` object of the metadata; also says in the log what was not covered."""
        counts = coverage_counts(self._slices)
        if any(counts[kind] for kind in Coverage if kind is not Coverage.ROUTED):
            _log.warning("experts by the origin of their Hessians: %s", counts)
        return {
            "text": text_name,
            "rows": rows.shape[0],
            "cols": rows.shape[1],
            "seed": self._plan.options.seed,
            "tokens_per_layer": rows.numel(),
            "experts_by_hessian": counts,
        }


def _names_by_layer(names: Iterable[str]) -> dict[int | None, list[str]]:
    """Tensor names by decoder layer, in the order given; None for those outside the layers."""
    groups: dict[int | None, list[str]] = {None: []}
    for name in names:
        match = _LAYER.fullmatch(name)
        groups.setdefault(int(match[1]) if match else None, []).append(name)
    return groups
