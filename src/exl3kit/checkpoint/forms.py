"""The forms in which a tensor of the model may be stored, and what is wrong with one.

A matrix is `.weight` (with FP8, block scales beside it), one EXL3 linear, several `.slice.{i}`, or,
for the embedding, a row table. What is there decides, and it must be complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from exl3kit.checkpoint.fp8 import FP8_DTYPES, SCALE_FIELD, block_size
from exl3kit.checkpoint.modules import exl3_parts
from exl3kit.checkpoint.names import TensorRule, check_rule
from exl3kit.checkpoint.open import Checkpoint
from exl3kit.checkpoint.widths import padded
from exl3kit.errors import CheckpointError, FormatError
from exl3kit.format.row_table import GROUP, row_table_bits
from exl3kit.format.spec import TILE, bits_from_words

EXL3_FIELDS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")
_DENSE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class StoredForm:
    """Names of the tensors that stand for one of the model's, and what is wrong with them."""

    names: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    def check(self, checkpoint: Checkpoint, name: str, rule: TensorRule) -> None:
        """Note `name`, and a fault if it is there in another dtype or shape than the rule's."""
        self.names.add(name)
        if checkpoint.has(name):
            self.faults += rule_fault(checkpoint, name, rule)


def stored_form(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> StoredForm | None:
    """How the model's tensor `name` of `shape` is stored, None if it is not."""
    module = name.removesuffix(".weight")
    if checkpoint.has(name):
        return _plain_form(checkpoint, name, shape)
    if len(shape) != 2:
        return None
    if parts := exl3_parts(checkpoint, module):
        return _exl3_form(checkpoint, module, parts, shape)
    return _row_table_form(checkpoint, module, shape) if checkpoint.is_row_table(module) else None


def rule_fault(checkpoint: Checkpoint, name: str, rule: TensorRule) -> list[str]:
    """The fault of a tensor that is there in another dtype or shape than the rule's, if any."""
    info = checkpoint.info(name)
    try:
        check_rule(name, info.dtype, info.shape, rule)
    except CheckpointError as err:
        return [str(err)]
    return []


def _plain_form(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> StoredForm:
    """A bias beside a trellis has the padded length; all other shapes are exact."""
    info = checkpoint.info(name)
    module = name.rpartition(".")[0]
    if name.endswith(".bias") and checkpoint.has(f"{module}.trellis"):
        shape = tuple(map(padded, shape))
    form = StoredForm()
    form.check(checkpoint, name, TensorRule(info.dtype, shape))
    if info.dtype in FP8_DTYPES and len(shape) == 2:
        _check_scales(checkpoint, form, f"{module}.{SCALE_FIELD}", shape)
    elif info.dtype not in _DENSE_DTYPES:
        allowed = ", ".join(map(str, _DENSE_DTYPES))
        form.faults.append(f"tensor {name!r}: expected one of {allowed}, got {info.dtype}")
    return form


def _check_scales(
    checkpoint: Checkpoint, form: StoredForm, name: str, shape: tuple[int, ...]
) -> None:
    form.names.add(name)
    try:
        rows, columns = block_size(checkpoint.config)
        expected = (-(-shape[0] // rows), -(-shape[1] // columns))
        rule = TensorRule(checkpoint.info(name).dtype, expected)
    except CheckpointError as err:
        form.faults.append(str(err))
    else:
        form.check(checkpoint, name, rule)
        if not rule.dtype.is_floating_point:
            form.faults.append(f"tensor {name!r}: expected floating-point scales, got {rule.dtype}")


def _exl3_form(
    checkpoint: Checkpoint, module: str, parts: list[str], shape: tuple[int, ...]
) -> StoredForm:
    """One EXL3 linear of (out, in) = `shape` padded to 128, or slices of its intermediate side."""
    form, cut = StoredForm(), 1 if module.endswith("down_proj") else 0
    full = list(map(padded, shape))
    total, is_sliced = 0, parts != [module]
    for part in parts:
        sizes = list(full)
        trellis = checkpoint.info(f"{part}.trellis").shape
        if is_sliced and len(trellis) == 3:
            sizes[cut] = TILE * trellis[1 - cut]
        total += sizes[cut]
        _check_linear(checkpoint, form, part, (sizes[0], sizes[1]))
    if is_sliced and total != full[cut]:
        form.faults.append(
            f"module {module!r}: slices must be {full[cut]} channels wide together, got {total}"
        )
    return form


def _check_linear(
    checkpoint: Checkpoint, form: StoredForm, part: str, sizes: tuple[int, int]
) -> None:
    """Dtypes and shapes of an EXL3 linear with (out, in) = `sizes`, multiples of 128."""
    outs, ins = sizes
    trellis = checkpoint.info(f"{part}.trellis")
    words = trellis.shape[-1] if trellis.shape else 0
    try:
        bits_from_words(words)
    except FormatError as err:
        form.faults.append(f"tensor '{part}.trellis': {err}")
    rules = {
        "trellis": TensorRule(torch.int16, (ins // TILE, outs // TILE, words)),
        "suh": TensorRule(torch.float16, (ins,)),
        "svh": TensorRule(torch.float16, (outs,)),
        "su": TensorRule(torch.int16, (ins // TILE,)),
        "sv": TensorRule(torch.int16, (outs // TILE,)),
        "mcg": TensorRule(torch.int32, ()),
        "mul1": TensorRule(torch.int32, ()),
    }
    for name, rule in rules.items():
        form.check(checkpoint, checkpoint.shared_name(part, name) or f"{part}.{name}", rule)
    for side in ("su", "sv"):
        vector = checkpoint.shared_name(part, f"{side}h") or f"{part}.{side}h"
        if not checkpoint.has(vector) and not checkpoint.has(f"{part}.{side}"):
            form.faults.append(f"tensor {vector!r} is missing")
    if checkpoint.has(f"{part}.mcg") and checkpoint.has(f"{part}.mul1"):
        form.faults.append(f"tensors '{part}.mcg' and '{part}.mul1': expected at most one marker")


def _row_table_form(checkpoint: Checkpoint, module: str, shape: tuple[int, ...]) -> StoredForm:
    form, groups = StoredForm(), -(-shape[1] // GROUP)
    width = checkpoint.info(f"{module}.trellis").shape[1]
    if not checkpoint.has(f"{module}.signs"):
        form.faults.append(f"tensor '{module}.signs' is missing")
    try:
        row_table_bits(width, groups, module)
    except FormatError as err:
        form.faults.append(f"tensor {err}")
    form.check(checkpoint, f"{module}.trellis", TensorRule(torch.int16, (shape[0], width)))
    form.check(checkpoint, f"{module}.signs", TensorRule(torch.float16, (groups, GROUP)))
    return form
