// The product of a tier, built from its strip decoder and the layout that decoder writes.
//
// Two rows of eight tiles are decoded into first-level cache and multiplied by every token of the
// chunk before the next two: the packed trellis is read once a chunk and never stored decoded.
// A (token, column) always sums in the same order, whatever the number of tokens beside it: batches
// are bit-equal to single rows.
#pragma once

#include <type_traits>

#include "lanes.h"
#include "rows.h"

namespace exl3 {
namespace {

using Decode = void (*)(const uint16_t* tiles, float* out);

// DECODER::at<BITS2, CODEBOOK>() is the strip decoder of one rate and codebook. DECODER::Single,
// where a tier has it, does the same for its product of one token.
template <class DECODER, int CODEBOOK>
auto decoder_of_whole_rate(int64_t bits2) {
    switch (bits2) {
        case 2: return DECODER::template at<2, CODEBOOK>();
        case 4: return DECODER::template at<4, CODEBOOK>();
        case 6: return DECODER::template at<6, CODEBOOK>();
        case 8: return DECODER::template at<8, CODEBOOK>();
        case 10: return DECODER::template at<10, CODEBOOK>();
        case 12: return DECODER::template at<12, CODEBOOK>();
        case 14: return DECODER::template at<14, CODEBOOK>();
        default: return DECODER::template at<16, CODEBOOK>();
    }
}

template <class DECODER>
auto decoder_of(int64_t bits2, int64_t codebook) {
    if (codebook == kThreeInst) return decoder_of_whole_rate<DECODER, kThreeInst>(bits2);
    if (codebook == kMcg) return decoder_of_whole_rate<DECODER, kMcg>(bits2);
    switch (bits2) {
        case 3: return DECODER::template at<3, kMul1>();
        case 5: return DECODER::template at<5, kMul1>();
        case 7: return DECODER::template at<7, kMul1>();
        default: return decoder_of_whole_rate<DECODER, kMul1>(bits2);
    }
}

// accumulators (TOKENS, units * vectors * L) += x (TOKENS, kStripRows * 16) times the strip.
template <class LAYOUT, int TOKENS>
inline void accumulate(const float* strip, const float* x, int64_t x_stride, float* accumulators) {
    constexpr int L = LAYOUT::L, V = LAYOUT::kVectors, width = LAYOUT::kUnits * V * L;
    for (int unit = 0; unit < LAYOUT::kUnits; ++unit) {
        F32<L> sums[TOKENS][V];
        float* home = accumulators + unit * V * L;
#pragma GCC unroll 16
        for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[t][v] = load<F32<L>>(home + t * width + v * L);
        for (int64_t row = 0; row < kStripRows; ++row) {
            const float* tiles = strip + row * kBlockTiles * kTileWeights;
            const float* inputs = x + row * kTile;
#pragma GCC unroll 16
            for (int step = 0; step < LAYOUT::kSteps; ++step) {
                F32<L> weights[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v)
                    weights[v] = load<F32<L>>(tiles + LAYOUT::offset(unit, step, v));
#pragma GCC unroll 16
                for (int t = 0; t < TOKENS; ++t) {
                    const F32<L> input =
                        LAYOUT::broadcast(inputs + t * x_stride + step * LAYOUT::kStepRows);
#pragma GCC unroll 4
                    for (int v = 0; v < V; ++v)
                        sums[t][v] = multiply_add(input, weights[v], sums[t][v]);
                }
            }
        }
#pragma GCC unroll 16
        for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) store(home + t * width + v * L, sums[t][v]);
    }
}

// All tokens times the strip, in blocks of TOKENS rows, and what is left in blocks of half as many.
template <class LAYOUT, int TOKENS>
void multiply(const float* strip, const float* x, int64_t x_stride, int64_t tokens,
              float* accumulators) {
    constexpr int64_t width = LAYOUT::kUnits * LAYOUT::kVectors * LAYOUT::L;
    int64_t token = 0;
    for (; token + TOKENS <= tokens; token += TOKENS)
        accumulate<LAYOUT, TOKENS>(strip, x + token * x_stride, x_stride,
                                   accumulators + token * width);
    if constexpr (TOKENS > 1)
        multiply<LAYOUT, TOKENS / 2>(strip, x + token * x_stride, x_stride, tokens - token,
                                     accumulators + token * width);
}

template <class DECODER, class = void>
constexpr bool kHasSingle = false;
template <class DECODER>
constexpr bool kHasSingle<DECODER, std::void_t<typename DECODER::Single>> = true;

// The product of one token, on a tier that multiplies values as it decodes them.
template <class LAYOUT, class DECODER>
void single_product(const Product& p, float* y) {
    const auto multiply_row = decoder_of<typename DECODER::Single>(p.bits2, p.codebook);
    const uint16_t* tiles = p.trellis;
    alignas(64) float sums[kBlock] = {};
    for (int64_t tile = 0; tile < p.k / kTile; ++tile, tiles += p.row_words) {
        prefetch_row(tiles + 2 * kStripRows * p.row_words, p.bits2);
        const float* x = p.x + tile / kBlockTiles * p.x_block + tile % kBlockTiles * kTile;
        multiply_row(tiles, x, sums);
    }
    LAYOUT::finish(sums, y);
}

template <class LAYOUT, class DECODER, int TOKENS>
void product(const Product& p, float* y) {
    if constexpr (kHasSingle<DECODER>)
        if (p.tokens == 1) return single_product<LAYOUT, DECODER>(p, y);
    constexpr int64_t width = LAYOUT::kUnits * LAYOUT::kVectors * LAYOUT::L;
    const Decode decode = decoder_of<DECODER>(p.bits2, p.codebook);
    const int64_t k_tiles = p.k / kTile;
    float* strip = p.scratch;
    float* accumulators = strip + kStripFloats;
    std::memset(accumulators, 0, p.tokens * width * sizeof(float));
    for (int64_t tile = 0; tile < k_tiles; tile += kStripRows) {
        for (int64_t row = 0; row < kStripRows; ++row) {
            const uint16_t* tiles = p.trellis + (tile + row) * p.row_words;
            prefetch_row(tiles + 2 * kStripRows * p.row_words, p.bits2);
            decode(tiles, strip + row * kBlockTiles * kTileWeights);
        }
        const float* x = p.x + tile / kBlockTiles * p.x_block + tile % kBlockTiles * kTile;
        multiply<LAYOUT, TOKENS>(strip, x, kBlock, p.tokens, accumulators);
    }
    for (int64_t token = 0; token < p.tokens; ++token)
        LAYOUT::finish(accumulators + token * width, y + token * kBlock);
}

template <class LAYOUT, class DECODER>
void decode_to_stream(const uint16_t* tiles, int64_t bits2, int64_t codebook, float* values) {
    alignas(64) float strip[kBlockTiles * kTileWeights];
    decoder_of<DECODER>(bits2, codebook)(tiles, strip);
    for (int tile = 0; tile < kBlockTiles; ++tile, values += kTileWeights)
        for (int column = 0; column < kTile; ++column)
            for (int r = 0; r < kTile; ++r)
                values[32 * (column % 8) + column_window(column, r)] =
                    strip[LAYOUT::strip_index(tile, column, r)];
}

template <class LAYOUT, class DECODER>
void decode_to_bfloat(const uint16_t* tiles, int64_t bits2, int64_t codebook, uint16_t* out) {
    alignas(64) float strip[kBlockTiles * kTileWeights];
    decoder_of<DECODER>(bits2, codebook)(tiles, strip);
    LAYOUT::store_bfloat(strip, out);
}

}  // namespace
}  // namespace exl3
