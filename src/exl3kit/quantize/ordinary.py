"""The metadata of an ordinary EXL3 checkpoint, as exllamav3 1.6.5 writes it.

config.json has `quantization_config`; quantization_config.json has the same object and, under
`tensor_storage`, what is stored of each module of the model itself. Next-token layers are a side
component to exllamav3 and are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from exl3kit._version import __version__
from exl3kit.checkpoint.shard import Entry
from exl3kit.checkpoint.version import SUPPORTED
from exl3kit.format.spec import Codebook, marker_value
from exl3kit.quantize.bit_plan import HEAD, BitPlan
from exl3kit.quantize.contents import Contents, layer_of

FILE_NAME = "quantization_config.json"
_UNQUANTISED = 16


def quantization_config(
    contents: Contents, calibration: Mapping[str, Any], original: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The object of config.json; `original` is the source's own, kept under exllamav3's key.

    `version` is the format's, in exllamav3's numbering; who wrote the file is in `producer`.
    """
    body, head, mtp = _parts(contents)
    config: dict[str, Any] = {
        "quant_method": "exl3",
        "version": ".".join(map(str, SUPPORTED)),
        "bits": round(float(body.average_bits(contents.model)), 2),
        "head_bits": head,
        "calibration": {key: calibration[key] for key in ("rows", "cols")},
        "out_scales": "always",
        "codebook": str(contents.codebook),
        "producer": {"name": "exl3kit", "version": __version__},  # vLLM asks for producer.name
    }
    if mtp.experts or mtp.modules:
        config["mtp_bits"] = round(float(mtp.average_bits(contents.model)), 2)
    if original is not None:
        config["original_quantization_config"] = dict(original)
    return config


def tensor_storage(contents: Contents) -> dict[str, Any]:
    """Module -> stored tensors with shape, bytes and dtype, and the rate of an EXL3 linear."""
    modules: dict[str, dict[str, Any]] = {}
    target = [layer for layer in contents.layers if layer not in contents.model.mtp_layers]
    for layer in target:
        for entry in contents.entries(layer):
            module = modules.setdefault(entry.name.rpartition(".")[0], {"stored_tensors": {}})
            module["stored_tensors"][entry.name] = _stored(entry)
        for linear in contents.linears(layer):
            modules[linear.spec.name] |= _format(linear.bits, contents.codebook)
    return modules


def _parts(contents: Contents) -> tuple[BitPlan, int | float, BitPlan]:
    """What counts for `bits`; the rate of the head; the next-token layers."""
    bits, mtp = contents.bits, contents.model.mtp_layers
    in_mtp = {name for name in bits.modules if layer_of(name) in mtp}
    body = replace(
        bits,
        experts={layer: rates for layer, rates in bits.experts.items() if layer not in mtp},
        modules={n: rate for n, rate in bits.modules.items() if n not in in_mtp and n != HEAD},
    )
    side = replace(
        bits,
        experts={layer: rates for layer, rates in bits.experts.items() if layer in mtp},
        modules={name: bits.modules[name] for name in in_mtp},
    )
    return body, bits.modules.get(HEAD, _UNQUANTISED), side


def _stored(entry: Entry) -> dict[str, Any]:
    return {"shape": list(entry.shape), "n_bytes": entry.nbytes, "dtype": str(entry.dtype)}


def _format(bits: int | float, codebook: Codebook) -> dict[str, Any]:
    found: dict[str, Any] = {"quant_format": "exl3", "bits_per_weight": bits}
    if (marker := marker_value(codebook)) is not None:
        found[f"{codebook}_multiplier"] = marker & 0xFFFFFFFF
    return found
