#include "route.h"

#include <algorithm>

#include "tier.h"

namespace exl3 {
namespace {

// Local expert of a route: -1 when it contributes nothing, -2 when the map is wrong.
int64_t local_expert(const MoeArgs& a, int64_t route) {
    if (a.topk_weights[route] == 0.0f) return -1;
    int64_t id = a.wide_ids ? static_cast<const int64_t*>(a.topk_ids)[route]
                            : static_cast<const int32_t*>(a.topk_ids)[route];
    if (id < 0 || id >= a.map_size) return -1;
    if (a.expert_map != nullptr) id = a.expert_map[id];
    return id < a.experts ? std::max<int64_t>(id, -1) : -2;
}

}  // namespace

bool pack_routes(const MoeArgs& a, Routes& routes) {
    const int64_t total = a.tokens * a.top_k;
    std::vector<int64_t> first(a.experts + 1), expert(total);
    for (int64_t route = 0; route < total; ++route) {
        expert[route] = local_expert(a, route);
        if (expert[route] == -2) return false;
        if (expert[route] >= 0) ++first[expert[route] + 1];
    }
    for (int64_t e = 0; e < a.experts; ++e) {
        first[e + 1] += first[e];
        for (int64_t row = first[e]; row < first[e + 1]; row += kTokenChunk)
            routes.chunks.push_back({e, row, std::min(kTokenChunk, first[e + 1] - row)});
    }
    routes.order.resize(first[a.experts]);
    routes.experts.resize(first[a.experts]);
    routes.position.assign(total, -1);
    for (int64_t route = 0; route < total; ++route) {
        if (expert[route] < 0) continue;
        const int64_t row = first[expert[route]]++;
        routes.order[row] = route;
        routes.experts[row] = expert[route];
        routes.position[route] = row;
    }
    return true;
}

}  // namespace exl3
