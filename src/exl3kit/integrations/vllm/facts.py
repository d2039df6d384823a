"""What an EXL3 checkpoint holds, as plain data that vLLM can pickle to its workers.

vLLM asks a quantisation config about modules by name before any weight is read, so the answers
come from the metadata and the safetensors headers: a module is EXL3 when the files have its
`.trellis`, whatever the dialect.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from exl3kit.checkpoint.forms import stored_form
from exl3kit.checkpoint.inventory import layer_of
from exl3kit.checkpoint.manifest import SHARED_H, RankSlicedManifest
from exl3kit.checkpoint.names import (
    check_complete,
    check_rule,
    expert_rules,
    layer_index,
    missing_text,
)
from exl3kit.checkpoint.open import Checkpoint, open_checkpoint
from exl3kit.checkpoint.signs import PACKED
from exl3kit.checkpoint.widths import check_cut, stored_cut
from exl3kit.errors import CheckpointError, FormatError, UnsupportedError
from exl3kit.format.spec import TILE, Codebook, bits_from_words
from exl3kit.integrations.vllm.params import MatrixSpec
from exl3kit.models.registry import model_map
from exl3kit.runtime.experts import Rates

_EXPERT_MODULE = re.compile(r"\.experts\.\d+\.[^.]+$")
_ROLES = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
    "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip


@dataclass(frozen=True)
class ExpertFacts:
    """The routed experts of one layer: rates of each, and how the file has them.

    Cut by rank where there is a `manifest`, else whole, `is_r7` as `r7_routed_experts` has them.
    """

    layer: int
    rates: tuple[Rates, ...]
    codebook: Codebook
    manifest: RankSlicedManifest | None
    is_r7: bool = False

    @property
    def num_experts(self) -> int:
        """Experts of the layer, over all ranks."""
        return len(self.rates)

    @property
    def is_sliced(self) -> bool:
        """True when every rank's slice is a tensor of its own, False for whole experts."""
        return self.manifest is not None

    @property
    def is_shared_h(self) -> bool:
        """True when the H-side vectors are stored once per layer, and per rank if cut by rank."""
        is_sliced_so = self.manifest is not None and self.manifest.rotation_layout == SHARED_H
        return is_sliced_so or self.is_r7


@dataclass(frozen=True)
class ModelSizes:
    """Sizes from the target's config; layers from `num_hidden_layers` on are draft layers.

    `moe_intermediate_size` is 0 for a model without routed experts.
    """

    num_hidden_layers: int
    hidden_size: int
    moe_intermediate_size: int

    @classmethod
    def of(cls, text_config: Any) -> ModelSizes:
        """The sizes in a Hugging Face text config."""
        width = getattr(text_config, "moe_intermediate_size", 0)
        return cls(text_config.num_hidden_layers, text_config.hidden_size, width)


@dataclass(frozen=True)
class CheckpointFacts:
    """EXL3 modules of one checkpoint: linears by module name, routed experts by layer index."""

    sizes: ModelSizes
    manifest: RankSlicedManifest | None
    linears: Mapping[str, MatrixSpec]
    experts: Mapping[int, ExpertFacts]

    def digest(self) -> str:
        """32 hex digits that differ where layers would be built differently."""
        parts = (
            self.sizes,
            self.manifest,
            sorted(self.linears.items()),
            sorted(self.experts.items()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def checkpoint_folder(model_name: str, revision: str | None) -> Path:
    """The folder of a local model, or of a hub model that is in the cache; else CheckpointError."""
    if Path(model_name).is_dir():
        return Path(model_name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"{model_name}: neither a folder nor a model in the Hugging Face cache; EXL3 layers "
            f"are built from the files' headers, so download it first: hf download {model_name}"
        ) from error


def check_missing(path: Path) -> None:
    """CheckpointError naming what the model needs outside its routed experts and the files lack.

    vLLM looks for unloaded parameters in unquantised models only: what is missing would keep the
    values that memory happened to hold. Next-token layers may be left out as a whole. Models that
    exl3kit has no map of are not checked.
    """
    checkpoint = open_checkpoint(path)
    try:
        model = model_map(checkpoint.config)
    except UnsupportedError:
        return
    absent = set(model.mtp_layers) - {layer_of(name) for name in checkpoint.names()}
    missing = [
        spec.name
        for spec in model.tensors()
        if not (
            spec.is_optional
            or ".mlp.experts." in spec.name
            or (layer_of(spec.name) in absent)
            or stored_form(checkpoint, spec.name, spec.shape)
        )
    ]
    if missing:
        raise CheckpointError(missing_text("model", missing))


def read_facts(path: Path, sizes: ModelSizes) -> CheckpointFacts:
    """Read metadata and headers of the folder `path`.

    CheckpointError for missing or truncated shards, missing tensors, wrong shapes and bad metadata,
    UnsupportedError for EXL3 tensors that vLLM's layers cannot take.
    """
    checkpoint = open_checkpoint(path)
    _check_embeddings(checkpoint)
    manifest = checkpoint.manifest
    linears: dict[str, MatrixSpec] = {}
    experts: dict[int, dict[str, MatrixSpec]] = {}
    for module in checkpoint.exl3_prefixes():
        if ".rank" in module:
            continue
        spec = _matrix_spec(checkpoint, module)
        if _EXPERT_MODULE.search(module):
            experts.setdefault(layer_index(module), {})[module] = spec
        else:
            linears[module] = spec
    _check_linears(linears)
    r7_layers = checkpoint.r7.moe_layers if checkpoint.r7 else ()
    found = {
        layer: replace(_whole_experts(layer, specs), is_r7=layer in r7_layers)
        for layer, specs in experts.items()
    }
    if manifest is not None:
        _check_slices(checkpoint, manifest, sizes)
        found |= _sliced_experts(manifest)
    return CheckpointFacts(sizes, manifest, linears, found)


def _check_slices(checkpoint: Checkpoint, manifest: RankSlicedManifest, sizes: ModelSizes) -> None:
    """Every tensor that every rank needs must be there in the declared shape."""
    hidden_size, width = sizes.hidden_size, sizes.moe_intermediate_size
    check_cut("hidden_size", hidden_size, 1)
    stored_cut("moe_intermediate_size", width, manifest.tp)
    for layer in manifest.moe_layers:
        missing = []
        for name, rule in expert_rules(manifest, layer, hidden_size, width):
            if checkpoint.has(name):
                info = checkpoint.info(name)
                check_rule(name, info.dtype, info.shape, rule)
            else:
                missing.append(name)
        check_complete(layer, missing)


def _check_embeddings(checkpoint: Checkpoint) -> None:
    if tables := checkpoint.row_tables():
        raise UnsupportedError(
            f"{', '.join(tables)}: a quantised embedding cannot be served; store its weight in BF16"
        )


def _check_vectors(checkpoint: Checkpoint, module: str) -> None:
    missing = []
    for field, packed in PACKED.items():
        name = checkpoint.shared_name(module, field) or f"{module}.{field}"
        if not checkpoint.has(name) and not checkpoint.has(f"{module}.{packed}"):
            missing.append(name)
    if missing:
        raise CheckpointError(missing_text(module, missing))


def _matrix_spec(checkpoint: Checkpoint, module: str) -> MatrixSpec:
    _check_vectors(checkpoint, module)
    shape = checkpoint.info(f"{module}.trellis").shape
    markers = [book for book in (Codebook.MCG, Codebook.MUL1) if checkpoint.has(f"{module}.{book}")]
    if len(shape) != 3 or len(markers) > 1:
        raise FormatError(
            f"{module}.trellis: expected 3 dimensions and at most one of mcg, mul1, "
            f"got shape {list(shape)} and {markers}"
        )
    codebook = markers[0] if markers else Codebook.THREE_INST
    return MatrixSpec(TILE * shape[0], TILE * shape[1], bits_from_words(shape[2]), codebook)


def _check_linears(linears: Mapping[str, MatrixSpec]) -> None:
    """What vLLM's layers cannot take: `eh_proj` of a draft is a bare nn.Linear there.

    exllamav3 stores a linear wider than 55,296 as several, `.slice.{i}`; vLLM has one layer for it.
    """
    for module in linears:
        if ".slice." in module:
            raise UnsupportedError(
                f"{module}: a linear stored in slices cannot be served; transformers can run it"
            )
        if module.endswith(".eh_proj"):
            raise UnsupportedError(
                f"{module}: vLLM needs this weight dense; store {module}.weight in BF16"
            )


def _sliced_experts(manifest: RankSlicedManifest) -> dict[int, ExpertFacts]:
    return {
        layer: ExpertFacts(
            layer=layer,
            rates=tuple((bits, bits, bits) for bits in manifest.layer_bits[layer]),
            codebook=Codebook.MCG,
            manifest=manifest,
        )
        for layer in manifest.moe_layers
    }


def _whole_experts(layer: int, specs: Mapping[str, MatrixSpec]) -> ExpertFacts:
    codebooks = {spec.codebook for spec in specs.values()}
    if len(codebooks) > 1:
        raise UnsupportedError(f"layer {layer}: experts use several codebooks {sorted(codebooks)}")
    table: dict[int, dict[str, int | float]] = {}
    for module, spec in specs.items():
        stem, _, projection = module.rpartition(".")
        if projection not in _ROLES:
            raise UnsupportedError(
                f"{module}: expected a projection named one of {', '.join(_ROLES)}"
            )
        expert = int(stem.rpartition(".")[2])
        table.setdefault(expert, {})[_ROLES[projection]] = spec.bits
    if sorted(table) != list(range(len(table))) or any(len(row) < 3 for row in table.values()):
        raise CheckpointError(
            f"layer {layer}: expected experts numbered from 0 on, each with gate, up and down as "
            f"EXL3; got {len(specs)} EXL3 matrices of experts {sorted(table)}"
        )
    rates = [table[expert] for expert in range(len(table))]
    return ExpertFacts(
        layer=layer,
        rates=tuple((row["gate"], row["up"], row["down"]) for row in rates),
        codebook=codebooks.pop(),
        manifest=None,
    )
