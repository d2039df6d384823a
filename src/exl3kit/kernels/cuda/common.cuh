// What every device header starts from: fixed-width integers, which NVRTC has no header for, and the
// qualifiers under which the same text compiles for the host (tests compare it with the oracle).
#pragma once

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#define EXL3_DEVICE __device__ __forceinline__
#define EXL3_HOST_DEVICE __host__ __device__
#define EXL3_DYNAMIC_SHARED(name) extern __shared__ __align__(16) uint8_t name[]
#else
#include <cstdint>
#include <cstring>
#define EXL3_DEVICE inline
#define EXL3_HOST_DEVICE
#define EXL3_DYNAMIC_SHARED(name) alignas(16) static uint8_t name[1 << 18]
#endif
