// Which tier may run here: compiled in (EXL3_HAVE_*, set by jit/cpu.py) and reported by the CPU.
#include "tier.h"

EXL3_API int exl3_cpu_isa_max(void) {
#if defined(EXL3_HAVE_AVX512FP16)
    if (__builtin_cpu_supports("avx512fp16") && __builtin_cpu_supports("avx512vbmi"))
        return exl3::kAvx512Fp16;
#endif
#if defined(EXL3_HAVE_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return exl3::kAvx512;
#endif
#if defined(EXL3_HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        return exl3::kAvx2;
#endif
    return exl3::kPortable;
}

namespace exl3 {

const Tier& tier(int64_t isa) {
#if defined(EXL3_HAVE_AVX512FP16)
    if (isa == kAvx512Fp16) return kTierAvx512Fp16;
#endif
#if defined(EXL3_HAVE_AVX512)
    if (isa == kAvx512) return kTierAvx512;
#endif
#if defined(EXL3_HAVE_AVX2)
    if (isa == kAvx2) return kTierAvx2;
#endif
    return kTierPortable;
}

}  // namespace exl3

EXL3_API void exl3_decode_strip(int64_t isa, const uint16_t* tiles, int64_t bits2, int64_t codebook,
                                float* values) {
    exl3::tier(isa).decode_strip(tiles, bits2, codebook, values);
}
