from __future__ import annotations

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.hadamard import hadamard
from exl3kit.format.tiles import TILE_COLS, TILE_ROWS, from_tiles, to_tiles
from exl3kit.testing.compare import assert_bitwise_equal, assert_three_gates
from tests import golden


def test_first_sixteen_positions() -> None:
    flat = (TILE_ROWS * 16 + TILE_COLS)[:16].tolist()
    assert flat == [0, 16, 128, 144, 8, 24, 136, 152, 32, 48, 160, 176, 40, 56, 168, 184]


def test_tiles_are_a_bijection_and_round_trip() -> None:
    matrix = torch.arange(48 * 80, dtype=torch.int32).reshape(48, 80)
    tiles = to_tiles(matrix)
    assert tiles.shape == (3, 5, 256)
    assert_bitwise_equal(from_tiles(tiles), matrix)
    t = 77
    expected = matrix[16 + int(TILE_ROWS[t]), 32 + int(TILE_COLS[t])]
    assert tiles[1, 2, t] == expected


def test_sides_that_are_no_multiple_of_16_are_refused() -> None:
    with pytest.raises(FormatError, match=r"multiples of 16, got \(32, 40\)"):
        to_tiles(torch.zeros(32, 40))


def _hadamard_matrix() -> torch.Tensor:
    index = torch.arange(128)
    parity = torch.tensor([[(i & j).bit_count() & 1 for j in range(128)] for i in index.tolist()])
    return (1 - 2 * parity.double()) / 128**0.5


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_hadamard_is_the_block_diagonal_matrix(dim: int) -> None:
    x = torch.randn(256, 384, dtype=torch.float64)
    blocks = torch.block_diag(*[_hadamard_matrix()] * (x.shape[dim] // 128))
    expected = blocks @ x if dim == 0 else x @ blocks
    assert_three_gates(hadamard(x, dim), expected, "float64")
    assert_three_gates(hadamard(hadamard(x, dim), dim), x, "float64")


def test_hadamard_of_activations_matches_exllamav3() -> None:
    stored = golden.tensors()
    scaled = stored["A.x"][:5] * stored["A.had.suh"]  # fp16, as the GPU path rounds it
    assert_bitwise_equal(hadamard(scaled.double()).half(), stored["A.had.x5"])


def test_hadamard_refuses_other_lengths() -> None:
    with pytest.raises(FormatError, match="multiple of 128, got 192"):
        hadamard(torch.zeros(2, 192))
