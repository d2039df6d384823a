"""The row tables of exllamav3 1.6.5, against a decoder written bit by bit."""

from __future__ import annotations

import pytest
import torch

from exl3kit.errors import FormatError
from exl3kit.format.codebook import codebook_values
from exl3kit.format.row_table import GROUP, RowTable
from exl3kit.format.spec import INTEGER_BITS, Codebook


def random_table(rows: int, groups: int, bits: int) -> RowTable:
    random = torch.Generator().manual_seed(bits)
    shape = (rows, groups, 1 + 16 * bits)
    words = torch.randint(-(1 << 15), 1 << 15, shape, generator=random, dtype=torch.int16)
    words[..., 0] = torch.rand(rows, groups, generator=random).half().view(torch.int16)
    signs = torch.randint(0, 2, (groups, GROUP), generator=random).half() * 2 - 1
    return RowTable(words.flatten(1), signs, "embed")


def slow_group(words: list[int], scale: float, signs: torch.Tensor, bits: int) -> torch.Tensor:
    """One group by the definition: symbols, states, values, H256 from its entries, signs."""
    stream = [(word >> i) & 1 for word in words for i in range(16)]
    rings = [stream[i * bits : (i + 1) * bits] for i in range(GROUP)]
    symbols = [sum(bit << j for j, bit in enumerate(ring)) for ring in rings]
    states = [
        sum(symbols[(i - m) % GROUP] << (m * bits) for m in range(16)) & 0xFFFF
        for i in range(GROUP)
    ]
    values = codebook_values(Codebook.MUL1)[torch.tensor(states)].double() * scale
    rows = torch.arange(GROUP)
    parity = torch.tensor([[(int(i) & int(j)).bit_count() & 1 for j in rows] for i in rows])
    return (1 - 2 * parity.double()) @ values / 16 * signs.double()


@pytest.mark.parametrize("bits", INTEGER_BITS)
def test_every_rate_by_the_definition(bits: int) -> None:
    table = random_table(3, 2, bits)
    decoded = table.dequantize()
    assert (table.bits, tuple(decoded.shape)) == (bits, (3, 2 * GROUP))
    row = table.trellis[1].reshape(2, -1)[1]
    scale = float(row[:1].view(torch.float16))
    expected = slow_group([int(w) & 0xFFFF for w in row[1:]], scale, table.signs[1], bits)
    torch.testing.assert_close(decoded[1, GROUP:].double(), expected, rtol=0, atol=1e-5)


def test_some_rows() -> None:
    table = random_table(9, 1, 4)
    rows = torch.tensor([7, 0])
    assert torch.equal(table.dequantize(rows), table.dequantize()[rows])


@pytest.mark.parametrize(
    "trellis, signs, text",
    [
        (torch.zeros(2, 49), torch.ones(1, 256).half(), "int16 with 2 dimensions"),
        (torch.zeros(2, 50, dtype=torch.int16), torch.ones(1, 256).half(), "got 50"),
        (torch.zeros(2, 49, dtype=torch.int16), torch.ones(1, 128).half(), "embed.signs"),
        (torch.zeros(2, 0, dtype=torch.int16), torch.ones(0, 256).half(), "0 groups"),
    ],
)
def test_wrong_tensors_are_named(trellis: torch.Tensor, signs: torch.Tensor, text: str) -> None:
    with pytest.raises(FormatError, match="embed") as error:
        RowTable(trellis, signs, "embed")
    assert text in str(error.value)
