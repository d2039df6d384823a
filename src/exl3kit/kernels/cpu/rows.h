// Row-wise parts of a tier: conversions, the 128-point transform, the input rotation.
#pragma once

#include <cstring>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "tier.h"

namespace exl3 {
namespace {

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

#if defined(__F16C__)
inline void halves_to_floats(const uint16_t* halves, float* out) {
    for (int i = 0; i < kBlock; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(halves + i))));
}

inline void floats_to_halves(const float* values, uint16_t* out) {
    for (int i = 0; i < kBlock; i += 8) {
        const __m256 value = _mm256_loadu_ps(values + i);
        _mm_storeu_si128((__m128i*)(out + i), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
    }
}
#else
inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    if (magnitude >= 0x7C00) return float_of(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    // 2^112 moves the exponent bias from 15 to 127 and is right for subnormal halves too.
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

inline uint16_t float_to_half(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7FFFFFFF;
    const uint16_t sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7F800000) return sign | 0x7E00;   // NaN
    if (magnitude >= 0x477FF000) return sign | 0x7C00;  // rounds to 65536 or more
    if (magnitude < 0x38800000) {                       // subnormal half: let an fp32 add round it
        return sign | uint16_t(bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
    }
    return sign | uint16_t((magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13);
}

inline void halves_to_floats(const uint16_t* halves, float* out) {
    for (int i = 0; i < kBlock; ++i) out[i] = half_to_float(halves[i]);
}

inline void floats_to_halves(const float* values, uint16_t* out) {
    for (int i = 0; i < kBlock; ++i) out[i] = float_to_half(values[i]);
}
#endif

inline uint16_t float_to_bfloat(float value) {
    const uint32_t bits = bits_of(value);
    const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;  // and stays one
    return (is_nan ? bits | 0x400000 : round_to_bfloat(bits)) >> 16;
}

void load_block(const void* values, int64_t dtype, float* out) {
    const auto* narrow = static_cast<const uint16_t*>(values);
    if (dtype == kFloat32) {
        std::memcpy(out, values, kBlock * sizeof(float));
    } else if (dtype == kFloat16) {
        halves_to_floats(narrow, out);
    } else {
        for (int i = 0; i < kBlock; ++i) out[i] = float_of(uint32_t(narrow[i]) << 16);
    }
}

void store_block(const float* values, int64_t dtype, void* out) {
    auto* narrow = static_cast<uint16_t*>(out);
    if (dtype == kFloat32) {
        std::memcpy(out, values, kBlock * sizeof(float));
    } else if (dtype == kFloat16) {
        floats_to_halves(values, narrow);
    } else {
        for (int i = 0; i < kBlock; ++i) narrow[i] = float_to_bfloat(values[i]);
    }
}

template <int STEP>
inline void butterfly(float* block) {
    for (int i = 0; i < kBlock; i += 2 * STEP) {
        for (int j = i; j < i + STEP; ++j) {
            const float low = block[j], high = block[j + STEP];
            block[j] = low + high;
            block[j + STEP] = low - high;
        }
    }
}

void hadamard_block(float* block) {
    butterfly<1>(block);
    butterfly<2>(block);
    butterfly<4>(block);
    butterfly<8>(block);
    butterfly<16>(block);
    butterfly<32>(block);
    butterfly<64>(block);
    for (int i = 0; i < kBlock; ++i) block[i] *= 0.08838834764831845f;  // 1 / sqrt(128)
}

// Columns c < 8 and c + 8 of a tile own 32 neighbouring windows: which of them holds the row at
// `position` in the order that rotate_row writes.
constexpr int column_window(int column, int position) {
    return position / 4 * 8 + column / 8 * 4 + position % 4;
}

void rotate_row(const void* x, int64_t dtype, const uint16_t* suh, int64_t k, float* out,
                int64_t out_block) {
    const int64_t width = dtype == kFloat32 ? 4 : 2;
    alignas(64) float block[kBlock], scale[kBlock];
    for (int64_t start = 0; start < k; start += kBlock, out += out_block) {
        load_block(static_cast<const char*>(x) + start * width, dtype, block);
        halves_to_floats(suh + start, scale);
        for (int i = 0; i < kBlock; ++i) block[i] *= scale[i];
        hadamard_block(block);
        for (int first = 0; first < kBlock; first += kTile)
#pragma GCC unroll 8
            for (int i = 0; i < kTile; i += 2)  // pairs stay together
                std::memcpy(out + first + i, block + first + (i >> 1 & 6) + (i << 2 & 8), 8);
    }
}

}  // namespace
}  // namespace exl3
