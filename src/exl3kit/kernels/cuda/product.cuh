// The inner loop of every decode kernel: a warp multiplies 16 kTiles output features of packed
// weights by up to 8 kGroups tokens, over a run of rows of tiles.
//
// Decoded weights are the A operand and tokens the n8 side, so one to eight tokens cost one tensor
// core instruction, two with the halves of `weight_halves` in two K slots. Per tile, K = 3, mcg: 2
// loads, 2 funnel shifts, 6 shifts, 8 byte permutes, 16 for the hash, 2 tensor core: 36.
#pragma once

#include <cuda_fp16.h>

#include "codebook.cuh"
#include "common.cuh"
#include "mma.cuh"
#include "ptx.cuh"
#include "trellis.cuh"

namespace exl3 {

constexpr int kStages = 4;  // of a warp's ring in shared memory: one in use, three on their way

// One row of tiles and the activations for it, as a stage of the ring holds them.
template <int kBits2, int kTiles, int kGroups>
struct Stage {
    static constexpr int kTileBytes = 4 * Trellis<kBits2>::kDwords;
    static constexpr int kWeights = kTiles * kTileBytes;
    static constexpr int kBytes = kWeights + 512 * kGroups;  // 16 a lane and group
    static constexpr int kRing = kStages * kBytes;
};

// Activations are kept twice over, as fp16 pairs, in the order in which lanes take them: of 16 K
// slots lane t of a token's four takes 2 t, 2 t + 8, 2 t + 1, 2 t + 9 in one 16-byte load.
EXL3_DEVICE constexpr int slot_position(int k) {
    return (k >> 1 & 3) * 4 + (k & 1) * 2 + (k >> 3 & 1);
}

// One row of tiles to `mine`, this lane's 16 bytes of a stage's first 512, from the same place of the
// row in global memory, if the row is there.
template <int kBytes>
EXL3_DEVICE void request_weights(uint32_t mine, const char* from, uint32_t lane, bool is_there) {
#pragma unroll
    for (int at = 0; at < kBytes; at += 512)
        copy_once(mine + at, from + at, is_there && (at + 512 <= kBytes || at + 16 * lane < kBytes));
}

// The activations for one row of tiles; `x` moves on to the next.
template <int kGroups>
EXL3_DEVICE void request_x(uint32_t mine, const uint4* (&x)[kGroups], bool is_there) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        copy_cached(mine + 512 * g, x[g], is_there);
        x[g] += kTile / 4;
    }
}

// The words of this lane's eight weights of a tile, from its dwords at low and high + offset.
template <int kBits2, Codebook kCodebook>
EXL3_DEVICE void decode_tile(uint32_t (&w)[kWindows],
                             const uint32_t (&low)[Trellis<kBits2>::kPairs],
                             const uint32_t (&high)[Trellis<kBits2>::kPairs], int offset,
                             const LaneWindows<kBits2>& lane) {
    LaneBits<kBits2> bits;
#pragma unroll
    for (int pair = 0; pair < Trellis<kBits2>::kPairs; ++pair) {
        bits.low[pair] = load_shared(low[pair] + offset);
        bits.high[pair] = load_shared(high[pair] + offset);
    }
    // The hashes of 3inst and mcg take 8 slots of the ALU pipe a tile, that of mul1 takes none.
    lane_states<kBits2, kCodebook != kMul1>(w, bits, lane);
#pragma unroll
    for (int j = 0; j < kWindows; ++j) w[j] = weight_halves<kCodebook>(w[j]);
}

// sum += residue * x, summed over the slots: the same for every feature.
template <Codebook kCodebook>
EXL3_DEVICE void add_residue(float (&sum)[4], const uint4& b) {
    const uint32_t a = __half_as_ushort(__float2half_rn(weight_residue<kCodebook>()));
    multiply_add(sum, a, a, a, a, b.x, b.y);
    multiply_add(sum, a, a, a, a, b.z, b.w);
}

// sum[tile][group] += weights * x, in units of the codebook's scale.
//   ring      shared memory of this warp, Stage::kRing bytes aligned to 16
//   tiles     first of kTiles neighbouring tiles in the first row; the next row is `stride` bytes on
//   x         for each group, what this lane takes of its token in the first row of tiles
//   rows      rows of tiles, 16 K slots each; may be 0
// The first weights are requested before the predecessor kernel, which makes x, is waited for.
template <int kBits2, Codebook kCodebook, int kTiles, int kGroups>
EXL3_DEVICE void multiply_rows(float (&sum)[kTiles][kGroups][4], const void* ring,
                               const void* tiles, int64_t stride, const uint4* (&x)[kGroups],
                               int rows) {
    using Layout = Trellis<kBits2>;
    using Stage = Stage<kBits2, kTiles, kGroups>;
    constexpr bool has_residue = weight_residue<kCodebook>() != 0;
    const uint32_t lane = keep(threadIdx.x & 31), base = shared_address(ring);
    const uint32_t mine = keep(base + 16 * lane);
    const char* from = static_cast<const char*>(tiles) + 16 * lane;
    LaneWindows<kBits2> windows(lane);
    uint32_t low[Layout::kPairs], high[Layout::kPairs];
#pragma unroll
    for (int pair = 0; pair < Layout::kPairs; ++pair) {
        low[pair] = keep(base + 4 * windows.low[pair]);
        high[pair] = keep(base + 4 * windows.high[pair]);
    }
#pragma unroll
    for (int r = 0; r < Layout::kRegisters; ++r) windows.shift[r] = keep(windows.shift[r]);

#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage, from += stride)
        request_weights<Stage::kWeights>(mine + stage * Stage::kBytes, from, lane, stage < rows);
    wait_for_predecessor();
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        request_x(mine + stage * Stage::kBytes + Stage::kWeights, x, stage < rows);
        commit_copies();
    }
    float rest[kGroups][4] = {};
    uint32_t now = 0, freed = (kStages - 1) * Stage::kBytes;
#pragma unroll 1
    for (; rows > 0; --rows) {
        wait_copies<kStages - 2>();
        __syncwarp();  // all lanes' copies of this row are here, the row before is read
        request_weights<Stage::kWeights>(mine + freed, from, lane, rows >= kStages);
        from += stride;
        request_x(mine + freed + Stage::kWeights, x, rows >= kStages);
        commit_copies();
        uint4 b[kGroups];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            b[g] = load_shared_four(mine + now + Stage::kWeights + 512 * g);
            if constexpr (has_residue) add_residue<kCodebook>(rest[g], b[g]);
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            uint32_t w[kWindows];
            decode_tile<kBits2, kCodebook>(w, low, high, now + n * Stage::kTileBytes, windows);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
                multiply_add(sum[n][g], w[0], w[4], w[2], w[6], b[g].x, b[g].y);
                multiply_add(sum[n][g], w[1], w[5], w[3], w[7], b[g].z, b[g].w);
            }
        }
        freed = now;
        now = now == (kStages - 1) * Stage::kBytes ? 0 : now + Stage::kBytes;
    }
    if constexpr (has_residue)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[n][g][i] += rest[g][i];
}

}  // namespace exl3
