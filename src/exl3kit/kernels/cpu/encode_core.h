// Trellis search over one 16 x 16 tile: the tail-biting, two-pass Viterbi of the EXL3 encoder, shared by
// every instruction set. A tier (encode_<isa>.cpp) supplies a vector type V and this header the algorithm.
//
// State s at position t has 16 bits: h (top D(t+1) bits) : m : n (low D(t) bits). Its predecessor node is
// h:m = s >> D(t), its successor node m:n. For one vector of consecutive successor nodes the states of each h
// are consecutive too, so values are read as one stream (table order [vector][h][lane]) and the predecessor
// costs of a vector are `lanes >> D` neighbours, each repeated 2^D times ("spread").
//
// Arithmetic is fp16 with one rounding a step: d = RN(value - x), cost = RN(d * d + cost[pred]).
// d * d is exact in fp32 (11 x 11 bits). Tiers in fp32 keep the unrounded sum, take the minimum, and round the
// winner once: rounding is monotone, so that is the minimum of the rounded costs. Rounding fp32 -> fp16 after
// rounding to fp32 differs from one rounding only where the fp32 sum is a midpoint of two fp16 values; those
// lanes (about 1 in 8192) are recomputed exactly, so all tiers return the same states.
//
// No back-pointers are kept. Cost rows are, every `keep_every` steps, and the trace recomputes the few
// candidates it meets: 2^(D * keep_every) <= 64 evaluations a group. At K = 3 that is 2 MB a tile (fits L2)
// where 16-bit back-pointers would be 4 MB, and the inner loop is spread, subtract, fma, min and nothing else.
//
// Floor: 2 passes * 256 positions * 65,536 states = 33.6 M evaluations a tile at any rate; with 32 fp16 lanes
// 1.05 M vectors of 4 instructions on two 512-bit ports = 2.1 M cycles a tile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "threads.h"

// Everything here has internal linkage: the same inline function is compiled with different instruction sets
// in each tier, and the linker must never merge two of them.
namespace {

constexpr int kPositions = 256;
constexpr int kHalfway = 128;
constexpr int kStates = 65536;

inline float float_of_bits(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

inline uint32_t bits_of_float(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    return u;
}

inline float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    if (magnitude >= 0x7C00) return float_of_bits(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    if (magnitude >= 0x0400) return float_of_bits(sign | ((magnitude << 13) + 0x38000000));
    const float tiny = float(magnitude) * 0x1p-24f;
    return sign ? -tiny : tiny;
}

// The fp16 value nearest to f (ties to even), as a float.
inline float round_half(float f) {
    const uint32_t u = bits_of_float(f);
    if (std::fabs(f) < 0x1p-14f) return std::copysign((std::fabs(f) + 0.5f) - 0.5f, f);
    if (std::fabs(f) >= 65520.0f) return std::copysign(INFINITY, f);
    return float_of_bits((u + 0x0FFF + ((u >> 13) & 1)) & ~0x1FFFu);
}

inline uint16_t float_to_half(float f) {
    const float r = round_half(f);
    const uint32_t u = bits_of_float(r), sign = u >> 16 & 0x8000;
    if (std::fabs(r) < 0x1p-14f) return uint16_t(sign | uint32_t(std::fabs(r) * 0x1p24f));
    if (std::isinf(r)) return uint16_t(sign | 0x7C00);
    return uint16_t(sign | ((u & 0x7FFFFFFF) - 0x38000000) >> 13);
}

// RN16(d * d + c) with a single rounding: round to odd in fp32 first (the double sum is exact wherever its low
// bits can decide), which makes the second rounding harmless.
inline float exact_cost(float d, float c) {
    const float sum = d * d + c;
    const double exact = double(d) * double(d) + double(c);
    if (double(sum) == exact) return round_half(sum);
    const uint32_t toward_zero = bits_of_float(sum) - (double(sum) > exact ? 1 : 0);
    return round_half(float_of_bits(toward_zero | 1));
}

inline uint32_t reverse5(uint32_t v) {
    return (v & 1) << 4 | (v & 2) << 2 | (v & 4) | (v & 8) >> 2 | (v & 16) >> 4;
}

// Order in which equal-cost final nodes of the first pass are preferred (lowest first).
inline uint32_t end_node_rank(uint32_t node) {
    return reverse5(node >> 5 & 31) << 10 | reverse5(node & 31) << 5 | node >> 10;
}

// Fresh bits of a position: K for whole rates, floor(K) at even and ceil(K) at odd positions otherwise.
struct Rate {
    int half_units;  // 2 K

    int fresh(int position) const {
        const int t = position & (kPositions - 1);
        return ((t + 1) * half_units >> 1) - (t * half_units >> 1);
    }
    int max_node_bits() const { return 16 - half_units / 2; }
    int keep_every() const { return half_units >= 7 ? 1 : 12 / half_units; }
};

// Grow-only memory of one thread: a fresh allocation a tile would page-fault 2 MB each time.
struct Arena {
    void* data = nullptr;
    size_t bytes = 0;

    void* reserve(size_t wanted) {
        if (wanted > bytes) {
            std::free(data);
            bytes = (wanted + 63) / 64 * 64;
            data = std::aligned_alloc(64, bytes);
            if (data == nullptr) std::abort();
        }
        return data;
    }
    ~Arena() { std::free(data); }
};

// What all tiles of a call share.
template <class V>
struct Codes {
    using elem = typename V::elem;
    Rate rate;
    const float* plain;       // value of each state
    const elem* ordered[2];   // per position parity: [successor vector][h][lane]
};

// One pass over the ring for up to V::kTiles tiles at once (they share the stream of values).
template <class V>
struct Pass {
    using elem = typename V::elem;
    using vec = typename V::vec;
    struct Choice {
        float cost;
        uint32_t state;
    };

    const Codes<V>& codes;
    elem* memory;        // rows of all tiles
    const float* x;      // [tile][position], fp16 values
    int start;           // first position
    int keep_from;       // first step whose cost row the trace will need

    static size_t row_elems(Rate rate) { return (size_t(1) << rate.max_node_bits()) + V::kLanes; }
    static int rows_per_tile(Rate rate) { return kPositions / rate.keep_every() + 3; }

    bool kept(int step) const {
        return step >= keep_from && (step - keep_from) % codes.rate.keep_every() == 0;
    }

    // Costs of the nodes that enter `step` (step 256: that leave the last one).
    elem* row(int tile, int step) const {
        const int index = kept(step) ? 2 + (step - keep_from) / codes.rate.keep_every() : step & 1;
        return memory + (size_t(tile) * rows_per_tile(codes.rate) + index) * row_elems(codes.rate);
    }

    // The cheapest state that leads into `node`, given the cost of each node before it. Lowest state on ties.
    template <class CostOf>
    Choice cheapest(int tile, int position, uint32_t node, CostOf cost_of) const {
        const int fresh = codes.rate.fresh(position), node_bits = 16 - codes.rate.fresh(position + 1);
        const float target = x[tile * kPositions + position];
        Choice best{INFINITY, node};
        for (uint32_t state = node; state < uint32_t(kStates); state += 1u << node_bits) {
            const float cost = exact_cost(round_half(codes.plain[state] - target), cost_of(state >> fresh));
            if (cost < best.cost) best = {cost, state};
        }
        return best;
    }

    // Cheapest state of step - 1 that leads into `node`, through rows that were not kept if need be.
    Choice survivor(int tile, int step, uint32_t node) const {
        return cheapest(tile, (start + step - 1) & (kPositions - 1), node, [&](uint32_t before) {
            return kept(step - 1) ? V::to_float(row(tile, step - 1)[before])
                                  : survivor(tile, step - 1, before).cost;
        });
    }

    template <int D, int Dnext>
    void advance(int step) const {
        constexpr int kNodeBits = 16 - Dnext, kHeads = 1 << Dnext, T = V::kTiles;
        const int position = (start + step) & (kPositions - 1);
        const elem* values = codes.ordered[position & 1];
        const elem* before[T];
        elem* after[T];
        vec target[T];
        for (int i = 0; i < T; ++i) {
            before[i] = row(i, step);
            after[i] = row(i, step + 1);
            target[i] = V::broadcast(x[i * kPositions + position]);
        }
        for (uint32_t node = 0; node < 1u << kNodeBits; node += V::kLanes) {
            vec best[T][2];  // two chains a tile hide the latency of the minimum
            for (uint32_t h = 0; h < kHeads; h += 2) {
                for (uint32_t c = 0; c < 2; ++c) {
                    const vec value = V::load(values);
                    values += V::kLanes;
                    const uint32_t pred = ((h + c) << kNodeBits | node) >> D;
                    for (int i = 0; i < T; ++i) {
                        const vec cost =
                            V::cost(value, target[i], V::template spread<D>(before[i] + pred));
                        best[i][c] = h == 0 ? cost : V::min(best[i][c], cost);
                    }
                }
            }
            for (int i = 0; i < T; ++i) {
                const vec least = V::min(best[i][0], best[i][1]);
                V::store(after[i] + node, V::round(least));
                for (uint32_t lanes = V::doubtful(least); lanes != 0; lanes &= lanes - 1) {
                    const uint32_t doubt = node + uint32_t(__builtin_ctz(lanes));
                    after[i][doubt] = V::from_float(cheapest(i, position, doubt, [&](uint32_t p) {
                                                        return V::to_float(before[i][p]);
                                                    }).cost);
                }
            }
        }
    }

    using Step = void (Pass::*)(int) const;

    static Step step_for(int fresh, int fresh_next) {
        switch (fresh * 16 + fresh_next) {
            case 0x11: return &Pass::advance<1, 1>;
            case 0x12: return &Pass::advance<1, 2>;
            case 0x21: return &Pass::advance<2, 1>;
            case 0x22: return &Pass::advance<2, 2>;
            case 0x23: return &Pass::advance<2, 3>;
            case 0x32: return &Pass::advance<3, 2>;
            case 0x33: return &Pass::advance<3, 3>;
            case 0x34: return &Pass::advance<3, 4>;
            case 0x43: return &Pass::advance<4, 3>;
            case 0x44: return &Pass::advance<4, 4>;
            case 0x55: return &Pass::advance<5, 5>;
            case 0x66: return &Pass::advance<6, 6>;
            case 0x77: return &Pass::advance<7, 7>;
            default: return &Pass::advance<8, 8>;
        }
    }

    void forward() const {
        const Step even = step_for(codes.rate.fresh(0), codes.rate.fresh(1));
        const Step odd = step_for(codes.rate.fresh(1), codes.rate.fresh(2));
        for (int step = 0; step < kPositions; ++step) (this->*(step & 1 ? odd : even))(step);
    }

    // Follows the survivors from `node` after the last step back to the node that enters `first`.
    uint32_t trace(int tile, int first, uint32_t node, int32_t* states) const {
        for (int step = kPositions; step > first; --step) {
            const int position = (start + step - 1) & (kPositions - 1);
            const uint32_t state = survivor(tile, step, node).state;
            if (states != nullptr) states[position] = int32_t(state);
            node = state >> codes.rate.fresh(position);
        }
        return node;
    }

    uint32_t cheapest_end(int tile) const {
        const elem* last = row(tile, kPositions);
        uint32_t best = 0;
        for (uint32_t node = 1; node < 1u << (16 - codes.rate.fresh(start)); ++node) {
            const float cost = V::to_float(last[node]), least = V::to_float(last[best]);
            if (cost < least || (cost == least && end_node_rank(node) < end_node_rank(best))) best = node;
        }
        return best;
    }
};

// Makes the ring chain from its fresh bits alone. It already does unless every path overflowed fp16.
inline void close_ring(Rate rate, int32_t* states) {
    uint32_t state = uint32_t(states[kPositions - 1]);
    for (int t = 0; t < kPositions; ++t) {
        const int fresh = rate.fresh(t);
        state = (state << fresh | (uint32_t(states[t]) & ((1u << fresh) - 1))) & 0xFFFF;
        states[t] = int32_t(state);
    }
}

// V::kTiles tiles (the last may repeat): x is [tile][position] rounded to fp16, states likewise.
template <class V>
void encode_group(const Codes<V>& codes, typename V::elem* memory, const float* x, int32_t* const* states) {
    const size_t nodes = size_t(1) << codes.rate.max_node_bits();
    const Pass<V> around{codes, memory, x, kHalfway, kHalfway};
    for (int i = 0; i < V::kTiles; ++i) std::memset(around.row(i, 0), 0, nodes * sizeof(typename V::elem));
    around.forward();
    uint32_t tail[V::kTiles];
    for (int i = 0; i < V::kTiles; ++i) {
        tail[i] = around.trace(i, kHalfway, around.cheapest_end(i), nullptr);
    }
    const Pass<V> pinned{codes, memory, x, 0, 0};
    for (int i = 0; i < V::kTiles; ++i) {
        auto* entry = pinned.row(i, 0);
        for (size_t node = 0; node < nodes; ++node) entry[node] = V::from_float(INFINITY);
        entry[tail[i]] = V::from_float(0.0f);
    }
    pinned.forward();
    for (int i = 0; i < V::kTiles; ++i) {
        pinned.trace(i, 0, tail[i], states[i]);
        close_ring(codes.rate, states[i]);
    }
}

template <class V>
typename V::elem* order_values(Rate rate, int parity, const float* plain) {
    auto* ordered = static_cast<typename V::elem*>(std::aligned_alloc(64, kStates * sizeof(typename V::elem)));
    if (ordered == nullptr) std::abort();
    const int heads = 1 << rate.fresh(parity + 1), nodes = kStates / heads;
    auto* out = ordered;
    for (int node = 0; node < nodes; node += V::kLanes) {
        for (int h = 0; h < heads; ++h) {
            for (int lane = 0; lane < V::kLanes; ++lane) *out++ = V::from_float(plain[h * nodes + node + lane]);
        }
    }
    return ordered;
}

template <class V>
struct Job {
    Codes<V> codes;
    const float* tiles;
    int64_t count;
    int32_t* states;

    void group(int64_t index) const {
        thread_local Arena arena;
        const size_t elems = Pass<V>::row_elems(codes.rate) * Pass<V>::rows_per_tile(codes.rate) * V::kTiles;
        auto* memory = static_cast<typename V::elem*>(arena.reserve(elems * sizeof(typename V::elem)));
        float x[V::kTiles * kPositions];
        int32_t* out[V::kTiles];
        for (int i = 0; i < V::kTiles; ++i) {
            int64_t tile = index * V::kTiles + i;
            if (tile >= count) tile = count - 1;  // a short last group encodes its last tile again
            for (int t = 0; t < kPositions; ++t) x[i * kPositions + t] = round_half(tiles[tile * kPositions + t]);
            out[i] = states + tile * kPositions;
        }
        encode_group<V>(codes, memory, x, out);
    }
};

// tiles: fp32 [count][256] in stream order. values: the codebook, fp16 bits of the 65,536 states.
// states: int32 [count][256]. half_units: 2 K.
template <class V>
void encode_tiles(const float* tiles, int64_t count, int half_units, const uint16_t* values, int32_t* states,
                  int threads) {
    const Rate rate{half_units};
    auto* plain = static_cast<float*>(std::malloc(kStates * sizeof(float)));
    if (plain == nullptr) std::abort();
    for (int s = 0; s < kStates; ++s) plain[s] = half_to_float(values[s]);
    auto* even = order_values<V>(rate, 0, plain);
    auto* odd = rate.half_units & 1 ? order_values<V>(rate, 1, plain) : even;
    const Job<V> job{{rate, plain, {even, odd}}, tiles, count, states};
    parallel_for((count + V::kTiles - 1) / V::kTiles, threads, [&](int64_t index) { job.group(index); });
    if (odd != even) std::free(odd);
    std::free(even);
    std::free(plain);
}

}  // namespace
