// Packed weights as a dense fp16 matrix in the rotated basis, and the rows it is multiplied by: for
// a library's matrix product. Values are the format's own, bit for bit.
#pragma once

#include "hadamard.cuh"
#include "rotate.cuh"
#include "weight_pairs.cuh"

namespace exl3 {

constexpr int kPartK = 64;  // K of a block of threads: lines of 128 bytes in what it writes

// Columns first_column .. first_column + 128 gridDim.x - 1 of the (k, n) matrix, transposed: (that
// many, k). Grid (strips of 128 columns, k / 64); a warp for each of the eight tiles side by side.
template <int kBits2, Codebook kCodebook>
__global__ void __launch_bounds__(256)
reconstruct(const uint4* trellis, __half* panel, int first_column, int k, int n) {
    using Layout = Trellis<kBits2>;
    constexpr int kTilesHigh = kPartK / kTile, kTilesWide = kBlock / kTile;
    constexpr int kTileBytes = 4 * Layout::kDwords, kRowChunks = kTilesWide * kTileBytes / 16;
    __shared__ uint4 words[kTilesHigh * kRowChunks];
    __shared__ __half values[kTilesWide][kTile][kPartK + 8];  // 8: no bank twice
    release_successor();
    wait_for_predecessor();
    const int64_t stride = static_cast<int64_t>(n / kTile) * kTileBytes / 16;
    const int64_t strip = first_column / kBlock + blockIdx.x;
    const uint4* from = trellis + blockIdx.y * kTilesHigh * stride + strip * kRowChunks;
    for (int i = threadIdx.x; i < kTilesHigh * kRowChunks; i += blockDim.x)
        words[i] = from[i / kRowChunks * stride + i % kRowChunks];
    __syncthreads();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const LaneWindows<kBits2> windows(lane);
    const uint32_t tile = shared_address(words) + warp * kTileBytes;
    uint32_t low[Layout::kPairs], high[Layout::kPairs];
#pragma unroll
    for (int pair = 0; pair < Layout::kPairs; ++pair) {
        low[pair] = tile + 4 * windows.low[pair];
        high[pair] = tile + 4 * windows.high[pair];
    }
#pragma unroll
    for (int row = 0; row < kTilesHigh; ++row) {
        uint32_t a[4];
        decode_fragment<kBits2, kCodebook>(a, low, high, row * kTilesWide * kTileBytes, windows);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int column = lane / 4 + i % 2 * 8, at = row * kTile + lane % 4 * 2 + i / 2 * 8;
            *reinterpret_cast<uint32_t*>(&values[warp][column][at]) = a[i];
        }
    }
    __syncwarp();
    __half* to = panel + (static_cast<int64_t>(blockIdx.x) * kBlock + warp * kTile) * k +
                 static_cast<int64_t>(blockIdx.y) * kPartK;
#pragma unroll
    for (int i = lane; i < kTile * kPartK / 8; i += 32) {
        const int column = i / (kPartK / 8), at = i % (kPartK / 8) * 8;
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(column) * k + at) =
            *reinterpret_cast<const uint4*>(&values[warp][column][at]);
    }
}

// H128(x * suh) -> fp16 (rows, k), row-major. Grid (rows, parts of k).
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
rotate_rows(const void* x, const __half* suh, __half* rotated, int k, int dtype) {
    release_successor();
    wait_for_predecessor();
    const int block = blockIdx.y * kWarps + threadIdx.x / 32;
    if (block >= k / kBlock) return;
    const int i = block * 32 + threadIdx.x % 32;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * (k / 4) + i;
    float v[4];
    load_four(v, x, at, dtype);
    scale_four(v, suh, i);
    hadamard(v);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = saturate_half(v[j]);
    store_four(rotated, at, kFloat16, v);
}

}  // namespace exl3
