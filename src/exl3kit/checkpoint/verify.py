"""Everything about a checkpoint that can be proved without a GPU and without running the model.

Metadata, shards and index, every name, dtype and shape, every codebook marker, every value of every
scale vector, and the digests in SHA256SUMS where there are any. All faults are collected. Memory is
bounded by one vector and one 8 MiB block, whatever the checkpoint's size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.index import scan_folder
from exl3kit.checkpoint.jsonfile import is_bare_name
from exl3kit.checkpoint.manifest import RankSlicedManifest
from exl3kit.checkpoint.names import RANK_SUFFIX, check_rank_sliced_marker
from exl3kit.checkpoint.open import Checkpoint, make_checkpoint, read_config
from exl3kit.checkpoint.structure import ExpectedModel, structure_faults
from exl3kit.checkpoint.writer import CHECKSUMS_NAME
from exl3kit.errors import CheckpointError, Exl3Error
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import check_marker

_BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class VerifyReport:
    """What was looked at, and every fault found; `num_bytes` counts tensor data."""

    path: Path
    dialect: str
    faults: tuple[str, ...]
    num_files: int
    num_tensors: int
    num_exl3_linears: int
    num_bytes: int
    num_digests: int

    @property
    def is_ok(self) -> bool:
        """True when nothing is wrong."""
        return not self.faults


def verify_checkpoint(
    path: str | Path, model_of: Callable[[Mapping[str, Any]], ExpectedModel]
) -> VerifyReport:
    """Check the folder `path`; `model_of` maps its config to the tensors the model has.

    Raises only where nothing can be judged: no folder, no readable config.json, no weights, an
    unknown architecture or dialect. Anything wrong beyond that is in the report's `faults`.
    """
    folder = Path(path)
    config = read_config(folder)
    scan = scan_folder(folder)
    faults = list(scan.faults)
    manifest, metadata_faults = _manifest(config, folder)
    faults += metadata_faults
    checkpoint = make_checkpoint(folder, config, manifest, scan.tensors)
    if not metadata_faults:
        faults += structure_faults(checkpoint, model_of(config))
    faults += _value_faults(checkpoint)
    num_digests, digest_faults = _check_digests(folder)
    return VerifyReport(
        path=folder,
        dialect=checkpoint.dialect,
        faults=tuple(faults + digest_faults),
        num_files=len(scan.files),
        num_tensors=len(scan.tensors),
        num_exl3_linears=len(checkpoint.exl3_prefixes()),
        num_bytes=sum(info.nbytes for info in scan.tensors.values()),
        num_digests=num_digests,
    )


def _manifest(
    config: Mapping[str, Any], folder: Path
) -> tuple[RankSlicedManifest | None, list[str]]:
    try:
        return RankSlicedManifest.from_config(config, folder), []
    except CheckpointError as err:
        return None, [str(err)]


def _value_faults(checkpoint: Checkpoint) -> list[str]:
    """Non-finite scale vectors and wrong markers, of every EXL3 linear, sliced or not."""
    faults: list[str] = []
    for name in checkpoint.names():
        prefix, _, field = name.rpartition(".")
        try:
            if field in ("suh", "svh"):
                _check_finite(name, checkpoint.tensor(name))
            elif field in (Codebook.MCG, Codebook.MUL1):
                _check_marker(name, prefix, checkpoint)
        except Exl3Error as err:
            faults.append(str(err))
    return faults


def _check_finite(name: str, vector: torch.Tensor) -> None:
    bad = (~torch.isfinite(vector.reshape(-1))).nonzero().reshape(-1)
    if len(bad):
        raise CheckpointError(
            f"tensor {name!r}: {len(bad)} of {vector.numel()} values are not finite, "
            f"first {vector.reshape(-1)[bad[0]].item()} at {int(bad[0])}"
        )


def _check_marker(name: str, prefix: str, checkpoint: Checkpoint) -> None:
    if checkpoint.info(name).nbytes > 8:
        raise CheckpointError(f"tensor {name!r}: a marker has one element")
    marker = checkpoint.tensor(name)
    if checkpoint.manifest is not None and RANK_SUFFIX.search(prefix):
        check_rank_sliced_marker(name, marker)
    else:
        check_marker(marker, Codebook(name.rpartition(".")[2]), name)


def _check_digests(folder: Path) -> tuple[int, list[str]]:
    """Compare the files that SHA256SUMS lists; how many were compared, and the faults."""
    sums = folder / CHECKSUMS_NAME
    if not sums.is_file():
        return 0, []
    faults: list[str] = []
    lines = sums.read_text(errors="replace").splitlines()
    for line in lines:
        digest, _, name = line.partition("  ")
        if not is_bare_name(name):
            faults.append(f"{sums}: expected '<sha256>  <file>' lines, got {line[:80]!r}")
        elif not (folder / name).is_file():
            faults.append(f"{folder / name}: listed in {CHECKSUMS_NAME} but missing")
        elif (found := _digest(folder / name)) != digest:
            faults.append(
                f"{folder / name}: sha256 is {found}, {CHECKSUMS_NAME} says {digest[:64]}"
            )
    return len(lines), faults


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
