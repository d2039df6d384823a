// Trellis search with 8 fp32 lanes that hold fp16 values; see encode_core.h for why the result is
// the same.
#include <immintrin.h>

#include "encode_core.h"

namespace exl3 {
namespace {

struct Avx2Lanes {
    using elem = float;
    using vec = __m256;
    static constexpr int kLanes = 8;
    static constexpr int kTiles = 1;
    static constexpr bool kDoubts = true;

    static vec load(const elem* p) { return _mm256_load_ps(p); }
    static void store(elem* p, vec v) { _mm256_store_ps(p, v); }
    static elem from_float(float f) { return f; }
    static float to_float(elem f) { return f; }
    static vec broadcast(float f) { return _mm256_set1_ps(f); }

    // lane i = p[i >> D]
    template <int D>
    static vec spread(const elem* p) {
        if constexpr (D >= 3) {
            return _mm256_set1_ps(*p);
        } else {
            const __m256i index = _mm256_srli_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), D);
            const __m128 few = D == 2 ? _mm_castsi128_ps(_mm_loadu_si64(p)) : _mm_load_ps(p);
            return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(few), index);
        }
    }

    static vec cost(vec value, vec target, vec before) {
        const vec d = round(_mm256_sub_ps(value, target));
        return _mm256_fmadd_ps(d, d, before);
    }
    static vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
    static vec round(vec v) {
        return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    // Midpoints of two fp16 values, and subnormal results, which have other midpoints.
    static uint32_t doubtful(vec v) {
        const __m256i tail = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x1FFF));
        const __m256 midpoint =
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(tail, _mm256_set1_epi32(0x1000)));
        const __m256 subnormal = _mm256_cmp_ps(v, _mm256_set1_ps(0x1p-14f), _CMP_LT_OQ);
        return uint32_t(_mm256_movemask_ps(_mm256_or_ps(midpoint, subnormal)));
    }
    static float lane(vec v, int i) { return v[i]; }
    static float round_one(float f) { return _cvtsh_ss(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT)); }
};

}  // namespace

const EncodeTier kEncodeAvx2 = make_tier<Avx2Lanes>();

}  // namespace exl3
