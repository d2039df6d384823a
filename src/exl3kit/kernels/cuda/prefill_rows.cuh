// What lies between the products of many tokens: rotations, the activation, the weighted sum.
//
// Weights are decoded to the format's own values, so no shift of a codebook is left to add. Products
// come and go as fp16; everything in between is float32.
#pragma once

#include "elements.cuh"
#include "hadamard.cuh"
#include "hadamard_mma.cuh"
#include "half_bits.cuh"
#include "prefill_layout.cuh"
#include "ptx.cuh"
#include "rotate.cuh"

namespace exl3 {

// H128(v * suh) -> fp16, columns 4 i .. 4 i + 3 of a row of panels.
EXL3_DEVICE void rotate_to_panel(__half* panels, int row, int capacity, float (&v)[4],
                                 const __half* suh, int i) {
    scale_four(v, suh, i);
    hadamard(v);
    uint2 pairs;
    pairs.x = as_bits(__floats2half2_rn(saturate_half(v[0]), saturate_half(v[1])));
    pairs.y = as_bits(__floats2half2_rn(saturate_half(v[2]), saturate_half(v[3])));
    *reinterpret_cast<uint2*>(panels + panel_offset(row, 4 * i, capacity)) = pairs;
}

// v = H128(row) * svh, columns 4 i .. 4 i + 3 of a product.
EXL3_DEVICE void rotate_from_row(float (&v)[4], const __half* row, const __half* svh, int i) {
    load_four(v, row, i, kFloat16);
    hadamard(v);
    scale_four(v, svh, i);
}

// Input of each route, for one side: suh (vectors, hidden), which serve the experts in turn. A warp
// takes sixteen routes and 128 columns. Grid (routes / 16, parts of hidden).
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
prefill_rotate(const void* x, const __half* suh, const int* expert, const int* row, __half* panels,
               int routes, int top_k, int hidden, int capacity, int vectors, int dtype) {
    release_successor();
    wait_for_predecessor();
    const int block = blockIdx.y * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (block >= hidden / kBlock) return;
    const int i = block * 32 + lane % 4;
    int to[2] = {-1, -1};
    Rows v;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int route = blockIdx.x * 16 + side * 8 + lane / 4;
        const int own = route < routes ? expert[route] : -1;
        if (own >= 0) to[side] = row[route];
        const int64_t from = static_cast<int64_t>(route / top_k) * (hidden / 4) + i;
        const __half* scale = suh + static_cast<int64_t>(own % vectors) * hidden;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float four[4] = {};
            if (own >= 0) {
                load_four(four, x, from + 4 * j, dtype);
                scale_four(four, scale, i + 4 * j);
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) v[j][4 * side + n] = four[n];
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) saturate_eight(v[j]);
    hadamard_rows<false>(v, Signs());
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int n = 0; n < 8; ++n) v[j][n] *= kHadamardScale;
        saturate_eight(v[j]);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (to[side] < 0) continue;
            uint2 pairs;
            pairs.x = as_bits(__floats2half2_rn(v[j][4 * side], v[j][4 * side + 1]));
            pairs.y = as_bits(__floats2half2_rn(v[j][4 * side + 2], v[j][4 * side + 3]));
            *reinterpret_cast<uint2*>(
                panels + panel_offset(to[side], 4 * (i + 4 * j), capacity)) = pairs;
        }
    }
}

// Input of down: H128(silu(gate) * up * suh), gate and up being H128(product) * svh with svh
// (2, experts, inner). Grid (routes, parts of inner).
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
prefill_activate(const __half* gate, const __half* up, const int* expert, const int* row,
                 const __half* svh, const __half* suh, __half* panels, int inner, int experts,
                 int capacity) {
    release_successor();
    wait_for_predecessor();
    const int block = blockIdx.y * kWarps + threadIdx.x / 32, route = blockIdx.x;
    const int64_t own = expert[route];
    if (block >= inner / kBlock || own < 0) return;
    const int i = block * 32 + threadIdx.x % 32;
    const int64_t start = static_cast<int64_t>(row[route]) * inner;
    float v[4], u[4];
    rotate_from_row(v, gate + start, svh + own * inner, i);
    rotate_from_row(u, up + start, svh + (experts + own) * inner, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __fdividef(v[j], 1.0f + __expf(-v[j])) * u[j];
    rotate_to_panel(panels, row[route], capacity, v, suh + own * inner, i);
}

// y = sum over slots, in order, of weight * H128(down) * svh (vectors, hidden). A warp takes
// sixteen tokens and 128 columns. Grid (tokens / 16, parts of hidden).
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
prefill_combine(const __half* down, const int* expert, const int* row, const float* weights,
                const __half* svh, void* y, int tokens, int top_k, int hidden, int vectors,
                int dtype) {
    release_successor();
    wait_for_predecessor();
    const int block = blockIdx.y * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (block >= hidden / kBlock) return;
    const int i = block * 32 + lane % 4, first = blockIdx.x * 16 + lane / 4;
    const Signs signs;
    Rows total = {};
    for (int slot = 0; slot < top_k; ++slot) {
        Rows v;
        float weight[2];
        const __half* scale[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int token = first + 8 * side;
            const int64_t route = static_cast<int64_t>(token) * top_k + slot;
            const int own = token < tokens ? expert[route] : -1;
            weight[side] = own < 0 ? 0.0f : weights[route];
            scale[side] = own < 0 ? nullptr : svh + static_cast<int64_t>(own % vectors) * hidden;
            const __half* from = own < 0 ? nullptr : down + static_cast<int64_t>(row[route]) * hidden;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float four[4] = {};
                if (own >= 0) load_four(four, from, i + 4 * j, kFloat16);
#pragma unroll
                for (int n = 0; n < 4; ++n) v[j][4 * side + n] = four[n];
            }
        }
        hadamard_rows<true>(v, signs);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            if (scale[side] == nullptr) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float four[4];
                load_four(four, scale[side], i + 4 * j, kFloat16);
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    total[j][4 * side + n] =
                        fmaf(weight[side], __fmul_rn(v[j][4 * side + n] * kHadamardScale, four[n]),
                             total[j][4 * side + n]);
            }
        }
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int token = first + 8 * side;
        if (token >= tokens) continue;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float four[4] = {total[j][4 * side], total[j][4 * side + 1],
                                   total[j][4 * side + 2], total[j][4 * side + 3]};
            store_four(y, static_cast<int64_t>(token) * (hidden / 4) + i + 4 * j, dtype, four);
        }
    }
}

// One linear as a product of `splits` experts: each takes a part of K, for which it has rows of its
// own, split * split_rows + row. Grid (rows, parts of k); the first block writes the table.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
prefill_rotate_linear(const void* x, const __half* suh, __half* panels, RowBlock* blocks,
                      int* num_blocks, int rows, int k, int splits, int split_rows, int block_rows,
                      int dtype) {
    release_successor();
    wait_for_predecessor();
    const int parts = (rows + block_rows - 1) / block_rows;
    const int part_rows = ((rows + parts - 1) / parts + 7) / 8 * 8;
    if (blockIdx.x == 0 && blockIdx.y == 0) {
        for (int i = threadIdx.x; i < splits * parts; i += blockDim.x) {
            const int split = i / parts, first = (i - split * parts) * part_rows;
            blocks[i] = RowBlock{split, split * split_rows + first, min(part_rows, rows - first), 0};
        }
        if (threadIdx.x == 0) *num_blocks = splits * parts;
    }
    const int block = blockIdx.y * kWarps + threadIdx.x / 32, row = blockIdx.x;
    if (block >= k / kBlock) return;
    const int lane = threadIdx.x % 32, split_blocks = k / kBlock / splits;
    const int split = block / split_blocks;
    float v[4];
    load_four(v, x, static_cast<int64_t>(row) * (k / 4) + block * 32 + lane, dtype);
    rotate_to_panel(panels, split * split_rows + row, splits * split_rows, v,
                    suh + static_cast<int64_t>(split) * split_blocks * kBlock,
                    (block - split * split_blocks) * 32 + lane);
}

// y = H128(sum over splits of the product) * svh + bias. `product` (splits, split_rows, n) of
// product_dtype; y has rows of y_stride. Grid (rows, parts of n).
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
prefill_finish_linear(const void* product, const __half* svh, const void* bias, void* y, int n,
                      int splits, int split_rows, int y_stride, int product_dtype, int dtype,
                      int bias_dtype) {
    release_successor();
    wait_for_predecessor();
    const int block = blockIdx.y * kWarps + threadIdx.x / 32, row = blockIdx.x;
    if (block >= n / kBlock) return;
    const int i = block * 32 + threadIdx.x % 32;
    float v[4] = {};
    for (int split = 0; split < splits; ++split) {
        float part[4];
        const int64_t line = static_cast<int64_t>(split) * split_rows + row;
        load_four(part, product, line * (n / 4) + i, product_dtype);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] += part[j];
    }
    hadamard(v);
    scale_four(v, svh, i);
    if (bias != nullptr) {
        float b[4];
        load_four(b, bias, i, bias_dtype);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] += b[j];
    }
    store_four(y, static_cast<int64_t>(row) * (y_stride / 4) + i, dtype, v);
}

}  // namespace exl3
