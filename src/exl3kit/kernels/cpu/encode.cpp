// Driver of the trellis encoder: picks the tier, prepares the value tables, spreads groups of tiles
// over threads.
#include "encode.h"

#include <cstdlib>
#include <memory>
#include <vector>

#include "encode_half.h"
#include "exl3_cpu.h"
#include "threads.h"

namespace exl3 {
namespace {

struct Free {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer make_buffer(size_t bytes) {
    Buffer made(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (!made) std::abort();
    return made;
}

// Grow-only and kept by the thread: fresh memory for every group would fault 2 to 8 MB of pages
// each time.
void* scratch(size_t bytes) {
    thread_local Buffer kept;
    thread_local size_t capacity = 0;
    if (bytes > capacity) {
        kept = make_buffer(bytes);
        capacity = bytes;
    }
    return kept.get();
}

const EncodeTier* tier_of(int isa) {
    if (isa > exl3_cpu_isa_max()) return nullptr;
    switch (isa) {
        case kPortable: return &kEncodePortable;
#if defined(EXL3_HAVE_AVX2)
        case kAvx2: return &kEncodeAvx2;
#endif
#if defined(EXL3_HAVE_AVX512)
        case kAvx512: return &kEncodeAvx512;
#endif
#if defined(EXL3_HAVE_AVX512FP16)
        case kAvx512Fp16: return &kEncodeAvx512Fp16;
#endif
        default: return nullptr;
    }
}

void encode_group(const EncodeTier& tier, const EncodeCodes& codes, const float* tiles,
                  int64_t first, int64_t count, int32_t* states) {
    const float* in[8];
    int32_t* out[8];
    for (int i = 0; i < tier.tiles; ++i) {
        const int64_t tile =
            first + i < count ? first + i : count - 1;  // a short last group repeats its last tile
        in[i] = tiles + tile * 256;
        out[i] = states + tile * 256;
    }
    tier.encode(codes, scratch(tier.scratch_bytes(codes.half_units)), in, out);
}

}  // namespace
}  // namespace exl3

// tiles: fp32 [count][256], stream order. values: fp16 bits of the codebook's 65,536 states.
// states: int32 [count][256]. half_units: 2 K. Returns 0, or 1 where this build or machine lacks
// the tier.
EXL3_API int exl3_encode_tiles(int isa, const float* tiles, int64_t count, int half_units,
                               const uint16_t* values, int32_t* states, int threads) {
    const exl3::EncodeTier* tier = exl3::tier_of(isa);
    if (tier == nullptr) return 1;
    std::vector<float> plain(65536);
    for (size_t s = 0; s < plain.size(); ++s) plain[s] = exl3::half_to_float(values[s]);
    const exl3::Buffer even = exl3::make_buffer(tier->table_bytes),
                       odd = exl3::make_buffer(tier->table_bytes);
    tier->order(half_units, 0, plain.data(), even.get());
    if (half_units & 1) tier->order(half_units, 1, plain.data(), odd.get());
    const exl3::EncodeCodes codes{
        half_units, plain.data(), {even.get(), half_units & 1 ? odd.get() : even.get()}};
    exl3::parallel_for((count + tier->tiles - 1) / tier->tiles, threads, [&](int64_t group, int) {
        exl3::encode_group(*tier, codes, tiles, group * tier->tiles, count, states);
    });
    return 0;
}
