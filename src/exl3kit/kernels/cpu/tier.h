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
    const float* x;  // (tokens, k) rotated rows in tile order, see Tier::rotate
    int64_t tokens;  // at most kTokenChunk
    float* scratch;  // product_scratch(tokens) floats
};

// Tokens that share one decode. Decoding costs about as much as the products of 7 tokens, so a
// chunk of 128 pays 5 % for it, and its accumulators (256 KB at most) stay in the second-level
// cache.
constexpr int64_t kTokenChunk = 128;
// Rows of 8 tiles decoded before they are multiplied: 16 KB of floats, in the first-level cache.
constexpr int64_t kStripRows = 2;
constexpr int64_t kStripFloats = kStripRows * kBlockTiles * kTileWeights;
constexpr int64_t kMaxAccumulators = 512;  // floats a token, largest of the tiers

constexpr int64_t token_chunk(int64_t tokens) {
    return tokens < kTokenChunk ? tokens : kTokenChunk;
}
constexpr int64_t product_scratch(int64_t tokens) {
    return kStripFloats + token_chunk(tokens) * kMaxAccumulators;
}

struct Tier {
    // y (tokens, 128) = x What, fp32 sums whose order depends on neither `tokens` nor the thread.
    void (*product)(const Product& product, float* y);
    // Eight tiles -> (8, 256) values in stream order, through the decoder that `product` uses.
    void (*decode_strip)(const uint16_t* tiles, int64_t bits2, int64_t codebook, float* values);
    // out = H128(x * suh) for one row of k, 128 values at a time. `out` is in tile order: within 16
    // rows position 4 l + w holds row 2 l + (w & 1) + 8 (w >> 1), the order in which a tile stores
    // them.
    void (*rotate)(const void* x, int64_t dtype, const uint16_t* suh, int64_t k, float* out);
    void (*hadamard)(float* block);  // H128 in place
    void (*load)(const void* values, int64_t dtype, int64_t count, float* out);
    void (*store)(const float* values, int64_t dtype, int64_t count, void* out);  // one rounding
};

extern const Tier kTierPortable, kTierAvx2, kTierAvx512, kTierAvx512Fp16;

// The table of a tier that exl3_cpu_isa_max() allows.
const Tier& tier(int64_t isa);

}  // namespace exl3
