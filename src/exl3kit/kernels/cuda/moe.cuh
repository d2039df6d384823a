// Routed experts for a few tokens: sum over slots of weight * down(silu(gate(x)) * up(x)).
//
// Five kernels: route (rotates the input of every route too), product of gate and up, activate,
// product of down, combine. Rows of blocks that no route fills are computed from another row and
// never stored. K is cut by the shapes alone and all sums have a fixed order, so a token's result
// does not depend on the tokens beside it. Offsets that scale an expert or a route are 64-bit.
#pragma once

#include "partial.cuh"
#include "product.cuh"
#include "rotate.cuh"
#include "route.cuh"

namespace exl3 {

constexpr int kMaxRoutes = 4096;  // of one launch

// Rotated inputs of a route: `rotated` (2, routes, hidden) with suh (2, experts, hidden), or, if
// one suh (hidden) serves all experts, (tokens, hidden); firsts likewise, for blocks of 128. Grid
// (routes, parts of hidden).
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
moe_route(const void* x, const void* ids, const float* weights, const void* map, const __half* suh,
          int* blocks, __half2* rotated, float* firsts, int routes, int top_k, int hidden,
          int experts, int map_size, int wide_ids, int wide_map, int is_shared, int dtype) {
    release_successor();
    wait_for_predecessor();
    __shared__ uint32_t matches[kMaxRoutes / 32];
    const Routing routing{ids,     weights,       map,          routes, map_size,
                          experts, wide_ids != 0, wide_map != 0};
    const int route = blockIdx.x, token = route / top_k;
    const Blocks table{blocks, blocks + routes, blocks + 2 * routes, blocks + 3 * routes};
    const int block = blockIdx.y * kWarps + threadIdx.x / 32, i = block * 32 + threadIdx.x % 32;
    const bool is_inside = block < hidden / kBlock;
    float v[4];
    if (is_inside) load_four(v, x, static_cast<int64_t>(token) * (hidden / 4) + i, dtype);
    const int expert = place_route(routing, table, matches, route, blockIdx.y == 0);
    if (!is_inside || (is_shared ? route % top_k != 0 : expert < 0)) return;
    if (is_shared) {
        const int64_t start = static_cast<int64_t>(token) * hidden;
        rotate_in(rotated + start, firsts + start / kBlock, v, suh, i);
        return;
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        float copy[4] = {v[0], v[1], v[2], v[3]};
        const int64_t row = static_cast<int64_t>(side) * routes + route;
        const int64_t source = static_cast<int64_t>(side) * experts + expert;
        const int64_t start = row * hidden;
        rotate_in(rotated + start, firsts + start / kBlock, copy, suh + source * hidden, i);
    }
}

// Products of one block of routes with `items` neighbouring strips of its expert's matrix. `sides`
// matrices (k, n) lie behind one another, each of all experts; items divides n / 128. Input row of
// a route: side * side_rows + route / share. Grid (splits, sides * n / 128 / items, routes) ->
// partial (splits, routes, sides * n).
template <int kBits2, Codebook kCodebook>
__global__ void __launch_bounds__(Shape<kBits2, 1, 8>::kThreads, Shape<kBits2, 1, 8>::kBlocks)
moe_product(const uint32_t* trellis, const int* blocks, const uint4* rotated, float* partial,
            int routes, int k, int n, int sides, int experts, int side_rows, int share, int items) {
    using Layout = Shape<kBits2, 1, 8>;  // strips of 128
    extern __shared__ __align__(16) char shared[];  // kRings and kSums bytes of Layout
    release_successor();
    // The table comes from moe_route: right before gate and up, but three kernels before down,
    // which starts only when moe_activate has seen the product of gate and up complete.
    if (sides == 2) wait_for_predecessor();
    const int leader = blockIdx.z, expert = blocks[routes + leader];
    if (expert < 0) {
        // Some block waits even where no route is here: a grid that ends says that all before it
        // have ended, which the kernels after it rely on when they write to the scratch.
        if (leader == 0) wait_for_predecessor();
        return;
    }
    const int rows = blocks[2 * routes + leader];
    const int* members = blocks + 3 * routes + kBlockRows * leader;
    const int strips = n / kBlock, side = blockIdx.y * items / strips;
    const Slice slice = slice_of<Layout>(k / kTile);
    const int lane = threadIdx.x % 32, row = lane / 4 < rows ? lane / 4 : 0;
    const int64_t source = static_cast<int64_t>(side) * side_rows + members[row] / share;
    const uint4* x[1] = {rotated + (source * k + slice.first * kTile) / 4 + lane % 4};
    const int64_t matrix = static_cast<int64_t>(side) * experts + expert, n_tiles = n / kTile;
    const int64_t tile = (matrix * (k / kTile) + slice.first) * n_tiles +
                         (blockIdx.y * items - side * strips) * Layout::kTiles;
    const Work work{trellis + tile * Trellis<kBits2>::kDwords, n_tiles * Layout::Row::kTileBytes,
                    Layout::kTiles * Layout::Row::kTileBytes, slice.count, items};
    const int64_t width = static_cast<int64_t>(sides) * n;
    float* out = partial + blockIdx.x * routes * width + blockIdx.y * items * kBlock;
    multiply<kBits2, kCodebook, Layout::kTiles, 1, true>(
        shared + threadIdx.x / 32 * Layout::Row::kRing, work, x,
        [&](int item, const typename Layout::Sums& sum) {
            store_partial<Layout>(
                sum, shared + Layout::kRings, weight_scale(kCodebook), [&](int r) {
                    return r < rows ? out + members[r] * width + item * kBlock : nullptr;
                });
        });
}

// H128(silu(gate) * up * suh of down) in slot order, from the partial sums of gate and up. One warp
// for each route and strip of inner. side_rows and share as in moe_product.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 12)
moe_activate(const float* partial, const float* firsts13, const int* blocks, const __half* svh,
             const __half* suh, __half2* rotated, float* firsts2, int routes, int hidden, int inner,
             int experts, int splits, int codebook, int side_rows, int share) {
    wait_for_predecessor();
    release_successor();  // only now: moe_product of down reads the table before it waits
    const int strip = blockIdx.y * kWarps + threadIdx.x / 32, route = blockIdx.x;
    const int64_t expert = blocks[route], width = 2 * static_cast<int64_t>(inner);
    if (strip >= inner / kBlock || expert < 0) return;
    const int i = strip * 32 + threadIdx.x % 32;
    const int h_blocks = hidden / kBlock;
    Product product{partial + route * width, routes * width, splits,
                    firsts13 + static_cast<int64_t>(route / share) * h_blocks, h_blocks, codebook};
    float gate[4], up[4];
    rotate_out(gate, product, svh + expert * inner, i);
    product.partial += inner;
    product.firsts += static_cast<int64_t>(side_rows) * h_blocks;
    rotate_out(up, product, svh + (experts + expert) * inner, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) gate[j] = __fdividef(gate[j], 1.0f + __expf(-gate[j])) * up[j];
    const int64_t start = static_cast<int64_t>(route) * inner;
    rotate_in(rotated + start, firsts2 + start / kBlock, gate, suh + expert * inner, i);
}

// y = sum over slots of weight * H128(down) * svh. One block for each token and strip, its warps
// take slots in turn.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
moe_combine(const float* partial, const float* firsts, const int* blocks, const float* weights,
            const __half* svh, void* y, int routes, int top_k, int hidden, int inner, int splits,
            int codebook, int dtype) {
    release_successor();
    wait_for_predecessor();
    __shared__ float sums[kWarps][kBlock];
    const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int i = blockIdx.y * 32 + lane;
    float total[4] = {};
    for (int slot = warp; slot < top_k; slot += kWarps) {
        const int64_t route = static_cast<int64_t>(token) * top_k + slot, expert = blocks[route];
        if (expert < 0) continue;
        float v[4];
        const int64_t stride = static_cast<int64_t>(routes) * hidden;
        const int s_blocks = inner / kBlock;
        const Product product{partial + route * hidden,  stride,   splits,
                              firsts + route * s_blocks, s_blocks, codebook};
        rotate_out(v, product, svh + expert * hidden, i);
#pragma unroll
        for (int j = 0; j < 4; ++j) total[j] += weights[route] * v[j];
    }
    *reinterpret_cast<float4*>(&sums[warp][4 * lane]) =
        make_float4(total[0], total[1], total[2], total[3]);
    __syncthreads();
    if (warp != 0) return;
#pragma unroll
    for (int other = 1; other < kWarps; ++other)
#pragma unroll
        for (int j = 0; j < 4; ++j) total[j] += sums[other][4 * lane + j];
    store_four(y, static_cast<int64_t>(token) * (hidden / 4) + i, dtype, total);
}

}  // namespace exl3
