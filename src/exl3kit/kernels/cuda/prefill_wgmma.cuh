// The product of many tokens on capability 9.0a: each block of rows by its expert's whole matrix.
//
// A block of threads walks over items, (block of rows) x (strip of 256 features), strips of a block
// of rows next to each other in time so that the rows stay in the second-level cache. Four warpgroups
// hold 64 features each: they decode the next two tiles while the tensor cores multiply the last two.
// Rows and trellis words arrive by bulk copies in a ring of stages of 64 K; the last warp to leave a
// stage asks for the one that takes its place. A row's sums run over K in order, whatever its block.
#pragma once

#include <cuda_fp16.h>

#include "async_copy.cuh"
#include "half_bits.cuh"
#include "named_barrier.cuh"
#include "prefill_layout.cuh"
#include "weight_pairs.cuh"
#include "wgmma.cuh"

namespace exl3 {

template <int kBits2>
struct WgmmaShape {
    static constexpr int kWarpgroups = 4, kWarps = 4 * kWarpgroups, kThreads = 32 * kWarps;
    static constexpr int kFeatures = 64 * kWarpgroups;  // of a strip
    static constexpr int kTileBytes = 4 * Trellis<kBits2>::kDwords;
    static constexpr int kTilesHigh = kPanel / kTile, kTilesWide = kFeatures / kTile;
    static constexpr int kRowBytes = 2 * kPanel, kRows = kMaxBlockRows * kRowBytes;
    static constexpr int kStageBytes =
        (kRows + kTilesHigh * kTilesWide * kTileBytes + 1023) / 1024 * 1024;
    static constexpr int kStoreRows = 32, kStore = kStoreRows * kRowBytes;  // of a warpgroup
    static constexpr int kMost = (227 * 1024 - 1024 - kWarpgroups * kStore - 256) / kStageBytes;
    static constexpr int kStages = kMost < 8 ? kMost : 8;
    static constexpr int kStores = kStages * kStageBytes, kBarriers = kStores + kWarpgroups * kStore;
    static constexpr int kCounters = kBarriers + 8 * kStages;
    static constexpr int kShared = kCounters + 4 * kStages + 1024;  // the ring is aligned to 1024
};

// What a launch multiplies; prefill_layout.cuh.
struct WgmmaWork {
    const uint8_t* trellis;
    const RowBlock* blocks;
    const uint8_t* x;
    __half* y;
    int items, rows_capacity, k, n;

    EXL3_DEVICE int strips() const { return (n + 255) / 256; }
    EXL3_DEVICE int steps() const { return k / kPanel; }
};

struct WgmmaItem {
    RowBlock block;
    int feature;  // first of the strip

    EXL3_DEVICE WgmmaItem(const WgmmaWork& work, int number) {
        block = work.blocks[number / work.strips()];
        feature = number % work.strips() * 256;
    }
};

// Ask for stage `number` of this block of threads, counted over its items.
template <int kBits2>
EXL3_DEVICE void request_stage(const WgmmaWork& work, uint32_t ring, uint32_t barriers, int number) {
    using Shape = WgmmaShape<kBits2>;
    const int turn = number / work.steps(), step = number - turn * work.steps();
    const int at = blockIdx.x + turn * gridDim.x;
    if (at >= work.items) return;
    const WgmmaItem item(work, at);
    const int slot = number % Shape::kStages, n_tiles = work.n / kTile, tile = item.feature / kTile;
    const int wide = min(Shape::kTilesWide, n_tiles - tile) * Shape::kTileBytes;
    const int rows = (item.block.rows + 7) / 8 * 8 * Shape::kRowBytes;
    const uint32_t target = ring + slot * Shape::kStageBytes, barrier = barriers + 8 * slot;
    expect_bytes(barrier, rows + Shape::kTilesHigh * wide);
    const int64_t line = static_cast<int64_t>(step) * work.rows_capacity + item.block.first;
    copy_bulk(target, work.x + line * Shape::kRowBytes, rows, barrier);
    const int64_t high = static_cast<int64_t>(item.block.expert) * (work.k / kTile) +
                         step * Shape::kTilesHigh;  // first row of tiles
    const uint8_t* from = work.trellis + (high * n_tiles + tile) * Shape::kTileBytes;
#pragma unroll
    for (int row = 0; row < Shape::kTilesHigh; ++row)
        copy_bulk(target + Shape::kRows + row * Shape::kTilesWide * Shape::kTileBytes,
                  from + static_cast<int64_t>(row) * n_tiles * Shape::kTileBytes, wide, barrier);
}

// A warp's place in the ring, and how it decodes.
template <int kBits2, Codebook kCodebook>
struct WgmmaWarp {
    using Shape = WgmmaShape<kBits2>;
    using Layout = Trellis<kBits2>;
    uint32_t low[Layout::kPairs], high[Layout::kPairs];
    LaneWindows<kBits2> windows;
    uint32_t ring, barriers, counters;
    int number = 0, slot = 0, left;  // stage, where it is, stages from it to the end
    uint32_t parity = 0;

    EXL3_DEVICE WgmmaWarp(uint32_t shared, int stages)
        : windows(threadIdx.x % 32), ring(shared), barriers(shared + Shape::kBarriers),
          counters(shared + Shape::kCounters), left(stages) {
        const uint32_t tile = shared + Shape::kRows + threadIdx.x / 32 * Shape::kTileBytes;
#pragma unroll
        for (int pair = 0; pair < Layout::kPairs; ++pair) {
            low[pair] = keep(tile + 4 * windows.low[pair]);
            high[pair] = keep(tile + 4 * windows.high[pair]);
        }
#pragma unroll
        for (int r = 0; r < Layout::kRegisters; ++r) windows.shift[r] = keep(windows.shift[r]);
    }

    EXL3_DEVICE void wait() const { wait_barrier(barriers + 8 * slot, parity); }

    // Tiles 2 kHalf and 2 kHalf + 1 of the four in the stage.
    template <int kHalf>
    EXL3_DEVICE void decode(uint32_t (&a)[2][4]) const {
        constexpr int kRow = Shape::kTilesWide * Shape::kTileBytes;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            decode_fragment<kBits2, kCodebook>(
                a[i], low, high, slot * Shape::kStageBytes + (2 * kHalf + i) * kRow, windows);
    }

    EXL3_DEVICE void advance() {
        ++number, --left;
        if (++slot == Shape::kStages) slot = 0, parity ^= 1;
    }

    // This warp has read all of the stage before this one.
    EXL3_DEVICE void release_last(const WgmmaWork& work) const {
        if (threadIdx.x % 32 == 0 && number > 0) {
            const int last = slot == 0 ? Shape::kStages - 1 : slot - 1;
            if (count_arrival(counters + 4 * last) % Shape::kWarps == Shape::kWarps - 1)
                request_stage<kBits2>(work, ring, barriers, number - 1 + Shape::kStages);
        }
        __syncwarp();
    }
};

// Rows of `sum` to y as fp16, through the warpgroup's part of shared memory.
template <int kTokens>
EXL3_DEVICE void store_rows(const float (&sum)[kTokens / 2], uint32_t shared, __half* y,
                            int64_t stride, int rows, bool is_inside) {
    const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    const int barrier = 1 + threadIdx.x / 128;
    const int token = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    const uint32_t mine = shared + token * 128 + ((chunk ^ token % 8) << 4);
#pragma unroll
    for (int part = 0; part < kTokens / 32; ++part) {
        if (32 * part >= rows) break;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            uint32_t v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 16 * part + 8 * pair + 2 * i;
                v[i] = as_bits(__floats2half2_rn(saturate_half(sum[at]), saturate_half(sum[at + 1])));
            }
            store_transposed(mine + pair * 16 * 128, v);
        }
        barrier_sync(barrier, 128);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = i * 16 + thread / 8, column = thread % 8;
            const uint4 v = load_shared_four(shared + row * 128 + ((column ^ row % 8) << 4));
            if (is_inside && 32 * part + row < rows)
                *reinterpret_cast<uint4*>(y + (32 * part + row) * stride + 8 * column) = v;
        }
        barrier_sync(barrier, 128);
    }
}

// One item with kTokens >= its rows. `ahead` holds the first two tiles, then those of the next item.
template <int kTokens, int kBits2, Codebook kCodebook>
EXL3_DEVICE void multiply_item(const WgmmaWork& work, int number,
                               WgmmaWarp<kBits2, kCodebook>& warp, uint32_t (&ahead)[2][4]) {
    using Shape = WgmmaShape<kBits2>;
    float sum[kTokens / 2] = {};
    uint32_t behind[2][4];
#pragma unroll 1
    for (int step = work.steps(); step > 0; --step) {
        const uint64_t x = panel_descriptor(warp.ring + warp.slot * Shape::kStageBytes);
        begin_products();
        multiply_group<kTokens>(sum, ahead[0], x);
        multiply_group<kTokens>(sum, ahead[1], x + 2);
        commit_products();
        warp.release_last(work);
        warp.template decode<1>(behind);
        wait_products();
        begin_products();
        multiply_group<kTokens>(sum, behind[0], x + 4);
        multiply_group<kTokens>(sum, behind[1], x + 6);
        commit_products();
        warp.advance();
        if (warp.left > 0) {
            warp.wait();
            warp.template decode<0>(ahead);
        }
        wait_products();
    }
    const WgmmaItem item(work, number);
    const int group = threadIdx.x / 128, feature = item.feature + 64 * group;
    const int64_t stride = work.n;
    store_rows<kTokens>(sum, warp.ring + Shape::kStores + group * Shape::kStore,
                        work.y + item.block.first * stride + feature, stride, item.block.rows,
                        feature < work.n);
}

template <int kBits2, Codebook kCodebook>
__global__ void __launch_bounds__(WgmmaShape<kBits2>::kThreads, 1)
prefill_wgmma(const uint8_t* trellis, const RowBlock* blocks, const int* count, const uint8_t* x,
              __half* y, int rows_capacity, int k, int n) {
    using Shape = WgmmaShape<kBits2>;
    EXL3_DYNAMIC_SHARED(raw);
    const uint32_t shared = (shared_address(raw) + 1023) & ~1023u;
    const uint32_t barriers = shared + Shape::kBarriers;
    if (threadIdx.x < Shape::kStages) {
        init_barrier(barriers + 8 * threadIdx.x, 1);
        store_shared(shared + Shape::kCounters + 4 * threadIdx.x, 0);
        publish_barriers();
    }
    release_successor();
    wait_for_predecessor();
    WgmmaWork work{trellis, blocks, x, y, 0, rows_capacity, k, n};
    work.items = *count * work.strips();
    const int turns = (work.items - static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) - 1) /
                      static_cast<int>(gridDim.x);
    if (turns <= 0) return;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int number = 0; number < Shape::kStages; ++number)
            request_stage<kBits2>(work, shared, barriers, number);
    __syncwarp();
    WgmmaWarp<kBits2, kCodebook> warp(shared, turns * work.steps());
    uint32_t ahead[2][4];
    warp.wait();
    warp.template decode<0>(ahead);
    for (int number = blockIdx.x; number < work.items; number += gridDim.x) {
        const int rows = work.blocks[number / work.strips()].rows;
        if (rows <= 32)
            multiply_item<32>(work, number, warp, ahead);
        else if (rows <= 64)
            multiply_item<64>(work, number, warp, ahead);
        else if (rows <= 96)
            multiply_item<96>(work, number, warp, ahead);
        else
            multiply_item<128>(work, number, warp, ahead);
    }
}

}  // namespace exl3
