// H128 of sixteen rows by one warp on the tensor cores, where many rows are at hand.
//
// H128 = H8 x H16. A warp that shuffles sends five numbers for each one it transforms, which at 4096
// tokens of 8 routes is more than writing them takes. Here H16 is a product with a matrix of signs
// and H8 joins registers of one lane. Rows enter as two fp16 numbers whose sum is the float32 to
// 22 bits, so nothing is lost that the fp16 result has; rows that are fp16 enter as they are.
#pragma once

#include "hadamard.cuh"
#include "half_bits.cuh"
#include "mma.cuh"
#include "rotate.cuh"

namespace exl3 {

// With g = lane / 4 and t = lane % 4: columns 16 j + 4 t + i of row g at [j][i], of row g + 8 at
// [j][4 + i].
using Rows = float[8][8];

// A lane's part of H16 as the B operand: slot 2 t + s is row 4 t + s and slot 2 t + 8 + s is row
// 4 t + 2 + s, column c of product u is column c / 2 * 4 + 2 u + c % 2, so that a lane's values are
// neighbours before and after.
struct Signs {
    uint32_t b[2][2];

    EXL3_DEVICE Signs() {
        const int lane = threadIdx.x % 32, column = lane / 8 * 4 + lane / 4 % 2;
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = lane % 4 * 4 + 2 * half;
                const uint32_t low = __popc(row & (column + 2 * u)) & 1;
                const uint32_t high = __popc((row + 1) & (column + 2 * u)) & 1;
                b[u][half] = 0x3C003C00u | low << 15 | high << 31;
            }
    }
};

EXL3_DEVICE void multiply_signs(float (&even)[4], float (&odd)[4], const uint32_t (&a)[4],
                                const Signs& signs) {
    multiply_add(even, a[0], a[1], a[2], a[3], signs.b[0][0], signs.b[0][1]);
    multiply_add(odd, a[0], a[1], a[2], a[3], signs.b[1][0], signs.b[1][1]);
}

// Eight values as fp16, in the order of the A operand.
EXL3_DEVICE void to_operand(uint32_t (&a)[4], const float (&v)[8]) {
    a[0] = as_bits(__floats2half2_rn(v[0], v[1]));
    a[1] = as_bits(__floats2half2_rn(v[4], v[5]));
    a[2] = as_bits(__floats2half2_rn(v[2], v[3]));
    a[3] = as_bits(__floats2half2_rn(v[6], v[7]));
}

EXL3_DEVICE void subtract_operand(float (&v)[8], const uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = __half22float2(as_half2(a[i]));
        const int at = i % 2 * 4 + i / 2 * 2;
        v[at] -= pair.x, v[at + 1] -= pair.y;
    }
}

// Finite values into fp16's range; almost always one comparison each.
EXL3_DEVICE void saturate_eight(float (&v)[8]) {
    bool is_inside = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) is_inside = is_inside && fabsf(v[i]) <= 65504.0f;
    if (is_inside) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = saturate_half(v[i]);
}

// Transform without its scale of 1 / sqrt(128). Without kIsHalf values are of fp16's range or not
// finite; a row with an infinity becomes NaN.
template <bool kIsHalf>
EXL3_DEVICE void hadamard_rows(Rows& v, const Signs& signs) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        uint32_t a[4];
        float even[4] = {}, odd[4] = {};
        to_operand(a, v[j]);
        multiply_signs(even, odd, a, signs);
        if constexpr (!kIsHalf) {
            subtract_operand(v[j], a);
            to_operand(a, v[j]);
            multiply_signs(even, odd, a, signs);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            v[j][i] = even[i], v[j][2 + i] = odd[i];
            v[j][4 + i] = even[2 + i], v[j][6 + i] = odd[2 + i];
        }
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j & step) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float a = v[j][i], b = v[j + step][i];
                v[j][i] = a + b, v[j + step][i] = a - b;
            }
        }
}

}  // namespace exl3
