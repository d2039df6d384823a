#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>

#include "exl3_cpu.h"

namespace exl3 {
namespace {

using Body = std::function<void(int64_t, int)>;
// GOMP_parallel(function, data, threads, flags) of an OpenMP runtime.
using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);

std::atomic<Team> team{nullptr};
// The runtime orders what its threads see. ThreadSanitizer, which does not know it, takes that from
// here: added to where one thread lets go, read where another goes on.
std::atomic<unsigned> handed_over{0};
thread_local bool inside_loop = false;

struct Loop {
    const Body& body;
    const int64_t items;
    std::atomic<int64_t> next{0};
    std::atomic<int> workers{0};

    void work(int worker) {
        const bool was_inside = inside_loop;
        inside_loop = true;
        for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;)
            body(item, worker);
        inside_loop = was_inside;
    }
};

void join(void* data) {
    handed_over.load(std::memory_order_acquire);
    auto& loop = *static_cast<Loop*>(data);
    loop.work(loop.workers.fetch_add(1, std::memory_order_relaxed));
    handed_over.fetch_add(1, std::memory_order_release);
}

}  // namespace

void parallel_for(int64_t items, int threads, const Body& body) {
    threads = static_cast<int>(std::min<int64_t>(threads, items));
    const Team start = team.load(std::memory_order_acquire);
    Loop loop{body, items};
    if (threads <= 1 || inside_loop || start == nullptr) return loop.work(0);
    handed_over.fetch_add(1, std::memory_order_release);
    start(join, &loop, threads, 0);
    handed_over.load(std::memory_order_acquire);
}

}  // namespace exl3

EXL3_API void exl3_use_team(void* gomp_parallel) {
    // The threads of a runtime do not survive fork(), and it would wait for them.
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { exl3::team.store(nullptr); });
    (void)registered;
    exl3::team.store(reinterpret_cast<exl3::Team>(gomp_parallel));
}
