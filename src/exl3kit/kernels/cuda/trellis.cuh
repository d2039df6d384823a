// From a packed tile to the eight states of each lane.
//
// Lane l of a warp owns stream positions 8 l .. 8 l + 7 of a tile; their windows end at
// lane-relative ring bits (j + 1) K, rounded down at half rates, so everything but one shift and
// the dword indexes is known at compile time. Windows are read from 32-bit registers aligned by one
// funnel shift each; inside one, a window at a byte boundary costs one byte permute and any other
// one shift more, which windows with the same bit offset share. docs/format.md has the layout.
#pragma once

#include "common.cuh"
#include "ptx.cuh"

namespace exl3 {

constexpr int kTile = 16;  // a tile is 16 x 16 weights
constexpr int kWindows = 8;  // of one lane

// kBits2 is twice the bits per weight: 2, 3, ... 8, 10, 12, 14, 16.
template <int kBits2>
struct Trellis {
    static constexpr int kDwords = 4 * kBits2;    // of a tile
    static constexpr int kLaneBits = 4 * kBits2;  // ring bits a lane's positions add

    // Ring bits between the end of window j and the end of the lane's last window.
    EXL3_DEVICE static constexpr int offset(int j) { return kLaneBits - ((j + 1) * kBits2 >> 1); }

    // A register reaches window j if the window ends at most 16 bits before the register does.
    // Registers are numbered from the last window backwards.
    EXL3_DEVICE static constexpr int register_of(int j) {
        int number = 0, end = 0;
        for (int i = kWindows - 1; i >= j; --i)
            if (offset(i) - end > 16) {
                ++number;
                end = offset(i);
            }
        return number;
    }
    static constexpr int kRegisters = register_of(0) + 1;

    // Ring bits between the end of register r and the end of the lane's last window.
    EXL3_DEVICE static constexpr int register_end(int r) {
        int j = kWindows - 1;
        while (register_of(j) != r) --j;
        return offset(j);
    }
    EXL3_DEVICE static constexpr int register_span(int r) {
        int j = 0;
        while (register_of(j) != r) ++j;
        return offset(j) - register_end(r) + 16;
    }

    // Most bits by which the end of a lane's last window falls short of a dword's end.
    EXL3_DEVICE static constexpr int max_shift() {
        int most = 0;
        for (int lane = 0; lane < 32; ++lane) {
            const int shift = (32 - kLaneBits * (lane + 1) % 32) % 32;
            most = shift > most ? shift : most;
        }
        return most;
    }
    // The last window's dword and the one before it hold 64 bits: enough for register r in every
    // lane?
    EXL3_DEVICE static constexpr bool is_near(int r) {
        return max_shift() + register_end(r) + register_span(r) <= 64;
    }
    // Pairs of dwords a lane loads: the near one, and one for each register it does not reach.
    EXL3_DEVICE static constexpr int pair_of(int r) {
        int pair = 0;
        for (int i = 1; i <= r; ++i) pair += is_near(i) ? 0 : 1;
        return is_near(r) ? 0 : pair;
    }
    static constexpr int kPairs = pair_of(kRegisters - 1) + 1;
    static_assert(is_near(0), "the last register always lies in the near pair");

    // Ring bit at which the pair's register ends, for lane-relative counting.
    EXL3_DEVICE static constexpr int pair_end(int pair) {
        int r = 0;
        while (pair_of(r) != pair) ++r;
        return register_end(r);
    }
};

// Where a lane finds its dwords, the same in every tile.
template <int kBits2>
struct LaneWindows {
    using Layout = Trellis<kBits2>;
    int low[Layout::kPairs], high[Layout::kPairs];  // dword indexes; `high` comes first in the ring
    uint32_t shift[Layout::kRegisters];             // bits of the pair after each register

    EXL3_DEVICE explicit LaneWindows(int lane) {
        place<0>(lane);
        if constexpr (Layout::kRegisters > 1) place<1>(lane);
        if constexpr (Layout::kRegisters > 2) place<2>(lane);
        static_assert(Layout::kRegisters <= 3, "6, 7 and 8 bits need three, other rates fewer");
    }

    template <int kRegister>
    EXL3_DEVICE void place(int lane) {
        constexpr int ring = 32 * Layout::kDwords, pair = Layout::pair_of(kRegister);
        constexpr int skip = Layout::pair_end(pair);
        const int end = (Layout::kLaneBits * (lane + 1) - skip + ring - 1) % ring + 1;
        low[pair] = (end - 1) / 32;
        high[pair] = (low[pair] + Layout::kDwords - 1) % Layout::kDwords;
        shift[kRegister] = 32 * (low[pair] + 1) - end + Layout::register_end(kRegister) - skip;
    }
};

// The dwords of one lane in one tile.
template <int kBits2>
struct LaneBits {
    uint32_t low[Trellis<kBits2>::kPairs], high[Trellis<kBits2>::kPairs];
};

// Bits [end, end + 32) of {high, low}, counted from the last.
EXL3_DEVICE uint32_t funnel(uint32_t low, uint32_t high, uint32_t end) {
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> end);
}

// Not `const`: to the compiler these could change, so that it multiplies by them and does not
// shift.
#if defined(__CUDACC__)
__constant__
#endif
    uint32_t powers_of_two[8] = {1, 2, 4, 8, 16, 32, 64, 128};

// State of window kWindow. A shift goes to the ALU pipe, or with kMultiply, as a multiplication by
// a power of two, to the FMA pipe.
template <int kBits2, bool kMultiply, int kWindow>
EXL3_DEVICE uint32_t lane_state(const LaneBits<kBits2>& bits, const LaneWindows<kBits2>& lane) {
    using Layout = Trellis<kBits2>;
    constexpr int number = Layout::register_of(kWindow), pair = Layout::pair_of(number);
    constexpr bool is_whole = Layout::max_shift() == 0 && number == 0;
    const uint32_t aligned =
        is_whole ? bits.low[pair] : funnel(bits.low[pair], bits.high[pair], lane.shift[number]);
    constexpr int offset = Layout::offset(kWindow) - Layout::register_end(number);
    constexpr int byte = offset / 8, rest = offset % 8;
    if constexpr (rest == 0) return permute_bytes(aligned, 0, 0x4410u + 0x11u * byte);
    if constexpr (kMultiply)
        return permute_bytes(aligned * powers_of_two[8 - rest], 0, 0x4410u + 0x11u * (byte + 1));
    return permute_bytes(aligned >> rest, 0, 0x4410u + 0x11u * byte);
}

// All eight, in stream order.
template <int kBits2, bool kMultiply>
EXL3_DEVICE void lane_states(uint32_t (&states)[kWindows], const LaneBits<kBits2>& bits,
                             const LaneWindows<kBits2>& lane) {
    states[0] = lane_state<kBits2, kMultiply, 0>(bits, lane);
    states[1] = lane_state<kBits2, kMultiply, 1>(bits, lane);
    states[2] = lane_state<kBits2, kMultiply, 2>(bits, lane);
    states[3] = lane_state<kBits2, kMultiply, 3>(bits, lane);
    states[4] = lane_state<kBits2, kMultiply, 4>(bits, lane);
    states[5] = lane_state<kBits2, kMultiply, 5>(bits, lane);
    states[6] = lane_state<kBits2, kMultiply, 6>(bits, lane);
    states[7] = lane_state<kBits2, kMultiply, 7>(bits, lane);
}

}  // namespace exl3
