// How fast this machine can read memory at all: the roof that benches hold every kernel against.

#include <cstdint>
#include <cstring>

#include "parallel.h"

namespace {

// What every machine's registers hold. Wider ones would read no faster from memory.
typedef uint64_t Words __attribute__((vector_size(16)));

constexpr int64_t kTaskBytes = 1 << 18;

Words load(const char* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

uint64_t read(const char* from, int64_t bytes) {
    // Four chains, so that loads are what is waited for, and not the additions.
    Words a{}, b{}, c{}, d{};
    int64_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
        a += load(from + at);
        b += load(from + at + 16);
        c += load(from + at + 32);
        d += load(from + at + 48);
    }
    const Words all = a + b + c + d;
    uint64_t total = all[0] + all[1];
    for (; at < bytes; at++) total += static_cast<unsigned char>(from[at]);
    return total;
}

}  // namespace

// Reads every byte once, on all threads of the pool. Returns a sum, so that no compiler can leave a load out.
extern "C" __attribute__((visibility("default"))) uint64_t specviz_read(const void* from, int64_t bytes) {
    const int64_t tasks = (bytes + kTaskBytes - 1) / kTaskBytes;
    uint64_t total = 0;
    specviz::parallel_for(tasks, [&](int64_t task) {
        const int64_t begin = task * kTaskBytes, left = bytes - begin;
        const uint64_t sum = read(static_cast<const char*>(from) + begin, left < kTaskBytes ? left : kTaskBytes);
        __atomic_fetch_add(&total, sum, __ATOMIC_RELAXED);
    });
    return total;
}
