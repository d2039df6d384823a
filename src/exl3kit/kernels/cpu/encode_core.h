// Trellis search over one 16 x 16 tile: the tail-biting, two-pass Viterbi of the EXL3 encoder,
// shared by every instruction set. A tier (encode_<isa>.cpp) supplies a vector type V and this
// header the algorithm.
//
// State s at position t has 16 bits: h (top D(t+1) bits) : m : n (low D(t) bits). Its predecessor
// node is h:m = s >> D(t), its successor node m:n. For one vector of consecutive successor nodes
// the states of each h are consecutive too, so values are read as one stream (table order
// [vector][h][lane]) and the predecessor costs of a vector are `lanes >> D` neighbours, each
// repeated 2^D times ("spread").
//
// Arithmetic is fp16 with one rounding a step: d = RN(value - x), cost = RN(d * d + cost[pred]).
// d * d is exact in fp32 (11 x 11 bits). Tiers in fp32 keep the unrounded sum, take the minimum,
// and round the winner once: rounding is monotone, so that is the minimum of the rounded costs.
// Rounding fp32 -> fp16 after rounding to fp32 differs from one rounding only where the fp32 sum is
// inexact and a midpoint of two fp16 values: AVX-512 avoids that by rounding to odd, the others
// recompute lanes on a midpoint exactly ("settle"). All tiers return the same states.
//
// No back-pointers are kept. Cost rows are, every `keep_every` steps, and the trace recomputes the
// few candidates it meets: 2^(D * keep_every) <= 64 a group up to K = 3.5. At K = 3 that is 2 MB a
// tile in fp16, where 8-bit back-pointers would be 2 MB too, but the inner loop is then spread,
// subtract, fma, min and nothing else: choosing an index would add a compare and a blend to those
// four.
//
// Floor: 2 passes * 256 positions * 65,536 states = 33.6 M evaluations a tile at any rate. With 32
// fp16 lanes that is 1.05 M vectors of 4 instructions on two 512-bit ports, 2.1 M cycles or 0.78 ms
// of one core at 2.7 GHz; benchmarks/results/encode.md has what is reached.
#pragma once

#include <cstring>

#include "encode.h"
#include "encode_half.h"

namespace exl3 {
namespace {  // each tier compiles its own copy: see encode_half.h

constexpr int kPositions = 256;
constexpr int kHalfway = 128;
constexpr int kStates = 65536;

inline uint32_t reverse5(uint32_t v) {
    return (v & 1) << 4 | (v & 2) << 2 | (v & 4) | (v & 8) >> 2 | (v & 16) >> 4;
}

// Order in which equal-cost final nodes of the first pass are preferred (lowest first).
inline uint32_t end_node_rank(uint32_t node) {
    return reverse5(node >> 5 & 31) << 10 | reverse5(node & 31) << 5 | node >> 10;
}

// RN16(d * d + c) with a single rounding: round to odd in fp32 first (the double sum is exact
// wherever its low bits can decide), which makes the second rounding harmless.
template <class V>
float exact_cost(float d, float c) {
    const float sum = d * d + c;
    const double exact = double(d) * double(d) + double(c);
    if (double(sum) == exact) return V::round_one(sum);
    const uint32_t toward_zero = bits_of_float(sum) - (double(sum) > exact ? 1 : 0);
    return V::round_one(float_of_bits(toward_zero | 1));
}

// Fresh bits of a position: K for whole rates, floor(K) at even and ceil(K) at odd positions
// otherwise.
struct Rate {
    int half_units;  // 2 K

    int fresh(int position) const {
        const int t = position & (kPositions - 1);
        return ((t + 1) * half_units >> 1) - (t * half_units >> 1);
    }
    int max_node_bits() const { return 16 - half_units / 2; }
    int keep_every() const { return half_units >= 7 ? 1 : 12 / half_units; }
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

    const EncodeCodes& codes;
    const Rate rate;
    elem* memory;    // rows of all tiles
    const float* x;  // [tile][position], fp16 values
    int start;       // first position
    int keep_from;   // first step whose cost row the trace will need

    // One vector of padding keeps equal indices of different rows off the same cache sets.
    static size_t row_elems(Rate rate) { return (size_t(1) << rate.max_node_bits()) + V::kLanes; }
    static int rows_per_tile(Rate rate) { return kPositions / rate.keep_every() + 3; }

    bool kept(int step) const {
        return step >= keep_from && (step - keep_from) % rate.keep_every() == 0;
    }

    // Costs of the nodes that enter `step` (step 256: that leave the last one).
    elem* row(int tile, int step) const {
        const int index = kept(step) ? 2 + (step - keep_from) / rate.keep_every() : step & 1;
        return memory + (size_t(tile) * rows_per_tile(rate) + index) * row_elems(rate);
    }

    // The cheapest state that leads into `node`, given the cost of each node before it. Lowest
    // state on ties.
    template <class CostOf>
    Choice cheapest(int tile, int position, uint32_t node, CostOf cost_of) const {
        const int fresh = rate.fresh(position), node_bits = 16 - rate.fresh(position + 1);
        const float target = x[tile * kPositions + position];
        Choice best{INFINITY, node};
        for (uint32_t state = node; state < uint32_t(kStates); state += 1u << node_bits) {
            const float d = V::round_one(codes.plain[state] - target);
            const float cost = exact_cost<V>(d, cost_of(state >> fresh));
            if (cost < best.cost) best = {cost, state};
        }
        return best;
    }

    // Cheapest state of step - 1 that leads into `node`, through rows that were not kept if need
    // be.
    Choice survivor(int tile, int step, uint32_t node) const {
        return cheapest(tile, (start + step - 1) & (kPositions - 1), node, [&](uint32_t before) {
            return kept(step - 1) ? V::to_float(row(tile, step - 1)[before])
                                  : survivor(tile, step - 1, before).cost;
        });
    }

    // The rounded cost of a node whose unrounded minimum is `least`: only states that reach it can
    // win.
    float settle(int tile, int position, uint32_t node, const elem* before, float least) const {
        const int fresh = rate.fresh(position), node_bits = 16 - rate.fresh(position + 1);
        const float target = x[tile * kPositions + position];
        float best = INFINITY;
        for (uint32_t state = node; state < uint32_t(kStates); state += 1u << node_bits) {
            const float d = V::round_one(codes.plain[state] - target),
                        c = V::to_float(before[state >> fresh]);
            if (d * d + c == least) best = std::fmin(best, exact_cost<V>(d, c));
        }
        return best;
    }

    void settle_lanes(int tile, int position, uint32_t node, vec least, const elem* before,
                      elem* after) const {
        for (uint32_t lanes = V::doubtful(least); lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            after[node + lane] = settle(tile, position, node + lane, before, V::lane(least, lane));
        }
    }

    template <int D, int Dnext>
    void advance(int step) const {
        constexpr int kNodeBits = 16 - Dnext, kHeads = 1 << Dnext, T = V::kTiles;
        const int position = (start + step) & (kPositions - 1);
        const elem* values = static_cast<const elem*>(codes.ordered[position & 1]);
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
            for (uint32_t h = 0; h < kHeads; ++h, values += V::kLanes) {
                const vec value = V::load(values);
                const uint32_t pred = (h << kNodeBits | node) >> D;
                for (int i = 0; i < T; ++i) {
                    const vec cost =
                        V::cost(value, target[i], V::template spread<D>(before[i] + pred));
                    best[i][h & 1] = h < 2 ? cost : V::min(best[i][h & 1], cost);
                }
            }
            for (int i = 0; i < T; ++i) {
                const vec least = V::min(best[i][0], best[i][1]);
                V::store(after[i] + node, V::round(least));
                if constexpr (V::kDoubts)
                    settle_lanes(i, position, node, least, before[i], after[i]);
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
        const Step even = step_for(rate.fresh(0), rate.fresh(1));
        const Step odd = step_for(rate.fresh(1), rate.fresh(2));
        for (int step = 0; step < kPositions; ++step) (this->*(step & 1 ? odd : even))(step);
    }

    void enter_free() const {
        for (int i = 0; i < V::kTiles; ++i)
            std::memset(row(i, 0), 0, row_elems(rate) * sizeof(elem));
    }

    void enter_at(int tile, uint32_t node) const {
        elem* entry = row(tile, 0);
        for (size_t other = 0; other < row_elems(rate); ++other)
            entry[other] = V::from_float(INFINITY);
        entry[node] = V::from_float(0.0f);
    }

    // Follows the survivors from `node` after the last step back to the node that enters step
    // `keep_from`.
    uint32_t trace(int tile, uint32_t node, int32_t* states) const {
        for (int step = kPositions; step > keep_from; --step) {
            const int position = (start + step - 1) & (kPositions - 1);
            const uint32_t state = survivor(tile, step, node).state;
            if (states != nullptr) states[position] = int32_t(state);
            node = state >> rate.fresh(position);
        }
        return node;
    }

    uint32_t cheapest_end(int tile) const {
        const elem* last = row(tile, kPositions);
        uint32_t best = 0;
        for (uint32_t node = 1; node < 1u << (16 - rate.fresh(start)); ++node) {
            const float cost = V::to_float(last[node]), least = V::to_float(last[best]);
            if (cost < least || (cost == least && end_node_rank(node) < end_node_rank(best)))
                best = node;
        }
        return best;
    }
};

// Makes the ring chain from its fresh bits alone. It already does unless every path overflowed
// fp16.
inline void close_ring(Rate rate, int32_t* states) {
    uint32_t state = uint32_t(states[kPositions - 1]);
    for (int t = 0; t < kPositions; ++t) {
        const int fresh = rate.fresh(t);
        state = (state << fresh | (uint32_t(states[t]) & ((1u << fresh) - 1))) & 0xFFFF;
        states[t] = int32_t(state);
    }
}

template <class V>
void encode_group(const EncodeCodes& codes, void* scratch, const float* const* tiles,
                  int32_t* const* states) {
    using elem = typename V::elem;
    const Rate rate{codes.half_units};
    auto* memory = static_cast<elem*>(scratch);
    float x[V::kTiles * kPositions];
    for (int i = 0; i < V::kTiles; ++i) {
        for (int t = 0; t < kPositions; ++t) x[i * kPositions + t] = round_half(tiles[i][t]);
    }
    const Pass<V> around{codes, rate, memory, x, kHalfway, kHalfway};
    around.enter_free();
    around.forward();
    uint32_t tail[V::kTiles];
    for (int i = 0; i < V::kTiles; ++i) tail[i] = around.trace(i, around.cheapest_end(i), nullptr);
    const Pass<V> pinned{codes, rate, memory, x, 0, 0};
    for (int i = 0; i < V::kTiles; ++i) pinned.enter_at(i, tail[i]);
    pinned.forward();
    for (int i = 0; i < V::kTiles; ++i) {
        pinned.trace(i, tail[i], states[i]);
        close_ring(rate, states[i]);
    }
}

template <class V>
void order_values(int half_units, int parity, const float* plain, void* table) {
    auto* out = static_cast<typename V::elem*>(table);
    const int heads = 1 << Rate{half_units}.fresh(parity + 1), nodes = kStates / heads;
    for (int node = 0; node < nodes; node += V::kLanes) {
        for (int h = 0; h < heads; ++h) {
            for (int lane = 0; lane < V::kLanes; ++lane)
                *out++ = V::from_float(plain[h * nodes + node + lane]);
        }
    }
}

template <class V>
size_t scratch_bytes(int half_units) {
    const Rate rate{half_units};
    return V::kTiles * Pass<V>::rows_per_tile(rate) * Pass<V>::row_elems(rate) *
           sizeof(typename V::elem);
}

template <class V>
constexpr EncodeTier make_tier() {
    return {V::kTiles, kStates * sizeof(typename V::elem), scratch_bytes<V>, order_values<V>,
            encode_group<V>};
}

}  // namespace
}  // namespace exl3
