// Which routes of a batch share an expert: the blocks of up to eight rows that are multiplied
// together.
//
// A route is one (token, slot), numbered token * top_k + slot. Routes of one expert, in their own
// order, form blocks of eight; a block is known by its first route, its leader, so nothing has to
// be counted or moved over all experts and every block of threads finds its part by itself.
#pragma once

#include "common.cuh"

namespace exl3 {

constexpr int kBlockRows = 8;
constexpr int kMaxRoutes = 4096;  // of one launch

// Router output as it comes. `map` may be null: ids are then local. Ids and map are int32 or int64.
struct Routing {
    const void* ids;
    const float* weights;
    const void* map;
    int routes, map_size, experts;
    bool wide_ids, wide_map;
};

// Per route: its expert, -1 if it adds nothing; of the block it leads the expert, -1 if it leads
// none, and the rows; and, at 8 * leader, the routes of a block.
struct Blocks {
    int *expert, *led_expert, *led_rows, *members;
};

EXL3_DEVICE int64_t load_id(const void* ids, bool is_wide, int64_t i) {
    return is_wide ? static_cast<const int64_t*>(ids)[i] : static_cast<const int*>(ids)[i];
}

// Local expert of a route; -1 for weight 0, an id outside the model, an expert that is not here.
EXL3_DEVICE int local_expert(const Routing& routing, int route) {
    int64_t id = load_id(routing.ids, routing.wide_ids, route);
    if (routing.weights[route] == 0.0f || id < 0 || id >= routing.map_size) return -1;
    if (routing.map != nullptr) id = load_id(routing.map, routing.wide_map, id);
    return id < 0 || id >= routing.experts ? -1 : static_cast<int>(id);
}

// Number of the n-th set bit of `words`, which has more than n.
EXL3_DEVICE int find_bit(const uint32_t* words, int n) {
    int word = 0;
    for (int count = __popc(words[0]); n >= count; count = __popc(words[++word])) n -= count;
    return 32 * word + __fns(words[word], 0, n + 1);
}

// Entries of `route` in `blocks`; returns its expert. All threads of the block take part; `matches`
// is shared memory, a bit a route. Writes what only this route's threads write.
EXL3_DEVICE int place_route(const Routing& routing, const Blocks& blocks, uint32_t* matches,
                            int route, bool is_writer) {
    const int expert = local_expert(routing, route);
    for (int other = threadIdx.x; other / 32 * 32 < routing.routes; other += blockDim.x) {
        const bool is_same = other < routing.routes && local_expert(routing, other) == expert;
        const uint32_t mask = __ballot_sync(0xFFFFFFFFu, is_same);
        if (threadIdx.x % 32 == 0) matches[other / 32] = mask;
    }
    __syncthreads();
    if (!is_writer || threadIdx.x != 0) return expert;
    int rank = __popc(matches[route / 32] & ((1u << route % 32) - 1)), all = 0;
    for (int word = 0; word < (routing.routes + 31) / 32; ++word) {
        all += __popc(matches[word]);
        if (word < route / 32) rank += __popc(matches[word]);
    }
    const int row = rank % kBlockRows;
    blocks.expert[route] = expert;
    blocks.led_expert[route] = row == 0 ? expert : -1;
    blocks.led_rows[route] = min(all - rank, kBlockRows);
    blocks.members[kBlockRows * find_bit(matches, rank - row) + row] = route;
    return expert;
}

// Which routes lead a block, a bit each in `leaders` (shared memory, kMaxRoutes bits); returns how many.
// All threads of the block take part.
EXL3_DEVICE int find_leaders(const int* led_expert, uint32_t* leaders, int routes) {
    const int words = (routes + 31) / 32;
    for (int route = threadIdx.x; route / 32 < words; route += blockDim.x) {
        const bool is_leader = route < routes && led_expert[route] >= 0;
        const uint32_t mask = __ballot_sync(0xFFFFFFFFu, is_leader);
        if (threadIdx.x % 32 == 0) leaders[route / 32] = mask;
    }
    __syncthreads();
    int count = 0;
    for (int word = 0; word < words; ++word) count += __popc(leaders[word]);
    return count;
}

}  // namespace exl3
