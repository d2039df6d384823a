"""Bytes of one tensor, read by range into memory of its own.

`pread` into a fresh tensor rather than `mmap`: the result owns its bytes (a view of a mapped file
changes when the file does), is aligned whatever the offset in the file, and a file that shrank
since its header was read is an error, not a bus error. Opening the file for each tensor costs
about 10 us, 10 s on the 933,888 tensors of the largest checkpoint known, and keeps no descriptor.
"""

from __future__ import annotations

import torch

from exl3kit.checkpoint.atomic import read_errors
from exl3kit.checkpoint.header import TensorInfo
from exl3kit.errors import CheckpointError


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor at `info`: its dtype and shape, contiguous, on the CPU, owning its bytes.

    CheckpointError if the file cannot be read or ends early.
    """
    return read_bytes(info, 0, info.nbytes).view(info.dtype).reshape(info.shape)


def read_bytes(info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Bytes `start` to `stop` of the tensor's data: uint8 (stop - start,), owning them."""
    data = torch.empty(stop - start, dtype=torch.uint8)
    if len(data):
        _read_into(data.numpy().data, info, info.start + start)
    return data


def _read_into(buffer: memoryview, info: TensorInfo, start: int) -> None:
    done = 0
    what = f"{info.file}: tensor {info.name!r}"
    with read_errors(what), info.file.open("rb", buffering=0) as file:
        file.seek(start)
        while done < len(buffer):
            count = file.readinto(buffer[done:])
            if not count:
                break
            done += count
    if done < len(buffer):
        raise CheckpointError(
            f"{info.file}: truncated: tensor {info.name!r} ends at byte {info.end}, "
            f"found {start + done} bytes"
        )
