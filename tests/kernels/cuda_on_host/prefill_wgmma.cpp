// Runs the Hopper core of the prefill plan on host threads. stdin: blocks, their capacity in rows, k,
// n, experts, thread blocks (int32); blocks (RowBlock), trellis (8 * BITS2 words a tile) and rows
// (fp16) as prefill_layout.cuh has them; stdout: y (fp16 [capacity][n]), NaN where it was not stored.
#include "hopper.h"

#include "prefill_wgmma.cuh"

int main() {
    using on_host::read;
    using Shape = exl3::WgmmaShape<BITS2>;
    const auto sizes = read<int32_t>(6);
    const int count = sizes[0], capacity = sizes[1], k = sizes[2], n = sizes[3];
    const auto blocks = read<exl3::RowBlock>(count);
    const auto trellis = read<uint4>(size_t(sizes[4]) * k / 16 * n / 16 * BITS2);
    const auto x = read<uint4>(size_t(capacity) * k / 8);
    std::vector<uint16_t> y(size_t(capacity) * n, 0x7E00);
    for (int warp = 0; warp < Shape::kWarps; ++warp)
        on_host::fragments.push_back(std::make_unique<on_host::Fragments>());
    on_host::shared_end = on_host::kSharedBase + Shape::kShared;
    std::thread engine(on_host::copy_all);
    on_host::launch(sizes[5], Shape::kThreads, [&] {
        exl3::prefill_wgmma<BITS2, CODEBOOK>(reinterpret_cast<const uint8_t*>(trellis.data()),
                                             blocks.data(), &count,
                                             reinterpret_cast<const uint8_t*>(x.data()),
                                             reinterpret_cast<__half*>(y.data()), capacity, k, n);
    });
    {
        const std::lock_guard lock(on_host::mutex);
        EXPECT(on_host::copies.empty());
        on_host::is_over = true;
        on_host::changed.notify_all();
    }
    engine.join();
    std::fwrite(y.data(), 2, y.size(), stdout);
    return 0;
}
