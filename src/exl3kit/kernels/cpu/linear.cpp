// One linear: y = H128(H128(x * suh) What) * svh + bias, in two loops over independent items.
#include <algorithm>

#include "threads.h"
#include "tier.h"

namespace exl3 {
namespace {

int64_t worker_floats(int64_t tokens) {
    return product_scratch(tokens) + token_chunk(tokens) * kBlock;
}

// Tokens of a work item: shorter chunks where a narrow matrix would leave threads without one.
int64_t chunk_tokens(const LinearArgs& a) {
    int64_t chunk = token_chunk(a.tokens);
    while (chunk > 2 * kPanelFrom && a.n / kBlock * (a.tokens / chunk) < a.threads) chunk /= 2;
    return chunk;
}

// One block of 128 columns for `tokens` rows from `first` on.
void column_block(const LinearArgs& a, const Tier& tier, const float* rotated, int64_t block,
                  int64_t first, int64_t tokens, float* scratch) {
    const int64_t column = block * kBlock, width = a.dtype == kFloat32 ? 4 : 2;
    float* y = scratch + product_scratch(a.tokens);
    multiply(tier,
             {a.trellis + block * kBlockTiles * 8 * a.bits2, a.n / kTile * 8 * a.bits2, a.k,
              a.bits2, a.codebook, rotated + first * kBlock, a.tokens * kBlock, tokens, scratch},
             y);
    const Finish finish(tier, a.svh, a.bias, a.bias_dtype, column);
    for (int64_t token = 0; token < tokens; ++token, y += kBlock)
        finish(y, a.dtype, static_cast<char*>(a.y) + ((first + token) * a.n + column) * width);
}

}  // namespace
}  // namespace exl3

EXL3_API int64_t exl3_linear_workspace(int64_t tokens, int64_t k, int64_t threads) {
    return tokens * k + threads * exl3::worker_floats(tokens);
}

EXL3_API void exl3_linear(const exl3::LinearArgs* args) {
    using namespace exl3;
    const LinearArgs& a = *args;
    const Tier& tier = exl3::tier(a.isa);
    const int64_t width = a.dtype == kFloat32 ? 4 : 2, blocks = a.n / kBlock;
    const int64_t chunk = chunk_tokens(a), chunks = (a.tokens + chunk - 1) / chunk;
    float* rotated = a.workspace;
    float* scratch = rotated + a.tokens * a.k;
    parallel_for(a.tokens, a.threads, [&](int64_t token, int) {
        tier.rotate(static_cast<const char*>(a.x) + token * a.k * width, a.dtype, a.suh, a.k,
                    rotated + token * kBlock, a.tokens * kBlock);
    });
    parallel_for(blocks * chunks, a.threads, [&](int64_t item, int worker) {
        const int64_t first = item / blocks * chunk;
        column_block(a, tier, rotated, item % blocks, first, std::min(chunk, a.tokens - first),
                     scratch + worker * worker_floats(a.tokens));
    });
}
