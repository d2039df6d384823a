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

constexpr int kStages = 3;  // of a warp's ring in shared memory: one in use, two on their way

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

// One row of tiles to `mine`, this lane's 16 bytes of a stage's first 512, from the same place of
// the row in global memory, if the row is there.
template <int kBytes>
EXL3_DEVICE void request_weights(uint32_t mine, const char* from, uint32_t lane, bool is_there) {
#pragma unroll
    for (int at = 0; at < kBytes; at += 512)
        copy_once(mine + at, from + at,
                  is_there && (at + 512 <= kBytes || at + 16 * lane < kBytes));
}

// The activations for one row of tiles.
template <int kGroups>
EXL3_DEVICE void request_x(uint32_t mine, const uint4* const (&x)[kGroups], bool is_there) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) copy_cached(mine + 512 * g, x[g], is_there);
}

// What a warp multiplies: `items` runs of `rows` rows of tiles, all by the same activations.
struct Work {
    const void* tiles;    // first of the neighbouring tiles in the first row of the first item
    int64_t stride;       // bytes from row to row
    int64_t item_stride;  // bytes from item to item
    int rows, items;      // rows may be 0
};

// Where a lane reads next. Items follow one another without a gap, so that the loads for one are on
// their way while the sums of the one before are added up.
template <int kGroups>
struct Cursor {
    const char* from;
    const uint4* x[kGroups];
    int left;  // rows of this item

    template <bool kStreams>
    EXL3_DEVICE void advance(const Work& work) {
        const bool is_last = kStreams && --left == 0;
        from += is_last ? work.item_stride - (work.rows - 1) * work.stride : work.stride;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) x[g] += (is_last ? 1 - work.rows : 1) * (kTile / 4);
        if (is_last) left = work.rows;
    }
};

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

// finish(item, sum) for each item, sum[tile][group] = sums of halves * x.
//   ring   shared memory of this warp, Stage::kRing bytes aligned to 16
//   x      for each group, what this lane takes of its token in the first row of tiles
// The first weights are requested before the predecessor kernel, which makes x, is waited for.
// Without kStreams there is one item.
template <int kBits2, Codebook kCodebook, int kTiles, int kGroups, bool kStreams, typename Finish>
EXL3_DEVICE void multiply(const void* ring, const Work& work, const uint4* const (&x)[kGroups],
                          Finish finish) {
    using Layout = Trellis<kBits2>;
    using Stage = Stage<kBits2, kTiles, kGroups>;
    const uint32_t lane = keep(threadIdx.x & 31), base = shared_address(ring);
    const uint32_t mine = keep(base + 16 * lane);
    LaneWindows<kBits2> windows(lane);
    uint32_t low[Layout::kPairs], high[Layout::kPairs];
#pragma unroll
    for (int pair = 0; pair < Layout::kPairs; ++pair) {
        low[pair] = keep(base + 4 * windows.low[pair]);
        high[pair] = keep(base + 4 * windows.high[pair]);
    }
#pragma unroll
    for (int r = 0; r < Layout::kRegisters; ++r) windows.shift[r] = keep(windows.shift[r]);

    Cursor<kGroups> next{static_cast<const char*>(work.tiles) + 16 * lane, {}, work.rows};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) next.x[g] = x[g];
    int ahead = work.rows * work.items;  // rows to ask for
    Cursor<kGroups> early = next;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        request_weights<Stage::kWeights>(mine + stage * Stage::kBytes, early.from, lane,
                                         stage < ahead);
        early.template advance<kStreams>(work);
    }
    wait_for_predecessor();
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        request_x(mine + stage * Stage::kBytes + Stage::kWeights, next.x, ahead > 0);
        commit_copies();
        next.template advance<kStreams>(work);
        --ahead;
    }
    uint32_t now = 0, freed = (kStages - 1) * Stage::kBytes;
#pragma unroll 1
    for (int item = 0; item < work.items; ++item) {
        float sum[kTiles][kGroups][4] = {};
#pragma unroll 1
        for (int row = 0; row < work.rows; ++row) {
            wait_copies<kStages - 2>();
            __syncwarp();  // all lanes' copies of this row are here, the row before is read
            request_weights<Stage::kWeights>(mine + freed, next.from, lane, ahead > 0);
            request_x(mine + freed + Stage::kWeights, next.x, ahead > 0);
            commit_copies();
            next.template advance<kStreams>(work);
            --ahead;
            uint4 b[kGroups];
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
                b[g] = load_shared_four(mine + now + Stage::kWeights + 512 * g);
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
        finish(item, sum);
    }
}

}  // namespace exl3
