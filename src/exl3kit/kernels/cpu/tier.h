// What every instruction-set tier provides. linear.cpp and moe.cpp are written against this table.
#pragma once

#include "exl3_cpu.h"

namespace exl3 {

// The product of some rows with one block of 128 columns, in the rotated basis.
struct Product {
    const uint16_t* trellis;  // tile (0, first tile of the block)
    int64_t row_words;        // words from one row of tiles to the next
    int64_t k;                // rows of the matrix
    int64_t bits2, codebook;
    const float* x;   // rotated rows, (k/128, rows, 128), see Tier::rotate; at the first of `tokens`
    int64_t x_block;  // floats from a block of 128 values to the next: 128 * rows
    int64_t tokens;   // at most kTokenChunk
    float* scratch;   // product_scratch(tokens) floats
};

// Tokens that share one decode. Decoding costs about as much as the products of 7 tokens, so a
// chunk of 512 pays 1.4 % for it, and its accumulators (1 MB at most, read and written once a
// panel) stay in the second-level cache.
constexpr int64_t kTokenChunk = 512;
// Tokens from which a chunk is multiplied in panels, see panel_product.h.
constexpr int64_t kPanelFrom = 32;
// Rows of 8 tiles decoded before they are multiplied: 16 KB of floats, in the first-level cache.
constexpr int64_t kStripRows = 2;
constexpr int64_t kStripFloats = kStripRows * kBlockTiles * kTileWeights;
// The same of a panel: one Hadamard block.
constexpr int64_t kPanelRows = kBlockTiles;
constexpr int64_t kPanelFloats = kPanelRows * (kBlockTiles + 1) * kTileWeights;
constexpr int64_t kMaxAccumulators = 512;  // floats a token, largest of the tiers

constexpr int64_t token_chunk(int64_t tokens) {
    return tokens < kTokenChunk ? tokens : kTokenChunk;
}
constexpr int64_t product_scratch(int64_t tokens) {
    return (tokens < kPanelFrom ? kStripFloats : kPanelFloats) +
           token_chunk(tokens) * kMaxAccumulators;
}

namespace {

// One row of eight tiles. Rows are a page or more apart, where the hardware does not look ahead.
inline void prefetch_row(const uint16_t* tiles, int64_t bits2) {
    const char* bytes = reinterpret_cast<const char*>(tiles);
    for (int64_t line = 0; line < kBlockTiles * 16 * bits2; line += 64)
        __builtin_prefetch(bytes + line);
}

}  // namespace

struct Tier {
    // y (tokens, 128) = x What, fp32 sums whose order depends on neither `tokens` nor the thread.
    void (*product)(const Product& product, float* y);        // fewer tokens than kPanelFrom
    void (*panel_product)(const Product& product, float* y);  // the same bits, sooner for many
    // Eight tiles -> (8, 256) values in stream order, through the decoder that `product` uses.
    void (*decode_strip)(const uint16_t* tiles, int64_t bits2, int64_t codebook, float* values);
    // The same rounded to bf16, to nearest even: 16 rows, in the order of `rotate`, of column c of
    // the 128 at out + c * kBlock.
    void (*decode_bfloat)(const uint16_t* tiles, int64_t bits2, int64_t codebook, uint16_t* out);
    // out = H128(x * suh) for one row of k, 128 values at a time, which lie out_block floats apart.
    // Within 16 rows position 4 l + w holds row 2 l + (w & 1) + 8 (w >> 1), the order in which a
    // tile stores them.
    void (*rotate)(const void* x, int64_t dtype, const uint16_t* suh, int64_t k, float* out,
                   int64_t out_block);
    void (*hadamard)(float* block);  // H128 in place
    // Of kBlock values; `store` rounds once.
    void (*load)(const void* values, int64_t dtype, float* out);
    void (*store)(const float* values, int64_t dtype, void* out);
};

extern const Tier kTierPortable, kTierAvx2, kTierAvx512, kTierAvx512Fp16;

inline void multiply(const Tier& tier, const Product& p, float* y) {
    (p.tokens < kPanelFrom ? tier.product : tier.panel_product)(p, y);
}

namespace {

// Back to the original basis, for one block of 128 columns.
struct Finish {
    const Tier& tier;
    alignas(64) float scale[kBlock], bias[kBlock] = {};

    // svh and bias (or null) of a whole matrix.
    Finish(const Tier& tier, const uint16_t* svh, const void* bias_of_all, int64_t bias_dtype,
           int64_t column)
        : tier(tier) {
        const int64_t width = bias_dtype == kFloat32 ? 4 : 2;
        tier.load(svh + column, kFloat16, scale);
        if (bias_of_all != nullptr)
            tier.load(static_cast<const char*>(bias_of_all) + column * width, bias_dtype, bias);
    }

    // out = H128(y) * scale + bias, rounded once; y is overwritten.
    void operator()(float* y, int64_t dtype, void* out) const {
        tier.hadamard(y);
        for (int i = 0; i < kBlock; ++i) y[i] = y[i] * scale[i] + bias[i];
        tier.store(y, dtype, out);
    }
};

}  // namespace

// The table of a tier that exl3_cpu_isa_max() allows.
const Tier& tier(int64_t isa);

}  // namespace exl3
