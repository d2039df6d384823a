// fp16 pairs as the 32-bit words they are, and float32 in the range of fp16.
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"

namespace exl3 {

EXL3_DEVICE uint32_t as_bits(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
EXL3_DEVICE __half2 as_half2(uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); }

// Finite values beyond fp16's range become its largest; infinities and NaN stay what they are.
EXL3_DEVICE float saturate_half(float v) {
    return isfinite(v) ? fminf(fmaxf(v, -65504.0f), 65504.0f) : v;
}

}  // namespace exl3
