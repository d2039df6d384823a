"""The hidden states of all calibration rows between two layers, and the room they take.

They are the largest thing a job holds: T tokens of H channels take 4 T H bytes, and a layer needs
three such buffers: its input, the input of its MLP, and what its experts add up to. With a spill
folder all three are files that the kernel writes out when memory is short; without one they are on
the device. Rows go through a layer in pieces, since attention needs several copies of what it is
given.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from exl3kit.checkpoint.atomic import disk_errors
from exl3kit.checkpoint.header import read_header
from exl3kit.checkpoint.reader import read_tensor
from exl3kit.checkpoint.shard import Entry
from exl3kit.models.forward import Carry
from exl3kit.quantize.shard_file import ShardFile

PIECE_TOKENS = 16384  # whole rows, at least one


class Scratch:
    """Makes the large buffers: on `device`, or in files of `folder` if it is given."""

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self._device, self._folder = device, folder
        self._count = 0

    def make(self, *shape: int) -> Tensor:
        """An fp32 buffer, its values not set. CheckpointError if the folder's disk is full."""
        if self._folder is None:
            return torch.empty(shape, device=self._device)
        self._count += 1
        size = torch.Size(shape).numel()
        path = self._folder / f".exl3kit-{os.getpid()}-{self._count}"
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, 4 * size)  # a page that finds no room is a SIGBUS
                buffer = torch.from_file(str(path), shared=True, size=size, dtype=torch.float32)
            finally:
                os.close(descriptor)
                path.unlink()  # the mapping keeps the bytes; a killed process leaves nothing
        return buffer.view(shape)


class Hidden:
    """Hidden states x (R, S, H) fp32, which layers change in place, and what the rows carry.

    `pieces` are views of x, whole rows of at most 16,384 tokens; `carries` has one a piece.
    """

    def __init__(self, x: Tensor, carries: Sequence[Carry] | None = None) -> None:
        self.x = x
        self.pieces = x.split(max(1, PIECE_TOKENS // x.shape[1]))
        self.carries = [Carry() for _ in self.pieces] if carries is None else list(carries)

    @property
    def num_tokens(self) -> int:
        """T, rows times positions."""
        return self.x.shape[0] * self.x.shape[1]

    def save(self, path: Path) -> None:
        """Write it to `path`, which appears whole or not at all."""
        tensors = dict(self._tensors())
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        entries = [Entry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
        with ShardFile(part, entries) as file:
            for name, tensor in tensors.items():
                file.write(name, tensor)
            file.sync()
        with disk_errors(path.parent):
            part.replace(path)

    @classmethod
    def load(cls, path: Path, scratch: Scratch) -> Hidden:
        """What `save` wrote; the file may be removed afterwards."""
        infos = read_header(path).tensors
        names = [name for name in infos if name.startswith("hidden.")]
        rows = sum(infos[name].shape[0] for name in names)
        hidden = cls(scratch.make(rows, *infos[names[0]].shape[1:]))
        for i, (piece, carry) in enumerate(zip(hidden.pieces, hidden.carries, strict=True)):
            piece.copy_(read_tensor(infos[f"hidden.{i}"]))
            if (selected := infos.get(f"selected.{i}")) is not None:
                carry.selected = read_tensor(selected).to(piece.device)
        return hidden

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for i, (piece, carry) in enumerate(zip(self.pieces, self.carries, strict=True)):
            yield f"hidden.{i}", piece
            if carry.selected is not None:
                yield f"selected.{i}", carry.selected
