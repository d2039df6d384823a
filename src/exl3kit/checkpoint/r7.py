"""`r7_routed_experts`: whole experts in mcg, a rate for each projection of each expert.

The second public way to hand EXL3 experts to a tensor-parallel engine: nothing is stored cut, the
loader cuts while it streams. Each matrix's rate is the width of its trellis. The vectors on the
hidden side are stored once a layer, under `...experts.r7_shared.`: `gate_up_suh` for gate and up,
`down_svh` for down. The block lies in `quantization_config` beside quant_method `modelopt`, which
tools that do not know EXL3 read instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.jsonfile import is_int
from exl3kit.checkpoint.keys import MAX_COUNT, show, some
from exl3kit.checkpoint.names import PROJECTIONS
from exl3kit.errors import CheckpointError, FormatError
from exl3kit.format.spec import bits_from_words

BLOCK_KEY = "r7_routed_experts"
SCHEMA = "r7-complete-v2-checkpoint-v1"
BITS = "mixed_tensor"
K_VALUES = (3, 4, 5)
SHARED = {
    ("gate_proj", "suh"): "gate_up_suh",
    ("up_proj", "suh"): "gate_up_suh",
    ("down_proj", "svh"): "down_svh",
}
_EXPERT = re.compile(
    r"(?P<stem>model\.layers\.(?P<layer>[0-9]{1,6})\.mlp\.experts)\."
    r"(?P<expert>[0-9]{1,6})\.(?P<proj>gate_proj|up_proj|down_proj)"
)
_REQUIRED = ("bits", "codebook", "k_values", "moe_layers", "schema")


@dataclass(frozen=True)
class R7Manifest:
    """Layers `first_layer..last_layer` (both included) with experts of the rates `k_values`."""

    first_layer: int
    last_layer: int
    k_values: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> R7Manifest | None:
        """The manifest in a model's config, None if it has none; CheckpointError names the key."""
        quantization = config.get("quantization_config")
        if not isinstance(quantization, Mapping) or BLOCK_KEY not in quantization:
            return None
        block = quantization[BLOCK_KEY]
        if not isinstance(block, Mapping):
            raise CheckpointError(f"{BLOCK_KEY} must be an object, got {show(block)}")
        if missing := [key for key in _REQUIRED if key not in block]:
            raise CheckpointError(f"{BLOCK_KEY}: missing keys: {', '.join(missing)}")
        for key, expected in (("schema", SCHEMA), ("codebook", "mcg"), ("bits", BITS)):
            if block[key] != expected:
                raise CheckpointError(
                    f"{BLOCK_KEY}: {key} must be {expected!r}, got {show(block[key])}"
                )
        return cls(*_layers(block["moe_layers"]), _k_values(block["k_values"]))

    @property
    def moe_layers(self) -> range:
        """Indices of the layers whose routed experts are of this dialect."""
        return range(self.first_layer, self.last_layer + 1)

    def to_config(self) -> dict[str, Any]:
        """The `r7_routed_experts` object for `quantization_config`."""
        return {
            "schema": SCHEMA,
            "codebook": "mcg",
            "bits": BITS,
            "moe_layers": [self.first_layer, self.last_layer],
            "k_values": list(self.k_values),
        }


def is_r7_expert(prefix: str, manifest: R7Manifest) -> bool:
    """True for a projection of a routed expert in a layer of the block."""
    match = _EXPERT.fullmatch(prefix)
    return match is not None and int(match["layer"]) in manifest.moe_layers


def r7_shared_name(prefix: str, field: str) -> str | None:
    """The shared tensor that stands for `field` of an expert's projection, None if it has its own.

    `prefix` as in `model.layers.1.mlp.experts.3.gate_proj`.
    """
    match = _EXPERT.fullmatch(prefix)
    if match is None or (match["proj"], field) not in SHARED:
        return None
    return f"{match['stem']}.r7_shared.{SHARED[match['proj'], field]}"


def r7_bits(
    manifest: R7Manifest, infos: Mapping[str, TensorInfo]
) -> dict[tuple[int, int, str], int]:
    """Rate of every (layer, expert, projection), from the widths of the trellises."""
    found: dict[tuple[int, int, str], int] = {}
    for name, info in infos.items():
        match = _EXPERT.fullmatch(name.removesuffix(".trellis"))
        if match is None or not name.endswith(".trellis"):
            continue
        if (layer := int(match["layer"])) in manifest.moe_layers:
            bits = _checked_bits(name, info, manifest)
            found[layer, int(match["expert"]), match["proj"]] = bits
    return found


def check_r7(manifest: R7Manifest, infos: Mapping[str, TensorInfo]) -> None:
    """CheckpointError unless the expert tensors are what the block says.

    Every rate is in `k_values`; each layer has both shared vectors and every expert all three
    projections with an mcg marker; no expert has a vector of its own that the layer shares.
    """
    bits = r7_bits(manifest, infos)
    experts: dict[int, set[int]] = {layer: set() for layer in manifest.moe_layers}
    for layer, expert, _ in bits:
        experts[layer].add(expert)
    wanted: set[str] = set()
    for layer, found in experts.items():
        if found != set(range(len(found))) or not found:
            raise CheckpointError(
                f"{BLOCK_KEY}: layer {layer}: expected experts numbered from 0 on, "
                f"got {show(sorted(found))}"
            )
        stem = f"model.layers.{layer}.mlp.experts"
        wanted |= {f"{stem}.r7_shared.{name}" for name in SHARED.values()}
        for expert in found:
            wanted |= _own_names(f"{stem}.{expert}")
    if missing := sorted(wanted - infos.keys()):
        raise CheckpointError(f"{BLOCK_KEY}: {len(missing)} tensors are missing: {some(missing)}")
    doubled = [
        f"model.layers.{layer}.mlp.experts.{expert}.{proj}.{field}"
        for layer, expert, proj in bits
        for field in ("suh", "svh")
        if (proj, field) in SHARED
    ]
    if extra := sorted(set(doubled) & infos.keys()):
        raise CheckpointError(
            f"{BLOCK_KEY}: vectors that the layer shares are also stored by expert: {some(extra)}"
        )


def _own_names(expert: str) -> set[str]:
    fields = ("trellis", "suh", "svh", "mcg")
    return {f"{expert}.{p}.{f}" for p in PROJECTIONS for f in fields if (p, f) not in SHARED}


def _checked_bits(name: str, info: TensorInfo, manifest: R7Manifest) -> int:
    try:
        bits = bits_from_words(info.shape[-1] if info.shape else 0)
    except FormatError as err:
        raise CheckpointError(f"tensor {name!r}: {err}") from None
    if bits not in manifest.k_values:
        raise CheckpointError(
            f"tensor {name!r}: {bits} bits, expected one of the declared k_values "
            f"{list(manifest.k_values)}"
        )
    return int(bits)


def _layers(value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2 and all(is_int(v) for v in value)
    if not is_pair or not 0 <= value[0] <= value[1] <= MAX_COUNT:
        raise CheckpointError(
            f"{BLOCK_KEY}: moe_layers must be [first, last], both included, got {show(value)}"
        )
    return value[0], value[1]


def _k_values(value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list) and bool(value)
    if not is_list or not all(is_int(k) and k in K_VALUES for k in value):
        raise CheckpointError(
            f"{BLOCK_KEY}: k_values must be a list out of {list(K_VALUES)}, got {show(value)}"
        )
    return tuple(sorted(set(value)))
