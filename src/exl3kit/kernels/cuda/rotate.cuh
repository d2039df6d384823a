// Rotations by one warp: what goes into a product and what comes out of it.
#pragma once

#include "elements.cuh"
#include "hadamard.cuh"
#include "half_bits.cuh"
#include "product.cuh"

namespace exl3 {

// v *= scale, rounded: not to be fused with an addition in one kernel and not in another.
EXL3_DEVICE void scale_four(float (&v)[4], const __half* scale, int64_t i) {
    float s[4];
    load_four(s, scale, i, kFloat16);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = __fmul_rn(v[j], s[j]);
}

// H128(v * suh) -> fp16, each twice, in slot order (product.cuh). `i` counts fours: lane l of block
// b has 32 b + l; `row` is the row's start. firsts[b], the first of v * suh in block b, is the sum
// of the transformed block over sqrt(128): what a codebook's shift needs.
EXL3_DEVICE void rotate_in(__half2* row, float* firsts, float (&v)[4], const __half* suh, int i) {
    scale_four(v, suh, i);
    if (i % 32 == 0) firsts[i / 32] = v[0];
    hadamard(v);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        row[i / 4 * kTile + slot_position(4 * (i % 4) + j)] =
            __float2half2_rn(saturate_half(v[j]));
}

// What rotate_out reads: partial sums of one row, `stride` apart, and the row's firsts.
struct Product {
    const float* partial;
    int64_t stride;
    int splits;
    const float* firsts;
    int blocks, codebook;
};

// Product of the codebook's shift with the row: one number, the same for every column.
EXL3_DEVICE float shift_of(const Product& product) {
    if (weight_shift(product.codebook) == 0.0f) return 0.0f;
    float sum = 0;
    for (int b = threadIdx.x % 32; b < product.blocks; b += 32) sum += product.firsts[b];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    return sum * (weight_shift(product.codebook) / kHadamardScale);
}

// v = H128(product) * svh, columns 4 i .. 4 i + 3.
EXL3_DEVICE void rotate_out(float (&v)[4], const Product& product, const __half* svh, int i) {
    const float shift = shift_of(product);
    v[0] = v[1] = v[2] = v[3] = shift;
    const float* part = product.partial + 4 * i;
#pragma unroll 4
    for (int split = 0; split < product.splits; ++split, part += product.stride) {
        const float4 p = *reinterpret_cast<const float4*>(part);
        v[0] += p.x, v[1] += p.y, v[2] += p.z, v[3] += p.w;
    }
    hadamard(v);
    scale_four(v, svh, i);
}

}  // namespace exl3
