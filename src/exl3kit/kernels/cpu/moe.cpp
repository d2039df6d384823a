// Routed experts: rotate the inputs, gate and up with the activation, down, weighted sum; four
// loops over independent items, each of which one thread does alone, so the schedule cannot show in
// the result.
//
// Between gate/up and down the rows stay in the rotated basis of the down projection: the epilogue
// of a column block of 128 applies H128, svh, silu(gate) * up, the down suh and H128 again.
#include <algorithm>
#include <cmath>

#include "route.h"
#include "threads.h"
#include "tier.h"

namespace exl3 {
namespace {

int64_t worker_floats(int64_t rows) {
    return product_scratch(rows) + 2 * token_chunk(rows) * kBlock;
}

struct Matrix {
    const uint16_t* tiles;
    int64_t bits2;
};

struct Moe {
    const MoeArgs& a;
    const Tier& tier;
    const Routes& routes;
    float* rotated[2];  // (hidden/128, rows, 128) inputs of gate and of up; the first is reused by
                        // `outputs`
    float* hidden;      // (inner/128, rows, 128) inputs of down
    float* outputs;     // (rows, hidden) un-weighted outputs of down
    float* scratch;

    int64_t rows() const { return a.tokens * a.top_k; }
    float* scratch_of(int worker) const { return scratch + worker * worker_floats(rows()); }

    // Gate (0), up (1) or down (2) of an expert.
    Matrix matrix_of(int64_t number, int64_t expert) const {
        const uint16_t* trellis = number == 2 ? a.w2_trellis : a.w13_trellis;
        if (a.matrices != nullptr) {
            const int64_t* entry = a.matrices + 2 * (number * a.experts + expert);
            return {trellis + entry[0], entry[1]};
        }
        const int64_t bits2 = number == 2 ? a.bits2_2 : a.bits2_13;
        const int64_t words = a.hidden / kTile * (a.inner / kTile) * 8 * bits2;
        return {trellis + (number % 2 * a.experts + expert) * words, bits2};
    }

    void rotate(int64_t row) const {
        const int64_t width = a.dtype == kFloat32 ? 4 : 2, token = routes.order[row] / a.top_k;
        const char* x = static_cast<const char*>(a.x) + token * a.hidden * width;
        for (int64_t side = 0; side < 2; ++side) {
            const int64_t vector = side * a.suh_rows + routes.experts[row] % a.suh_rows;
            tier.rotate(x, a.dtype, a.w13_suh + vector * a.hidden, a.hidden,
                        rotated[side] + row * kBlock, rows() * kBlock);
        }
    }

    // One block of 128 columns of gate or up for the rows of a chunk, back in the original basis.
    void gate_or_up(int64_t side, const RouteChunk& chunk, int64_t block, float* product,
                    float* y) const {
        const Matrix matrix = matrix_of(side, chunk.expert);
        const int64_t tile_words = 8 * matrix.bits2, row_words = a.inner / kTile * tile_words;
        multiply(tier,
                 {matrix.tiles + block * kBlockTiles * tile_words, row_words, a.hidden,
                  matrix.bits2, a.codebook, rotated[side] + chunk.first * kBlock, rows() * kBlock,
                  chunk.count, product},
                 y);
        alignas(64) float scale[kBlock];
        tier.load(a.w13_svh + (side * a.experts + chunk.expert) * a.inner + block * kBlock,
                  kFloat16, scale);
        for (int64_t row = 0; row < chunk.count; ++row, y += kBlock) {
            tier.hadamard(y);
            for (int i = 0; i < kBlock; ++i) y[i] *= scale[i];
        }
    }

    void gate_up(const RouteChunk& chunk, int64_t block, float* product) const {
        float* gate = product + product_scratch(rows());
        float* up = gate + token_chunk(rows()) * kBlock;
        gate_or_up(0, chunk, block, product, gate);
        gate_or_up(1, chunk, block, product, up);
        for (int64_t i = 0; i < chunk.count * kBlock; ++i)
            gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
        const uint16_t* suh = a.w2_suh + chunk.expert * a.inner + block * kBlock;
        for (int64_t row = 0; row < chunk.count; ++row)
            tier.rotate(gate + row * kBlock, kFloat32, suh, kBlock,
                        hidden + (block * rows() + chunk.first + row) * kBlock, 0);
    }

    void down(const RouteChunk& chunk, int64_t block, float* product) const {
        const Matrix matrix = matrix_of(2, chunk.expert);
        const int64_t tile_words = 8 * matrix.bits2, row_words = a.hidden / kTile * tile_words;
        float* y = product + product_scratch(rows());
        multiply(tier,
                 {matrix.tiles + block * kBlockTiles * tile_words, row_words, a.inner,
                  matrix.bits2, a.codebook, hidden + chunk.first * kBlock, rows() * kBlock,
                  chunk.count, product},
                 y);
        alignas(64) float scale[kBlock];
        tier.load(a.w2_svh + chunk.expert % a.svh_rows * a.hidden + block * kBlock, kFloat16,
                  scale);
        for (int64_t row = 0; row < chunk.count; ++row, y += kBlock) {
            tier.hadamard(y);
            float* out = outputs + (chunk.first + row) * a.hidden + block * kBlock;
            for (int i = 0; i < kBlock; ++i) out[i] = y[i] * scale[i];
        }
    }

    // The weighted sum over the slots of a token, in slot order, rounded once.
    void combine(int64_t token) const {
        const int64_t width = a.dtype == kFloat32 ? 4 : 2;
        for (int64_t column = 0; column < a.hidden; column += kBlock) {
            alignas(64) float sum[kBlock] = {};
            for (int64_t route = token * a.top_k; route < (token + 1) * a.top_k; ++route) {
                if (routes.position[route] < 0) continue;
                const float* row = outputs + routes.position[route] * a.hidden + column;
                for (int i = 0; i < kBlock; ++i) sum[i] += a.topk_weights[route] * row[i];
            }
            tier.store(sum, a.dtype,
                       static_cast<char*>(a.y) + (token * a.hidden + column) * width);
        }
    }
};

}  // namespace
}  // namespace exl3

EXL3_API int64_t exl3_moe_workspace(int64_t tokens, int64_t top_k, int64_t hidden, int64_t inner,
                                    int64_t threads) {
    const int64_t rows = tokens * top_k;
    return rows * (2 * hidden + inner) + threads * exl3::worker_floats(rows);
}

EXL3_API int exl3_moe(const exl3::MoeArgs* args) {
    using namespace exl3;
    const MoeArgs& a = *args;
    Routes routes;
    if (!pack_routes(a, routes)) return 1;
    const int64_t rows = a.tokens * a.top_k, chunks = routes.chunks.size();
    float* w = a.workspace;
    const Moe moe{a,
                  tier(a.isa),
                  routes,
                  {w, w + rows * a.hidden},
                  w + 2 * rows * a.hidden,
                  w,
                  w + rows * (2 * a.hidden + a.inner)};
    parallel_for(routes.order.size(), a.threads, [&](int64_t row, int) { moe.rotate(row); });
    parallel_for(chunks * (a.inner / kBlock), a.threads, [&](int64_t item, int worker) {
        moe.gate_up(routes.chunks[item % chunks], item / chunks, moe.scratch_of(worker));
    });
    parallel_for(chunks * (a.hidden / kBlock), a.threads, [&](int64_t item, int worker) {
        moe.down(routes.chunks[item % chunks], item / chunks, moe.scratch_of(worker));
    });
    parallel_for(a.tokens, a.threads, [&](int64_t token, int) { moe.combine(token); });
    return 0;
}
