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

// Rotated inputs of a route: `rotated` (2, routes, hidden) with suh (2, experts, hidden), or, if one
// suh (hidden) serves all experts, (tokens, hidden). Grid (routes, parts of hidden).
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
moe_route(const void* x, const void* ids, const float* weights, const void* map, const __half* suh,
          int* blocks, __half2* rotated, int routes, int top_k, int hidden, int experts,
          int map_size, int wide_ids, int wide_map, int is_shared, int dtype) {
    release_successor();
    wait_for_predecessor();
    __shared__ uint32_t matches[kMaxRoutes / 32];
    const Routing routing{ids, weights, map, routes, map_size, experts, wide_ids != 0, wide_map != 0};
    const int route = blockIdx.x, token = route / top_k;
    const Blocks table{blocks, blocks + routes, blocks + 2 * routes, blocks + 3 * routes};
    const int expert = place_route(routing, table, matches, route, blockIdx.y == 0);
    const int block = blockIdx.y * kWarps + threadIdx.x / 32, i = block * 32 + threadIdx.x % 32;
    if (block >= hidden / kBlock) return;
    if (is_shared ? route % top_k != 0 : expert < 0) return;
    float v[4];
    load_four(v, x, static_cast<int64_t>(token) * (hidden / 4) + i, dtype);
    if (is_shared) {
        rotate_in(rotated + static_cast<int64_t>(token) * hidden, v, suh, i);
        return;
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        float copy[4] = {v[0], v[1], v[2], v[3]};
        const int64_t row = static_cast<int64_t>(side) * routes + route;
        const int64_t source = static_cast<int64_t>(side) * experts + expert;
        rotate_in(rotated + row * hidden, copy, suh + source * hidden, i);
    }
}

// Product of one block of routes with one strip of its expert's matrix. `sides` matrices (k, n) lie
// behind one another, each of all experts. Input row of a route: side * side_rows + route / share.
// Grid (splits, sides * n / 128, routes) -> partial (splits, routes, sides * n).
template <int kBits2, Codebook kCodebook>
__global__ void __launch_bounds__(Shape<kBits2, 1>::kThreads, Shape<kBits2, 1>::kBlocks)
moe_product(const uint32_t* trellis, const int* blocks, const uint4* rotated, float* partial,
            int routes, int k, int n, int sides, int experts, int side_rows, int share) {
    using Layout = Shape<kBits2, 1>;
    extern __shared__ __align__(16) char shared[];  // Layout::kSharedBytes
    release_successor();
    // The table comes from moe_route: right before gate and up, but three kernels before down, which
    // starts only when moe_activate has seen the product of gate and up complete.
    if (sides == 2) wait_for_predecessor();
    const int leader = blockIdx.z, expert = blocks[routes + leader];
    if (expert < 0) return;
    const int rows = blocks[2 * routes + leader];
    const int* members = blocks + 3 * routes + kBlockRows * leader;
    const int strips = n / kBlock, side = blockIdx.y / strips, strip = blockIdx.y % strips;
    const Slice slice = slice_of<Layout>(k / kTile);
    const int lane = threadIdx.x % 32, row = lane / 4 < rows ? lane / 4 : 0;
    const int64_t source = static_cast<int64_t>(side) * side_rows + members[row] / share;
    const uint4* x[1] = {rotated + (source * k + slice.first * kTile) / 4 + lane % 4};
    const int64_t matrix = static_cast<int64_t>(side) * experts + expert, n_tiles = n / kTile;
    const int64_t tile = (matrix * (k / kTile) + slice.first) * n_tiles + strip * Layout::kTiles;
    float sum[Layout::kTiles][1][4] = {};
    multiply_rows<kBits2, kCodebook>(sum, shared + threadIdx.x / 32 * Layout::Row::kRing,
                                     trellis + tile * Trellis<kBits2>::kDwords,
                                     n_tiles * Layout::Row::kTileBytes, x, slice.count);
    const int64_t width = static_cast<int64_t>(sides) * n;
    float* out = partial + blockIdx.x * routes * width + blockIdx.y * kBlock;
    store_partial<Layout>(sum, shared, weight_scale<kCodebook>(), [&](int r) {
        return r < rows ? out + members[r] * width : nullptr;
    });
}

// H128(silu(gate) * up * suh of down) in slot order, from the partial sums of gate and up. One warp
// for each route and strip of inner.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
moe_activate(const float* partial, const int* blocks, const __half* svh, const __half* suh,
             __half2* rotated, int routes, int inner, int experts, int splits) {
    wait_for_predecessor();
    release_successor();  // only now: moe_product of down reads the table before it waits
    const int strip = blockIdx.y * kWarps + threadIdx.x / 32, route = blockIdx.x;
    const int64_t expert = blocks[route], width = 2 * static_cast<int64_t>(inner);
    if (strip >= inner / kBlock || expert < 0) return;
    const int i = strip * 32 + threadIdx.x % 32;
    const float* row = partial + route * width;
    float gate[4], up[4];
    rotate_out(gate, row, routes * width, splits, svh + expert * inner, i);
    rotate_out(up, row + inner, routes * width, splits, svh + (experts + expert) * inner, i);
#pragma unroll
    for (int j = 0; j < 4; ++j) gate[j] = __fdividef(gate[j], 1.0f + __expf(-gate[j])) * up[j];
    rotate_in(rotated + static_cast<int64_t>(route) * inner, gate, suh + expert * inner, i);
}

// y = sum over slots of weight * H128(down) * svh. One block for each token and strip, its warps
// take slots in turn.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
moe_combine(const float* partial, const int* blocks, const float* weights, const __half* svh,
            void* y, int routes, int top_k, int hidden, int splits, int dtype) {
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
        rotate_out(v, partial + route * hidden, stride, splits, svh + expert * hidden, i);
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
