// Trellis search over 16 x 16 tiles: the tail-biting, two-pass Viterbi of the EXL3 encoder. The states
// are bit for bit those of the CPU encoder and of exllamav3 1.6.5.
//
// A block has 16 warps that run forward passes (encode_forward.cuh) and one that traces paths back
// (encode_trace.cuh). The values of all 65,536 states live in the registers of the 16 warps for the
// whole launch, 64 half2 a thread, and the two current rows of costs in shared memory. A trace is a
// chain of loads that leaves the arithmetic idle, a third of the time of a tile; so a block takes
// tiles in pairs and runs the passes in turn: while one tile's path is traced, the other tile's costs
// advance.
//
//     passes   A1  B1  A2  B2  C1  D1 ...
//     traces       A1  B1  A2  B2  C1 ...
//
// Floor: 2 passes * 256 positions * 65,536 states = 33.6 M evaluations a tile, at three bits 88
// instructions for 64 of them at 128 a cycle and multiprocessor: 0.36 M cycles a tile, 180 M weights a
// second on 132 multiprocessors at 1.9 GHz before any wait. Reached: half of that, see
// benchmarks/results/encode_gpu.md. The rest is a barrier and a latency of shared memory a step, and
// the stores of kept rows (a tenth).
#pragma once

#include <cuda_fp16.h>

#include "common.cuh"
#include "encode_forward.cuh"
#include "encode_rate.cuh"
#include "encode_trace.cuh"
#include "named_barrier.cuh"

namespace exl3 {

constexpr int kEncodeThreads = kOwners + 32;
// Two of each: a pass may end before the trace of the one before it has begun to wait.
constexpr int kPassBarrier = 2, kTraceBarrier = 4;

// What a pass and its trace share about one tile.
struct TileSlot {
    __half2 x[kPositions];  // targets, each twice
    uint32_t warp_best[kOwners / 32];
    uint32_t tail;  // the node between the last position and the first
    uint16_t path[kPositions];
};

// Calls visit(tile, slot, pass, tiles of the pair) for every pass of this block, in order.
template <class Visit>
EXL3_DEVICE void for_each_pass(int count, Visit visit) {
    for (int first = blockIdx.x; first < count; first += 2 * gridDim.x) {
        const int filled = first + int(gridDim.x) < count ? 2 : 1;
        for (int pass = 0; pass < 2; ++pass) {
            for (int slot = 0; slot < filled; ++slot)
                visit(first + slot * int(gridDim.x), slot, pass, filled);
        }
    }
}

// tiles: fp32 [count][256] in stream order and the codebook's scale. states: int32 [count][256].
// values: fp16 of the 65,536 states. scratch: 2 * kKeptRows * kRowNodes fp16 a block. refused: set to 1
// if a target is not finite in fp16. Dynamic shared memory: 2 * kRowNodes fp16.
template <int kHalfUnits>
__global__ void __launch_bounds__(kEncodeThreads, 1)
    encode_tiles(const float* __restrict__ tiles, int32_t* __restrict__ states, int count,
                 const __half* __restrict__ values, __half* scratch, int32_t* refused) {
    using Rate = EncodeRate<kHalfUnits>;
    constexpr int64_t kSlotScratch = int64_t(Rate::kKeptRows) * Rate::kRowNodes;
    EXL3_DYNAMIC_SHARED(dynamic);
    __shared__ TileSlot slots[2];
    __half* const kept = scratch + 2 * kSlotScratch * blockIdx.x;
    int job = 0;  // passes so far

    if (threadIdx.x >= kOwners) {
        const int lane = threadIdx.x % 32;
        for_each_pass(count, [&](int tile, int index, int pass, int) {
            TileSlot& slot = slots[index];
            barrier_sync(kPassBarrier + (job & 1), kEncodeThreads);
            const Trace<kHalfUnits> trace{values, slot.x, kept + index * kSlotScratch};
            if (pass == 0) {
                const uint32_t best =
                    __reduce_min_sync(~0u, slot.warp_best[lane % (kOwners / 32)]);
                const uint32_t end = end_node_of(best & 0x7FFF);
                const uint32_t node = trace.follow(end, kHalfway, kHalfway, nullptr);
                if (lane == 0) slot.tail = node;
            } else {
                trace.follow(slot.tail, 0, 0, slot.path);
                __syncwarp();
                for (int t = lane; t < kPositions; t += 32)
                    states[int64_t(tile) * kPositions + t] =
                        closed_state<kHalfUnits>(slot.path, t);
            }
            barrier_arrive(kTraceBarrier + (job & 1), kEncodeThreads);
            ++job;
        });
        return;
    }

    ForwardPass<kHalfUnits> forward;
    forward.middle = Rate::middle(threadIdx.x);
    forward.rows = reinterpret_cast<__half*>(dynamic);
    forward.load_values(values);
    int traced = 0;  // traces waited for
    const auto wait_for = [&](int jobs) {
        for (; traced < jobs; ++traced) barrier_sync(kTraceBarrier + (traced & 1), kEncodeThreads);
    };
    for_each_pass(count, [&](int tile, int index, int pass, int filled) {
        TileSlot& slot = slots[index];
        __half* const own = kept + index * kSlotScratch;
        wait_for(job - filled + 1);  // the last trace that used this slot
        if (pass == 0) {
            if (threadIdx.x < kPositions) {
                const float target = tiles[int64_t(tile) * kPositions + threadIdx.x];
                if (!(fabsf(target) <= 65504.0f)) *refused = 1;
                slot.x[threadIdx.x] = __half2half2(__float2half_rn(target));
            }
            forward.enter_free();
        } else {
            forward.enter_at(slot.tail, own);
        }
        barrier_sync(kOwnersBarrier, kOwners);
        const int start = pass == 0 ? kHalfway : 0;
        forward.run(slot.x, start, start, own);
        if (pass == 0) {
            const uint32_t best = forward.cheapest_end();
            if (threadIdx.x % 32 == 0) slot.warp_best[threadIdx.x / 32] = best;
            barrier_sync(kOwnersBarrier, kOwners);  // before the next pass fills the row
        }
        barrier_arrive(kPassBarrier + (job & 1), kEncodeThreads);
        ++job;
    });
    wait_for(job);
}

}  // namespace exl3
