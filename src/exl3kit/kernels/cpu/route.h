// Route packing: which rows go to which expert, in an order that depends on the routes alone.
#pragma once

#include <vector>

#include "exl3_cpu.h"

namespace exl3 {

// At most kTokenChunk neighbouring rows of one expert. Experts without a route have none.
struct RouteChunk {
    int64_t expert, first, count;
};

struct Routes {
    // A route is token * top_k + slot. The rows of an expert keep the order of their tokens.
    std::vector<int64_t> order;     // packed row -> route
    std::vector<int64_t> experts;   // packed row -> local expert
    std::vector<int64_t> position;  // route -> packed row, -1 = contributes nothing
    std::vector<RouteChunk> chunks;
};

// Routes with weight zero, with an id outside the model, or mapped to -1 are dropped. False when
// the map names an expert that is not there.
bool pack_routes(const MoeArgs& args, Routes& routes);

}  // namespace exl3
