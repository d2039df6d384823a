// Routed experts for a few tokens: sum over slots of weight * down(silu(gate(x)) * up(x)).
//
// Five kernels: route (rotates the inputs too), product of gate and up, activate, product of down,
// combine. Rows of blocks that no route fills are computed from another row and never stored. K is
// cut by the shapes alone and all sums have a fixed order, so a token's result does not depend on the
// tokens beside it. Experts may differ in rate, and gate from up. Offsets that scale an expert or a
// route are 64-bit.
#pragma once

#include "partial.cuh"
#include "product.cuh"
#include "rotate.cuh"
#include "route.cuh"

namespace exl3 {

// Rows of rotated inputs. Where `vectors` input vectors serve all experts (expert e has number
// e % vectors), gate has one for each token and vector, else (0) one for each route; up's lie behind.
struct Inputs {
    int top_k, vectors;

    EXL3_DEVICE int row(int route, int expert) const {
        return vectors == 0 ? route : route / top_k * vectors + expert % vectors;
    }
};

// Rotated inputs: `rotated` (2, rows of Inputs, hidden) with suh (2, suh_rows, hidden), expert e having
// row e % suh_rows; firsts likewise, for blocks of 128. Grid (routes, parts of hidden).
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
moe_route(const void* x, const void* ids, const float* weights, const void* map, const __half* suh,
          int* blocks, __half2* rotated, float* firsts, int routes, int top_k, int hidden,
          int experts, int map_size, int wide_ids, int wide_map, int suh_rows, int vectors,
          int dtype) {
    release_successor();
    wait_for_predecessor();
    __shared__ uint32_t matches[kMaxRoutes / 32];
    const Routing routing{ids,     weights,       map,          routes, map_size,
                          experts, wide_ids != 0, wide_map != 0};
    const int route = blockIdx.x, token = route / top_k, slot = route % top_k;
    const Blocks table{blocks, blocks + routes, blocks + 2 * routes, blocks + 3 * routes};
    const int block = blockIdx.y * kWarps + threadIdx.x / 32, i = block * 32 + threadIdx.x % 32;
    const bool is_inside = block < hidden / kBlock;
    float v[4];
    if (is_inside) load_four(v, x, static_cast<int64_t>(token) * (hidden / 4) + i, dtype);
    const int expert = place_route(routing, table, matches, route, blockIdx.y == 0);
    // A token's first routes make the rows that its routes share.
    const bool is_maker = vectors == 0 ? expert >= 0 : slot < vectors;
    if (!is_inside || !is_maker) return;
    const Inputs inputs{top_k, vectors};
    const int vector = vectors == 0 ? expert % suh_rows : slot;
    const int64_t row = inputs.row(route, vector);
    const int64_t rows = vectors == 0 ? routes : routes / top_k * vectors;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        float copy[4] = {v[0], v[1], v[2], v[3]};
        const int64_t source = static_cast<int64_t>(side) * suh_rows + vector;
        const int64_t start = (side * rows + row) * hidden;
        rotate_in(rotated + start, firsts + start / kBlock, copy, suh + source * hidden, i);
    }
}

// Sizes of a product launch: `sides` matrices (k, n) of each of `experts`, K in `splits` parts.
struct ProductSizes {
    int routes, k, n, sides, experts, splits;
};

// A part of the work of a block of threads: `items` neighbouring columns of strips (kStrips strips each)
// of one matrix, for one block of routes and one split of K.
struct Run {
    int leader, side, split, first, items;

    // Work is numbered leader by leader, in each side by side, split by split, column by column.
    EXL3_DEVICE Run(const ProductSizes& sizes, const uint32_t* leaders, int columns, int unit,
                    int end) {
        const int run = unit / columns, parts = sizes.sides * sizes.splits, part = run % parts;
        leader = find_bit(leaders, run / parts);
        side = part / sizes.splits;
        split = part % sizes.splits;
        first = unit % columns;
        items = min(columns - first, end - unit);
    }
};

// Where a matrix lies, from its entry in `matrices` (start in int16, twice the bits), or among matrices
// of one rate where there are no entries.
struct Matrix {
    const uint16_t* tiles;
    int bits2;
};

template <int kUniformBits2>
EXL3_DEVICE Matrix find_matrix(const uint16_t* trellis, const longlong2* matrices,
                               int64_t number, int64_t tiles) {
    if constexpr (kUniformBits2 != 0) {
        return {trellis + number * tiles * (2 * Trellis<kUniformBits2>::kDwords), kUniformBits2};
    } else {
        const longlong2 entry = matrices[number];
        return {trellis + entry.x, static_cast<int>(entry.y)};
    }
}

// One run at the rate of its matrix; this thread's warp takes one of the strips of each column.
template <int kBits2, Codebook kCodebook, int kSlices>
EXL3_DEVICE void run_product(const ProductSizes& sizes, const Run& run, const uint16_t* tiles,
                             const int* blocks, const uint4* rotated, float* partial,
                             const Inputs& inputs, int side_rows, char* shared, int ring_bytes) {
    using Layout = Shape<kBits2, 1, 8, kSlices>;  // strips of 128
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, strips = sizes.n / kBlock;
    const int strip = run.first * Layout::kStrips + warp / kSlices;
    const int items = min(run.items, (strips - strip + Layout::kStrips - 1) / Layout::kStrips);
    if (items <= 0) return;
    const int rows = blocks[2 * sizes.routes + run.leader];
    const int member = blocks[3 * sizes.routes + kBlockRows * run.leader + min(lane / 4, rows - 1)];
    const Slice slice = slice_of<Layout>(sizes.k / kTile, run.split, sizes.splits);
    const int64_t source = static_cast<int64_t>(run.side) * side_rows +
                           inputs.row(member, blocks[sizes.routes + run.leader]);
    const uint4* x[1] = {rotated + (source * sizes.k + slice.first * kTile) / 4 + lane % 4};
    const int64_t n_tiles = sizes.n / kTile;
    const int64_t tile = slice.first * n_tiles + strip * Layout::kTiles;
    constexpr int kStripBytes = Layout::kTiles * Layout::Row::kTileBytes;
    const Work work{tiles + tile * (Layout::Row::kTileBytes / 2), n_tiles * Layout::Row::kTileBytes,
                    Layout::kStrips * kStripBytes, slice.count, items};
    const int64_t width = static_cast<int64_t>(sizes.sides) * sizes.n;
    float* out = partial + run.split * sizes.routes * width + run.side * sizes.n + strip * kBlock;
    multiply<kBits2, kCodebook, Layout::kTiles, 1, true>(
        shared + Layout::kSums + warp * ring_bytes, work, x,
        [&](int item, const typename Layout::Sums& sum) {
            store_partial<Layout>(sum, shared, weight_scale(kCodebook), [&](int r) {
                const int64_t route = __shfl_sync(0xFFFFFFFFu, member, 4 * r);
                return r < rows ? out + route * width + item * Layout::kStrips * kBlock : nullptr;
            });
        });
}

template <int kBits2, int... kMore>
struct Rates {
    static constexpr int kUniform = sizeof...(kMore) == 0 ? kBits2 : 0;
    static constexpr int kBlocks =
        Shape<kBits2, 1, 8>::kBlocks < Rates<kMore...>::kBlocks ? Shape<kBits2, 1, 8>::kBlocks
                                                               : Rates<kMore...>::kBlocks;
};
template <int kBits2>
struct Rates<kBits2> {
    static constexpr int kUniform = kBits2, kBlocks = Shape<kBits2, 1, 8>::kBlocks;
};

// Products of all blocks of routes with their experts' matrices, shared out evenly among the blocks of
// threads. kRates are the rates (twice the bits) that matrices may have; with one, `matrices` is not
// read. Dynamic shared memory: Shape::kSums bytes, then `ring_bytes` for each warp. partial
// (splits, routes, sides * n).
template <Codebook kCodebook, int kSlices, int... kRates>
__global__ void __launch_bounds__(256, Rates<kRates...>::kBlocks)
moe_product(const uint16_t* trellis, const longlong2* matrices, const int* blocks,
            const uint4* rotated, float* partial, int routes, int k, int n, int sides, int experts,
            int splits, int side_rows, int top_k, int vectors, int ring_bytes) {
    extern __shared__ __align__(16) char shared[];
    __shared__ uint32_t leaders[kMaxRoutes / 32];
    release_successor();
    // The table of blocks comes from moe_route: right before gate and up, but three kernels before
    // down, which starts only when moe_activate has seen the product of gate and up complete.
    if (sides == 2) wait_for_predecessor();
    const ProductSizes sizes{routes, k, n, sides, experts, splits};
    const Inputs inputs{top_k, vectors};
    constexpr int kStrips = 8 / kSlices;
    const int columns = (n / kBlock + kStrips - 1) / kStrips;
    const int64_t units = static_cast<int64_t>(find_leaders(blocks + routes, leaders, routes)) *
                          sides * splits * columns;
    int unit = static_cast<int>(units * blockIdx.x / gridDim.x);
    const int end = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
    // Also where there is no work: a grid that ends says that all before it have ended, which the
    // kernels after it rely on when they write to the scratch.
    if (unit == end) wait_for_predecessor();
    while (unit < end) {
        const Run run(sizes, leaders, columns, unit, end);
        const int64_t number = static_cast<int64_t>(run.side) * experts + blocks[routes + run.leader];
        const Matrix matrix = find_matrix<Rates<kRates...>::kUniform>(
            trellis, matrices, number, static_cast<int64_t>(k / kTile) * (n / kTile));
        ((matrix.bits2 == kRates
              ? run_product<kRates, kCodebook, kSlices>(sizes, run, matrix.tiles, blocks, rotated,
                                                        partial, inputs, side_rows, shared,
                                                        ring_bytes)
              : void()),
         ...);
        unit += run.items;
    }
}

// H128(silu(gate) * up * suh of down) in slot order, from the partial sums of gate and up. One warp
// for each route and strip of inner.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 12)
moe_activate(const float* partial, const float* firsts13, const int* blocks, const __half* svh,
             const __half* suh, __half2* rotated, float* firsts2, int routes, int hidden, int inner,
             int experts, int splits, int codebook, int side_rows, int top_k, int vectors) {
    wait_for_predecessor();
    release_successor();  // only now: moe_product of down reads the table before it waits
    const int strip = blockIdx.y * kWarps + threadIdx.x / 32, route = blockIdx.x;
    const int64_t expert = blocks[route], width = 2 * static_cast<int64_t>(inner);
    if (strip >= inner / kBlock || expert < 0) return;
    const int i = strip * 32 + threadIdx.x % 32;
    const int h_blocks = hidden / kBlock;
    const int64_t row = Inputs{top_k, vectors}.row(route, static_cast<int>(expert));
    Product product{partial + route * width, routes * width, splits, firsts13 + row * h_blocks,
                    h_blocks, codebook};
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
// take slots in turn. Expert e has row e % svh_rows of svh.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
moe_combine(const float* partial, const float* firsts, const int* blocks, const float* weights,
            const __half* svh, void* y, int routes, int top_k, int hidden, int inner, int splits,
            int codebook, int svh_rows, int dtype) {
    release_successor();
    wait_for_predecessor();
    __shared__ float sums[kWarps][kBlock];
    const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int i = blockIdx.y * 32 + lane;
    float total[4] = {};
    for (int slot = warp; slot < top_k; slot += kWarps) {
        const int64_t route = static_cast<int64_t>(token) * top_k + slot;
        const int expert = blocks[route];
        if (expert < 0) continue;
        float v[4];
        const int64_t stride = static_cast<int64_t>(routes) * hidden;
        const int s_blocks = inner / kBlock;
        const Product product{partial + route * hidden,  stride,   splits,
                              firsts + route * s_blocks, s_blocks, codebook};
        rotate_out(v, product, svh + static_cast<int64_t>(expert % svh_rows) * hidden, i);
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
