// Bulk copies into shared memory and the barriers they complete on (capability 9.0).
#pragma once

#include "common.cuh"

#if defined(__CUDACC_RTC__)  // on a host a test brings its own

namespace exl3 {

// A barrier in shared memory for `arrivals` arrivals and the bytes they expect.
EXL3_DEVICE void init_barrier(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; once, before the block's first barrier.
EXL3_DEVICE void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival; the phase completes when `bytes` more have been copied.
EXL3_DEVICE void expect_bytes(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

EXL3_DEVICE void wait_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// `bytes` (a multiple of 16) from global to shared memory, both aligned to 16.
EXL3_DEVICE void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(shared), "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Value before the addition; everything this thread did or saw comes before it.
EXL3_DEVICE uint32_t count_arrival(uint32_t counter) {
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(counter)
                 : "memory");
    return before;
}

}  // namespace exl3

#endif
