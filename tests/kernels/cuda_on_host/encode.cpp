// Runs one block of the CUDA encoder on host threads. stdin: the number of tiles (int32), the tiles
// (float32 [n][256]), the codebook (fp16 [65536]); stdout: the states (int32 [n][256]).
#include "encode.cuh"

#include <cmath>
#include <cstdio>
#include <thread>

int main() {
    using Rate = exl3::EncodeRate<HALF_UNITS>;
    int32_t count = 0, refused = 0;
    if (std::fread(&count, 4, 1, stdin) != 1) return 1;
    std::vector<float> tiles(size_t(count) * 256);
    std::vector<__half> values(65536), scratch(size_t(2) * Rate::kKeptRows * Rate::kRowNodes);
    std::vector<int32_t> states(tiles.size());
    if (std::fread(tiles.data(), 4, tiles.size(), stdin) != tiles.size()) return 1;
    if (std::fread(values.data(), 2, values.size(), stdin) != values.size()) return 1;
    std::vector<std::thread> threads;
    for (int warp = 0; warp < exl3::kEncodeThreads / 32; ++warp)
        on_host::warps.push_back(std::make_unique<on_host::Warp>());
    for (int i = 0; i < exl3::kEncodeThreads; ++i) {
        threads.emplace_back([&, i] {
            threadIdx.x = i;
            exl3::encode_tiles<HALF_UNITS>(tiles.data(), states.data(), count, values.data(),
                                           scratch.data(), &refused);
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::fwrite(states.data(), 4, states.size(), stdout);
    return refused ? 2 : 0;
}
