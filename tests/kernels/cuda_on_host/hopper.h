// What capability 9.0 adds, for host threads: bulk copies by an engine of its own that takes them in
// no order, the barriers they complete on, and products of a warpgroup, which are computed as late as
// the program allows, from registers and shared memory as they are by then.
#pragma once

#include "launch.h"

#include <atomic>
#include <deque>
#include <map>
#include <random>

#define EXPECT(condition)                                                             \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            std::abort();                                                             \
        }                                                                             \
    } while (false)

inline __half2 __hadd2(__half2 a, __half2 b) {
    return {{_Float16(double(a.x.v) + double(b.x.v))}, {_Float16(double(a.y.v) + double(b.y.v))}};
}
inline __half2 __float2half2_rn(float f) { return {__float2half_rn(f), __float2half_rn(f)}; }
inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}

namespace on_host {

// Shared memory starts at an address that is aligned to 16 and to nothing more.
constexpr uint32_t kSharedBase = 1040;
inline std::atomic<uint8_t*> shared_memory = nullptr;  // told by shared_address
inline uint32_t shared_end = 0;  // first address past what the launch asked for

inline uint8_t* at(uint32_t address, uint32_t bytes) {
    EXPECT(address >= kSharedBase && address + bytes <= shared_end && address % bytes == 0);
    return shared_memory + (address - kSharedBase);
}

struct Barrier {
    int arrivals = 0, pending = 0, phases = 0;  // phases that are complete
    int64_t bytes = 0;
};
inline std::mutex mutex;  // of barriers and of the engine
inline std::condition_variable changed;
inline std::map<uint32_t, Barrier> shared_barriers;

struct Copy {
    uint32_t to;
    const uint8_t* from;
    int bytes;
    uint32_t barrier;
};
inline std::deque<Copy> copies;
inline bool is_over = false;

inline void complete(Barrier& barrier) {
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    ++barrier.phases;
    barrier.pending = barrier.arrivals;
    changed.notify_all();
}

// The copy engine, until `is_over`.
inline void copy_all() {
    std::mt19937 random(7);
    std::unique_lock lock(mutex);
    for (;;) {
        changed.wait(lock, [] { return is_over || !copies.empty(); });
        if (copies.empty()) return;
        std::swap(copies[random() % copies.size()], copies.front());
        const Copy copy = copies.front();
        copies.pop_front();
        for (int i = 0; i < copy.bytes; i += 16) std::memcpy(at(copy.to + i, 16), copy.from + i, 16);
        shared_barriers[copy.barrier].bytes -= copy.bytes;
        complete(shared_barriers[copy.barrier]);
    }
}

struct Fragments {
    std::barrier<> meet{32};
    const uint32_t* a[32];
};
inline std::vector<std::unique_ptr<Fragments>> fragments;  // of the warps

struct Multiplication {
    float* sum;
    const uint32_t* a;
    uint64_t b;
    int tokens;
};
inline thread_local std::vector<Multiplication> issued;
inline thread_local bool is_begun = false;
inline thread_local size_t committed = 0;

// Element (row, k) of an operand that a descriptor places in shared memory: rows of 128 bytes whose
// 16-byte chunks are exchanged by address bits 7 to 9.
inline float operand(uint64_t descriptor, int row, int k) {
    EXPECT(descriptor >> 62 == 1 && (descriptor >> 49 & 7) == 0);
    const uint32_t start = (descriptor & 0x3FFF) << 4, stride = (descriptor >> 32 & 0x3FFF) << 4;
    const uint32_t plain = start + row / 8 * stride + row % 8 * 128 + 2 * k;
    _Float16 value;
    std::memcpy(&value, at(plain ^ (plain >> 7 & 7) << 4, 2), 2);
    return float(value);
}

// Registers of m64nNk16: lane 4 g + t has for features g and g + 8 of its warp's 16 k 2 t, 2 t + 1,
// then 2 t + 8, 2 t + 9; and of each 8 tokens the sums of 2 t and 2 t + 1, for g and then g + 8.
inline void multiply(const Multiplication& work) {
    const int lane = threadIdx.x % 32;
    Fragments& warp = *fragments[threadIdx.x / 32];
    warp.a[lane] = work.a;
    warp.meet.arrive_and_wait();
    float a[2][16];
    for (int side = 0; side < 2; ++side)
        for (int k = 0; k < 16; ++k) {
            const uint32_t pair = warp.a[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + side];
            const uint16_t bits = pair >> 16 * (k % 2);
            a[side][k] = float(__ushort_as_half(bits).v);
        }
    for (int i = 0; i < work.tokens / 2; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            work.sum[i] += a[i / 2 % 2][k] * operand(work.b, token, k);
    }
    warp.meet.arrive_and_wait();
}

}  // namespace on_host

namespace exl3 {

inline uint32_t keep(uint32_t value) { return value; }

inline uint32_t shared_address(void* shared) {
    on_host::shared_memory = static_cast<uint8_t*>(shared);
    return on_host::kSharedBase;
}
inline uint32_t load_shared(uint32_t address) {
    uint32_t value;
    std::memcpy(&value, on_host::at(address, 4), 4);
    return value;
}
inline void store_shared(uint32_t address, uint32_t value) {
    std::memcpy(on_host::at(address, 4), &value, 4);
}
inline uint4 load_shared_four(uint32_t address) {
    uint4 value;
    std::memcpy(&value, on_host::at(address, 16), 16);
    return value;
}
inline void store_transposed(uint32_t address, const uint32_t (&v)[4]) {
    const int lane = threadIdx.x % 32;
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint32_t all[32];
        on_host::exchange(v[matrix], [&](uint32_t* values) {
            std::memcpy(all, values, sizeof all);
            return 0u;
        });
        if (lane / 8 != matrix) continue;
        const int row = lane % 8;
        uint16_t out[8];
        for (int column = 0; column < 8; ++column)
            out[column] = all[4 * column + row / 2] >> 16 * (row % 2);
        std::memcpy(on_host::at(address, 16), out, 16);
    }
    __syncwarp();
}
// Of the decode kernels, which share headers with this one.
inline void copy_once(uint32_t, const void*, bool) { std::abort(); }
inline void copy_cached(uint32_t, const void*, bool) { std::abort(); }
inline void commit_copies() { std::abort(); }
template <int kLeft>
void wait_copies() { std::abort(); }

inline void init_barrier(uint32_t barrier, int arrivals) {
    const std::lock_guard lock(on_host::mutex);
    on_host::at(barrier, 8);
    on_host::shared_barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void publish_barriers() {}
inline void expect_bytes(uint32_t barrier, int bytes) {
    const std::lock_guard lock(on_host::mutex);
    on_host::Barrier& own = on_host::shared_barriers.at(barrier);
    EXPECT(own.pending > 0);
    own.bytes += bytes, --own.pending;
    on_host::complete(own);
}
inline void wait_barrier(uint32_t barrier, uint32_t parity) {
    std::unique_lock lock(on_host::mutex);
    on_host::changed.wait(lock, [&] {
        return (on_host::shared_barriers.at(barrier).phases & 1u) != parity;
    });
}
inline void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
    EXPECT(bytes > 0 && bytes % 16 == 0 && shared % 16 == 0);
    EXPECT(reinterpret_cast<uintptr_t>(global) % 16 == 0);
    const std::lock_guard lock(on_host::mutex);
    on_host::copies.push_back({shared, static_cast<const uint8_t*>(global), bytes, barrier});
    on_host::changed.notify_all();
}
inline uint32_t count_arrival(uint32_t counter) {
    auto* value = reinterpret_cast<uint32_t*>(on_host::at(counter, 4));
    return std::atomic_ref<uint32_t>(*value).fetch_add(1, std::memory_order_acq_rel);
}

inline void begin_products() { on_host::is_begun = true; }
template <int kTokens>
void multiply_group(float (&d)[kTokens / 2], const uint32_t (&a)[4], uint64_t b) {
    EXPECT(on_host::is_begun);
    on_host::issued.push_back({d, a, b, kTokens});
}
inline void commit_products() {
    on_host::is_begun = false;
    on_host::committed = on_host::issued.size();
}
inline void wait_products() {
    EXPECT(on_host::committed == on_host::issued.size());
    for (const on_host::Multiplication& work : on_host::issued) on_host::multiply(work);
    on_host::issued.clear();
}

}  // namespace exl3
