"""Proof that a rank-sliced checkpoint holds the bytes of the one it was cut from, no more, no less.

Not by repeating the cut: both files' slices are joined along the cut side and must be the same
matrix, and each hidden-side vector and marker must be that of the source ranks with the same
channels. All other tensors must be the same bytes under the same names, as must tokenizer and other
files that go with the weights, and config.json the same but for the keys that slicing writes. A job
holds one projection of one expert twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from exl3kit.checkpoint.header import TensorInfo
from exl3kit.checkpoint.keys import show
from exl3kit.checkpoint.manifest import BLOCK_KEY
from exl3kit.checkpoint.names import PROJECTIONS, TensorRule, check_rule
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.reader import read_bytes
from exl3kit.checkpoint.side_files import side_files
from exl3kit.errors import CheckpointError, Exl3Error, SliceError
from exl3kit.models.registry import model_map
from exl3kit.slicing.axes import rank_range
from exl3kit.slicing.experts import CUT_SIDES, FIELDS, CutSide, ExpertSet
from exl3kit.slicing.job import SOURCE_QUANTIZATION_KEY
from exl3kit.slicing.whole import expert_set

_WRITTEN_KEYS = {BLOCK_KEY, "quantization_config", SOURCE_QUANTIZATION_KEY}
_BLOCK_BYTES = 2**23
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Progress = Callable[[int, int], None]  # bytes proved, bytes in all
_Part = tuple[int, Callable[[], list[str]]]  # bytes of it, and the comparison


def source_faults(
    checkpoint: Checkpoint, source: Checkpoint, jobs: int = 1, progress: Progress | None = None
) -> list[str]:
    """Every way in which `checkpoint` is not a cut of `source`, an ordinary or rank-sliced one.

    Reads all tensors of both, in `jobs` threads. SliceError if one of the two has no experts that
    could be compared.
    """
    if checkpoint.manifest is None:
        raise SliceError(f"{checkpoint.path}: expected a rank-sliced checkpoint to compare")
    target = expert_set(checkpoint, model_map(checkpoint.config))
    origin = expert_set(source, model_map(source.config))
    if faults := _differences(target, origin):
        return faults
    faults = _config_faults(checkpoint.config, source.config)
    faults += _file_faults(checkpoint.path, source.path)
    parts = list(_parts(target, origin, faults))
    total, done = sum(size for size, _ in parts), 0
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for (size, _), found in zip(parts, pool.map(_proved, parts), strict=True):
            faults += found
            done += size
            if progress is not None:
                progress(done, total)
    return faults


def _differences(target: ExpertSet, origin: ExpertSet) -> list[str]:
    """What makes a comparison of single tensors pointless."""
    values = {
        "hidden_size": (target.hidden_size, origin.hidden_size),
        "moe_intermediate_size": (target.width, origin.width),
        "layers and bits": (dict(target.manifest.layer_bits), dict(origin.manifest.layer_bits)),
    }
    return [
        f"{key}: {target.checkpoint.path} and its source {origin.checkpoint.path} differ"
        for key, (one, other) in values.items()
        if one != other
    ]


def _config_faults(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Keys of config.json that differ; the same weights with another rope_theta are no cut."""
    found, expected = map(_model_keys, (ours, theirs))
    return [
        f"config.json: {key}: expected the source's {show(expected.get(key))}, "
        f"got {show(found.get(key))}"
        for key in sorted(found.keys() | expected)
        if key not in found or key not in expected or found[key] != expected[key]
    ]


def _model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says beside the keys that slicing writes, here and in a nested text config."""
    keys = {key: value for key, value in config.items() if key not in _WRITTEN_KEYS}
    if isinstance(nested := config.get("text_config"), Mapping):
        keys["text_config"] = {key: nested[key] for key in nested if key != BLOCK_KEY}
    return keys


def _file_faults(ours: Path, theirs: Path) -> list[str]:
    """Files beside the weights that differ: another tokenizer makes another model of them too."""
    found, expected = side_files(ours), side_files(theirs)
    faults = [
        f"{name}: the source has no file of that name" for name in found if name not in expected
    ]
    faults += [f"{name}: the source's file is missing" for name in expected if name not in found]
    for name in found.keys() & expected:
        try:
            if found[name].read_bytes() != expected[name].read_bytes():
                faults.append(f"{name}: differs from the source's file")
        except OSError as err:
            faults.append(f"{name}: cannot compare: {err.filename}: {err.strerror}")
    return sorted(faults)


def _parts(target: ExpertSet, origin: ExpertSet, faults: list[str]) -> Iterator[_Part]:
    """The comparisons to make; names that only one of the files has are faults at once."""
    ours, theirs = ({i.name: i for i in s.other_tensors()} for s in (target, origin))
    extra = sorted(ours.keys() - theirs)
    faults += [f"tensor {name!r}: the source has none of that name" for name in extra]
    faults += [f"tensor {name!r} of the source is missing" for name in sorted(theirs.keys() - ours)]
    for experts in (target, origin):
        strays = chain.from_iterable(map(experts.strays, experts.manifest.moe_layers))
        faults += [
            f"{experts.checkpoint.path}: tensor {n!r} belongs to no EXL3 expert" for n in strays
        ]
    for name in sorted(ours.keys() & theirs.keys()):
        yield ours[name].nbytes, partial(_copy_faults, ours[name], theirs[name])
    for layer in target.manifest.moe_layers:
        for expert in range(target.manifest.experts_per_layer):
            for proj in PROJECTIONS:
                trellis = target.checkpoint.infos.get(
                    target.name(layer, expert, proj, 0, "trellis")
                )
                size = trellis.nbytes * target.manifest.tp if trellis else 0
                yield size, partial(_expert_faults, target, origin, layer, expert, proj)


def _proved(part: _Part) -> list[str]:
    _, compare = part
    try:
        return compare()
    except Exl3Error as err:
        return [str(err)]


def _copy_faults(ours: TensorInfo, theirs: TensorInfo) -> list[str]:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        expected = f"the source's {theirs.dtype} {list(theirs.shape)}"
        return [f"tensor {ours.name!r}: expected {expected}, got {ours.dtype} {list(ours.shape)}"]
    for start in range(0, ours.nbytes, _BLOCK_BYTES):
        stop = min(start + _BLOCK_BYTES, ours.nbytes)
        found, expected = read_bytes(ours, start, stop), read_bytes(theirs, start, stop)
        if not torch.equal(found, expected):
            first = start + int((found != expected).nonzero()[0])
            return [f"tensor {ours.name!r}: differs from the source at byte {first}"]
    return []


def _expert_faults(
    target: ExpertSet, origin: ExpertSet, layer: int, expert: int, proj: str
) -> list[str]:
    faults: list[str] = []
    for field in FIELDS:
        linear = layer, expert, proj
        if side := CUT_SIDES[proj].get(field):
            faults += _joined_faults(target, origin, linear, field, side)
        else:
            faults += _whole_faults(target, origin, linear, field)
    return faults


def _joined_faults(
    target: ExpertSet, origin: ExpertSet, linear: tuple[int, int, str], field: str, side: CutSide
) -> list[str]:
    """The slices of all ranks, side by side, are the same in both."""
    found, expected = (_joined(experts, linear, field, side) for experts in (target, origin))
    if found.dtype == expected.dtype and torch.equal(_bits(found), _bits(expected)):
        return []
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        name = target.name(*linear, 0, field)
        sizes = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (expected, found)]
        return [f"tensor {name!r}: all ranks together: expected {sizes[0]}, got {sizes[1]}"]
    where = (_bits(found) != _bits(expected)).nonzero()[:, side.axis]
    ranks = sorted({int(i) * side.channels // target.slice_width for i in where.unique()})
    names = [target.name(*linear, rank, field) for rank in ranks]
    return [f"tensor {name!r}: is not the cut of the source" for name in names]


def _joined(
    experts: ExpertSet, linear: tuple[int, int, str], field: str, side: CutSide
) -> torch.Tensor:
    """The slices of all ranks side by side; CheckpointError names one that is unlike the first."""
    slices = [_tensor(experts, linear, rank, field) for rank in range(experts.manifest.tp)]
    first = slices[0]
    if first.dim() <= side.axis:
        name = experts.name(*linear, 0, field)
        raise CheckpointError(f"tensor {name!r}: expected a matrix or vector, got {first.dtype} []")
    for rank, tensor in enumerate(slices):
        expected = TensorRule(first.dtype, tuple(first.shape))
        check_rule(experts.name(*linear, rank, field), tensor.dtype, tuple(tensor.shape), expected)
    return torch.cat(slices, side.axis)


def _whole_faults(
    target: ExpertSet, origin: ExpertSet, linear: tuple[int, int, str], field: str
) -> list[str]:
    """Each rank has the bytes of every source rank that holds its channels."""
    faults = []
    for rank in range(target.manifest.tp):
        found = _tensor(target, linear, rank, field)
        channels = rank_range("moe_intermediate_size", target.width, target.manifest.tp, rank)
        for owner in origin.owners(channels):
            expected = _tensor(origin, linear, owner, field)
            is_same = found.dtype == expected.dtype and found.shape == expected.shape
            if not (is_same and torch.equal(_bits(found), _bits(expected))):
                names = target.name(*linear, rank, field), origin.name(*linear, owner, field)
                faults.append(f"tensor {names[0]!r}: differs from the source's {names[1]!r}")
    return faults


def _tensor(
    experts: ExpertSet, linear: tuple[int, int, str], rank: int, field: str
) -> torch.Tensor:
    return experts.tensor(experts.name(*linear, rank, field))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Values as integers, so that -0 is not 0 and NaN equals itself."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])
