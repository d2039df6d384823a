// Four neighbouring activations at a time, whatever their type; the type is run-time data, so that
// it does not multiply the number of kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common.cuh"

namespace exl3 {

enum DType { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Elements 4 i .. 4 i + 3 of `data`, which is aligned to four elements.
EXL3_DEVICE void load_four(float (&v)[4], const void* data, int64_t i, int dtype) {
    if (dtype == kFloat32) {
        const float4 f = static_cast<const float4*>(data)[i];
        v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
        return;
    }
    const uint2 pairs = static_cast<const uint2*>(data)[i];
    float2 low, high;
    if (dtype == kFloat16) {
        low = __half22float2(*reinterpret_cast<const __half2*>(&pairs.x));
        high = __half22float2(*reinterpret_cast<const __half2*>(&pairs.y));
    } else {
        low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.x));
        high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs.y));
    }
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
}

// The reverse, with one rounding to nearest even.
EXL3_DEVICE void store_four(void* data, int64_t i, int dtype, const float (&v)[4]) {
    if (dtype == kFloat32) {
        static_cast<float4*>(data)[i] = make_float4(v[0], v[1], v[2], v[3]);
        return;
    }
    uint2 pairs;
    if (dtype == kFloat16) {
        *reinterpret_cast<__half2*>(&pairs.x) = __floats2half2_rn(v[0], v[1]);
        *reinterpret_cast<__half2*>(&pairs.y) = __floats2half2_rn(v[2], v[3]);
    } else {
        *reinterpret_cast<__nv_bfloat162*>(&pairs.x) = __floats2bfloat162_rn(v[0], v[1]);
        *reinterpret_cast<__nv_bfloat162*>(&pairs.y) = __floats2bfloat162_rn(v[2], v[3]);
    }
    static_cast<uint2*>(data)[i] = pairs;
}

}  // namespace exl3
