// The steps around a product in bf16 that a library does (kernels/bfloat_panel.py): where a machine
// has AMX or AVX-512-BF16, that product does several times what fp32 fma can.
// What the steps cost is in benchmarks/results/bfloat_panel.md.
#include <algorithm>
#include <cstring>

#include "threads.h"
#include "tier.h"

namespace exl3 {
namespace {

constexpr int64_t kFinishTokens = 32;  // of a work item: svh and bias are widened once for them

// 128 rows of 128 columns: through 32 KB of scratch, since the columns of a panel lie so far apart
// that their cache lines would share a few sets.
void decode_square(const DecodeArgs& a, const Tier& tier, int64_t row, int64_t column) {
    alignas(64) uint16_t square[kBlock * kBlock];
    const int64_t tile_words = 8 * a.bits2, row_words = a.n / kTile * tile_words;
    const uint16_t* tiles =
        a.trellis + row / kTile * row_words + (a.first + column) / kTile * tile_words;
    for (int64_t tile = 0; tile < kBlockTiles; ++tile)
        prefetch_row(tiles + tile * row_words, a.bits2);
    for (int64_t tile = 0; tile < kBlockTiles; ++tile)
        tier.decode_bfloat(tiles + tile * row_words, a.bits2, a.codebook, square + tile * kTile);
    for (int64_t i = 0; i < kBlock; ++i)
        std::memcpy(a.panel + (column + i) * a.k + row, square + i * kBlock, 2 * kBlock);
}

// One block of 128 columns of kFinishTokens tokens.
void finish_part(const FinishArgs& a, const Tier& tier, int64_t token, int64_t column) {
    const int64_t width = a.dtype == kFloat32 ? 4 : 2, out = a.first + column;
    const int64_t last = std::min(token + kFinishTokens, a.tokens);
    const Finish finish(tier, a.svh, a.bias, a.bias_dtype, out);
    alignas(64) float y[kBlock];
    for (; token < last; ++token) {
        tier.load(a.product + token * a.columns + column, kBFloat16, y);
        finish(y, a.dtype, static_cast<char*>(a.y) + (token * a.n + out) * width);
    }
}

}  // namespace
}  // namespace exl3

EXL3_API void exl3_rotate_bfloat(const exl3::RotateArgs* args) {
    using namespace exl3;
    const RotateArgs& a = *args;
    const Tier& tier = exl3::tier(a.isa);
    const int64_t width = a.dtype == kFloat32 ? 4 : 2;
    parallel_for(a.tokens, a.threads, [&](int64_t token, int) {
        alignas(64) float block[kBlock];
        for (int64_t i = token * a.k, column = 0; column < a.k; i += kBlock, column += kBlock) {
            tier.rotate(static_cast<const char*>(a.x) + i * width, a.dtype, a.suh + column, kBlock,
                        block, 0);
            tier.store(block, kBFloat16, a.out + i);
        }
    });
}

EXL3_API void exl3_decode_bfloat(const exl3::DecodeArgs* args) {
    using namespace exl3;
    const DecodeArgs& a = *args;
    const Tier& tier = exl3::tier(a.isa);
    const int64_t blocks = a.columns / kBlock;
    parallel_for(blocks * (a.k / kBlock), a.threads, [&](int64_t item, int) {
        decode_square(a, tier, item / blocks * kBlock, item % blocks * kBlock);
    });
}

EXL3_API void exl3_finish_bfloat(const exl3::FinishArgs* args) {
    using namespace exl3;
    const FinishArgs& a = *args;
    const Tier& tier = exl3::tier(a.isa);
    const int64_t blocks = a.columns / kBlock;
    const int64_t parts = (a.tokens + kFinishTokens - 1) / kFinishTokens;
    parallel_for(blocks * parts, a.threads, [&](int64_t item, int) {
        finish_part(a, tier, item / blocks * kFinishTokens, item % blocks * kBlock);
    });
}
