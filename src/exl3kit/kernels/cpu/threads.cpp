#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace exl3 {
namespace {

using Body = std::function<void(int64_t, int)>;

// One loop at a time. The pool is never destroyed: its threads sleep until the process ends, and a
// child made by fork(), which has none of them, drops the pointer and starts afresh.
class Pool {
  public:
    void run(int64_t items, int threads, const Body& body) {
        std::lock_guard<std::mutex> one_caller(callers_);
        grow(threads - 1);
        {
            std::lock_guard<std::mutex> lock(state_);
            body_ = &body;
            items_ = items;
            next_.store(0, std::memory_order_relaxed);
            helpers_ = threads - 1;
            running_ = threads - 1;
            ++round_;
        }
        wake_.notify_all();
        work(0);
        std::unique_lock<std::mutex> lock(state_);
        done_.wait(lock, [&] { return running_ == 0; });
    }

  private:
    void grow(int helpers) {
        for (; started_ < helpers; ++started_) {
            std::thread(&Pool::helper, this, started_ + 1, round_).detach();
        }
    }

    void helper(int worker, uint64_t seen) {
        std::unique_lock<std::mutex> lock(state_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            if (worker > helpers_) continue;
            lock.unlock();
            work(worker);
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    void work(int worker);

    std::mutex callers_, state_;
    std::condition_variable wake_, done_;
    const Body* body_ = nullptr;
    std::atomic<int64_t> next_{0};
    int64_t items_ = 0;
    uint64_t round_ = 0;
    int helpers_ = 0, running_ = 0, started_ = 0;
};

thread_local bool inside_loop = false;

void Pool::work(int worker) {
    inside_loop = true;
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) {
        (*body_)(item, worker);
    }
    inside_loop = false;
}

std::atomic<Pool*> current{nullptr};

Pool& pool() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
    (void)registered;
    Pool* found = current.load();
    if (found == nullptr) {
        Pool* fresh = new Pool;
        if (current.compare_exchange_strong(found, fresh)) return *fresh;
        delete fresh;
    }
    return *found;
}

}  // namespace

void parallel_for(int64_t items, int threads, const Body& body) {
    threads = static_cast<int>(std::min<int64_t>(threads, items));
    if (threads <= 1 || inside_loop) {
        for (int64_t item = 0; item < items; ++item) body(item, 0);
        return;
    }
    pool().run(items, threads, body);
}

}  // namespace exl3
