"""`open_checkpoint`: one object that knows a folder's dialect and reads its tensors when asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.atomic import read_errors
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.index import read_index
from exl3kit.checkpoint.jsonfile import read_json_object
from exl3kit.checkpoint.manifest import SHARED_H, RankSlicedManifest
from exl3kit.checkpoint.names import RANK_SUFFIX, check_rank_sliced_marker, shared_h_name
from exl3kit.checkpoint.r7 import R7Manifest, check_r7, is_r7_expert, r7_shared_name
from exl3kit.checkpoint.reader import read_tensor
from exl3kit.checkpoint.signs import PACKED, unpack_signs
from exl3kit.checkpoint.stamps import Stamp, check_stamps, read_stamps
from exl3kit.checkpoint.version import warn_if_newer
from exl3kit.errors import CheckpointError
from exl3kit.format.row_table import RowTable
from exl3kit.format.spec import TILE
from exl3kit.format.tensors import Exl3Tensor

RANK_SLICED, R7, ORDINARY, PLAIN = "rank-sliced", "r7", "ordinary", "plain"
_TRELLIS = ".trellis"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: config, dialect and tensor table in memory, tensor bytes on disk.

    `dialect` is "rank-sliced" (EXL3 experts, one slice a rank), "r7" (whole EXL3 experts with
    shared vectors), "ordinary" (EXL3, whole linears) or "plain" (no EXL3). `manifest` is set for
    "rank-sliced" only, `r7` for "r7" only; `stamps` tells what its shards were when opened.
    """

    path: Path
    config: dict[str, Any]
    dialect: str
    infos: Mapping[str, TensorInfo]
    manifest: RankSlicedManifest | None
    r7: R7Manifest | None = None
    stamps: Mapping[str, Stamp] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The first of the config's `architectures`; CheckpointError if it names none."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self.path}/config.json: architectures must be a list with a name, got {names!r}"
            )
        return names[0]

    @property
    def tp(self) -> int | None:
        """Ranks the experts are cut for; None unless rank-sliced."""
        return self.manifest.tp if self.manifest else None

    @property
    def bits(self) -> float | None:
        """Mean bits per weight over the EXL3 linears, from their trellis shapes; None if plain."""
        trellises = [self.infos[prefix + _TRELLIS] for prefix in self.exl3_prefixes()]
        trellises = [info for info in trellises if len(info.shape) == 3]
        weights = sum(info.shape[0] * info.shape[1] for info in trellises) * TILE * TILE
        return sum(8 * info.nbytes for info in trellises) / weights if weights else None

    @property
    def is_head_tied(self) -> bool:
        """True if the embedding serves as head: the config says so and no head is stored.

        The flag alone does not count: exllamav3 up to 1.4.1 leaves it true beside a quantised head.
        """
        is_stored = self.has("lm_head.weight") or self.is_exl3("lm_head")
        return self.config.get("tie_word_embeddings") is True and not is_stored

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self.infos)

    def has(self, name: str) -> bool:
        """True if the checkpoint holds a tensor of that name."""
        return name in self.infos

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor; CheckpointError if it is not there."""
        if name not in self.infos:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self.infos[name]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, read now, on the CPU, owning its bytes."""
        return read_tensor(self.info(name))

    def check_unchanged(self) -> None:
        """CheckpointError if a shard changed, went or came since `open_checkpoint`.

        To be asked when all has been read, before what was made of it is called finished.
        """
        check_stamps(self.path, self.stamps)

    def is_exl3(self, prefix: str) -> bool:
        """True if `prefix` is an EXL3 linear: it has a trellis that is no row table."""
        return f"{prefix}{_TRELLIS}" in self.infos and not self.is_row_table(prefix)

    def exl3_prefixes(self) -> list[str]:
        """Names of the EXL3 linears, sorted; a rank's slice ends in `.rank{r}`."""
        return sorted(filter(self.is_exl3, self._trellises()))

    def is_row_table(self, prefix: str) -> bool:
        """True if `prefix` is a quantised embedding: a trellis of two dimensions, no vectors."""
        info = self.infos.get(f"{prefix}{_TRELLIS}")
        vectors = ("suh", "svh", "su", "sv")
        has_vectors = any(f"{prefix}.{field}" in self.infos for field in vectors)
        return info is not None and len(info.shape) == 2 and not has_vectors

    def row_tables(self) -> list[str]:
        """Names of the quantised embeddings, token and n-gram tables, sorted."""
        return sorted(filter(self.is_row_table, self._trellises()))

    def row_table(self, prefix: str) -> RowTable:
        """A quantised token embedding, as `model.embed_tokens`; FormatError names what is wrong.

        An n-gram table, which has no `signs`, is listed but not read: CheckpointError.
        """
        tensors = {name: self._own(prefix, name) for name in ("trellis", "signs")}
        found = {name: self._required(prefix, name, tensor) for name, tensor in tensors.items()}
        return RowTable(found["trellis"], found["signs"], prefix)

    def _trellises(self) -> Iterator[str]:
        return (n.removesuffix(_TRELLIS) for n in self.infos if n.endswith(_TRELLIS))

    def linears(self) -> list[str]:
        """Names of the modules with an EXL3 trellis or a 2-D `.weight` (embeddings too), sorted."""
        dense = [
            name.removesuffix(".weight")
            for name, info in self.infos.items()
            if name.endswith(".weight") and len(info.shape) == 2
        ]
        return sorted({*dense, *self.exl3_prefixes()})

    def exl3(self, prefix: str) -> Exl3Tensor:
        """The EXL3 linear `prefix`, as in `model.layers.1.mlp.experts.0.gate_proj.rank0`.

        Shared hidden-side vectors and legacy packed signs (`su`, `sv`) are resolved. A routed
        expert that is rank-sliced or of the r7 dialect must have the mcg marker. FormatError or
        CheckpointError name the tensor.
        """
        found = {
            field: self.exl3_field(prefix, field)
            for field in ("trellis", "suh", "svh", "mcg", "mul1")
        }
        is_slice = self.manifest is not None and RANK_SUFFIX.search(prefix)
        if is_slice or (self.r7 is not None and is_r7_expert(prefix, self.r7)):
            self._check_markers(prefix, found)
        trellis, suh, svh = (
            self._required(prefix, field, found[field]) for field in ("trellis", "suh", "svh")
        )
        bias = self.exl3_field(prefix, "bias")
        return Exl3Tensor(trellis, suh, svh, found["mcg"], found["mul1"], bias, name=prefix)

    def exl3_field(self, prefix: str, field: str) -> torch.Tensor | None:
        """One tensor of the EXL3 linear `prefix`, as `svh`, None if it has none.

        Shared and packed vectors are resolved as in `exl3`.
        """
        shared = self.shared_name(prefix, field)
        if shared is not None:
            return self.tensor(shared) if shared in self.infos else None
        return self._own(prefix, field)

    def shared_name(self, prefix: str, field: str) -> str | None:
        """The tensor that stands for `field` of several experts, None if each has its own."""
        if self.manifest is not None and self.manifest.rotation_layout == SHARED_H:
            return shared_h_name(prefix, field)
        if self.r7 is not None and is_r7_expert(prefix, self.r7):
            return r7_shared_name(prefix, field)
        return None

    def _own(self, prefix: str, field: str) -> torch.Tensor | None:
        name = f"{prefix}.{field}"
        if name in self.infos:
            return self.tensor(name)
        packed = f"{prefix}.{PACKED.get(field)}"
        if packed in self.infos:
            return unpack_signs(self.tensor(packed), packed)
        return None

    def _required(self, prefix: str, field: str, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor '{prefix}.{field}' is missing")
        return tensor

    def _check_markers(self, prefix: str, found: dict[str, torch.Tensor | None]) -> None:
        for codebook in ("mul1", "mcg"):
            if (marker := found[codebook]) is not None:
                check_rank_sliced_marker(f"{prefix}.{codebook}", marker)
        self._required(prefix, "mcg", found["mcg"])


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read config, metadata and all headers of a checkpoint folder; no tensor bytes.

    CheckpointError lists missing or damaged files, or names the wrong metadata key. A checkpoint
    made by a newer exllamav3 is warned of, once.
    """
    folder = Path(path)
    config = read_config(folder)
    manifest = RankSlicedManifest.from_config(config, folder)
    stamps = read_stamps(folder)  # before the headers: what changes from here on is seen
    r7 = R7Manifest.from_config(config) if manifest is None else None
    checkpoint = make_checkpoint(folder, config, manifest or r7, read_index(folder))
    if checkpoint.r7 is not None:
        check_r7(checkpoint.r7, checkpoint.infos)
    warn_if_newer(config)
    return replace(checkpoint, stamps=stamps)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder."""
    with read_errors(folder):
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a checkpoint folder, found none")
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder}: config.json is missing; the checkpoint is not complete"
            )
    return read_json_object(folder / "config.json")


def make_checkpoint(
    folder: Path,
    config: dict[str, Any],
    manifest: RankSlicedManifest | R7Manifest | None,
    infos: Mapping[str, TensorInfo],
) -> Checkpoint:
    """The `Checkpoint` of metadata and headers that were read already."""
    if isinstance(manifest, RankSlicedManifest):
        return Checkpoint(folder, config, RANK_SLICED, infos, manifest)
    if manifest is not None:
        return Checkpoint(folder, config, R7, infos, None, manifest)
    quantization = config.get("quantization_config")
    claims_exl3 = isinstance(quantization, dict) and quantization.get("quant_method") == "exl3"
    is_exl3 = claims_exl3 or any(name.endswith(_TRELLIS) for name in infos)
    return Checkpoint(folder, config, ORDINARY if is_exl3 else PLAIN, infos, None)
