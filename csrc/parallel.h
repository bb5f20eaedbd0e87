// A small pool of threads that sleep while there is nothing to do.

#pragma once

#include <cstdint>

namespace specviz {

// Runs body(context, task) for each task in [0, tasks) on the caller and the pool, and returns when all are done.
// Tasks are handed out in order, one at a time. Safe from several threads at once: a second caller works alone.
void run_tasks(int64_t tasks, void (*body)(void* context, int64_t task), void* context);

// Threads that run_tasks may use, the caller included.
void set_threads(int threads);
int threads();

// The same for a callable. Static, because each variant is compiled with its own instruction set (see simd.h).
template <class Body>
static inline void parallel_for(int64_t tasks, const Body& body) {
    auto call = [](void* context, int64_t task) { (*static_cast<const Body*>(context))(task); };
    run_tasks(tasks, call, const_cast<Body*>(&body));
}

// Work that is not `worthwhile` stays on the caller: waking a thread takes some 10 us.
template <class Body>
static inline void parallel_for(int64_t tasks, bool worthwhile, const Body& body) {
    if (worthwhile) return parallel_for(tasks, body);
    for (int64_t task = 0; task < tasks; task++) body(task);
}

}  // namespace specviz
