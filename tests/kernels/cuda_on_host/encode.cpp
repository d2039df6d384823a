// Runs one block of the CUDA encoder on host threads. stdin: the number of tiles (int32), the tiles
// (float32 [n][256]), the codebook (fp16 [65536]); stdout: the states (int32 [n][256]).
#include "launch.h"

#include "encode.cuh"

int main() {
    using Rate = exl3::EncodeRate<HALF_UNITS>;
    const int count = on_host::read<int32_t>(1)[0];
    const auto tiles = on_host::read<float>(size_t(count) * 256);
    const auto values = on_host::read<__half>(65536);
    std::vector<__half> scratch(size_t(2) * Rate::kKeptRows * Rate::kRowNodes);
    std::vector<int32_t> states(tiles.size());
    int32_t refused = 0;
    on_host::launch(1, exl3::kEncodeThreads, [&] {
        exl3::encode_tiles<HALF_UNITS>(tiles.data(), states.data(), count, values.data(),
                                       scratch.data(), &refused);
    });
    std::fwrite(states.data(), 4, states.size(), stdout);
    return refused ? 2 : 0;
}
