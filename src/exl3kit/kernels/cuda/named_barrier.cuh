// Barriers of some of a block's warps: `sync` waits for `threads` arrivals, `arrive` is one and goes on.
#pragma once

#include "common.cuh"

#if defined(__CUDACC_RTC__)  // on a host a test brings its own

namespace exl3 {

EXL3_DEVICE void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
EXL3_DEVICE void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace exl3

#endif
