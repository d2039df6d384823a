// Trellis search for any machine: four fp32 lanes in the compiler's vector extension, integer
// rounding to fp16.
#include "encode_core.h"

namespace exl3 {
namespace {

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

struct PortableLanes {
    using elem = float;
    using vec = Floats;
    static constexpr int kLanes = 4;
    static constexpr int kTiles = 1;
    static constexpr bool kDoubts = true;

    static vec load(const elem* p) { return *reinterpret_cast<const vec*>(p); }
    static void store(elem* p, vec v) { *reinterpret_cast<vec*>(p) = v; }
    static elem from_float(float f) { return f; }
    static float to_float(elem f) { return f; }
    static vec broadcast(float f) { return vec{f, f, f, f}; }

    // lane i = p[i >> D]
    template <int D>
    static vec spread(const elem* p) {
        return vec{p[0], p[1 >> D], p[2 >> D], p[3 >> D]};
    }

    // d needs no care for subnormals: it is a multiple of 2^-24, so below 2^-14 it is exact in fp16
    // and in the rounding of normal values alike. Nor can it overflow: |value| < 4, |target| <=
    // 65504.
    static vec cost(vec value, vec target, vec before) {
        const vec d = round_normal(value - target);
        return d * d + before;
    }
    static vec min(vec a, vec b) { return select(a < b, a, b); }
    static vec round(vec v) {
        const vec infinite = broadcast(INFINITY);
        return select(v >= 65520.0f, infinite, round_normal(v));
    }
    // Midpoints of two fp16 values, and subnormal results, which have other midpoints.
    static uint32_t doubtful(vec v) {
        const Ints doubt = (((Ints)v & 0x1FFF) == 0x1000) | (v < 0x1p-14f);
        return uint32_t(doubt[0] & 1) | uint32_t(doubt[1] & 2) | uint32_t(doubt[2] & 4) |
               uint32_t(doubt[3] & 8);
    }
    static float lane(vec v, int i) { return v[i]; }
    static float round_one(float f) { return round_half(f); }

  private:
    static vec select(Ints condition, vec yes, vec no) {
        return (vec)((condition & (Ints)yes) | (~condition & (Ints)no));
    }
    static vec round_normal(vec v) {
        const Ints bits = (Ints)v;
        return (vec)((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF);
    }
};

}  // namespace

const EncodeTier kEncodePortable = make_tier<PortableLanes>();

}  // namespace exl3
