// H128 of one aligned block of 128 values by one warp: lane l holds values 4 l .. 4 l + 3.
#pragma once

#include "common.cuh"

namespace exl3 {

constexpr int kBlock = 128;  // Hadamard block
constexpr float kHadamardScale = 0.08838834764831845f;  // 1 / sqrt(128)

// Natural order, scale 1/sqrt(128), float32. All 32 lanes take part.
EXL3_DEVICE void hadamard(float (&v)[4]) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[i] = fmaf(v[i], sign, __shfl_xor_sync(0xFFFFFFFFu, v[i], step));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= kHadamardScale;
}

}  // namespace exl3
