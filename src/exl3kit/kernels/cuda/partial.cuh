// How a block of the product kernels is cut among its warps, and how it adds their sums.
//
// A block owns kStrips strips of output features and one split of K, which the kSlices warps of a strip
// share. The order of all sums follows from K and the number of splits, never from the number of
// tokens.
#pragma once

#include "hadamard.cuh"
#include "named_barrier.cuh"
#include "product.cuh"

namespace exl3 {

// kTiles bounds what a lane holds: kTiles * kTokenGroups * 4 sums. kBlocks bounds the registers: 24
// warps a multiprocessor, or 16.
template <int kBits2, int kTokenGroups, int kStripTiles, int kStripSlices = 8>
struct Shape {
    static constexpr int kGroups = kTokenGroups, kTiles = kStripTiles, kSlices = kStripSlices;
    static constexpr int kBlocks = kGroups > 1 || Trellis<kBits2>::kPairs > 1 ? 2 : 3;
    static constexpr int kWarps = 8, kThreads = 32 * kWarps, kStrips = kWarps / kSlices;
    static constexpr int kWidth = kTile * kTiles;  // features of a strip
    using Row = Stage<kBits2, kTiles, kGroups>;
    using Sums = float[kTiles][kGroups][4];  // of a lane
    static constexpr int kRings = Row::kRing * kWarps;
    static constexpr int kSums = 4 * kWarps * 8 * (kWidth + 4);  // of all strips
};

// A warp's share: rows of tiles first .. first + count - 1.
struct Slice {
    int first, count;
};

template <typename Layout>
EXL3_DEVICE Slice slice_of(int k_tiles, int split, int splits) {
    const int slices = splits * Layout::kSlices;
    const int slice = split * Layout::kSlices + threadIdx.x / 32 % Layout::kSlices;
    const int first = k_tiles * slice / slices;
    return {first, k_tiles * (slice + 1) / slices - first};
}

// Add the sums of a strip's slices and store them times `scale`: row r of the strip's tokens goes to
// the kWidth floats at row_at(r), or nowhere where that is null. All lanes of a warp ask for the
// same row. `shared` is Layout::kSums bytes; they may be those of the rings where nothing is on its
// way any more.
template <typename Layout, typename RowAt>
EXL3_DEVICE void store_partial(const typename Layout::Sums& sum, void* shared, float scale,
                               RowAt row_at) {
    constexpr int kWidth = Layout::kWidth, kSlices = Layout::kSlices, kThreads = 32 * kSlices;
    const int warp = threadIdx.x / 32, feature = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
    const int strip = warp / kSlices;
    auto* sums = static_cast<float(*)[8][kWidth + 4]>(shared) + strip * kSlices;  // 4: no bank twice
#pragma unroll
    for (int g = 0; g < Layout::kGroups; ++g) {
        if (row_at(8 * g) == nullptr) return;  // the same for all threads
        barrier_sync(1 + strip, kThreads);     // what was stored here before is read
        float(&to)[8][kWidth + 4] = sums[warp % kSlices];
#pragma unroll
        for (int n = 0; n < Layout::kTiles; ++n) {
            const int column = n * kTile + feature;
            to[token][column] = sum[n][g][0];
            to[token + 1][column] = sum[n][g][1];
            to[token][column + 8] = sum[n][g][2];
            to[token + 1][column + 8] = sum[n][g][3];
        }
        barrier_sync(1 + strip, kThreads);
        for (int i = threadIdx.x % kThreads; i < 8 * kWidth; i += kThreads) {
            const int row = i / kWidth, column = i % kWidth;
            float* to = row_at(8 * g + row);
            if (to == nullptr) break;  // rows after it are absent too
            float total = sums[0][row][column];
#pragma unroll
            for (int s = 1; s < kSlices; ++s) total += sums[s][row][column];
            to[column] = total * scale;
        }
    }
}

}  // namespace exl3
