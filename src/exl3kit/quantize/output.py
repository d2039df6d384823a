"""The config.json of a rank-sliced checkpoint: the source's, the manifest and the quantisation."""

from __future__ import annotations

from typing import Any

from exl3kit._version import __version__
from exl3kit.checkpoint.manifest import BLOCK_KEY, make_manifest
from exl3kit.quantize.preflight import JobPlan
from exl3kit.quantize.report import QuantizeReport


def output_config(source: dict[str, Any], plan: JobPlan, report: QuantizeReport) -> dict[str, Any]:
    """`source` with `hybrid_tr3_tail` and `quantization_config` set; `source` is not changed."""
    options = plan.options
    extra = {
        "producer": "exl3kit",
        "producer_version": __version__,
        "source_format": plan.source_format,
        "calibration": report.calibration,
    }
    experts = (options.bits,) * plan.model.num_experts
    manifest = make_manifest(options.tp, dict.fromkeys(plan.quantized_layers, experts), extra)
    quantization: dict[str, Any] = {"quant_method": "exl3", "bits": options.bits, "codebook": "mcg"}
    if options.shim == "modelopt":
        quantization = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "exclude_modules": plain_modules(plan),
        }
    return {**source, BLOCK_KEY: manifest.to_config(), "quantization_config": quantization}


def plain_modules(plan: JobPlan) -> list[str]:
    """Patterns for every linear that stays as it was, for readers that go by an exclusion list.

    A next-token layer with quantised experts is named by its plain parts, never as a whole: a
    pattern for the layer would exclude its experts too.
    """
    patterns = ["lm_head", "model.embed_tokens"]
    dense = (layer for layer in plan.model.layers if layer not in plan.model.moe_layers)
    patterns += [f"model.layers.{layer}.mlp*" for layer in dense]
    parts = ("self_attn*", "mlp.gate", "mlp.shared_experts*")
    patterns += [f"model.layers.*.{part}" for part in parts]
    for layer in plan.mtp_layers:
        if layer in plan.quantized_layers:
            plain = ("eh_proj*", "enorm*", "hnorm*", "shared_head*", "embed_tokens*")
            patterns += [f"model.layers.{layer}.{part}" for part in plain]
        else:
            patterns.append(f"model.layers.{layer}*")
    return patterns
