// C ABI of the CPU kernels and the names shared by their files. No framework is included anywhere in
// this folder: raw pointers in, raw pointers out, memory owned by the caller.
#pragma once

#include <cstdint>

#define EXL3_API extern "C" __attribute__((visibility("default")))

namespace exl3 {

// Instruction-set tiers, in the order of ISA_NAMES in jit/cpu.py. Every kernel takes one as an argument.
enum Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Fp16 = 3 };

}  // namespace exl3

// The highest tier that was compiled and that this machine can run.
EXL3_API int exl3_cpu_isa_max(void);
