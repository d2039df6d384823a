// Trellis search in native half arithmetic, 32 lanes. Each operation rounds once to fp16 and treats
// subnormals exactly (FTZ and DAZ do not apply to AVX512-FP16), so no lane is ever in doubt.
#include <immintrin.h>

#include "encode_core.h"

namespace exl3 {
namespace {

struct HalfLanes {
    using elem = uint16_t;
    using vec = __m512h;
    static constexpr int kLanes = 32;
    static constexpr int kTiles = 2;
    static constexpr bool kDoubts = false;

    static vec load(const elem* p) { return _mm512_load_ph(p); }
    static void store(elem* p, vec v) { _mm512_store_ph(p, v); }
    static elem from_float(float f) { return float_to_half(f); }
    static float to_float(elem h) { return half_to_float(h); }
    static vec broadcast(float f) {
        return _mm512_castsi512_ph(_mm512_set1_epi16(short(from_float(f))));
    }

    // lane i = p[i >> D]. Broadcasting loads cost no shuffle port, and each 16-byte lane then finds
    // its costs within itself: one byte shuffle, where a word permute of the whole register is two
    // operations.
    template <int D>
    static vec spread(const elem* p) {
        __m512i costs;
        if constexpr (D >= 5) {
            costs = _mm512_set1_epi16(short(*p));
        } else if constexpr (D == 1) {
            const __m256i few = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
            costs = _mm512_permutexvar_epi16(words<D>(), _mm512_castsi256_si512(few));
        } else {
            __m512i few;
            if constexpr (D == 4) few = _mm512_set1_epi32(load_as<int32_t>(p));
            if constexpr (D == 3) few = _mm512_set1_epi64(load_as<int64_t>(p));
            if constexpr (D == 2)
                few = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
            costs = _mm512_shuffle_epi8(few, bytes<D>());
        }
        return _mm512_castsi512_ph(costs);
    }

    static vec cost(vec value, vec target, vec before) {
        const vec d = _mm512_sub_ph(value, target);
        return _mm512_fmadd_ph(d, d, before);
    }
    static float round_one(float f) { return _cvtsh_ss(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT)); }
    static vec min(vec a, vec b) { return _mm512_min_ph(a, b); }
    static vec round(vec v) { return v; }

  private:
    template <class T>
    static T load_as(const elem* p) {
        T value;
        std::memcpy(&value, p, sizeof(T));
        return value;
    }
    // i >> D for each word i.
    template <int D>
    static __m512i words() {
        alignas(64) static constexpr auto table = [] {
            struct {
                uint16_t at[32];
            } t{};
            for (int i = 0; i < 32; ++i) t.at[i] = uint16_t(i >> D);
            return t;
        }();
        return _mm512_load_si512(table.at);
    }
    // The same as byte positions.
    template <int D>
    static __m512i bytes() {
        return _mm512_add_epi16(_mm512_mullo_epi16(words<D>(), _mm512_set1_epi16(0x0202)),
                                _mm512_set1_epi16(0x0100));
    }
};

}  // namespace

const EncodeTier kEncodeAvx512Fp16 = make_tier<HalfLanes>();

}  // namespace exl3
