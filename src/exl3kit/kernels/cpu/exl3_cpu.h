// C ABI of the CPU kernels and the names shared by their files. No framework is included anywhere
// in this folder: raw pointers in, raw pointers out, memory owned by the caller.
//
// Headers of this folder are compiled once a tier with other instruction sets, so everything they
// define lives in an unnamed namespace: a shared copy could be the one this machine cannot run.
#pragma once

#include <cstdint>

#define EXL3_API extern "C" __attribute__((visibility("default")))

namespace exl3 {

// Instruction-set tiers, in the order of ISA_NAMES in jit/cpu.py. Every kernel takes one as
// argument.
enum Isa : int64_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Fp16 = 3 };
enum Codebook : int64_t { kThreeInst = 0, kMcg = 1, kMul1 = 2 };
enum DType : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

// Pinned by format/spec.py.
constexpr int kTile = 16;  // a tile is 16 x 16 weights
constexpr int kTileWeights = 256;
constexpr int kBlock = 128;  // Hadamard block, and the columns of one work item
constexpr int kBlockTiles = kBlock / kTile;

// Arguments are structs whose fields all have eight bytes, so that their mirrors in kernels/*.py
// cannot disagree about padding. `bits2` is twice the bits per weight: 2, 3, ... 8, 10, 12, 14, 16.
struct LinearArgs {
    const void* x;            // (tokens, k) of dtype
    void* y;                  // (tokens, n) of dtype
    const uint16_t* trellis;  // (k/16, n/16, 8 * bits2)
    const uint16_t* suh;      // (k) fp16
    const uint16_t* svh;      // (n) fp16
    const void* bias;         // (n) of bias_dtype, or null
    float* workspace;         // exl3_linear_workspace floats, 64-byte aligned, contents ignored
    int64_t dtype, bias_dtype, tokens, k, n, bits2, codebook, isa, threads;
};

struct MoeArgs {
    const void* x;                // (tokens, hidden) of dtype
    void* y;                      // (tokens, hidden) of dtype
    const float* topk_weights;    // (tokens, top_k)
    const void* topk_ids;         // (tokens, top_k) int32, or int64 when wide_ids
    const int32_t* expert_map;    // (map_size) model id -> local id or -1, or null
    const int64_t* matrices;      // (3, experts, 2) starts of gate, up and down in their trellis and
                                  // twice the bits, or null: all of bits2_13 and bits2_2
    const uint16_t* w13_trellis;  // (2, experts, hidden/16, inner/16, 8 * bits2_13), gate then up
    const uint16_t* w13_suh;      // (2, suh_rows, hidden), expert e has row e % suh_rows
    const uint16_t* w13_svh;      // (2, experts, inner)
    const uint16_t* w2_trellis;   // (experts, inner/16, hidden/16, 8 * bits2_2)
    const uint16_t* w2_suh;       // (experts, inner)
    const uint16_t* w2_svh;       // (svh_rows, hidden), expert e has row e % svh_rows
    float* workspace;             // exl3_moe_workspace floats, 64-byte aligned, contents ignored
    int64_t dtype, tokens, top_k, wide_ids, map_size, experts, hidden, inner;
    int64_t suh_rows, svh_rows, bits2_13, bits2_2, codebook, isa, threads;
};

// out = H128(x * suh) in bf16, within 16 columns in the order in which a tile stores its rows.
struct RotateArgs {
    const void* x;        // (tokens, k) of dtype
    const uint16_t* suh;  // (k) fp16
    uint16_t* out;        // (tokens, k) bf16
    int64_t dtype, tokens, k, isa, threads;
};

// panel[j, i] = What[i, first + j] in bf16, i in the same order.
struct DecodeArgs {
    const uint16_t* trellis;  // (k/16, n/16, 8 * bits2)
    uint16_t* panel;          // (columns, k) bf16; columns and first are multiples of 128
    int64_t k, n, first, columns, bits2, codebook, isa, threads;
};

// Columns first .. first + columns of y = H128(product) * svh + bias.
struct FinishArgs {
    const uint16_t* product;  // (tokens, columns) bf16
    void* y;                  // (tokens, n) of dtype
    const uint16_t* svh;      // (n) fp16
    const void* bias;         // (n) of bias_dtype, or null
    int64_t dtype, bias_dtype, tokens, n, first, columns, isa, threads;
};

}  // namespace exl3

// The highest tier that was compiled and that this machine can run.
EXL3_API int exl3_cpu_isa_max(void);

// Run the loops of all calls to come on the threads of an OpenMP runtime, `gomp_parallel` being the
// address of its GOMP_parallel; on the caller alone when it is null, and until this is called.
EXL3_API void exl3_use_team(void* gomp_parallel);

EXL3_API int64_t exl3_linear_workspace(int64_t tokens, int64_t k, int64_t threads);
EXL3_API void exl3_linear(const exl3::LinearArgs* args);

EXL3_API int64_t exl3_moe_workspace(int64_t tokens, int64_t top_k, int64_t hidden, int64_t inner,
                                    int64_t threads);
// 0, or 1 when expert_map names an expert that is not there; nothing is written then.
EXL3_API int exl3_moe(const exl3::MoeArgs* args);

// The steps around a product of bf16 matrices that a library does, see bfloat_panel.cpp.
EXL3_API void exl3_rotate_bfloat(const exl3::RotateArgs* args);
EXL3_API void exl3_decode_bfloat(const exl3::DecodeArgs* args);
EXL3_API void exl3_finish_bfloat(const exl3::FinishArgs* args);

// What the product decodes: eight neighbouring tiles -> values in stream order, (8, 256).
EXL3_API void exl3_decode_strip(int64_t isa, const uint16_t* tiles, int64_t bits2, int64_t codebook,
                                float* values);
