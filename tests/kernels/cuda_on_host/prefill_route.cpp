// Runs the routing of the prefill plan on host threads. stdin: routes, experts, rows of a block, size
// of the map, 0 for none (int32); ids (int64 [routes]), weights (float32 [routes]), map (int32);
// stdout: expert and row of every route, counts of the experts, number of blocks, blocks (int32).
#include "launch.h"

#include <bit>

struct int2 {
    int x, y;
};
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __fns(uint32_t, int, int) { return 0; }  // of the decode plan's routing
inline uint32_t __ballot_sync(unsigned, bool is_set) {
    return on_host::exchange(is_set, [](uint32_t* all) {
        uint32_t bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= all[lane] << lane;
        return bits;
    });
}
inline int __reduce_add_sync(unsigned, int value) {
    return on_host::exchange(value, [](uint32_t* all) {
        uint32_t sum = 0;
        for (int lane = 0; lane < 32; ++lane) sum += all[lane];
        return sum;
    });
}

#include "prefill_route.cuh"

constexpr int kWarps = 3;

template <class Kernel>
static void launch(int blocks, const Kernel& kernel) {
    on_host::launch(blocks, 32 * kWarps, kernel);
}

int main() {
    using on_host::read;
    const auto sizes = read<int32_t>(4);
    const int routes = sizes[0], experts = sizes[1], block_rows = sizes[2], map_size = sizes[3];
    const auto ids = read<int64_t>(routes);
    const auto weights = read<float>(routes);
    const auto map = read<int32_t>(map_size);
    std::vector<int32_t> expert(routes), row(routes, -1), counts(experts), num_blocks(1);
    std::vector<exl3::RowBlock> blocks(experts + routes / block_rows);
    const int each = 32 * kWarps;
    launch((routes + each - 1) / each, [&] {
        exl3::prefill_experts<kWarps>(ids.data(), weights.data(), map_size ? map.data() : nullptr,
                                      expert.data(), routes, experts,
                                      map_size ? map_size : experts, 1, 0);
    });
    launch(experts, [&] { exl3::prefill_count<kWarps>(expert.data(), counts.data(), routes); });
    launch(experts, [&] {
        exl3::prefill_place<kWarps>(expert.data(), counts.data(), row.data(), blocks.data(),
                                    num_blocks.data(), routes, block_rows);
    });
    for (const auto& numbers : {expert, row, counts, num_blocks})
        std::fwrite(numbers.data(), 4, numbers.size(), stdout);
    std::fwrite(blocks.data(), sizeof(exl3::RowBlock), num_blocks[0], stdout);
    return 0;
}
