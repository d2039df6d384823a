// Loops over independent items, on the threads that torch has anyway: threads of our own would
// inherit the caller's core where OpenMP binds threads to cores, and share it (2 threads then took
// the time of 1), and beside torch's, which spin a while after each of its operations, there would
// be twice as many as cores.
#pragma once

#include <cstdint>
#include <functional>

namespace exl3 {

// Call body(item, worker) once for every item in [0, items), on at most `threads` threads;
// worker < threads names the scratch a body may use. Items are handed out one by one, so a body
// must not depend on which worker runs it or in what order. With one thread, inside another
// parallel_for, without exl3_use_team, or in a process forked after it, whose parent's threads are
// gone, everything runs in the caller.
void parallel_for(int64_t items, int threads,
                  const std::function<void(int64_t item, int worker)>& body);

}  // namespace exl3
