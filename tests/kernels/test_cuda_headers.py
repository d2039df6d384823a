"""Device headers compiled by g++, against format: every state, every window of every rate."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from exl3kit import env
from exl3kit.format.codebook import codebook_values
from exl3kit.format.spec import NUM_STATES, Codebook, words_per_tile
from exl3kit.format.trellis import unpack
from exl3kit.jit.source import SOURCES
from tests.golden import COMBINATIONS

RATES = sorted({bits for bits, _ in COMBINATIONS})
NUMBERS = {Codebook.THREE_INST: 0, Codebook.MCG: 1, Codebook.MUL1: 2}

PROGRAM = """
#include "codebook.cuh"
#include "trellis.cuh"

using namespace exl3;

template <Codebook kCodebook>
void words(uint32_t* out, float* affine) {
    for (uint32_t state = 0; state < 65536; ++state) out[state] = weight_halves<kCodebook>(state);
    affine[0] = weight_scale(kCodebook), affine[1] = weight_shift(kCodebook);
}

template <int kBits2, bool kMultiply>
void states(const uint32_t* tile, uint32_t* out) {
    using Layout = Trellis<kBits2>;
    for (int lane = 0; lane < 32; ++lane) {
        const LaneWindows<kBits2> windows(lane);
        LaneBits<kBits2> bits;
        for (int pair = 0; pair < Layout::kPairs; ++pair) {
            bits.low[pair] = tile[windows.low[pair]];
            bits.high[pair] = tile[windows.high[pair]];
        }
        uint32_t lane_out[kWindows];
        lane_states<kBits2, kMultiply>(lane_out, bits, windows);
        for (int j = 0; j < kWindows; ++j) out[8 * lane + j] = lane_out[j];
    }
}

extern "C" void codebook_words(int codebook, uint32_t* out, float* affine) {
    if (codebook == kThreeInst) words<kThreeInst>(out, affine);
    if (codebook == kMcg) words<kMcg>(out, affine);
    if (codebook == kMul1) words<kMul1>(out, affine);
}

extern "C" void tile_states(int bits2, int multiply, const uint32_t* tile, uint32_t* out) {
    switch (bits2) {
#define RATE(n) case n: multiply ? states<n, true>(tile, out) : states<n, false>(tile, out); break;
    RATE(2) RATE(3) RATE(4) RATE(5) RATE(6) RATE(7) RATE(8) RATE(10) RATE(12) RATE(14) RATE(16)
    }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The headers, as g++ sees them."""
    compiler = env.cxx()
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder: Path = tmp_path_factory.mktemp("headers")
    (folder / "headers.cpp").write_text(PROGRAM)
    target = folder / "headers.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    command = [compiler, *flags, f"-I{SOURCES}", str(folder / "headers.cpp"), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


@pytest.mark.parametrize("codebook", list(Codebook))
def test_halves_add_up_to_the_codebook(library: ctypes.CDLL, codebook: Codebook) -> None:
    """Exactly for 3inst and mcg; mul1 differs by the rounding to fp16 that the format ends with."""
    words = np.empty(NUM_STATES, np.uint32)
    affine = np.empty(2, np.float32)
    library.codebook_words(
        NUMBERS[codebook], *(ctypes.c_void_p(a.ctypes.data) for a in (words, affine))
    )
    halves = words.view(np.float16).reshape(-1, 2).astype(np.float64)
    values = affine[0] * halves.sum(axis=1) + affine[1]
    expected = torch.as_tensor(codebook_values(codebook)).double().numpy()
    if codebook is not Codebook.MUL1:
        assert (values.astype(np.float16) == expected).all()
    half_step = np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64) / 2
    assert (np.abs(values - expected) <= half_step + 1e-6).all()


@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize("bits", RATES)
def test_windows_of_every_lane(library: ctypes.CDLL, bits: float, multiply: bool) -> None:
    """Random rings: any bit pattern is a valid tile."""
    random = np.random.default_rng(int(2 * bits))
    tiles = random.integers(0, 1 << 16, (20, words_per_tile(bits)), dtype=np.uint16).view(np.int16)
    states = np.empty((20, 256), np.uint32)
    for tile, out in zip(tiles, states, strict=True):
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (tile, out))
        library.tile_states(int(2 * bits), int(multiply), *pointers)
    assert (states == unpack(torch.from_numpy(tiles)).numpy()).all()
