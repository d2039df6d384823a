// Between a block of 16 matrix rows in float64 and tiles in stream order; one block of 256 threads a tile.
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"

namespace exl3 {

// Where stream position t of tile `tile` lies in rows of n columns: format/tiles.py. Tiles count on
// over the matrices of a batch, n / 16 in each.
EXL3_DEVICE int64_t place(int tile, int t, int n, int64_t matrix_stride) {
    const int lane = t >> 3, j = t & 7, per_matrix = n / 16;
    const int row = 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1), column = (lane >> 2) + 8 * (j >> 2);
    return tile / per_matrix * matrix_stride + int64_t(row) * n + tile % per_matrix * 16 + column;
}

// target: float64 [matrix][16][n]. tiles: float32 [matrix][n / 16][256].
__global__ void rows_to_tiles(const double* __restrict__ target, float* __restrict__ tiles, int n) {
    const int tile = blockIdx.x, t = threadIdx.x;
    tiles[int64_t(tile) * 256 + t] = float(target[place(tile, t, n, int64_t(16) * n)]);
}

// errors = inner - values[states] on the 16 rows at which both pointers start.
__global__ void take_errors(const int32_t* __restrict__ states, const __half* __restrict__ values,
                            const double* __restrict__ inner, double* __restrict__ errors, int n,
                            int64_t matrix_stride) {
    const int tile = blockIdx.x, t = threadIdx.x;
    const int64_t at = place(tile, t, n, matrix_stride);
    const __half value = values[states[int64_t(tile) * 256 + t]];
    errors[at] = inner[at] - double(__half2float(value));
}

}  // namespace exl3
