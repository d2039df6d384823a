// How a trellis rate is laid out over a block of the encoder; see encode.cuh.
//
// State s at position t has 16 bits: its predecessor node is s >> D(t), the node it hands on is its low
// 16 - D(t + 1) bits, and its top D(t + 1) bits ("head") tell which of the states that lead to that
// node it is. A thread owns the 128 states that share the middle nine bits:
//
//     state = top (4 bits) : middle (9 bits) : low (3 bits)
//
// So the states of one predecessor and the heads of one node meet in one thread as far as three and
// four bits reach. Longer heads are spread over 2^kGroupBits neighbouring lanes.
#pragma once

#include "common.cuh"

namespace exl3 {

constexpr int kPositions = 256;
constexpr int kHalfway = 128;
constexpr int kTop = 4, kMiddle = 9, kLow = 3;
constexpr int kOwners = 1 << kMiddle;  // threads that own states

template <int kHalfUnits>  // twice the bits per weight
struct EncodeRate {
    static constexpr int kGroupBits = kHalfUnits > 2 * kTop ? kHalfUnits / 2 - kTop : 0;
    // Rows of costs are kept in memory every so many steps: more often costs bandwidth, less often
    // the trace has more candidates to recompute (at most 2^8 here). Divides 128.
    static constexpr int kKeepEvery = kHalfUnits <= 3 ? 4 : kHalfUnits <= 8 ? 2 : 1;
    static constexpr int kRowNodes = 1 << (16 - kHalfUnits / 2);
    static constexpr int kKeptRows = kPositions / kKeepEvery;

    // Bits that a position adds: floor(K) at even and ceil(K) at odd positions.
    static constexpr EXL3_HOST_DEVICE int fresh(int position) {
        return (kHalfUnits + (position & 1)) / 2;
    }

    // Middle bits of a thread's states. With groups the top middle bits (a part of the head) are the
    // lowest lane bits, so that shuffles reduce over them, and the other lane bits are the lowest
    // middle bits, for which predecessor costs are read as broadcasts.
    static EXL3_DEVICE uint32_t middle(uint32_t thread) {
        if (kGroupBits == 0) return thread;
        const uint32_t warp = thread >> 5, lane = thread & 31;
        const uint32_t group = lane & ((1u << kGroupBits) - 1);
        return group << (kMiddle - kGroupBits) | warp << (5 - kGroupBits) | lane >> kGroupBits;
    }
};

// bitrev5 of the low five bits.
EXL3_DEVICE uint32_t reverse5(uint32_t v) {
    return (v & 1) << 4 | (v & 2) << 2 | (v & 4) | (v & 8) >> 2 | (v & 16) >> 4;
}

// Order in which equal-cost final nodes of the first pass are preferred (lowest first), and its
// inverse. Both are maps of 15 bits onto themselves.
EXL3_DEVICE uint32_t end_node_rank(uint32_t node) {
    return reverse5(node >> 5) << 10 | reverse5(node) << 5 | node >> 10;
}
EXL3_DEVICE uint32_t end_node_of(uint32_t rank) {
    return (rank & 31) << 10 | reverse5(rank >> 10) << 5 | reverse5(rank >> 5);
}

}  // namespace exl3
