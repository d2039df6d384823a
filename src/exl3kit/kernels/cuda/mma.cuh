// One tensor core product of a warp: 16 features x 16 K slots times 16 K slots x 8 tokens.
#pragma once

#include "common.cuh"

namespace exl3 {

// sum[feature][token] += a[feature][slot] * b[slot][token], fp16 times fp16 in fp32. With
// g = lane / 4 and t = lane % 4 a lane holds
//   a     slots 2 t and 2 t + 1 of feature g, of g + 8; slots 2 t + 8 and 2 t + 9 of g, of g + 8
//   b     slots 2 t and 2 t + 1 of token g; slots 2 t + 8 and 2 t + 9
//   sum   feature g of tokens 2 t and 2 t + 1; feature g + 8 of the same
EXL3_DEVICE void multiply_add(float (&sum)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                              uint32_t b0, uint32_t b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace exl3
