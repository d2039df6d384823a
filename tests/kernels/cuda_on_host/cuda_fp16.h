// Enough of CUDA for some of the kernels to compile with g++ and run with one host thread for each
// device thread: fp16 arithmetic with one rounding, warp exchanges, named barriers.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__

using std::fmaxf;
using std::fminf;
using std::isfinite;
using std::min;

struct Index {
    int x;
};
inline thread_local Index threadIdx{0};
inline Index blockIdx{0}, gridDim{1};

struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};

struct __half {
    _Float16 v;
};
struct __half2 {
    __half x, y;
};
inline __half __ushort_as_half(uint16_t bits) {
    __half h;
    std::memcpy(&h, &bits, 2);
    return h;
}
inline uint16_t __half_as_ushort(__half h) {
    uint16_t bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}
inline __half __float2half_rn(float f) { return {_Float16(f)}; }
// Differences and squares of fp16 numbers of everyday size are exact in double.
inline __half __hsub(__half a, __half b) { return {_Float16(double(a.v) - double(b.v))}; }
inline __half __hfma(__half a, __half b, __half c) {
    return {_Float16(double(a.v) * double(b.v) + double(c.v))};
}
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half2 __hmin2(__half2 a, __half2 b) {
    return {a.x.v < b.x.v ? a.x : b.x, a.y.v < b.y.v ? a.y : b.y};
}
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 __low2half2(__half2 a) { return {a.x, a.x}; }
inline __half2 __high2half2(__half2 a) { return {a.y, a.y}; }
inline __half __low2half(__half2 a) { return a.x; }
inline uint32_t __byte_perm(uint32_t x, uint32_t, uint32_t selector) {
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i) out |= (x >> 8 * (selector >> 4 * i & 3) & 255) << 8 * i;
    return out;
}

template <class T>
T __ldg(const T* from) { return *from; }
template <class T>
T __ldcg(const T* from) { return *from; }
template <class T>
void __stcg(T* to, T value) { *to = value; }

namespace on_host {

struct Warp {
    std::barrier<> meet{32};
    uint32_t values[32];
};
inline std::vector<std::unique_ptr<Warp>> warps;

// Every lane's value, seen by all lanes at once.
template <class Pick>
uint32_t exchange(uint32_t value, Pick pick) {
    Warp& warp = *warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = value;
    warp.meet.arrive_and_wait();
    const uint32_t picked = pick(warp.values);
    warp.meet.arrive_and_wait();
    return picked;
}

struct Named {
    std::mutex mutex;
    std::condition_variable changed;
    int arrived = 0;
    long phase = 0;
};
inline Named barriers[16];

inline void arrive(int id, int threads, bool waits) {
    Named& barrier = barriers[id];
    std::unique_lock lock(barrier.mutex);
    const long phase = barrier.phase;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        ++barrier.phase;
        barrier.changed.notify_all();
    } else if (waits) {
        barrier.changed.wait(lock, [&] { return barrier.phase != phase; });
    }
}

}  // namespace on_host

namespace exl3 {
inline void barrier_sync(int id, int threads) { on_host::arrive(id, threads, true); }
inline void barrier_arrive(int id, int threads) { on_host::arrive(id, threads, false); }
}  // namespace exl3

inline uint32_t __shfl_xor_sync(unsigned, uint32_t value, int mask) {
    const int lane = threadIdx.x % 32;
    return on_host::exchange(value, [&](uint32_t* all) { return all[lane ^ mask]; });
}
inline uint32_t __shfl_sync(unsigned, uint32_t value, int source) {
    return on_host::exchange(value, [&](uint32_t* all) { return all[source]; });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
    return on_host::exchange(value,
                             [](uint32_t* all) { return *std::min_element(all, all + 32); });
}
inline void __syncwarp() { on_host::warps[threadIdx.x / 32]->meet.arrive_and_wait(); }
