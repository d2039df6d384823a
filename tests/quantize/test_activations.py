"""Hidden states come back from disk as they were; spilled buffers leave no file behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from exl3kit.errors import CheckpointError
from exl3kit.models.forward import Carry
from exl3kit.quantize.activations import PIECE_TOKENS, Hidden, Scratch

CPU = torch.device("cpu")


def test_hidden_states_and_what_rows_carry_survive_the_disk(tmp_path: Path) -> None:
    x = torch.randn(5, PIECE_TOKENS // 2, 2)
    carries = [Carry(torch.rand(2, 3, 3) < 0.5), Carry(), Carry(torch.rand(1, 3, 3) < 0.5)]
    Hidden(x, carries).save(tmp_path / "hidden-1.safetensors")
    found = Hidden.load(tmp_path / "hidden-1.safetensors", Scratch(CPU, None))
    assert torch.equal(found.x, x)
    assert [len(piece) for piece in found.pieces] == [2, 2, 1]
    for carry, expected in zip(found.carries, carries, strict=True):
        if expected.selected is None:
            assert carry.selected is None
        else:
            assert carry.selected is not None and torch.equal(carry.selected, expected.selected)
    assert [path.name for path in tmp_path.iterdir()] == ["hidden-1.safetensors"]


def test_pieces_are_views(tmp_path: Path) -> None:
    hidden = Hidden(torch.zeros(3, PIECE_TOKENS, 1))
    hidden.pieces[1].add_(1)
    assert hidden.x.flatten(1).sum(1).tolist() == [0, PIECE_TOKENS, 0]


def test_a_spilled_buffer_is_a_file_without_a_name(tmp_path: Path) -> None:
    scratch = Scratch(CPU, tmp_path / "spill")
    first, second = scratch.make(2, 3, 4), scratch.make(8)
    first.fill_(1)
    second.fill_(2)
    assert first.shape == (2, 3, 4)
    assert (float(first.sum()), float(second.sum())) == (24, 16)
    assert not any((tmp_path / "spill").iterdir())
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "spill") in mapped


def test_a_full_spill_disk_is_an_error_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match="disk full"):
        Scratch(CPU, tmp_path).make(4)
    assert not any(tmp_path.iterdir())
