// Routes of many tokens sorted by expert, and the blocks of rows they form (prefill_layout.cuh).
//
// Three kernels: the expert of every route, the routes of every expert, and their places. Routes of
// an expert keep their order, so equal inputs give equal rows. Each expert counts for itself, by
// one pass over all routes (4096 tokens of 8 slots: 128 KiB, which stay in the first-level cache);
// nothing is added up by atomics, whose memory would have to be cleared first.
#pragma once

#include "prefill_layout.cuh"
#include "ptx.cuh"
#include "route.cuh"

namespace exl3 {

// expert[route]: the local expert, -1 where the route adds nothing.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
prefill_experts(const void* ids, const float* weights, const void* map, int* expert, int routes,
                int experts, int map_size, int wide_ids, int wide_map) {
    release_successor();
    wait_for_predecessor();
    const int route = blockIdx.x * 32 * kWarps + threadIdx.x;
    const Routing routing{ids,     weights,       map,          routes, map_size,
                          experts, wide_ids != 0, wide_map != 0};
    if (route < routes) expert[route] = local_expert(routing, route);
}

// Routes of `own` among first .. last - 1, which are multiples of 32 but for the end of all.
EXL3_DEVICE int count_routes(const int* expert, int first, int last, int own) {
    int found = 0;
#pragma unroll 4
    for (int i = first + threadIdx.x % 32; i < last; i += 32) found += expert[i] == own;
    return __reduce_add_sync(0xFFFFFFFFu, found);
}

// This warp's share of the routes: a multiple of 32, but for the end of all.
template <int kWarps>
EXL3_DEVICE int share_of_warp(int routes) {
    return (routes + 32 * kWarps - 1) / (32 * kWarps) * 32;
}

// Grid (experts): counts[e] = routes of expert e.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
prefill_count(const int* expert, int* counts, int routes) {
    release_successor();
    wait_for_predecessor();
    __shared__ int found[kWarps];
    const int warp = threadIdx.x / 32, share = share_of_warp<kWarps>(routes), first = warp * share;
    const int mine = count_routes(expert, first, min(first + share, routes), blockIdx.x);
    if (threadIdx.x % 32 == 0) found[warp] = mine;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += found[w];
    counts[blockIdx.x] = all;
}

// Rows and blocks of the experts before `own`: sums over counts by all threads of the block.
template <int kWarps>
EXL3_DEVICE int2 places_before(const int* counts, int own, int block_rows) {
    __shared__ int rows[kWarps], blocks[kWarps];
    int my_rows = 0, my_blocks = 0;
    for (int e = threadIdx.x; e < own; e += blockDim.x) {
        const int count = counts[e];
        my_rows += (count + 7) / 8 * 8;
        my_blocks += (count + block_rows - 1) / block_rows;
    }
    my_rows = __reduce_add_sync(0xFFFFFFFFu, my_rows);
    my_blocks = __reduce_add_sync(0xFFFFFFFFu, my_blocks);
    if (threadIdx.x % 32 == 0) rows[threadIdx.x / 32] = my_rows, blocks[threadIdx.x / 32] = my_blocks;
    __syncthreads();
    int2 sum{0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum.x += rows[w], sum.y += blocks[w];
    return sum;
}

// Grid (experts): row of each route of the expert, and its blocks. `row` of other routes is left.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps)
prefill_place(const int* expert, const int* counts, int* row, RowBlock* blocks, int* num_blocks,
              int routes, int block_rows) {
    release_successor();
    wait_for_predecessor();
    __shared__ int found[kWarps];
    const int own = blockIdx.x, count = counts[own], warp = threadIdx.x / 32;
    const int2 before = places_before<kWarps>(counts, own, block_rows);
    const int parts = (count + block_rows - 1) / block_rows;
    if (own == static_cast<int>(gridDim.x) - 1 && threadIdx.x == 0) *num_blocks = before.y + parts;
    if (count == 0) return;
    const int part_rows = ((count + parts - 1) / parts + 7) / 8 * 8;
    for (int part = threadIdx.x; part < parts; part += blockDim.x)
        blocks[before.y + part] = RowBlock{own, before.x + part * part_rows,
                                           min(part_rows, count - part * part_rows), 0};
    const int share = share_of_warp<kWarps>(routes), first = warp * share;
    const int last = min(first + share, routes);
    const int mine = count_routes(expert, first, last, own);
    if (threadIdx.x % 32 == 0) found[warp] = mine;
    __syncthreads();
    int next = before.x;
    for (int w = 0; w < warp; ++w) next += found[w];
    for (int start = first; start < last; start += 32) {
        const int route = start + threadIdx.x % 32;
        const bool is_own = route < last && expert[route] == own;
        const uint32_t mask = __ballot_sync(0xFFFFFFFFu, is_own);
        if (is_own) row[route] = next + __popc(mask & ((1u << threadIdx.x % 32) - 1));
        next += __popc(mask);
    }
}

}  // namespace exl3
