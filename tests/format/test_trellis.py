from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3kit.errors import FormatError
from exl3kit.format.spec import SUPPORTED_BITS, fresh_bits, words_per_tile
from exl3kit.format.trellis import chains, pack, unpack, windows_on_device
from exl3kit.testing.compare import assert_bitwise_equal

# Symbols (7t^2 + 3t + 1) mod 2^D(t): first four words, last two words, states 0, 1, 2, 7, 8, 255.
PACKING_VECTORS = {
    1.5: "7df7 f7df f7df df7d df7d 7df7 befb fbef f7df df7d befb df7d",
    2: "7d7d 7d7d 7d7d 7d7d 7d7d 7d7d f5f5 d7d7 5f5f 7d7d f5f5 7d7d",
    2.5: "d5e5 5e5f 5fd5 fd5e e5fd 5fd5 97f5 bfab feaf e5fd 97f5 e5fd",
    3: "fd2d 2d9b 2d9b 9bfd 9bfd fd2d dfe9 ff4b fa5b 9bfd dfe9 9bfd",
    3.5: "ffd2 36e6 f536 6c6b 6bf5 d26c 5fa9 fa9b d4db 6ffd 7fe9 6bf5",
    4: "dffd 1b39 5775 93b1 5775 93b1 7751 751b 51b3 dffd ffd9 5775",
    5: "9efd 0ac6 f71a edcc dee5 d612 dca1 942b 8563 fded bdb9 dee5",
    6: "c9f7 04b8 6536 f3ed 75c5 e197 7141 504b 12e3 f3ed fb59 75c5",
    7: "1c9f 022d edb3 afc7 cb85 1cad c281 408b 45a3 c7ed f6d9 cb85",
    8: "2349 010b 0f6d 7dbf 1705 6537 0501 010b 0b23 0f6d 6dd9 1705",
}


@pytest.mark.parametrize("bits", list(PACKING_VECTORS))
def test_packing_check_values(bits: float) -> None:
    t = torch.arange(256, dtype=torch.int64)
    symbols = (7 * t * t + 3 * t + 1) % (1 << torch.from_numpy(fresh_bits(bits).copy()))
    words = pack(symbols, bits)
    states = unpack(words, bits)
    found = [*(words[[0, 1, 2, 3, -2, -1]] & 0xFFFF).tolist()]
    found = [w & 0xFFFF for w in found] + states[[0, 1, 2, 7, 8, 255]].tolist()
    assert " ".join(f"{value:04x}" for value in found) == PACKING_VECTORS[bits]


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_the_form_for_devices_reads_the_same_states(
    bits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = torch.randint(-(2**15), 2**15, (5, words_per_tile(bits)), dtype=torch.int16)
    expected = unpack(words)
    monkeypatch.setattr("exl3kit.format.trellis._windows", windows_on_device)
    assert_bitwise_equal(unpack(words), expected)


@settings(max_examples=60, deadline=None)
@given(bits=st.sampled_from(SUPPORTED_BITS), seed=st.integers(0, 2**31))
def test_any_words_are_a_ring_and_survive_the_round_trip(bits: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 3, words_per_tile(bits))
    words = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
    states = unpack(words)
    assert chains(states, bits).all()
    assert_bitwise_equal(pack(states, bits), words)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_chains_sees_one_wrong_state(bits: float) -> None:
    words = torch.randint(-(2**15), 2**15, (1, words_per_tile(bits))).to(torch.int16)
    states = unpack(words)
    states[0, 100] ^= 0x8000
    assert not chains(states, bits).any()


@pytest.mark.parametrize("width", [0, 8, 20, 72, 144])
def test_unknown_width_is_refused(width: int) -> None:
    with pytest.raises(FormatError, match=rf"expected one of .*16.*got {width}"):
        unpack(torch.zeros(1, width, dtype=torch.int16))


def test_wrong_dtype_rate_and_length_are_refused() -> None:
    with pytest.raises(FormatError, match=r"dtype: expected torch\.int16"):
        unpack(torch.zeros(1, 48, dtype=torch.int32))
    with pytest.raises(FormatError, match="means 3 bits, got 4"):
        unpack(torch.zeros(1, 48, dtype=torch.int16), 4)
    with pytest.raises(FormatError, match="expected 256, got 255"):
        pack(torch.zeros(1, 255, dtype=torch.int32), 3)
