"""Everything about a checkpoint that can be proved without a GPU and without running the model.

Metadata, shards and index, every name, dtype and shape, every codebook marker, every value (finite,
of a believable size), and the digests in SHA256SUMS where there are any. All faults are collected.
Each file is read once, in blocks: memory is a few MB a job and 0.5 KB a tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from exl3kit.checkpoint.atomic import read_errors
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.index import scan_folder
from exl3kit.checkpoint.jsonfile import check_regular, is_bare_name
from exl3kit.checkpoint.manifest import RankSlicedManifest
from exl3kit.checkpoint.names import RANK_SUFFIX, check_rank_sliced_marker
from exl3kit.checkpoint.open import Checkpoint, make_checkpoint, read_config
from exl3kit.checkpoint.padding import padding_faults
from exl3kit.checkpoint.r7 import R7Manifest
from exl3kit.checkpoint.sanity import sanity_faults
from exl3kit.checkpoint.structure import ExpectedModel, structure_faults
from exl3kit.checkpoint.values import FileFacts, TensorFacts, read_facts
from exl3kit.checkpoint.writer import CHECKSUMS_NAME
from exl3kit.errors import CheckpointError, Exl3Error
from exl3kit.format.spec import Codebook
from exl3kit.format.tensors import check_marker

Progress = Callable[[int, int], None]  # bytes read, bytes in all
_SUM = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")  # `*`: of sha256sum --binary


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
    path: str | Path,
    model_of: Callable[[Mapping[str, Any]], ExpectedModel],
    jobs: int = 1,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check the folder `path`; `model_of` maps its config to the tensors the model has.

    `jobs` files are read at a time. Raises only where nothing can be judged: no folder, no readable
    config.json, no weights, an unknown architecture or dialect. Anything wrong beyond that is in
    the report's `faults`.
    """
    folder = Path(path)
    config = read_config(folder)
    scan = scan_folder(folder)
    faults = list(scan.faults)
    manifest, metadata_faults = _manifest(config, folder)
    faults += metadata_faults
    checkpoint = make_checkpoint(folder, config, manifest, scan.tensors)
    if not metadata_faults:
        model = model_of(config)
        faults += structure_faults(checkpoint, model)
        faults += padding_faults(checkpoint, model.moe_intermediate_size)
    faults += _marker_faults(checkpoint)
    listed, sum_faults = _listed_digests(folder)
    facts, digests, read_faults = _read_all(checkpoint, bool(listed), jobs, progress)
    faults += read_faults + sanity_faults(checkpoint, facts) + sum_faults
    faults += _digest_faults(folder, listed, digests)
    return VerifyReport(
        path=folder,
        dialect=checkpoint.dialect,
        faults=tuple(faults),
        num_files=len(scan.files),
        num_tensors=len(scan.tensors),
        num_exl3_linears=len(checkpoint.exl3_prefixes()),
        num_bytes=sum(info.nbytes for info in scan.tensors.values()),
        num_digests=len(listed),
    )


def _manifest(
    config: Mapping[str, Any], folder: Path
) -> tuple[RankSlicedManifest | R7Manifest | None, list[str]]:
    try:
        manifest = RankSlicedManifest.from_config(config, folder)
        return manifest or R7Manifest.from_config(config), []
    except CheckpointError as err:
        return None, [str(err)]


def _read_all(
    checkpoint: Checkpoint, use_digests: bool, jobs: int, progress: Progress | None
) -> tuple[dict[str, TensorFacts], dict[str, str], list[str]]:
    """Facts by tensor, digests by file name, and the files that could not be read."""
    files: dict[Path, list[TensorInfo]] = defaultdict(list)
    for info in checkpoint.infos.values():
        files[info.file].append(info)
    total, done, lock = sum(info.nbytes for info in checkpoint.infos.values()), 0, Lock()

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            if progress is not None:
                progress(done, total)

    def read(file: Path) -> FileFacts | str:
        try:
            return read_facts(file, files[file], use_digests and _covers(file, files[file]), count)
        except CheckpointError as err:
            return str(err)
        except OSError as err:
            return f"{file}: cannot read: {err.strerror}"

    facts: dict[str, TensorFacts] = {}
    digests: dict[str, str] = {}
    faults: list[str] = []
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for file, found in zip(files, pool.map(read, files), strict=True):
            if isinstance(found, str):
                faults.append(found)
                continue
            facts |= found.tensors
            if found.digest is not None:
                digests[file.name] = found.digest
    return facts, digests, faults


def _covers(file: Path, infos: list[TensorInfo]) -> bool:
    """False where tensors of the file are left out, as those that another file has too."""
    data = sum(info.nbytes for info in infos)
    return min(info.start for info in infos) + data == file.stat().st_size


def _marker_faults(checkpoint: Checkpoint) -> list[str]:
    """Wrong markers of every EXL3 linear, sliced or not."""
    faults: list[str] = []
    for name in checkpoint.names():
        prefix, _, field = name.rpartition(".")
        try:
            if field in (Codebook.MCG, Codebook.MUL1):
                _check_marker(name, prefix, checkpoint)
        except Exl3Error as err:
            faults.append(str(err))
    return faults


def _check_marker(name: str, prefix: str, checkpoint: Checkpoint) -> None:
    if checkpoint.info(name).nbytes > 8:
        raise CheckpointError(f"tensor {name!r}: a marker has one element")
    marker = checkpoint.tensor(name)
    if checkpoint.manifest is not None and RANK_SUFFIX.search(prefix):
        check_rank_sliced_marker(name, marker)
    else:
        check_marker(marker, Codebook(name.rpartition(".")[2]), name)


def _listed_digests(folder: Path) -> tuple[dict[str, str], list[str]]:
    """File name -> digest of SHA256SUMS, empty if there is none; and its malformed lines."""
    sums = folder / CHECKSUMS_NAME
    listed: dict[str, str] = {}
    faults: list[str] = []
    if not os.path.lexists(sums):
        return listed, faults
    try:
        with read_errors(sums):
            check_regular(sums)
            text = sums.read_text(errors="replace")
    except CheckpointError as err:
        return listed, [str(err)]
    for line in text.splitlines():
        match = _SUM.fullmatch(line)
        if match and is_bare_name(match["name"]):
            listed[match["name"]] = match["digest"].lower()
        else:
            faults.append(f"{sums}: expected '<sha256>  <file>' lines, got {line[:80]!r}")
    return listed, faults


def _digest_faults(
    folder: Path, listed: Mapping[str, str], digests: Mapping[str, str]
) -> list[str]:
    """Listed files that are missing or of another digest than `digests` has or they have."""
    faults: list[str] = []
    for name, expected in listed.items():
        if not (folder / name).is_file():
            faults.append(f"{folder / name}: listed in {CHECKSUMS_NAME} but missing")
            continue
        try:
            found = digests.get(name) or _digest(folder / name)
        except OSError as err:
            faults.append(f"{folder / name}: cannot read: {err.strerror}")
            continue
        if found != expected:
            faults.append(
                f"{folder / name}: sha256 is {found}, {CHECKSUMS_NAME} says {expected[:64]}"
            )
    return faults


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
