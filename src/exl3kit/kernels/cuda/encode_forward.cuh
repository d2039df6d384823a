// The forward half of the trellis search: costs of all nodes, step by step.
//
// Costs are fp16 with one rounding a step: d = RN(value - x), cost = RN(d * d + cost[pred]); both are
// single half2 instructions here. Costs are never negative, so their minimum is that of their bits as
// integers, of which Hopper takes three at a time. No back-pointers are kept: choosing them would
// double the inner loop. Rows of costs go to global memory, and the trace recomputes the few
// candidates it meets.
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"
#include "encode_rate.cuh"
#include "half_bits.cuh"
#include "named_barrier.cuh"

namespace exl3 {

constexpr int kOwnersBarrier = 1;

// Elementwise minimum of costs. HMNMX2 before Hopper; there and later the integer unit, two or three
// operands at a time.
EXL3_DEVICE __half2 min_cost(__half2 a, __half2 b) {
#if __CUDA_ARCH__ >= 900
    return as_half2(__vminu2(as_bits(a), as_bits(b)));
#else
    return __hmin2(a, b);
#endif
}
EXL3_DEVICE __half2 min_cost(__half2 a, __half2 b, __half2 c) {
#if __CUDA_ARCH__ >= 900
    return as_half2(__vimin3_u16x2(as_bits(a), as_bits(b), as_bits(c)));
#else
    return __hmin2(__hmin2(a, b), c);
#endif
}

// One pass around the ring, by the kOwners threads that own states.
template <int kHalfUnits>
struct ForwardPass {
    using Rate = EncodeRate<kHalfUnits>;
    static constexpr int kPairs = 1 << (kLow - 1);

    // The costs of 2^kBits consecutive nodes, as loaded.
    template <int kBits>
    struct Costs {
        static_assert(kBits <= 2, "at most 8 bytes");
        uint32_t word[kBits == 2 ? 2 : 1];

        EXL3_DEVICE explicit Costs(const __half* from) {
            if constexpr (kBits == 2) {
                const uint2 both = *reinterpret_cast<const uint2*>(from);
                word[0] = both.x, word[1] = both.y;
            } else if constexpr (kBits == 1) {
                word[0] = *reinterpret_cast<const uint32_t*>(from);
            } else {
                word[0] = *reinterpret_cast<const uint16_t*>(from);
            }
        }
        // The cost of one node, twice. As an operand modifier (the first form) this is free, but only
        // one of the two pipes that take half2 instructions has the modifier. With a permute the
        // compiler spreads them evenly, 32 to 32 instead of 16 to 48; at one bit, where a load has
        // four costs, the permutes themselves cost 6 %.
        EXL3_DEVICE __half2 twice(int index) const {
            if constexpr (kBits == 2) {
                const __half2 pair = as_half2(word[index >> 1]);
                return index & 1 ? __high2half2(pair) : __low2half2(pair);
            }
            const uint32_t both =
                __byte_perm(word[index >> 1], 0, index & 1 ? 0x3232 : 0x1010);
            return as_half2(both);
        }
    };

    __half2 value[1 << kTop][kPairs];  // of the thread's states, [top][low / 2]
    uint32_t middle;
    __half* rows;        // shared: two rows of kRowNodes costs

    EXL3_DEVICE void load_values(const __half* values) {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(values);
#pragma unroll
        for (int top = 0; top < 1 << kTop; ++top) {
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair)
                value[top][pair] = as_half2(
                    words[top << (15 - kTop) | middle << (kLow - 1) | uint32_t(pair)]);
        }
    }

    // Position kParity (mod 2): costs of all nodes one step on. `keep` is null or takes the row.
    template <int kParity>
    EXL3_DEVICE void advance(const __half* before, __half* after, __half2 target,
                             __half* keep) const {
        constexpr int D = Rate::fresh(kParity), Dnext = Rate::fresh(kParity + 1);
        constexpr int kOwnHeadBits = Dnext < kTop ? Dnext : kTop;
        constexpr int kRestBits = kTop - kOwnHeadBits;  // top bits that belong to the node
        constexpr int kCostBits = D < kLow ? kLow - D : 0;
        const uint32_t first = D < kLow ? middle << (kLow - D) : middle >> (D - kLow);
#pragma unroll
        for (int rest = 0; rest < 1 << kRestBits; ++rest) {
            __half2 best[kPairs];
#pragma unroll
            for (int head = 0; head < 1 << kOwnHeadBits; head += 2) {
                const int top0 = head << kRestBits | rest, top1 = (head + 1) << kRestBits | rest;
                const Costs<kCostBits> costs0(before + (top0 << (16 - kTop - D)) + first);
                const Costs<kCostBits> costs1(before + (top1 << (16 - kTop - D)) + first);
#pragma unroll
                for (int pair = 0; pair < kPairs; ++pair) {
                    const int index = (2 * pair) >> D;
                    const __half2 d0 = __hsub2(value[top0][pair], target);
                    const __half2 d1 = __hsub2(value[top1][pair], target);
                    const __half2 c0 = __hfma2(d0, d0, costs0.twice(index));
                    const __half2 c1 = __hfma2(d1, d1, costs1.twice(index));
                    best[pair] = head == 0 ? min_cost(c0, c1) : min_cost(best[pair], c0, c1);
                }
            }
            store<Dnext>(best, rest, after, keep);
        }
    }

    template <int Dnext>
    EXL3_DEVICE void store(__half2 (&best)[kPairs], int rest, __half* after, __half* keep) const {
        if constexpr (Rate::kGroupBits > 0) {
#pragma unroll
            for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
                for (int bit = 0; bit < Rate::kGroupBits; ++bit)
                    best[pair] = min_cost(
                        best[pair],
                        as_half2(__shfl_xor_sync(~0u, as_bits(best[pair]), 1 << bit)));
            }
            if (threadIdx.x & ((1 << Rate::kGroupBits) - 1)) return;
        }
        const uint32_t node =
            (uint32_t(rest) << (16 - kTop) | middle << kLow) & ((1u << (16 - Dnext)) - 1);
        const uint4 words{as_bits(best[0]), as_bits(best[1]), as_bits(best[2]), as_bits(best[3])};
        *reinterpret_cast<uint4*>(after + node) = words;
        if (keep != nullptr) __stcg(reinterpret_cast<uint4*>(keep + node), words);
    }

    // Where the row that enters `step` is kept, or null.
    static EXL3_DEVICE __half* kept_row(__half* kept, int step, int keep_from) {
        const int since = step - keep_from;
        if (since < 0 || step == kPositions || since % Rate::kKeepEvery) return nullptr;
        return kept + since / Rate::kKeepEvery * Rate::kRowNodes;
    }

    // Once around the ring from position `start`, whose row is in rows[0]; the last row ends there too.
    // x: shared, the targets, each twice. kept: global, takes the rows from step `keep_from` on.
    EXL3_DEVICE void run(const __half2* x, int start, int keep_from, __half* kept) const {
        __half* const other = rows + Rate::kRowNodes;
        for (int step = 0; step < kPositions; step += 2) {
            const int position = (start + step) & (kPositions - 1);
            advance<0>(rows, other, x[position], kept_row(kept, step + 1, keep_from));
            barrier_sync(kOwnersBarrier, kOwners);
            advance<1>(other, rows, x[position + 1], kept_row(kept, step + 2, keep_from));
            barrier_sync(kOwnersBarrier, kOwners);
        }
    }

    // The first row: 0 everywhere.
    EXL3_DEVICE void enter_free() const {
        for (int i = threadIdx.x; i < Rate::kRowNodes / 2; i += kOwners)
            reinterpret_cast<uint32_t*>(rows)[i] = 0;
    }
    // The first row: 0 at `node`, infinity elsewhere; kept too.
    EXL3_DEVICE void enter_at(uint32_t node, __half* kept) const {
        for (uint32_t i = threadIdx.x; i < Rate::kRowNodes; i += kOwners)
            rows[i] = kept[i] = __ushort_as_half(i == node ? 0 : 0x7C00);
    }

    // The least (cost : rank) over the last row, as far as this warp's threads see it.
    EXL3_DEVICE uint32_t cheapest_end() const {
        uint32_t best = ~0u;
        for (uint32_t node = threadIdx.x; node < Rate::kRowNodes; node += kOwners)
            best = min(best, uint32_t(__half_as_ushort(rows[node])) << 16 | end_node_rank(node));
        return __reduce_min_sync(~0u, best);
    }
};

}  // namespace exl3
