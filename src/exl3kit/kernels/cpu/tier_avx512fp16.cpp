// The tier of Sapphire Rapids and later: multishift and fp16 arithmetic, two weights a 32-bit lane.
//
// A quad is four neighbouring windows of one column: at most 40 ring bits, which lie in two
// neighbouring dwords (at 7 bits in two such pairs). With that pair of all eight columns in one
// register, one vpmultishiftqb cuts all 32 windows, whatever the rate. The 32-bit hash is made as
// two 16-bit halves, which are the two fp16 operands that the 3inst and mcg codebooks add.
//
// Floor, per 32 weights and one token, in vector micro-operations: K/8 permutes, 1 multishift, 3
// multiplications, 1 addition, 2 mask-and-flip, 1 fp16 addition, 2 conversions, 2 fma: 12.4 at
// K = 3, two a cycle. That is 5 weights or 1.9 bytes of trellis a cycle, so memory is not the
// limit. Measured on a Xeon with AMX, one core: 8.5e9 weights (3.2 GB of trellis) a second at K = 3.
#include <immintrin.h>

#include "column_decode.h"
#include "panel_product.h"

namespace exl3 {
namespace {

constexpr int kQuads = 8;

// For quad q: which dwords each of the 8 qwords takes, and where its 4 windows start in them.
template <int BITS2>
struct QuadTable {
    alignas(64) uint32_t index[kQuads][2][16] = {};  // dwords of windows 0-1 and 2-3
    alignas(64) uint8_t shift[kQuads][64] = {};
    bool split[kQuads] = {};  // the two index rows differ
    bool fresh[kQuads] = {};  // the first index row is not the last of the quad before

    constexpr QuadTable() {
        for (int quad = 0; quad < kQuads; ++quad) {
            for (int column = 0; column < 8; ++column) place(quad, column);
            fresh[quad] = quad == 0 || differs(index[quad][0], index[quad - 1][1]);
        }
    }

  private:
    constexpr void place(int quad, int column) {
        const int base = 16 * BITS2 * column, dwords = 4 * BITS2;
        const int last = pair_of(base + window_end(4 * quad + 3, BITS2));
        const bool fits = base + window_end(4 * quad, BITS2) - 16 >= 32 * last;
        const int first = fits ? last : pair_of(base + window_end(4 * quad + 1, BITS2));
        if (!fits) split[quad] = true;
        for (int i = 0; i < 2; ++i) {
            index[quad][0][2 * column + i] = (first + i + dwords) % dwords;
            index[quad][1][2 * column + i] = (last + i + dwords) % dwords;
        }
        for (int w = 0; w < 4; ++w) {
            const int start = base + window_end(4 * quad + w, BITS2) - 16;
            const int offset = start - 32 * (w < 2 ? first : last);
            // Little endian puts the earlier dword low: bit positions are rotated by 32, and wrap.
            shift[quad][8 * column + 2 * w] = (80 - offset) & 63;
            shift[quad][8 * column + 2 * w + 1] = (88 - offset) & 63;
        }
    }
    // The dword before the one that holds the last bit of a window which ends before `end`.
    static constexpr int pair_of(int end) { return (end + 31) / 32 - 2; }
    static constexpr bool differs(const uint32_t* a, const uint32_t* b) {
        for (int i = 0; i < 16; ++i)
            if (a[i] != b[i]) return true;
        return false;
    }
};

template <int BITS2>
constexpr QuadTable<BITS2> kTable{};

// The packed tile in registers, and dwords picked from it.
template <int BITS2>
struct PackedTile {
    static constexpr int kDwords = 4 * BITS2, kRegisters = (kDwords + 15) / 16;
    __m512i part[4];

    explicit PackedTile(const uint16_t* words) {
#pragma GCC unroll 4
        for (int r = 0; r < kRegisters; ++r) {
            const int lanes = kDwords - 16 * r;
            const __mmask16 mask = lanes >= 16 ? 0xFFFF : (1 << lanes) - 1;
            part[r] = _mm512_maskz_loadu_epi32(mask, words + 32 * r);
        }
    }
    __m512i pick(const uint32_t* dwords) const {
        const __m512i index = _mm512_load_si512(dwords);
        if constexpr (kRegisters == 1) return _mm512_permutexvar_epi32(index, part[0]);
        const __m512i low = _mm512_permutex2var_epi32(part[0], index, part[1]);
        if constexpr (kRegisters <= 2) return low;
        const __mmask16 is_high = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
        if constexpr (kRegisters == 3)
            return _mm512_mask_permutexvar_epi32(low, is_high, index, part[2]);
        return _mm512_mask_mov_epi32(low, is_high,
                                     _mm512_permutex2var_epi32(part[2], index, part[3]));
    }
};

// Low and high halves of state * factor + addend, per 16-bit lane.
template <uint32_t FACTOR, uint32_t ADDEND>
inline void hash_halves(__m512i state, __m512i& low, __m512i& high) {
    const __m512i factor_low = _mm512_set1_epi16(short(FACTOR & 0xFFFF));
    const __m512i factor_high = _mm512_set1_epi16(short(FACTOR >> 16));
    low = _mm512_mullo_epi16(state, factor_low);
    high = _mm512_add_epi16(_mm512_mulhi_epu16(state, factor_low),
                            _mm512_mullo_epi16(state, factor_high));
    if constexpr (ADDEND != 0) {
        const __m512i addend_low = _mm512_set1_epi16(short(ADDEND & 0xFFFF));
        low = _mm512_add_epi16(low, addend_low);
        high = _mm512_add_epi16(high, _mm512_set1_epi16(short(ADDEND >> 16)));
        const __mmask32 carry = _mm512_cmplt_epu16_mask(low, addend_low);
        high = _mm512_mask_add_epi16(high, carry, high, _mm512_set1_epi16(1));
    }
}

inline __m512h masked_halves(__m512i half) {
    const __m512i mask = _mm512_set1_epi16(short(0x8FFF)), flip = _mm512_set1_epi16(0x3B60);
    return (__m512h)_mm512_ternarylogic_epi32(half, mask, flip, 0x6A);  // (half & mask) ^ flip
}

template <int CODEBOOK>
inline __m512h halves_of(__m512i state) {
    __m512i low, high;
    if constexpr (CODEBOOK == kMul1) {
        hash_halves<0x83DCD12D, 0>(state, low, high);
        const __m512i ones = _mm512_set1_epi8(1);
        const __m512i sum =
            _mm512_add_epi16(_mm512_maddubs_epi16(low, ones), _mm512_maddubs_epi16(high, ones));
        // 0x6400 is 1024 in fp16, where one unit is the last bit.
        const __m512i biased = _mm512_or_si512(sum, _mm512_set1_epi16(0x6400));
        return _mm512_fmadd_ph((__m512h)biased, (__m512h)_mm512_set1_epi16(0x1EEE),
                               (__m512h)_mm512_set1_epi16(short(0xC931)));
    } else {
        if constexpr (CODEBOOK == kMcg)
            hash_halves<0xCBAC1FED, 0>(state, low, high);
        else
            hash_halves<89226354, 64248484>(state, low, high);
        return _mm512_add_ph(masked_halves(low), masked_halves(high));
    }
}

template <int BITS2, int CODEBOOK>
void decode_quads(const uint16_t* tiles, float* out) {
    constexpr const QuadTable<BITS2>& table = kTable<BITS2>;
    for (int tile = 0; tile < kBlockTiles; ++tile, out += kTileWeights) {
        const PackedTile<BITS2> packed(tiles + tile * 8 * BITS2);
        // Converting from memory spares the shuffle that splits a register of 32 halves.
        alignas(64) uint16_t halves[kTileWeights];
        __m512i dwords = {};
#pragma GCC unroll 8
        for (int quad = 0; quad < kQuads; ++quad) {
            if (table.fresh[quad]) dwords = packed.pick(table.index[quad][0]);
            const __m512i shift = _mm512_load_si512(table.shift[quad]);
            __m512i state = _mm512_multishift_epi64_epi8(shift, dwords);
            if (table.split[quad]) {
                dwords = packed.pick(table.index[quad][1]);
                state = _mm512_mask_multishift_epi64_epi8(state, 0xF0F0F0F0F0F0F0F0, shift, dwords);
            }
            _mm512_store_si512(halves + 32 * quad, (__m512i)halves_of<CODEBOOK>(state));
        }
#pragma GCC unroll 16
        for (int i = 0; i < kTileWeights; i += 16) {
            const __m256i half = _mm256_load_si256((const __m256i*)(halves + i));
            _mm512_store_ps(out + i, _mm512_cvtph_ps(half));
        }
    }
}

struct Decoder {
    template <int BITS2, int CODEBOOK>
    static constexpr Decode at() {
        return decode_quads<BITS2, CODEBOOK>;
    }
};

// A vector holds 4 columns x the 4 rows of a quad; the rows are summed at the very end.
struct QuadLayout {
    static constexpr int L = 16, kUnits = kBlockTiles, kVectors = 4, kSteps = 4, kStepRows = 4;
    static F32<L> broadcast(const float* x) {
        return (F32<L>)_mm512_broadcast_f32x4(_mm_loadu_ps(x));
    }
    static constexpr int offset(int unit, int step, int vector) {
        return unit * kTileWeights + step * 64 + vector * 16;
    }
    static constexpr int strip_index(int tile, int column, int position) {
        const int window = column_window(column, position);
        return tile * kTileWeights + window / 4 * 32 + column % 8 * 4 + window % 4;
    }
    static void store_bfloat(const float* strip, uint16_t* out) {
        alignas(64) uint16_t rounded[kBlockTiles * kTileWeights];
        for (int i = 0; i < kBlockTiles * kTileWeights; ++i)
            rounded[i] = round_to_bfloat(bits_of(strip[i])) >> 16;
        for (int column = 0; column < kBlock; ++column, out += kBlock)
#pragma GCC unroll 4
            for (int r = 0; r < kTile; r += 4)
                std::memcpy(out + r, rounded + strip_index(column / kTile, column % kTile, r), 8);
    }
    static void finish(const float* sums, float* y) {
        for (int i = 0; i < kBlock; ++i, sums += 4)
            y[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

}  // namespace

const Tier kTierAvx512Fp16 = make_tier<QuadLayout, Decoder, 6>();

}  // namespace exl3
