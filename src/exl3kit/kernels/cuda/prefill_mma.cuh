// The product of many tokens by mma.sync, for every architecture: each block of rows by its
// expert's matrix. prefill_layout.cuh has what it reads and writes.
//
// A block of threads owns a strip of 128 features and one block of up to kMmaRows rows; its four
// warps take 32 features each, for all rows, so each decoded weight meets every row of the block.
// Rows and trellis words come in stages of 64 K by asynchronous copies; rows lie swizzled in global
// memory as ldmatrix reads them without a bank twice. A row's sums run over K in order, whatever its
// block.
#pragma once

#include "hadamard.cuh"
#include "mma.cuh"
#include "prefill_layout.cuh"
#include "rotate.cuh"
#include "weight_pairs.cuh"

namespace exl3 {

constexpr int kMmaRows = 64;  // 64 sums a lane, which leave 16 warps a multiprocessor

template <int kBits2>
struct MmaShape {
    static constexpr int kWarps = 4, kThreads = 32 * kWarps, kStages = 3;
    static constexpr int kTileBytes = 4 * Trellis<kBits2>::kDwords;
    static constexpr int kTilesHigh = kPanel / kTile, kTilesWide = kBlock / kTile;
    static constexpr int kTilesOfWarp = kTilesWide / kWarps, kPairs = kMmaRows / 16;
    static constexpr int kRows = 2 * kPanel * kMmaRows, kRow = kTilesWide * kTileBytes;
    static constexpr int kStage = kRows + kTilesHigh * kRow;
    static constexpr int kShared = kStages * kStage;
    using Sums = float[kTilesOfWarp][2 * kPairs][4];
};

// Four 8 x 8 matrices of fp16; lane l gives the address of row l % 8 of matrix l / 8.
EXL3_DEVICE void load_matrices(uint32_t (&b)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(address)
                 : "memory");
}

// Asks for one stage: the rows' part of a panel, one piece of memory, and four rows of tiles.
template <int kBits2>
EXL3_DEVICE void request_mma_stage(uint32_t stage, const char* x, int chunks, const char* tiles,
                                   int64_t stride, bool is_there) {
    using Shape = MmaShape<kBits2>;
    for (int i = threadIdx.x; i < chunks; i += Shape::kThreads)
        copy_cached(stage + 16 * i, x + 16 * i, is_there);
    constexpr int kRowChunks = Shape::kRow / 16;
    for (int i = threadIdx.x; i < Shape::kTilesHigh * kRowChunks; i += Shape::kThreads) {
        const int row = i / kRowChunks, at = 16 * (i - row * kRowChunks);
        copy_once(stage + Shape::kRows + row * Shape::kRow + at, tiles + row * stride + at,
                  is_there);
    }
    commit_copies();
}

// Adds the products of one stage; `pairs` times sixteen rows are there.
template <int kBits2, Codebook kCodebook>
EXL3_DEVICE void multiply_stage(typename MmaShape<kBits2>::Sums& sum, uint32_t stage, int pairs,
                                uint32_t row, uint32_t chunk,
                                const uint32_t (&low)[Trellis<kBits2>::kPairs],
                                const uint32_t (&high)[Trellis<kBits2>::kPairs],
                                const LaneWindows<kBits2>& windows) {
    using Shape = MmaShape<kBits2>;
#pragma unroll
    for (int high_tile = 0; high_tile < Shape::kTilesHigh; ++high_tile) {
        uint32_t a[Shape::kTilesOfWarp][4];
#pragma unroll
        for (int tile = 0; tile < Shape::kTilesOfWarp; ++tile)
            decode_fragment<kBits2, kCodebook>(
                a[tile], low, high,
                stage + high_tile * Shape::kRow + tile * Shape::kTileBytes, windows);
#pragma unroll
        for (int pair = 0; pair < Shape::kPairs; ++pair) {
            if (pair >= pairs) break;  // the same for all threads
            uint32_t b[4];
            load_matrices(b, stage + row + 16 * 128 * pair + (chunk ^ (32 * high_tile)));
#pragma unroll
            for (int tile = 0; tile < Shape::kTilesOfWarp; ++tile) {
                const uint32_t(&w)[4] = a[tile];
                multiply_add(sum[tile][2 * pair], w[0], w[1], w[2], w[3], b[0], b[1]);
                multiply_add(sum[tile][2 * pair + 1], w[0], w[1], w[2], w[3], b[2], b[3]);
            }
        }
    }
}

// The block's sums to y as fp16, through shared memory that nothing reads or writes any more.
template <int kBits2>
EXL3_DEVICE void store_mma_rows(const typename MmaShape<kBits2>::Sums& sum, void* shared, __half* y,
                                int64_t stride, int rows) {
    using Shape = MmaShape<kBits2>;
    auto& out = *static_cast<__half(*)[kMmaRows][kBlock + 8]>(shared);
    static_assert(sizeof(out) <= Shape::kShared, "the rows fit where the stages were");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int feature = warp * Shape::kTilesOfWarp * kTile + lane / 4, token = lane % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < Shape::kTilesOfWarp; ++tile)
#pragma unroll
        for (int group = 0; group < 2 * Shape::kPairs; ++group)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                out[8 * group + token + i % 2][feature + kTile * tile + i / 2 * 8] =
                    __float2half_rn(saturate_half(sum[tile][group][i]));
    __syncthreads();
    for (int i = threadIdx.x; i < rows * (kBlock / 8); i += Shape::kThreads) {
        const int row = i / (kBlock / 8), at = i % (kBlock / 8) * 8;
        *reinterpret_cast<uint4*>(y + row * stride + at) =
            *reinterpret_cast<const uint4*>(&out[row][at]);
    }
}

// Grid (n / 128, capacity of blocks); y (rows_capacity, n). Where experts differ in rate `matrices`
// has the 16-bit word at which each starts, and twice its bits: those of another rate are left to
// other launches.
template <int kBits2, Codebook kCodebook>
__global__ void __launch_bounds__(MmaShape<kBits2>::kThreads, 4)
prefill_mma(const char* trellis, const longlong2* matrices, const RowBlock* blocks,
            const int* count, const char* x, __half* y, int rows_capacity, int k, int n) {
    using Shape = MmaShape<kBits2>;
    using Layout = Trellis<kBits2>;
    EXL3_DYNAMIC_SHARED(shared);
    release_successor();
    wait_for_predecessor();
    if (static_cast<int>(blockIdx.y) >= *count) return;
    const RowBlock block = blocks[blockIdx.y];
    const int steps = k / kPanel;
    const int64_t stride = static_cast<int64_t>(n / kTile) * Shape::kTileBytes;
    const char* tiles = trellis + blockIdx.x * Shape::kRow;
    if (matrices == nullptr) {
        tiles += block.expert * (k / kTile) * stride;
    } else {
        const longlong2 matrix = matrices[block.expert];
        if (matrix.y != kBits2) return;
        tiles += 2 * matrix.x;
    }
    const char* from = x + static_cast<int64_t>(block.first) * 2 * kPanel;
    const int64_t panel = static_cast<int64_t>(rows_capacity) * 2 * kPanel;
    const int chunks = (block.rows + 7) / 8 * 8 * (2 * kPanel / 16);
    const int pairs = (block.rows + 15) / 16;

    const uint32_t base = shared_address(shared), lane = threadIdx.x % 32;
    const uint32_t token = lane / 16 * 8 + lane % 8;  // of a pair, whose chunk this lane addresses
    const uint32_t row = 128 * token, chunk = (lane / 8 % 2 ^ token % 8) << 4;
    LaneWindows<kBits2> windows(lane);
    const uint32_t mine = Shape::kRows + threadIdx.x / 32 * Shape::kTilesOfWarp * Shape::kTileBytes;
    uint32_t low[Layout::kPairs], high[Layout::kPairs];
#pragma unroll
    for (int pair = 0; pair < Layout::kPairs; ++pair) {
        low[pair] = keep(mine + 4 * windows.low[pair]);
        high[pair] = keep(mine + 4 * windows.high[pair]);
    }
    const auto request = [&](int step, uint32_t stage) {
        request_mma_stage<kBits2>(stage, from + step * panel, chunks,
                                  tiles + step * Shape::kTilesHigh * stride, stride, step < steps);
    };
    for (int step = 0; step < Shape::kStages - 1; ++step) request(step, base + step * Shape::kStage);
    typename Shape::Sums sum = {};
    uint32_t now = base, freed = base + (Shape::kStages - 1) * Shape::kStage;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        wait_copies<Shape::kStages - 2>();
        __syncthreads();  // everyone's copies of this stage are here, the stage before is read
        request(step + Shape::kStages - 1, freed);
        multiply_stage<kBits2, kCodebook>(sum, now, pairs, row, chunk, low, high, windows);
        freed = now;
        now = now == base + (Shape::kStages - 1) * Shape::kStage ? base : now + Shape::kStage;
    }
    wait_copies<0>();
    __syncthreads();
    const int64_t width = n;
    store_mma_rows<kBits2>(sum, shared, y + block.first * width + blockIdx.x * kBlock, width,
                           block.rows);
}

}  // namespace exl3
