// Trellis search with 16 fp32 lanes that hold fp16 values; see encode_core.h for why the result is
// the same.
#include <immintrin.h>

#include "encode_core.h"

namespace exl3 {
namespace {

struct Avx512Lanes {
    using elem = float;
    using vec = __m512;
    static constexpr int kLanes = 16;
    static constexpr int kTiles = 1;
    static constexpr bool kDoubts = false;

    static vec load(const elem* p) { return _mm512_load_ps(p); }
    static void store(elem* p, vec v) { _mm512_store_ps(p, v); }
    static elem from_float(float f) { return f; }
    static float to_float(elem f) { return f; }
    static vec broadcast(float f) { return _mm512_set1_ps(f); }

    // lane i = p[i >> D]
    template <int D>
    static vec spread(const elem* p) {
        if constexpr (D >= 4) {
            return _mm512_set1_ps(*p);
        } else {
            const __m512i index = _mm512_srli_epi32(
                _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), D);
            __m512 few;
            if constexpr (D == 3) few = _mm512_castps128_ps512(_mm_castsi128_ps(_mm_loadu_si64(p)));
            if constexpr (D == 2) few = _mm512_castps128_ps512(_mm_load_ps(p));
            if constexpr (D == 1) few = _mm512_castps256_ps512(_mm256_load_ps(p));
            return _mm512_permutexvar_ps(index, few);
        }
    }

    static vec cost(vec value, vec target, vec before) {
        const vec d = round(_mm512_sub_ps(value, target));
        const __m512i down = _mm512_castps_si512(
            _mm512_fmadd_round_ps(d, d, before, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
        const __m512i up = _mm512_castps_si512(
            _mm512_fmadd_round_ps(d, d, before, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
        // Round to odd: `down`, with the last bit set where the sum is inexact. down | (up & 1)
        return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(down, up, _mm512_set1_epi32(1), 0xF8));
    }
    static float round_one(float f) { return _cvtsh_ss(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT)); }
    static vec min(vec a, vec b) { return _mm512_min_ps(a, b); }
    static vec round(vec v) {
        return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

}  // namespace

const EncodeTier kEncodeAvx512 = make_tier<Avx512Lanes>();

}  // namespace exl3
