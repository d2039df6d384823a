// Vectors of L 32-bit lanes, with the compiler's own vector types: the same source is SSE2, AVX2 or
// AVX-512 code by the flags of the file that includes it. Intrinsics only where the types have no
// word for the operation.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "exl3_cpu.h"

namespace exl3 {
namespace {

template <int L>
struct Lanes {
    typedef uint32_t u32 __attribute__((vector_size(4 * L)));
    typedef int32_t i32 __attribute__((vector_size(4 * L)));
    typedef float f32 __attribute__((vector_size(4 * L)));
};
template <int L>
using U32 = typename Lanes<L>::u32;
template <int L>
using I32 = typename Lanes<L>::i32;
template <int L>
using F32 = typename Lanes<L>::f32;

template <class V, class T>
inline V load(const T* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V, class T>
inline void store(T* to, V value) {
    std::memcpy(to, &value, sizeof value);
}

// *from in every lane; {} + *from would be an addition before the instruction that does it.
template <int L>
inline F32<L> broadcast(const float* from) {
#if defined(__AVX512F__)
    if constexpr (L == 16) return (F32<L>)_mm512_set1_ps(*from);
#endif
#if defined(__AVX2__)
    if constexpr (L == 8) return (F32<L>)_mm256_broadcast_ss(from);
#endif
    return F32<L>{} + *from;
}

// a * b + c: one rounding where the tier has the instruction, two where it has not.
template <class V>
inline V multiply_add(V a, V b, V c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
    if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
    return a * b + c;
}

// bf16 in the high half, to nearest even, of finite fp32.
template <class V>
inline V round_to_bfloat(V bits) {
    return bits + 0x7FFF + (bits >> 16 & 1);
}

// rows[i][j] <-> rows[j][i].
inline void transpose(U32<8>* rows) {
#if defined(__AVX2__)
    __m256i pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            quads[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            quads[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    }
    for (int i = 0; i < 4; ++i) {
        rows[i] = (U32<8>)_mm256_permute2x128_si256(quads[i], quads[i + 4], 0x20);
        rows[i + 4] = (U32<8>)_mm256_permute2x128_si256(quads[i], quads[i + 4], 0x31);
    }
#else
    for (int i = 0; i < 8; ++i)
        for (int j = 0; j < i; ++j) {
            const uint32_t value = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = value;
        }
#endif
}

// Sum of the four bytes of every lane.
template <int L>
inline U32<L> byte_sum(U32<L> v) {
#if defined(__AVX512BW__)
    if constexpr (L == 16) {
        const __m512i pairs = _mm512_maddubs_epi16((__m512i)v, _mm512_set1_epi8(1));
        return (U32<L>)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
#endif
#if defined(__AVX2__)
    if constexpr (L == 8) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)v, _mm256_set1_epi8(1));
        return (U32<L>)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#endif
    const U32<L> pairs = (v & 0x00FF00FF) + (v >> 8 & 0x00FF00FF);
    return (pairs & 0xFFFF) + (pairs >> 16);
}

// The signed low 16 bits of every lane, times 2^13.
template <int L>
inline U32<L> low_half_up_13(U32<L> v) {
#if defined(__AVX2__)
    if constexpr (L == 8)
        return (U32<L>)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi32(1 << 13));
#endif
    return (U32<L>)((I32<L>)(v << 16) >> 3);
}

}  // namespace
}  // namespace exl3
