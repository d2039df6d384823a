// Decoded weights as fp16 pairs: the A operand of a tensor core, each K slot one weight.
//
// With many tokens the tensor cores have no room for the two slots a weight that product.cuh gives
// them; adding the halves costs 1.5 instructions a weight instead. Values are the format's own, bit
// for bit, in all three codebooks.
#pragma once

#include <cuda_fp16.h>

#include "codebook.cuh"
#include "half_bits.cuh"
#include "product.cuh"

namespace exl3 {

// Values of two states, the first in the low half; `first` and `second` are their `weight_halves`.
template <Codebook kCodebook>
EXL3_DEVICE uint32_t weight_pair(uint32_t first, uint32_t second) {
    if constexpr (kCodebook == kMul1) {
        const __half2 sums = as_half2(permute_bytes(first, second, 0x5410));  // 1024 + byte sum
        return as_bits(__hfma2(sums, __float2half2_rn(kMul1Scale), __float2half2_rn(kMul1Shift)));
    }
    // Both halves of each sum are the value, so that one permutation picks the pair: two additions
    // on the FMA pipe and one instruction on the ALU pipe, which is the fuller one.
    const __half2 a = as_half2(first), b = as_half2(second);
    const __half2 low = __hadd2(__low2half2(a), __high2half2(a));
    const __half2 high = __hadd2(__low2half2(b), __high2half2(b));
    return permute_bytes(as_bits(low), as_bits(high), 0x5410);
}

// A fragment of this lane, in the order of mma.cuh, from its dwords at low and high + offset.
template <int kBits2, Codebook kCodebook>
EXL3_DEVICE void decode_fragment(uint32_t (&a)[4], const uint32_t (&low)[Trellis<kBits2>::kPairs],
                                 const uint32_t (&high)[Trellis<kBits2>::kPairs], int offset,
                                 const LaneWindows<kBits2>& lane) {
    uint32_t w[kWindows];
    decode_tile<kBits2, kCodebook>(w, low, high, offset, lane);
    a[0] = weight_pair<kCodebook>(w[0], w[1]);
    a[1] = weight_pair<kCodebook>(w[4], w[5]);
    a[2] = weight_pair<kCodebook>(w[2], w[3]);
    a[3] = weight_pair<kCodebook>(w[6], w[7]);
}

}  // namespace exl3
