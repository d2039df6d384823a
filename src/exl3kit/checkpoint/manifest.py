"""`hybrid_tr3_tail`: what a rank-sliced checkpoint's config.json says about its routed experts.

Each rank's slice of an expert is an EXL3 linear of its own under `...rank{r}.`; the block states
how many ranks, layers and experts there are and how many bits each takes. Read strictly: a value of
the wrong type, an unknown string or a missing key is refused before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exl3kit.checkpoint.bits_map import parse_reference, read_bits_map
from exl3kit.checkpoint.jsonfile import is_int
from exl3kit.checkpoint.keys import MAX_COUNT, integer, integral, show, text
from exl3kit.errors import CheckpointError
from exl3kit.format.spec import MCG_MULTIPLIER

BLOCK_KEY = "hybrid_tr3_tail"
FORMAT = "exl3-trellis"
TENSOR_SCHEMA = "model.layers.{L}.mlp.experts.{E}.{proj}.rank{r}.{trellis|suh|svh|mcg}"
SHARED_H_SCHEMA = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"
PER_EXPERT, SHARED_H = "per_expert_v1", "shared_h_v1"
MIN_BITS, MAX_BITS = 2, 6
DEFAULT_MAP = "tier_bitmap.json:k"

_REQUIRED = (
    "bits",
    "codebook",
    "experts_per_layer",
    "format",
    "moe_layers",
    "tensor_schema",
    "tp",
)
_KNOWN = {*_REQUIRED, "rotation_layout", "shared_h_tensor_schema"}
_OF_MIXED = {"k_values", "bits_per_expert"}  # informational where one bitrate is everywhere


@dataclass(frozen=True)
class RankSlicedManifest:
    """Layers `first_layer..last_layer` (both included), their experts cut for `tp` ranks.

    `layer_bits[layer]` has the bits of each expert; `k_values` and `bits_per_expert` are set when
    the checkpoint is mixed. `extra` holds the informational keys, kept for writing.
    """

    tp: int
    first_layer: int
    last_layer: int
    experts_per_layer: int
    layer_bits: Mapping[int, tuple[int, ...]]
    rotation_layout: str = PER_EXPERT
    k_values: tuple[int, ...] = ()
    bits_per_expert: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], folder: Path | None
    ) -> RankSlicedManifest | None:
        """The manifest in a model's config, or None if it has none.

        `folder` is where config.json lies; a mixed checkpoint's bitrate map is read from there.
        CheckpointError (R1 to R10 of docs/checkpoints.md) names key, value and rule.
        """
        block = find_block(config)
        return None if block is None else _parse(block, folder)

    @property
    def moe_layers(self) -> range:
        """Indices of the layers whose routed experts are rank-sliced."""
        return range(self.first_layer, self.last_layer + 1)

    @property
    def runs_at(self) -> tuple[int, ...]:
        """Numbers of ranks that can run the file as it is: a rank may hold several slices."""
        return tuple(tp for tp in range(1, self.tp + 1) if self.tp % tp == 0)

    @property
    def is_mixed(self) -> bool:
        """True when experts differ in bits, so that a map file goes with the config."""
        return self.bits_per_expert is not None

    def bits_of(self, layer: int, expert: int) -> int:
        """Bits per weight of one expert, all three projections and all ranks."""
        return self.layer_bits[layer][expert]

    def to_config(self) -> dict[str, Any]:
        """The `hybrid_tr3_tail` object for config.json."""
        block: dict[str, Any] = {
            "format": FORMAT,
            "codebook": "mcg",
            "bits": "mixed" if self.is_mixed else self.bits_of(self.first_layer, 0),
            "moe_layers": [self.first_layer, self.last_layer],
            "experts_per_layer": self.experts_per_layer,
            "tp": self.tp,
            "tensor_schema": TENSOR_SCHEMA,
            "rotation_layout": self.rotation_layout,
            "mcg_multiplier": MCG_MULTIPLIER,
        }
        if self.rotation_layout == SHARED_H:
            block["shared_h_tensor_schema"] = SHARED_H_SCHEMA
        if self.is_mixed:
            block |= {"k_values": list(self.k_values), "bits_per_expert": self.bits_per_expert}
        return {**self.extra, **block}

    def map_file(self) -> tuple[str, dict[str, Any]] | None:
        """Name and content of the bitrate map to write beside config.json; None if not mixed."""
        if self.bits_per_expert is None:
            return None
        file, key = parse_reference(self.bits_per_expert, BLOCK_KEY)
        return file, {str(layer): {key: list(bits)} for layer, bits in self.layer_bits.items()}


def make_manifest(
    tp: int,
    layer_bits: Mapping[int, tuple[int, ...]],
    extra: Mapping[str, Any] | None = None,
    rotation_layout: str = PER_EXPERT,
) -> RankSlicedManifest:
    """The manifest of a new checkpoint from the bits of each expert of each layer.

    Layers must be contiguous and equally long. One bitrate everywhere gives a uniform manifest,
    otherwise a mixed one with the published map file name.
    """
    layers = sorted(layer_bits)
    experts = len(layer_bits[layers[0]]) if layers else 0
    if not experts or layers != list(range(layers[0], layers[0] + len(layers))):
        raise CheckpointError(
            f"{BLOCK_KEY}: moe_layers must be contiguous, got {layers}; in a file of whole experts "
            "they may have gaps: leave out --tp"
        )
    if any(len(bits) != experts for bits in layer_bits.values()):
        raise CheckpointError(f"{BLOCK_KEY}: every layer must have {experts} experts")
    _moe_layers([layers[0], layers[-1]])
    checked = {layer: tuple(_check_bits(k, "bits") for k in layer_bits[layer]) for layer in layers}
    k_values = tuple(sorted({k for bits in checked.values() for k in bits}))
    is_mixed = len(k_values) > 1
    return RankSlicedManifest(
        tp=integer({"tp": tp}, "tp", BLOCK_KEY),
        first_layer=layers[0],
        last_layer=layers[-1],
        experts_per_layer=experts,
        layer_bits=checked,
        k_values=k_values if is_mixed else (),
        rotation_layout=rotation_layout,
        bits_per_expert=DEFAULT_MAP if is_mixed else None,
        extra=dict(extra or {}),
    )


def find_block(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The `hybrid_tr3_tail` of a config or of the text config nested in it; both must be equal.

    None when there is none; CheckpointError for a `format` other than the one this file reads.
    """
    nested = config.get("text_config")
    inner = nested.get(BLOCK_KEY) if isinstance(nested, Mapping) else None
    outer = config.get(BLOCK_KEY)
    if outer is not None and inner is not None and outer != inner:
        raise CheckpointError(f"{BLOCK_KEY}: the outer config and its text_config differ")
    block = outer if outer is not None else inner
    if block is None:
        return None
    if not isinstance(block, Mapping):
        raise CheckpointError(f"{BLOCK_KEY} must be an object, got {show(block)}")
    if "format" in block and block["format"] != FORMAT:
        raise CheckpointError(
            f"{BLOCK_KEY}: format must be {FORMAT!r}, got {show(block['format'])}"
        )
    return block


def _parse(block: Mapping[str, Any], folder: Path | None) -> RankSlicedManifest:
    if missing := sorted(key for key in _REQUIRED if key not in block):
        raise CheckpointError(f"{BLOCK_KEY}: missing keys: {', '.join(missing)}")
    if block["codebook"] != "mcg":
        raise CheckpointError(f"{BLOCK_KEY}: codebook must be 'mcg', got {show(block['codebook'])}")
    if block.get("mcg_multiplier", MCG_MULTIPLIER) != MCG_MULTIPLIER:
        raise CheckpointError(
            f"{BLOCK_KEY}: mcg_multiplier must be {MCG_MULTIPLIER}, "
            f"got {show(block['mcg_multiplier'])}"
        )
    if text(block, "tensor_schema", BLOCK_KEY) != TENSOR_SCHEMA:
        raise CheckpointError(
            f"{BLOCK_KEY}: tensor_schema must be {TENSOR_SCHEMA!r}, "
            f"got {show(block['tensor_schema'])}"
        )
    tp = integer(block, "tp", BLOCK_KEY)
    experts = integer(block, "experts_per_layer", BLOCK_KEY)
    layers = _moe_layers(block["moe_layers"])
    k_values, reference = _bitrates(block)
    if reference is None:
        layer_bits = dict.fromkeys(layers, k_values * experts)
    else:
        if folder is None:
            raise CheckpointError(f"{BLOCK_KEY}: no folder to read {show(reference)} from")
        file, key = parse_reference(reference, BLOCK_KEY)
        layer_bits = read_bits_map(folder / file, key, layers, experts, k_values)
    known = _KNOWN | _OF_MIXED if reference else _KNOWN
    return RankSlicedManifest(
        tp=tp,
        first_layer=layers[0],
        last_layer=layers[-1],
        experts_per_layer=experts,
        layer_bits=layer_bits,
        rotation_layout=_rotation_layout(block),
        k_values=k_values if reference else (),
        bits_per_expert=reference,
        extra={key: value for key, value in block.items() if key not in known},
    )


def _moe_layers(value: object) -> range:
    if isinstance(value, list) and len(value) == 2:
        first, last = value
        if is_int(first) and is_int(last) and 0 <= first <= last < MAX_COUNT:
            return range(first, last + 1)
    raise CheckpointError(
        f"{BLOCK_KEY}: moe_layers must be [first, last] with 0 <= first <= last, got {show(value)}"
    )


def _rotation_layout(block: Mapping[str, Any]) -> str:
    layout = block.get("rotation_layout", PER_EXPERT)
    if layout not in (PER_EXPERT, SHARED_H):
        raise CheckpointError(
            f"{BLOCK_KEY}: rotation_layout must be {PER_EXPERT!r} or {SHARED_H!r}, "
            f"got {show(layout)}"
        )
    expected = SHARED_H_SCHEMA if layout == SHARED_H else None
    found = block.get("shared_h_tensor_schema")
    if found != expected or (expected is None and "shared_h_tensor_schema" in block):
        rule = repr(expected) if expected else "absent"
        raise CheckpointError(
            f"{BLOCK_KEY}: with rotation_layout {layout!r}, shared_h_tensor_schema must be {rule}, "
            f"got {show(found)}"
        )
    return layout


def _bitrates(block: Mapping[str, Any]) -> tuple[tuple[int, ...], str | None]:
    """The declared bitrates, and the map reference if they are mixed."""
    bits = block["bits"]
    if not (isinstance(bits, str) and bits.strip().lower() == "mixed"):
        return (_check_bits(bits, "bits"),), None
    declared = block.get("k_values")
    if not isinstance(declared, list) or not declared:
        raise CheckpointError(
            f"{BLOCK_KEY}: bits 'mixed' needs k_values, a list of integers "
            f"{MIN_BITS}..{MAX_BITS}, got {show(declared)}"
        )
    k_values = tuple(sorted({_check_bits(value, "k_values") for value in declared}))
    reference = block.get("bits_per_expert")
    if not isinstance(reference, str):
        raise CheckpointError(
            f"{BLOCK_KEY}: bits 'mixed' needs bits_per_expert '<file.json>:<field>', "
            f"got {show(reference)}"
        )
    parse_reference(reference, BLOCK_KEY)
    return k_values, reference


def _check_bits(value: object, key: str) -> int:
    bits = integral(value)
    if bits is None or not MIN_BITS <= bits <= MAX_BITS:
        raise CheckpointError(
            f"{BLOCK_KEY}: {key} must be integers {MIN_BITS}..{MAX_BITS}, got {show(value)}"
        )
    return bits
