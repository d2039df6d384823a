// The way back through the trellis: one warp follows the cheapest path, kKeepEvery steps at a time.
//
// From a node the warp goes through all 2^B paths that lead to it from the next kept row, one or more a
// lane, and takes minima level by level from the row upwards, each as the forward pass did: rounded
// cost first, lowest head on ties. All loads of a turn depend on the node alone, so a turn costs one
// latency of global memory.
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"
#include "encode_rate.cuh"

namespace exl3 {

template <int kHalfUnits>
struct Trace {
    using Rate = EncodeRate<kHalfUnits>;
    static constexpr int kLevels = Rate::kKeepEvery;

    // Level s (1..kLevels) is the step `end - s`; `end` and the start are even, so its parity is s's.
    static constexpr EXL3_HOST_DEVICE int head_bits(int level) { return Rate::fresh(level + 1); }
    // Candidate bits of the levels from `level` on.
    static constexpr EXL3_HOST_DEVICE int bits_from(int level) {
        int bits = 0;
        for (int s = level; s <= kLevels; ++s) bits += head_bits(s);
        return bits;
    }
    static constexpr int kBits = kLevels == 4   ? Rate::fresh(0) * 2 + Rate::fresh(1) * 2
                                 : kLevels == 2 ? Rate::fresh(0) + Rate::fresh(1)
                                                : Rate::fresh(0);
    static constexpr int kLaneBits = kBits < 5 ? kBits : 5;
    static constexpr int kOwnBits = kBits - kLaneBits;  // candidates of one lane, of the last level
    static_assert(kOwnBits <= (kHalfUnits + 1) / 2, "a lane's candidates differ in the last head only");

    const __half* values;  // global, [state]
    const __half2* x;      // shared, [position], each twice
    const __half* kept;    // global rows of costs

    // Cost and head of one way to a node, given the cost of its predecessor.
    EXL3_DEVICE uint32_t key(uint32_t state, __half target, __half before, uint32_t head) const {
        const __half d = __hsub(__ldg(values + state), target);
        return uint32_t(__half_as_ushort(__hfma(d, d, before))) << 16 | head;
    }

    // Minimum over the lanes that differ in lane bits [first, first + count).
    static EXL3_DEVICE uint32_t min_over(uint32_t key, int first, int count) {
        for (int bit = first; bit < first + count; ++bit)
            key = min(key, __shfl_xor_sync(~0u, key, 1 << bit));
        return key;
    }

    // From `node` after the last step back to the node that enters `keep_from`, which is returned;
    // writes the state of each position it passes unless `path` is null. A whole warp calls this.
    EXL3_DEVICE uint32_t follow(uint32_t node, int start, int keep_from, uint16_t* path) const {
        for (int end = kPositions; end > keep_from; end -= kLevels) {
            const __half* row = kept + (end - kLevels - keep_from) / kLevels * Rate::kRowNodes;
            node = turn(node, (start + end) & (kPositions - 1), row, path);
        }
        return node;
    }

  private:
    EXL3_DEVICE uint32_t turn(uint32_t node, int position, const __half* row,
                              uint16_t* path) const {
        const uint32_t lane = threadIdx.x & 31;
        const uint32_t digits = (lane & ((1u << kLaneBits) - 1)) << kOwnBits;
        uint32_t head[kLevels + 1], state[kLevels + 1], at = node;
        __half target[kLevels + 1];
#pragma unroll
        for (int s = 1; s <= kLevels; ++s) {
            target[s] = __low2half(x[(position - s) & (kPositions - 1)]);
            head[s] = digits >> bits_from(s + 1) & ((1u << head_bits(s)) - 1);
            state[s] = head[s] << (16 - head_bits(s)) | at;
            at = state[s] >> Rate::fresh(s);
        }
        uint32_t best[kLevels + 1];
        best[kLevels] = ~0u;
#pragma unroll
        for (uint32_t own = 0; own < 1u << kOwnBits; ++own) {
            const uint32_t last = state[kLevels] | own << (16 - head_bits(kLevels));
            const __half before = __ldcg(row + (last >> Rate::fresh(kLevels)));
            best[kLevels] =
                min(best[kLevels], key(last, target[kLevels], before, head[kLevels] | own));
        }
        best[kLevels] = min_over(best[kLevels], 0, head_bits(kLevels) - kOwnBits);
#pragma unroll
        for (int s = kLevels - 1; s >= 1; --s) {
            const __half before = __ushort_as_half(uint16_t(best[s + 1] >> 16));
            best[s] = min_over(key(state[s], target[s], before, head[s]),
                               bits_from(s + 1) - kOwnBits, head_bits(s));
        }
        return emit(best, node, position, path);
    }

    // Reads the winning heads off the levels, from the node back.
    EXL3_DEVICE uint32_t emit(const uint32_t (&best)[kLevels + 1], uint32_t node, int position,
                              uint16_t* path) const {
        uint32_t source = 0;  // a lane whose candidate shares the heads chosen so far
#pragma unroll
        for (int s = 1; s <= kLevels; ++s) {
            const uint32_t chosen = __shfl_sync(~0u, best[s], source) & 0xFFFF;
            const uint32_t state = chosen << (16 - head_bits(s)) | node;
            if (path != nullptr && (threadIdx.x & 31) == 0)
                path[(position - s) & (kPositions - 1)] = uint16_t(state);
            node = state >> Rate::fresh(s);
            if (s < kLevels) source |= chosen << (bits_from(s + 1) - kOwnBits);
        }
        return node;
    }
};

// State of `position` rebuilt from the fresh bits of the path, which closes the ring. The path already
// does unless every cost overflowed fp16.
template <int kHalfUnits>
EXL3_DEVICE int32_t closed_state(const uint16_t* path, int position) {
    uint32_t state = 0;
    int filled = 0;
    for (int p = position; p >= 0 && filled < 16; --p) {
        const int fresh = EncodeRate<kHalfUnits>::fresh(p);
        state |= (path[p] & ((1u << fresh) - 1)) << filled;
        filled += fresh;
    }
    if (filled < 16) state |= uint32_t(path[kPositions - 1]) << filled;
    return int32_t(state & 0xFFFF);
}

}  // namespace exl3
