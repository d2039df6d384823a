// Runs a kernel on host threads, one for each of its own, block after block; and reads its arguments.
#pragma once

#include "cuda_fp16.h"

#include <cstdio>
#include <cstdlib>
#include <thread>

inline Index blockDim{0};
inline void __syncthreads() { on_host::arrive(0, blockDim.x, true); }

namespace exl3 {
inline void wait_for_predecessor() {}
inline void release_successor() {}
}  // namespace exl3

namespace on_host {

template <class T>
std::vector<T> read(size_t count) {
    std::vector<T> values(count);
    if (std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(1);
    return values;
}

template <class Kernel>
void launch(int blocks, int threads_of_block, const Kernel& kernel) {
    gridDim.x = blocks, blockDim.x = threads_of_block;
    warps.clear();
    for (int i = 0; i < threads_of_block; i += 32) warps.push_back(std::make_unique<Warp>());
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        std::vector<std::thread> threads;
        for (int i = 0; i < threads_of_block; ++i)
            threads.emplace_back([&, i] { threadIdx.x = i, kernel(); });
        for (std::thread& thread : threads) thread.join();
    }
}

}  // namespace on_host
