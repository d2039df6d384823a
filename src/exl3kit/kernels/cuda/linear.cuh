// One EXL3 linear for a few tokens: y = H128(H128(x * suh) What) * svh + bias.
//
// Three kernels: rotate (x -> fp16 in slot order), product (partial sums in float32), finish. K is
// cut into gridDim.x splits of kSlices warps each, by the shape alone, and all sums have a fixed
// order: a row's result does not depend on the rows beside it. Nothing is shared between launches
// but the workspace, so streams with a workspace each do not meet.
#pragma once

#include "partial.cuh"
#include "product.cuh"
#include "rotate.cuh"

namespace exl3 {

constexpr int kWarp = 32;

// One warp for each row and block of 128 of x (rows, k) of dtype; firsts (rows, k / 128).
template <int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp)
linear_rotate(const void* x, const __half* suh, __half2* rotated, float* firsts, int rows, int k,
              int dtype) {
    release_successor();
    wait_for_predecessor();
    const int block = blockIdx.y * kWarps + threadIdx.x / kWarp, row = blockIdx.x;
    if (block >= k / kBlock) return;
    const int i = block * kWarp + threadIdx.x % kWarp;
    float v[4];
    load_four(v, x, static_cast<int64_t>(row) * (k / 4) + i, dtype);
    const int64_t start = static_cast<int64_t>(row) * k;
    rotate_in(rotated + start, firsts + start / kBlock, v, suh, i);
}

// Grid (splits, strips of 16 kTiles columns, chunks of 8 kGroups rows) -> partial (splits, rows,
// n).
template <int kBits2, Codebook kCodebook, int kGroups, int kTiles>
__global__ void __launch_bounds__(Shape<kBits2, kGroups, kTiles>::kThreads,
                                  Shape<kBits2, kGroups, kTiles>::kBlocks)
linear_product(const uint32_t* trellis, const uint4* rotated, float* partial, int rows, int k,
               int n) {
    using Layout = Shape<kBits2, kGroups, kTiles>;
    release_successor();
    const Slice slice = slice_of<Layout>(k / kTile, blockIdx.x, gridDim.x);
    const int row0 = blockIdx.z * 8 * kGroups, lane = threadIdx.x % kWarp;
    const int64_t n_tiles = n / kTile;
    const int64_t tile = slice.first * n_tiles + blockIdx.y * kTiles;
    const uint4* x[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const int row = min(row0 + 8 * g + lane / 4, rows - 1);  // beyond: any row, not stored
        x[g] = rotated + (static_cast<int64_t>(row) * k + slice.first * kTile) / 4 + lane % 4;
    }
    extern __shared__ __align__(16) char shared[];  // first kRings, then kSums bytes of Layout
    const Work work{trellis + tile * Trellis<kBits2>::kDwords, n_tiles * Layout::Row::kTileBytes, 0,
                    slice.count, 1};
    const int64_t split = blockIdx.x;
    float* out = partial + split * rows * n + blockIdx.y * Layout::kWidth;
    multiply<kBits2, kCodebook, kTiles, kGroups, false>(
        shared + threadIdx.x / kWarp * Layout::Row::kRing, work, x,
        [&](int, const typename Layout::Sums& sum) {
            store_partial<Layout>(
                sum, shared, weight_scale(kCodebook), [&](int row) {
                    return row0 + row < rows ? out + static_cast<int64_t>(row0 + row) * n : nullptr;
                });
        });
}

// One warp for each row and strip: y (rows, n) of dtype.
template <int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp)
linear_finish(const float* partial, const float* firsts, const __half* svh, const void* bias,
              void* y, int rows, int k, int n, int splits, int codebook, int dtype,
              int bias_dtype) {
    release_successor();
    wait_for_predecessor();
    const int strip = blockIdx.y * kWarps + threadIdx.x / kWarp, row = blockIdx.x;
    if (strip >= n / kBlock) return;
    const int i = strip * kWarp + threadIdx.x % kWarp;
    const int64_t start = static_cast<int64_t>(row) * n;
    float v[4];
    const int64_t stride = static_cast<int64_t>(rows) * n;
    const int blocks = k / kBlock;
    const Product product{partial + start, stride, splits, firsts + row * blocks, blocks, codebook};
    rotate_out(v, product, svh, i);
    if (bias != nullptr) {
        float b[4];
        load_four(b, bias, i, bias_dtype);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] += b[j];
    }
    store_four(y, start / 4 + i, dtype, v);
}

}  // namespace exl3
