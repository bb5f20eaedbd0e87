#include "parallel.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specviz {
namespace {

// How long a thread looks for more work before it sleeps: a layer's next kernel often comes within this time, and
// a wake-up costs more. Short, so that torch's own threads find the cores free.
constexpr auto kSpin = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Done>
bool spin_until(Done done) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; i++) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

// One call of run_tasks. Workers enter under the pool's lock; the caller waits until all that entered have left.
struct Job {
    void (*body)(void*, int64_t);
    void* context;
    int64_t tasks;
    std::atomic<int64_t> next{0};
    std::atomic<int> inside{0};

    // A few tasks at a time, so that threads seldom meet at the counter, but enough shares for late ones to have some.
    void work(int threads) {
        const int64_t share = tasks / (8 * threads) + 1;
        for (int64_t task; (task = next.fetch_add(share, std::memory_order_relaxed)) < tasks;)
            for (const int64_t end = task + share < tasks ? task + share : tasks; task < end; task++)
                body(context, task);
    }
};

class Pool {
  public:
    void resize(int threads) {
        std::lock_guard<std::mutex> caller(caller_);
        stop();
        try {
            for (int i = 1; i < threads; i++) workers_.emplace_back([this] { serve(); });
        } catch (const std::exception&) {
            // The system gives no more threads: those that there are do the work.
        }
        size_.store(static_cast<int>(workers_.size()) + 1, std::memory_order_relaxed);
    }

    int size() const { return size_.load(std::memory_order_relaxed); }

    void run(int64_t tasks, void (*body)(void*, int64_t), void* context) {
        std::unique_lock<std::mutex> caller(caller_, std::try_to_lock);
        if (!caller || workers_.empty() || tasks < 2) {
            for (int64_t task = 0; task < tasks; task++) body(context, task);
            return;
        }
        Job job{body, context, tasks};
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        job.work(size());
        {
            // Nobody enters from here on: a worker that slept through the job must not touch a dead one.
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = nullptr;
        }
        auto left = [&] { return job.inside.load(std::memory_order_acquire) == 0; };
        if (!spin_until(left)) {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, left);
        }
    }

    // In a forked child the workers are gone, and a lock may be held by one of them: start over, on one thread.
    static void after_fork();

  private:
    void serve() {
        uint64_t seen = 0;
        while (true) {
            auto called = [&] { return generation_.load(std::memory_order_acquire) != seen; };
            Job* job;
            {
                if (!called()) spin_until(called);
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, called);
                seen = generation_.load(std::memory_order_relaxed);
                if (stopping_) return;
                job = job_;
                if (job) job->inside.fetch_add(1, std::memory_order_relaxed);
            }
            if (!job) continue;
            job->work(size());
            if (job->inside.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                // The caller may be gone with the job after this; only the pool is touched.
                std::lock_guard<std::mutex> lock(mutex_);
                done_.notify_one();
            }
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
        workers_.clear();
        stopping_ = false;
    }

    std::mutex caller_;  // one job at a time
    std::mutex mutex_;   // guards what follows
    std::condition_variable wake_, done_;
    std::atomic<uint64_t> generation_{0};
    Job* job_ = nullptr;
    bool stopping_ = false;
    std::atomic<int> size_{1};  // of workers_ and the caller, for who does not hold caller_
    std::vector<std::thread> workers_;
};

// Never destroyed: threads may still sleep in it while the process ends.
Pool* pool = new Pool;
const int fork_handler = pthread_atfork(nullptr, nullptr, Pool::after_fork);

void Pool::after_fork() { pool = new Pool; }

}  // namespace

void run_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) { pool->run(tasks, body, context); }
void set_threads(int threads) { pool->resize(threads < 1 ? 1 : threads); }
int threads() { return pool->size(); }

}  // namespace specviz
