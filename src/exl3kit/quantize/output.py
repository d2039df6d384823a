"""What goes beside the weights of a quantised checkpoint: config.json and the metadata files."""

from __future__ import annotations

import re
from typing import Any

from exl3kit._version import __version__
from exl3kit.checkpoint.jsonfile import json_bytes
from exl3kit.checkpoint.manifest import BLOCK_KEY, RankSlicedManifest
from exl3kit.checkpoint.side_files import side_files
from exl3kit.quantize import ordinary
from exl3kit.quantize.bit_plan import HEAD
from exl3kit.quantize.preflight import JobPlan, rank_sliced_manifest
from exl3kit.quantize.report import REPORT_NAME, QuantizeReport
from exl3kit.slicing.job import SOURCE_QUANTIZATION_KEY

_TIED = "tie_word_embeddings"


def output_config(plan: JobPlan, report: QuantizeReport) -> dict[str, Any]:
    """The source's config.json with the quantisation set; the source's own one is kept under
    another key."""
    source = plan.contents.checkpoint.config
    original = source.get("quantization_config")
    config = {key: value for key, value in source.items() if key != "quantization_config"}
    if HEAD in plan.contents.bits.modules and _TIED in config:
        config[_TIED] = False  # the head is stored by itself now
    if plan.options.tp is None:
        quantization = ordinary.quantization_config(plan.contents, report.calibration, original)
        return {**config, "quantization_config": quantization}
    manifest = _manifest(plan, report)
    if original is not None:
        config[SOURCE_QUANTIZATION_KEY] = original
    quantization = _rank_sliced_quantization(plan, manifest)
    return {**config, BLOCK_KEY: manifest.to_config(), "quantization_config": quantization}


def output_files(plan: JobPlan, report: QuantizeReport) -> dict[str, bytes]:
    """Name -> content of every file but the weights, the index and config.json."""
    source = plan.contents.checkpoint.path
    files = {name: file.read_bytes() for name, file in side_files(source).items()}
    files[REPORT_NAME] = json_bytes(report.to_json())
    if plan.options.tp is None:
        quantization = output_config(plan, report)["quantization_config"]
        storage = {"tensor_storage": ordinary.tensor_storage(plan.contents)}
        files[ordinary.FILE_NAME] = json_bytes({**quantization, **storage})
    elif table := _manifest(plan, report).map_file():
        files[table[0]] = json_bytes(table[1])
    return files


def _manifest(plan: JobPlan, report: QuantizeReport) -> RankSlicedManifest:
    extra = {
        "producer": "exl3kit",
        "producer_version": __version__,
        "source_format": plan.source_format,
        "slicing": plan.options.slice_mode,
        "calibration": report.calibration,
    }
    assert plan.options.tp is not None
    return rank_sliced_manifest(plan.options.tp, plan.contents.bits, extra)


def _rank_sliced_quantization(plan: JobPlan, manifest: RankSlicedManifest) -> dict[str, Any]:
    if plan.options.shim == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "exclude_modules": plain_modules(plan),
        }
    bits = manifest.to_config()["bits"]
    return {"quant_method": "exl3", "bits": bits, "codebook": "mcg"}


def plain_modules(plan: JobPlan) -> list[str]:
    """Patterns for every module that is stored dense, for readers that go by an exclusion list.

    A pattern stands for the module in all layers, unless one of them has it as EXL3; no pattern
    covers an EXL3 module, as one for a whole next-token layer would cover its experts.
    """
    contents = plan.contents
    linears = {p.spec.name for layer in contents.layers for p in contents.linears(layer)}
    quantised = {_in_any_layer(name) for name in linears}
    patterns: set[str] = set()
    for layer in contents.layers:
        for name in contents.copied(layer):
            module = name.rpartition(".")[0]
            if ".mlp.experts." in module:
                patterns.add(module.partition(".experts.")[0] + ".experts*")
            else:
                general = _in_any_layer(module)
                patterns.add(module if general in quantised else general)
    return sorted(patterns)


def _in_any_layer(module: str) -> str:
    return re.sub(r"(\.layers)\.[0-9]+\.", r"\1.*.", module)
