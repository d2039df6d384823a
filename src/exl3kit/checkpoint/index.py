"""Every tensor of a checkpoint folder, from the files that are there.

The headers are the truth, as for the ordinary EXL3 loader, which reads every `*.safetensors` of the
folder; `model.safetensors.index.json` is checked against them. What the index or the `-of-` number
of a shard's siblings promises must be there: engines skip their missing-weight check for quantised
models, so a deleted shard would otherwise load and answer nonsense. An index that is merely stale
(it puts tensors in other files, leaves some out, or is that of the model before it was quantised)
is a fault of the folder, but nothing is missing and it can be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from exl3kit.checkpoint.atomic import read_errors
from exl3kit.checkpoint.header import FileHeader, TensorInfo, check_tensor_name, read_header
from exl3kit.checkpoint.jsonfile import is_bare_name, read_json_object
from exl3kit.checkpoint.keys import some
from exl3kit.errors import CheckpointError
from exl3kit.log import get_logger, warn_once

_log = get_logger(__name__)
INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})\.safetensors")
_FETCH = "copy or download them"
_MAX_SHARDS = 100_000
_MOST_NAMED = 8


@dataclass(frozen=True)
class FolderScan:
    """What the safetensors files of a folder hold, and every fault found on the way.

    `stale` are the faults that are the index file's alone; `tensors` is complete all the same.
    """

    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]
    faults: tuple[str, ...]
    stale: tuple[str, ...]


def read_index(folder: Path) -> dict[str, TensorInfo]:
    """Tensors of `folder` by name; CheckpointError lists every fault `scan_folder` finds.

    A stale index file is warned of, once, and otherwise ignored.
    """
    scan = scan_folder(folder)
    if fatal := [fault for fault in scan.faults if fault not in scan.stale]:
        raise CheckpointError("; ".join(fatal))
    for fault in scan.stale:
        warn_once(_log, f"{folder}: {fault}", f"{folder}: {fault}; the files are read without it")
    return scan.tensors


def scan_folder(folder: Path) -> FolderScan:
    """Read all headers of `folder` and compare them with one another and with the index file."""
    with read_errors(folder):
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a checkpoint folder, found none")
    files = tuple(weight_files(folder))
    if not files:
        raise CheckpointError(f"{folder}: expected *.safetensors files, found none")
    faults: list[str] = []
    headers = _read_headers(files, faults)
    tensors = _merge(headers, faults)
    faults += _missing_siblings(folder, files)
    stale: list[str] = []
    if (folder / INDEX_NAME).exists():
        lost, stale = _index_faults(folder, headers, tensors)
        faults += lost + stale
    return FolderScan(tensors, files, tuple(faults), tuple(stale))


def weight_files(folder: Path) -> list[Path]:
    """The `*.safetensors` in `folder`, sorted; not the hidden ones, which no engine reads."""
    # iterdir and not glob, which takes a folder that must not be read for an empty one
    with read_errors(folder):
        return sorted(
            file
            for file in folder.iterdir()
            if file.name.endswith(".safetensors") and not file.name.startswith(".")
        )


def _read_headers(files: tuple[Path, ...], faults: list[str]) -> dict[str, FileHeader]:
    headers = {}
    for file in files:
        try:
            headers[file.name] = read_header(file)
        except CheckpointError as err:
            faults.append(str(err))
    return headers


def _merge(headers: dict[str, FileHeader], faults: list[str]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for file, header in headers.items():
        for name, info in header.tensors.items():
            first = tensors.setdefault(name, info)
            if first is not info:
                twice.setdefault((first.file.name, file), []).append(name)
    for (one, other), names in twice.items():
        faults.append(
            f"{one} and {other}: the same tensors are in both: {some(names)}; "
            "remove the file that does not belong here"
        )
    return tensors


def _missing_siblings(folder: Path, files: tuple[Path, ...]) -> list[str]:
    """Shards of a numbered set that are not there, whether or not an index names them."""
    sets: dict[tuple[str, int, int], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file.name):
            key = (match["stem"], int(match["count"]), len(match["number"]))
            sets.setdefault(key, set()).add(int(match["number"]))
    faults = []
    for (stem, count, digits), numbers in sets.items():
        if count > _MAX_SHARDS:
            faults.append(f"{folder}: shards claim a set of {count}, expected <= {_MAX_SHARDS}")
            continue
        first = 0 if 0 in numbers else 1
        expected = range(first, first + count)
        missing = (n for n in expected if n not in numbers)
        names = [
            f"{stem}-{n:0{digits}d}-of-{count:0{digits}d}.safetensors"
            for n in islice(missing, _MOST_NAMED)
        ]
        if names:
            total = count - sum(number in expected for number in numbers)
            faults.append(f"{folder}: missing shards: {some(names, total)}; {_FETCH}")
    return faults


def _index_faults(
    folder: Path, headers: dict[str, FileHeader], tensors: dict[str, TensorInfo]
) -> tuple[list[str], list[str]]:
    """What the index promises and no file holds; and where the index alone is wrong."""
    try:
        weight_map = _weight_map(folder / INDEX_NAME)
    except CheckpointError as err:
        return [str(err)], []
    quantised = {name.rpartition(".")[0] for name in tensors if name.endswith(".trellis")}
    lost, found = {}, {}
    for name, file in weight_map.items():
        is_there = name in tensors or name.removesuffix(".weight") in quantised
        (found if is_there else lost)[name] = file
    absent = {file for file in lost.values() if not (folder / file).exists()}
    faults = []
    if absent:
        faults.append(f"{INDEX_NAME}: missing shards: {some(sorted(absent))}; {_FETCH}")
    if names := [name for name, file in lost.items() if file in headers]:
        faults.append(f"{INDEX_NAME}: tensors that are not in their shard: {some(names)}")
    return faults, _stale(found, headers, set(weight_map))


def _stale(found: dict[str, str], headers: dict[str, FileHeader], listed: set[str]) -> list[str]:
    """Names the index puts in a file that has them not, and names of its files it does not list."""
    elsewhere = [
        name
        for name, file in found.items()
        if file not in headers or name not in headers[file].tensors
    ]
    shards = sorted(set(found.values()) & set(headers))
    unlisted = [name for file in shards for name in headers[file].tensors if name not in listed]
    if headers and not listed:
        return [f"{INDEX_NAME}: stale: it lists no tensors, engines would load none"]
    return [
        f"{INDEX_NAME}: stale: {claim}: {some(names)}"
        for claim, names in (
            ("tensors are not in the file it names", elsewhere),
            ("its shards hold tensors it does not list", unlisted),
        )
        if names
    ]


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: expected an object under 'weight_map'")
    for name, file in weight_map.items():
        check_tensor_name(name, str(path))
        if not isinstance(file, str) or not is_bare_name(file):
            raise CheckpointError(
                f"{path}: weight_map[{name!r}] must be a bare file name, got {str(file)[:80]!r}"
            )
    return weight_map
