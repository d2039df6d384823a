// What the prefill products read and write, whatever architecture they are for.
//
// Rows are routes sorted by expert; those of one expert start at a multiple of 8. A block is up to
// kMaxBlockRows of them that are multiplied by each decoded weight together: an expert with more
// rows has several blocks of nearly equal size (a multiple of 8, but for the last), so that none
// pays for a whole decode with a few rows. Rows between blocks are never stored, nor read except
// into columns that are not stored; they need no value.
//
//     blocks      RowBlock [capacity], the first `count[0]` of them valid, experts ascending
//     x           fp16 [k / 64][rows_capacity][64], in panels: `panel_offset`
//     y           fp16 [rows_capacity][n], before the output rotation
#pragma once

#include "common.cuh"

namespace exl3 {

constexpr int kMaxBlockRows = 128;
constexpr int kPanel = 64;  // columns of a panel: rows of 128 bytes, the widest swizzle

struct alignas(16) RowBlock {
    int expert, first, rows, unused;
};

// Element (row, k) of x. Sixteen-byte chunks of a row are permuted by the row, as the tensor
// cores of capability 9.0 read them from shared memory: a block's part of a panel is one piece of
// memory, copied as it is. `rows_capacity` is a multiple of 8.
EXL3_DEVICE int64_t panel_offset(int row, int k, int rows_capacity) {
    const int64_t line = static_cast<int64_t>(k / kPanel) * rows_capacity + row;
    return line * kPanel + ((k / 8 % 8 ^ row % 8) * 8 + k % 8);
}

}  // namespace exl3
