// A persistent pool for loops over independent items. Idle workers sleep on a condition variable
// and never spin: a tensor-parallel server runs several such processes on the same cores.
#pragma once

#include <cstdint>
#include <functional>

namespace exl3 {

// Call body(item, worker) once for every item in [0, items), on at most `threads` threads, the
// caller being worker 0; worker < threads names the scratch a body may use. Items are handed out
// one by one, so a body must not depend on which worker runs it or in what order. With one thread,
// or inside another parallel_for, everything runs in the caller. Safe after fork(): the child
// starts its own pool.
void parallel_for(int64_t items, int threads,
                  const std::function<void(int64_t item, int worker)>& body);

}  // namespace exl3
