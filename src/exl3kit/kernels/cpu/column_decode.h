// Decode with one column a lane, for the tiers without a byte-wise multishift.
//
// Column c of a tile (c & 7 here, both halves) owns stream positions 32 c .. 32 c + 31, and the
// windows of two columns sit 32 K ring bits apart. So with q-th dword of all columns in one vector,
// a window is one or two shifts by constants and no lane does anything of its own: the lanes are L
// of the 64 column pairs of a strip. At half rates 32 K bits are a whole number of 16-bit groups
// but not of dwords, which the gather hides.
//
// A vector of mcg values takes 14.9 instructions with L = 8 and 13.4 with L = 16 at K = 3, the
// product with one row included; docs/benchmarks.md has the count. Measured with L = 8 on one core
// of an EPYC (Zen 4), one row: 3.7e9 weights a second.
#pragma once

#include "lanes.h"
#include "rows.h"

namespace exl3 {
namespace {

// First ring bit past window p of a column: S(p) of the format.
constexpr int window_end(int p, int bits2) { return ((p + 1) * bits2) >> 1; }

constexpr int column_dwords(int bits2) { return (bits2 + 1) / 2 + 1; }

// columns[lane group][q][lane] = dword q - 1 of the lane's column: one before its first, which
// windows reach into. Done for a whole strip at once: vectors loaded soon after their lanes were
// stored stall.
template <int BITS2, int L>
inline void gather_columns(const uint16_t* tiles, uint32_t (*columns)[column_dwords(BITS2)][L]) {
    constexpr int groups = 8 * BITS2, dwords = column_dwords(BITS2);
    for (int tile = 0; tile < kBlockTiles; ++tile, tiles += groups) {
        // The ring with its dwords in reverse order and the ends it wraps to: 32 ring bits that
        // start at any 16-bit group g are then one little-endian load.
        constexpr int size = groups / 2;
        uint32_t ring[size + 2];
        for (int i = 0; i < size + 2; ++i)
            std::memcpy(ring + i, tiles + (2 * (2 * size - i) % groups), 4);
#pragma GCC unroll 8
        for (int column = 0; column < 8; ++column) {
            uint32_t* home = &columns[(tile * 8 + column) / L][0][(tile * 8 + column) % L];
#pragma GCC unroll 9
            for (int q = 0; q < dwords; ++q) {
                const int group = BITS2 * column + 2 * (q - 1);
                std::memcpy(home + q * L, reinterpret_cast<uint16_t*>(ring) + groups - group, 4);
            }
        }
    }
}

template <int BITS2, int L>
inline U32<L> window(const uint32_t (*columns)[L], int p) {
    const int start = window_end(p, BITS2) + 16;  // the gathered column starts 32 bits early
    const int q = start >> 5, offset = start & 31;
    const U32<L> first = load<U32<L>>(columns[q]);
    if (offset <= 16) return first >> (16 - offset) & 0xFFFF;
    return (first << (offset - 16) | load<U32<L>>(columns[q + 1]) >> (48 - offset)) & 0xFFFF;
}

// fp32 rounded to the 11 significant bits of fp16, to nearest even: beside 2^13 times its own power
// of two the last bit of a value is the one to keep, and both multiplications are exact. Three
// instructions, where integers take five. No codebook value is subnormal.
template <int L>
inline F32<L> round_to_half(F32<L> value) {
    const F32<L> power = (F32<L>)((U32<L>)value & 0xFF800000), far = F32<L>{} + 8192.0f;
    return multiply_add(power, -far, multiply_add(power, far, value));
}

// A signed fp16 13 bits up in a lane, after the mask and flip of the format, as fp32. The mask
// leaves the two low exponent bits, so the exponent is 12..15 and rebiasing it to 124..127 is part
// of the flip.
template <int L>
inline F32<L> masked_half(U32<L> shifted) {
    return (F32<L>)((shifted & 0x81FFE000) ^ 0x3F6C0000);
}

template <int CODEBOOK, int L>
inline F32<L> value_of(U32<L> state) {
    if constexpr (CODEBOOK == kMul1) {
        const U32<L> sum = byte_sum<L>(state * 0x83DCD12D);
        // 1024 + sum as fp32; multiply and add round like the single fp16 fma for all 65536 states.
        const F32<L> biased = (F32<L>)(sum << 13 | 0x44800000);
        return round_to_half<L>(biased * 0.00676727294921875f + -10.3828125f);
    } else {
        const U32<L> hash = CODEBOOK == kMcg ? state * 0xCBAC1FED : state * 89226354u + 64248484u;
        return round_to_half<L>(masked_half<L>(low_half_up_13<L>(hash)) +
                                masked_half<L>((U32<L>)((I32<L>)hash >> 3)));
    }
}

template <int BITS2, int CODEBOOK, int L>
void decode_columns(const uint16_t* tiles, float* out) {
    constexpr int lane_groups = kBlockTiles * 8 / L;
    alignas(64) uint32_t columns[lane_groups][column_dwords(BITS2)][L];
    gather_columns<BITS2, L>(tiles, columns);
    for (int group = 0; group < lane_groups; ++group, out += 32 * L) {
#pragma GCC unroll 32
        for (int p = 0; p < 32; ++p)
            store(out + p * L, value_of<CODEBOOK, L>(window<BITS2, L>(columns[group], p)));
    }
}

// sums (128) += x (16) times one row of eight tiles, each value multiplied as soon as it is
// decoded: for one token, where the decoder's arithmetic hides the latency of two sums.
// The order of a sum is that of `accumulate` on a decoded strip.
template <int BITS2, int CODEBOOK, int L>
void multiply_columns(const uint16_t* tiles, const float* x, float* sums) {
    constexpr int lane_groups = kBlockTiles * 8 / L;
    alignas(64) uint32_t columns[lane_groups][column_dwords(BITS2)][L];
    gather_columns<BITS2, L>(tiles, columns);
    for (int group = 0; group < lane_groups; ++group, sums += 2 * L) {
        F32<L> sum[2] = {load<F32<L>>(sums), load<F32<L>>(sums + L)};
#pragma GCC unroll 32
        for (int p = 0; p < 32; ++p) {
            const F32<L> value = value_of<CODEBOOK, L>(window<BITS2, L>(columns[group], p));
            const F32<L> input = broadcast<L>(x + p / 8 * 4 + p % 4);
            sum[p / 4 % 2] = multiply_add(input, value, sum[p / 4 % 2]);
        }
        store(sums, sum[0]);
        store(sums + L, sum[1]);
    }
}

// The strip decoder of a tier with L lanes, and the product of one token that needs no strip.
template <int L>
struct ColumnDecoder {
    template <int BITS2, int CODEBOOK>
    static constexpr auto at() {
        return decode_columns<BITS2, CODEBOOK, L>;
    }
    struct Single {
        template <int BITS2, int CODEBOOK>
        static constexpr auto at() {
            return multiply_columns<BITS2, CODEBOOK, L>;
        }
    };
};

// How decode_columns lays out a strip, and how the product walks it.
template <int LANES>
struct ColumnLayout {
    static constexpr int L = LANES;
    static constexpr int kUnits = kBlock / (2 * L);   // groups of columns that accumulate together
    static constexpr int kVectors = 2;                // of a unit: columns c < 8, columns c >= 8
    static constexpr int kSteps = 16, kStepRows = 1;  // a step takes one row of x
    static F32<L> broadcast(const float* x) { return exl3::broadcast<L>(x); }
    static constexpr int offset(int unit, int step, int vector) {
        return ((unit * 4 + step / 4) * 8 + vector * 4 + step % 4) * L;
    }
    static constexpr int strip_index(int tile, int column, int position) {
        const int lane = tile * 8 + column % 8;
        return (lane / L * 32 + column_window(column, position)) * L + lane % L;
    }
    // One row of eight columns of a tile, the first of which is 0 or 8.
    static U32<8> eight(const float* strip, int tile, int first, int position) {
        constexpr int lanes = L < 8 ? L : 8;
        uint32_t values[8];
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += lanes)
            std::memcpy(values + i, strip + strip_index(tile, first + i, position), 4 * lanes);
        return load<U32<8>>(values);
    }
    // Two rows a dword, 8 dwords of 8 columns, transposed.
    static void store_bfloat(const float* strip, uint16_t* out) {
        for (int column = 0; column < kBlock; column += 8, out += 8 * kBlock) {
            const int tile = column / kTile, first = column % kTile;
            U32<8> rows[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const U32<8> low = eight(strip, tile, first, 2 * i);
                const U32<8> high = eight(strip, tile, first, 2 * i + 1);
                rows[i] = round_to_bfloat(low) >> 16 | (round_to_bfloat(high) & 0xFFFF0000);
            }
            transpose(rows);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) store(out + i * kBlock, rows[i]);
        }
    }
    static void finish(const float* accumulators, float* y) {
        for (int i = 0; i < kBlock; ++i) {
            const int vector = i / L % 2, lane = i / (2 * L) * L + i % L;
            y[lane / 8 * kTile + vector * 8 + lane % 8] = accumulators[i];
        }
    }
};

}  // namespace
}  // namespace exl3
