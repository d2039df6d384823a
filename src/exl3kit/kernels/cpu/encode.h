// What an instruction-set tier of the trellis encoder offers to the driver in encode.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace exl3 {

// What all tiles of one call share. `ordered` is made by EncodeTier::order, one table per position
// parity (one table twice for whole rates).
struct EncodeCodes {
    int half_units;      // 2 K
    const float* plain;  // value of each of the 65,536 states
    const void* ordered[2];
};

struct EncodeTier {
    int tiles;           // tiles encoded together
    size_t table_bytes;  // one ordered table
    size_t (*scratch_bytes)(int half_units);
    void (*order)(int half_units, int parity, const float* plain, void* table);
    // tiles[i]: 256 fp32 in stream order; states[i]: 256 int32. Buffers are 64-byte aligned.
    void (*encode)(const EncodeCodes& codes, void* scratch, const float* const* tiles,
                   int32_t* const* states);
};

extern const EncodeTier kEncodePortable, kEncodeAvx2, kEncodeAvx512, kEncodeAvx512Fp16;

}  // namespace exl3
