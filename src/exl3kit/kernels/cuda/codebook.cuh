// State -> value for the three codebooks, in the form the tensor core takes.
//
// A 16-bit state becomes one 32-bit word of two fp16 halves whose sum is the value (3inst, mcg: the
// format's own definition) or the value before a common scale and shift (mul1). The word is given
// to the tensor core as two K slots with the activation repeated in both, so the addition costs no
// instruction and is exact in fp32, where the format rounds it to fp16: docs/numerics.md.
#pragma once

#include "common.cuh"
#include "ptx.cuh"

namespace exl3 {

enum Codebook { kThreeInst = 0, kMcg = 1, kMul1 = 2 };

// Pinned by format/spec.py and format/codebook.py; a test compares all 65,536 states.
constexpr uint32_t kThreeInstMultiplier = 89226354u, kThreeInstAddend = 64248484u;
constexpr uint32_t kMcgMultiplier = 0xCBAC1FEDu, kMul1Multiplier = 0x83DCD12Du;
constexpr uint32_t kHalvesKeep = 0x8FFF8FFFu, kHalvesFlip = 0x3B603B60u;

// mul1: value = scale * (1024 + b) + shift with b the sum of the hash's bytes. Adding b to the
// fp16 pattern of 1024 gives 1024 + b; the other half is -1534, so that the tensor core sees
// b - 510, of the size of a weight, and nothing cancels later. What is left of the shift is
// scale * residue, -0.0018 of a deviation of 1.0: the same for all weights, so the sum of a token's
// activations times it is added to the product (rotate_out).
constexpr uint32_t kMul1Base = 0xE5FE6400u;  // fp16 -1534 over fp16 1024
constexpr float kMul1Scale = 0.00676727294921875f, kMul1Shift = -10.3828125f;
constexpr float kMul1Residue = kMul1Shift / kMul1Scale + 1534.0f;

// The word of a state; bits 16 to 31 of `state` must be clear.
template <Codebook kCodebook>
EXL3_DEVICE uint32_t weight_halves(uint32_t state) {
    if constexpr (kCodebook == kMul1) return add_bytes(state * kMul1Multiplier, kMul1Base);
    const uint32_t hash = kCodebook == kMcg ? state * kMcgMultiplier
                                            : state * kThreeInstMultiplier + kThreeInstAddend;
    return keep_and_flip(hash, kHalvesKeep, kHalvesFlip);
}

// value = weight_scale * (sum of halves) + weight_shift
EXL3_DEVICE constexpr float weight_scale(int codebook) {
    return codebook == kMul1 ? kMul1Scale : 1.0f;
}

EXL3_DEVICE constexpr float weight_shift(int codebook) {
    return codebook == kMul1 ? kMul1Scale * kMul1Residue : 0.0f;
}

}  // namespace exl3
