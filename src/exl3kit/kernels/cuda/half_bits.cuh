// fp16 pairs as the 32-bit words they are.
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"

namespace exl3 {

EXL3_DEVICE uint32_t as_bits(__half2 pair) { return *reinterpret_cast<uint32_t*>(&pair); }
EXL3_DEVICE __half2 as_half2(uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); }

}  // namespace exl3
