"""`open_checkpoint`: one object that knows a folder's dialect and reads its tensors when asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.index import read_index
from exl3kit.checkpoint.jsonfile import read_json_object
from exl3kit.checkpoint.manifest import SHARED_H, RankSlicedManifest
from exl3kit.checkpoint.names import RANK_SUFFIX, check_rank_sliced_marker, shared_h_name
from exl3kit.checkpoint.reader import read_tensor
from exl3kit.errors import CheckpointError, FormatError, UnsupportedError
from exl3kit.format.spec import TILE
from exl3kit.format.tensors import Exl3Tensor

RANK_SLICED, ORDINARY, PLAIN = "rank-sliced", "ordinary", "plain"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: config, dialect and tensor table in memory, tensor bytes on disk.

    `dialect` is "rank-sliced" (EXL3 experts, one slice a rank), "ordinary" (EXL3, whole linears) or
    "plain" (no EXL3). `manifest` is set for "rank-sliced" only.
    """

    path: Path
    config: dict[str, Any]
    dialect: str
    infos: Mapping[str, TensorInfo]
    manifest: RankSlicedManifest | None

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
        trellises = [
            info
            for name, info in self.infos.items()
            if name.endswith(".trellis") and len(info.shape) == 3
        ]
        weights = sum(info.shape[0] * info.shape[1] for info in trellises) * TILE * TILE
        return sum(8 * info.nbytes for info in trellises) / weights if weights else None

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

    def exl3_prefixes(self) -> list[str]:
        """Names of the EXL3 linears, sorted; a rank's slice ends in `.rank{r}`."""
        ending = ".trellis"
        return sorted(name.removesuffix(ending) for name in self.infos if name.endswith(ending))

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

        Shared hidden-side vectors and legacy packed signs (`su`, `sv`) are resolved. A rank-sliced
        linear must have the mcg marker. FormatError or CheckpointError name the tensor.
        """
        found = {
            field: self._field(prefix, field) for field in ("trellis", "suh", "svh", "mcg", "mul1")
        }
        if self.manifest is not None and RANK_SUFFIX.search(prefix):
            self._check_markers(prefix, found)
        trellis, suh, svh = (
            self._required(prefix, field, found[field]) for field in ("trellis", "suh", "svh")
        )
        bias = self._field(prefix, "bias")
        return Exl3Tensor(trellis, suh, svh, found["mcg"], found["mul1"], bias, name=prefix)

    def _field(self, prefix: str, field: str) -> torch.Tensor | None:
        shares_h = self.manifest is not None and self.manifest.rotation_layout == SHARED_H
        shared = shared_h_name(prefix, field) if shares_h else None
        name = shared or f"{prefix}.{field}"
        if name in self.infos:
            return self.tensor(name)
        packed = f"{prefix}.{field.removesuffix('h')}"
        if field in ("suh", "svh") and packed in self.infos:
            return _unpack_signs(self.tensor(packed), packed)
        return None

    def _required(self, prefix: str, field: str, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise CheckpointError(f"{self.path}: tensor '{prefix}.{field}' is missing")
        return tensor

    def _check_markers(self, prefix: str, found: dict[str, torch.Tensor | None]) -> None:
        for field in ("mul1", "mcg"):
            if (marker := found[field]) is not None:
                check_rank_sliced_marker(f"{prefix}.{field}", marker)
        self._required(prefix, "mcg", found["mcg"])


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read config, metadata and all headers of a checkpoint folder; no tensor bytes.

    CheckpointError lists missing or damaged files, or names the wrong metadata key.
    UnsupportedError for the streamed R7 dialect.
    """
    folder = Path(path)
    config = read_config(folder)
    manifest = RankSlicedManifest.from_config(config, folder)
    return make_checkpoint(folder, config, manifest, read_index(folder))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder; refuses dialects that cannot be read."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: expected a checkpoint folder, found none")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: config.json is missing; the checkpoint is not complete")
    config = read_json_object(folder / "config.json")
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and "r7_routed_experts" in quantization:
        raise UnsupportedError(
            f"{folder}: quantization_config.r7_routed_experts (streamed R7 experts) is not "
            "supported; use a checkpoint with hybrid_tr3_tail or an ordinary EXL3 one"
        )
    return config


def make_checkpoint(
    folder: Path,
    config: dict[str, Any],
    manifest: RankSlicedManifest | None,
    infos: Mapping[str, TensorInfo],
) -> Checkpoint:
    """The `Checkpoint` of metadata and headers that were read already."""
    if manifest is not None:
        return Checkpoint(folder, config, RANK_SLICED, infos, manifest)
    quantization = config.get("quantization_config")
    claims_exl3 = isinstance(quantization, dict) and quantization.get("quant_method") == "exl3"
    is_exl3 = claims_exl3 or any(name.endswith(".trellis") for name in infos)
    return Checkpoint(folder, config, ORDINARY if is_exl3 else PLAIN, infos, None)


def _unpack_signs(words: torch.Tensor, name: str) -> torch.Tensor:
    """Legacy signs int16 (n/16,) to float16 (n,): bit i of word j is element 16 j + i, set = -1."""
    if words.dtype != torch.int16 or words.dim() != 1:
        raise FormatError(
            f"{name}: expected torch.int16 with 1 dimension, got {words.dtype} {tuple(words.shape)}"
        )
    bits = (words[:, None].to(torch.int32) >> torch.arange(16, dtype=torch.int32)) & 1
    return (1 - 2 * bits).reshape(-1).to(torch.float16)
