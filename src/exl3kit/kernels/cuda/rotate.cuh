// Rotations by one warp: what goes into a product and what comes out of it.
#pragma once

#include "elements.cuh"
#include "hadamard.cuh"
#include "product.cuh"

namespace exl3 {

// Finite values beyond fp16's range become its largest; infinities and NaN stay what they are.
EXL3_DEVICE float saturate_half(float v) {
    return isfinite(v) ? fminf(fmaxf(v, -65504.0f), 65504.0f) : v;
}

EXL3_DEVICE void scale_four(float (&v)[4], const __half* scale, int64_t i) {
    float s[4];
    load_four(s, scale, i, kFloat16);
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] *= s[j];
}

// H128(v * suh) -> fp16, each twice, in slot order (product.cuh). `i` counts fours: lane l of block b
// has 32 b + l; `row` is the row's start.
EXL3_DEVICE void rotate_in(__half2* row, float (&v)[4], const __half* suh, int i) {
    scale_four(v, suh, i);
    hadamard(v);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        row[i / 4 * kTile + slot_position(4 * (i % 4) + j)] =
            __float2half2_rn(saturate_half(v[j]));
}

// v = H128(sum over splits of the partial sums) * svh. `stride` is the distance of splits.
EXL3_DEVICE void rotate_out(float (&v)[4], const float* partial, int64_t stride, int splits,
                            const __half* svh, int i) {
    v[0] = v[1] = v[2] = v[3] = 0;
    for (int split = 0; split < splits; ++split) {
        const float4 part = reinterpret_cast<const float4*>(partial + split * stride)[i];
        v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
    hadamard(v);
    scale_four(v, svh, i);
}

}  // namespace exl3
