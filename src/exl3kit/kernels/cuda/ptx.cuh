// Instructions that C++ has no operator for.
#pragma once

#include "common.cuh"

namespace exl3 {

// Byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes {high, low}.
EXL3_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(low, high, selector);
#else
    const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
#endif
}

// addend + the sum of the four bytes of `bytes`.
EXL3_DEVICE uint32_t add_bytes(uint32_t bytes, uint32_t addend) {
#if defined(__CUDA_ARCH__)
    return __dp4a(bytes, 0x01010101u, addend);
#else
    for (int i = 0; i < 4; ++i) addend += bytes >> 8 * i & 0xFF;
    return addend;
#endif
}

// (value & keep) ^ flip in one instruction; the compiler does not always find it by itself.
EXL3_DEVICE uint32_t keep_and_flip(uint32_t value, uint32_t keep, uint32_t flip) {
#if defined(__CUDA_ARCH__)
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(value), "r"(keep), "r"(flip));
    return result;
#else
    return (value & keep) ^ flip;
#endif
}

#if defined(__CUDACC__)

// Wait until the kernels before this one in the stream are complete and their writes visible. Comes
// before the first access to anything they read or write: with programmatic launches (capability
// 9.0) a kernel starts while its predecessor still runs.
EXL3_DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Let the next kernel of the stream start as soon as every block of this one has said so.
EXL3_DEVICE void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// `value`, computed once: the compiler would rather repeat a few cheap instructions in every turn
// of a loop than keep a register.
EXL3_DEVICE uint32_t keep(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

EXL3_DEVICE uint32_t shared_address(const void* shared) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

EXL3_DEVICE uint32_t load_shared(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

EXL3_DEVICE uint4 load_shared_four(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

EXL3_DEVICE void store_shared(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Four matrices of 8 x 8 halves as tensor core sums lie in a warp, transposed: lane l of matrix i
// holds [2 (l % 4) .. + 1][l / 4] in v[i]. Lane 8 i + r gives the address of row r of matrix i.
EXL3_DEVICE void store_transposed(uint32_t address, const uint32_t (&v)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     address),
                 "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// 16 bytes from global memory to a shared address, both aligned to 16, past the registers, if
// `is_wanted`: a predicate costs less than a branch that the compiler must take for a divergent
// one. What is read once goes past the first-level cache too.
EXL3_DEVICE void copy_once(uint32_t shared, const void* global, bool is_wanted) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16; }"
        :
        : "r"(shared), "l"(global), "r"(static_cast<int>(is_wanted))
        : "memory");
}

EXL3_DEVICE void copy_cached(uint32_t shared, const void* global, bool is_wanted) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], 16; }"
        :
        : "r"(shared), "l"(global), "r"(static_cast<int>(is_wanted))
        : "memory");
}

EXL3_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kLeft of this thread's groups are on their way.
template <int kLeft>
EXL3_DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

#endif

}  // namespace exl3
