// The product of a tier for many tokens: eight rows of tiles are decoded into a panel, which every
// token of the chunk multiplies before the next eight, through the decoder and the layout that
// tile_product.h uses for few.
//
// Each (token, column) sums in the same order there and here, so that both give the same bits: how
// many tokens share a call decides the time alone. What differs is where things lie. A panel is one
// Hadamard block of rows deep, so the inputs of six (AVX2) to twelve tokens, 3 to 6 KB, and one
// unit of the panel, 8 KB, fit into the first-level cache together, also where two threads share
// it; sums are read and written once a panel instead of once a strip.
#pragma once

#include "lanes.h"
#include "tile_product.h"

namespace exl3 {
namespace {

// One kilobyte more than eight tiles: units of rows 8 KB apart would share 16 sets of the cache.
constexpr int64_t kPanelStride = (kBlockTiles + 1) * kTileWeights;
static_assert(kPanelFloats == kPanelRows * kPanelStride);

// sums of TOKENS rows for one unit of columns += inputs (TOKENS, 128) times the panel.
template <class LAYOUT, int TOKENS>
inline void accumulate_panel(const float* panel, const float* inputs, int unit, float* home) {
    constexpr int L = LAYOUT::L, V = LAYOUT::kVectors, width = LAYOUT::kUnits * V * L;
    F32<L> sums[TOKENS][V];
#pragma GCC unroll 16
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[t][v] = load<F32<L>>(home + t * width + v * L);
    for (int64_t row = 0; row < kPanelRows; ++row, panel += kPanelStride, inputs += kTile) {
#pragma GCC unroll 16
        for (int step = 0; step < LAYOUT::kSteps; ++step) {
            F32<L> weights[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v)
                weights[v] = load<F32<L>>(panel + LAYOUT::offset(unit, step, v));
#pragma GCC unroll 16
            for (int t = 0; t < TOKENS; ++t) {
                const F32<L> input =
                    LAYOUT::broadcast(inputs + t * kBlock + step * LAYOUT::kStepRows);
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

// All tokens times one unit, in blocks of TOKENS rows, and what is left in blocks of half as many.
template <class LAYOUT, int TOKENS>
void multiply_panel(const float* panel, const float* x, int64_t tokens, int unit, float* sums) {
    constexpr int64_t width = LAYOUT::kUnits * LAYOUT::kVectors * LAYOUT::L;
    int64_t token = 0;
    for (; token + TOKENS <= tokens; token += TOKENS)
        accumulate_panel<LAYOUT, TOKENS>(panel, x + token * kBlock, unit, sums + token * width);
    if constexpr (TOKENS > 1)
        multiply_panel<LAYOUT, TOKENS / 2>(panel, x + token * kBlock, tokens - token, unit,
                                           sums + token * width);
}

template <class LAYOUT, class DECODER, int TOKENS>
void panel_product(const Product& p, float* y) {
    constexpr int64_t width = LAYOUT::kUnits * LAYOUT::kVectors * LAYOUT::L;
    const Decode decode = decoder_of<DECODER>(p.bits2, p.codebook);
    float* panel = p.scratch;
    float* sums = panel + kPanelFloats;
    std::memset(sums, 0, p.tokens * width * sizeof(float));
    const uint16_t* tiles = p.trellis;
    for (int64_t block = 0; block < p.k / kBlock; ++block) {
        for (int64_t row = 0; row < kPanelRows; ++row, tiles += p.row_words) {
            prefetch_row(tiles + kPanelRows * p.row_words, p.bits2);
            decode(tiles, panel + row * kPanelStride);
        }
        for (int unit = 0; unit < LAYOUT::kUnits; ++unit)
            multiply_panel<LAYOUT, TOKENS>(panel, p.x + block * p.x_block, p.tokens, unit,
                                           sums + unit * LAYOUT::kVectors * LAYOUT::L);
    }
    for (int64_t token = 0; token < p.tokens; ++token)
        LAYOUT::finish(sums + token * width, y + token * kBlock);
}

template <class LAYOUT, class DECODER, int TOKENS>
constexpr Tier make_tier() {
    return Tier{product<LAYOUT, DECODER, TOKENS>,
                panel_product<LAYOUT, DECODER, TOKENS>,
                decode_to_stream<LAYOUT, DECODER>,
                decode_to_bfloat<LAYOUT, DECODER>,
                rotate_row,
                hadamard_block,
                load_block,
                store_block};
}

}  // namespace
}  // namespace exl3
