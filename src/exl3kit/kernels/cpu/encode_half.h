// Scalar fp16 arithmetic on floats, exact on any machine. Internal linkage throughout: these
// functions are compiled with several instruction sets, and the linker must never merge two of
// them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace exl3 {
namespace {

[[maybe_unused]] inline float float_of_bits(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

[[maybe_unused]] inline uint32_t bits_of_float(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}

[[maybe_unused]] inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    if (magnitude >= 0x7C00) return float_of_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    if (magnitude >= 0x0400) return float_of_bits(sign | ((magnitude << 13) + 0x38000000));
    const float tiny = float(magnitude) * 0x1p-24f;
    return sign ? -tiny : tiny;
}

// The fp16 value nearest to f (ties to even), as a float.
[[maybe_unused]] inline float round_half(float f) {
    const uint32_t u = bits_of_float(f);
    if (std::fabs(f) < 0x1p-14f) return std::copysign((std::fabs(f) + 0.5f) - 0.5f, f);
    if (std::fabs(f) >= 65520.0f) return std::copysign(INFINITY, f);
    return float_of_bits((u + 0x0FFF + ((u >> 13) & 1)) & ~0x1FFFu);
}

[[maybe_unused]] inline uint16_t float_to_half(float f) {
    const float r = round_half(f);
    const uint32_t u = bits_of_float(r), sign = u >> 16 & 0x8000;
    if (std::fabs(r) < 0x1p-14f) return uint16_t(sign | uint32_t(std::fabs(r) * 0x1p24f));
    if (std::isinf(r)) return uint16_t(sign | 0x7C00);
    return uint16_t(sign | ((u & 0x7FFFFFFF) - 0x38000000) >> 13);
}

}  // namespace
}  // namespace exl3
