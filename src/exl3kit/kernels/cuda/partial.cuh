// How a block of the product kernels is cut among its warps, and how it adds their sums.
//
// A block owns a strip of output features and one split of K, which its kSlices warps share. The
// order of all sums follows from K and the number of splits, never from the number of tokens.
#pragma once

#include "hadamard.cuh"
#include "product.cuh"

namespace exl3 {

// kTiles bounds what a lane holds: kTiles * kTokenGroups * 4 sums. kBlocks bounds the registers: 24
// warps a multiprocessor, or 16.
template <int kBits2, int kTokenGroups, int kStripTiles>
struct Shape {
    static constexpr int kGroups = kTokenGroups, kTiles = kStripTiles, kSlices = 8;
    static constexpr int kBlocks = kGroups > 1 || Trellis<kBits2>::kPairs > 1 ? 2 : 3;
    static constexpr int kThreads = 32 * kSlices;
    static constexpr int kWidth = kTile * kTiles;  // features of a block
    using Row = Stage<kBits2, kTiles, kGroups>;
    using Sums = float[kTiles][kGroups][4];  // of a lane
    static constexpr int kRings = Row::kRing * kSlices;
    static constexpr int kSums = 4 * kSlices * 8 * (kWidth + 4);
};

// A warp's share: rows of tiles first .. first + count - 1.
struct Slice {
    int first, count;
};

template <typename Layout>
EXL3_DEVICE Slice slice_of(int k_tiles) {
    const int slices = gridDim.x * Layout::kSlices;
    const int slice = blockIdx.x * Layout::kSlices + threadIdx.x / 32;
    const int first = k_tiles * slice / slices;
    return {first, k_tiles * (slice + 1) / slices - first};
}

// Add the sums of the block's slices and store them times `scale`: row r of the block's tokens goes
// to the kWidth floats at row_at(r), or nowhere where that is null. `shared` is Layout::kSums
// bytes; they may be those of the rings where nothing is on its way any more.
template <typename Layout, typename RowAt>
EXL3_DEVICE void store_partial(const typename Layout::Sums& sum, void* shared, float scale,
                               RowAt row_at) {
    constexpr int kWidth = Layout::kWidth, kSlices = Layout::kSlices;
    auto& sums = *static_cast<float(*)[kSlices][8][kWidth + 4]>(shared);  // 4: no bank twice
    const int warp = threadIdx.x / 32, feature = threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
    for (int g = 0; g < Layout::kGroups; ++g) {
        if (row_at(8 * g) == nullptr) return;  // the same for all threads
        __syncthreads();  // what was stored here before is read
#pragma unroll
        for (int n = 0; n < Layout::kTiles; ++n) {
            const int column = n * kTile + feature;
            float(&to)[8][kWidth + 4] = sums[warp];
            to[token][column] = sum[n][g][0];
            to[token + 1][column] = sum[n][g][1];
            to[token][column + 8] = sum[n][g][2];
            to[token + 1][column + 8] = sum[n][g][3];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 8 * kWidth; i += Layout::kThreads) {
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
