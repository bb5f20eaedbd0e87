// Which variant runs on this machine. Compiled without any instruction set but the compiler's default.

#include <atomic>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace specviz {

extern const Kernels kernels_portable;
#if defined(SPECVIZ_WITH_avx2)
extern const Kernels kernels_avx2;
#endif
#if defined(SPECVIZ_WITH_avx512)
extern const Kernels kernels_avx512;
#endif
#if defined(SPECVIZ_WITH_avx512bf16)
extern const Kernels kernels_avx512bf16;
#endif
#if defined(SPECVIZ_WITH_amx)
extern const Kernels kernels_amx;
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Tiles must be there, enabled by the system, and asked for by the process.
bool has_amx() {
#if defined(SPECVIZ_EMULATE_AMX)
    return has_avx512bf16();
#elif defined(__linux__)
    unsigned a, b, c, d;
    if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

#if defined(SPECVIZ_WITH_amx)
// Whether a variant multiplies as `portable` does. The factors are small integers, so that every sum is exact. Asked of
// tiles, which were developed on a model of them in software: if the real ones disagree, they are not used.
bool agrees(const Kernels& kernels) {
    constexpr int64_t kRows = 19, kDepth = 70, kOutputs = 37;
    static uint16_t x[kRows * kDepth], weight[kOutputs * kDepth];
    static uint16_t expected[kRows * kOutputs], found[kRows * kOutputs];
    const auto integer = [](int64_t n) {
        const float value = static_cast<float>(n % 13 - 6);
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return static_cast<uint16_t>(bits >> 16);
    };
    for (int64_t i = 0; i < kRows * kDepth; i++) x[i] = integer(7 * i);
    for (int64_t i = 0; i < kOutputs * kDepth; i++) weight[i] = integer(5 * i + i / kDepth);
    LinearArgs args{Type::bf16, x, weight, nullptr, expected, kRows, kDepth, kOutputs};
    kernels_portable.linear(args);
    args.out = found;
    kernels.linear(args);
    return std::memcmp(expected, found, sizeof found) == 0;
}
#endif

struct Variant {
    const Kernels* kernels;
    bool supported;
};

// Best last.
const Variant variants[] = {
    {&kernels_portable, true},
#if defined(SPECVIZ_WITH_avx2)
    {&kernels_avx2, has_avx2()},
#endif
#if defined(SPECVIZ_WITH_avx512)
    {&kernels_avx512, has_avx512()},
#endif
#if defined(SPECVIZ_WITH_avx512bf16)
    {&kernels_avx512bf16, has_avx512bf16()},
#endif
#if defined(SPECVIZ_WITH_amx)
    {&kernels_amx, has_amx() && agrees(kernels_amx)},
#endif
};
constexpr int kVariants = sizeof variants / sizeof variants[0];

const Kernels* best() {
    const Kernels* found = nullptr;
    for (const Variant& variant : variants)
        if (variant.supported) found = variant.kernels;
    return found;
}

std::atomic<const Kernels*> in_use{best()};

}  // namespace

const Kernels& current() { return *in_use.load(std::memory_order_relaxed); }

}  // namespace specviz

// The plain C face, for ctypes: nothing here takes tensors.
extern "C" {

#define SPECVIZ_EXPORT __attribute__((visibility("default")))

// The name of compiled variant i, best last; null past the end.
SPECVIZ_EXPORT const char* specviz_variant(int i) {
    return i >= 0 && i < specviz::kVariants ? specviz::variants[i].kernels->name : nullptr;
}

SPECVIZ_EXPORT int specviz_supported(int i) {
    return i >= 0 && i < specviz::kVariants && specviz::variants[i].supported;
}

SPECVIZ_EXPORT const char* specviz_current() { return specviz::current().name; }

// Use the variant of that name from now on; 0 when it is not compiled in or not supported here.
SPECVIZ_EXPORT int specviz_use(const char* name) {
    for (const specviz::Variant& variant : specviz::variants) {
        if (variant.supported && std::strcmp(variant.kernels->name, name) == 0) {
            specviz::in_use.store(variant.kernels, std::memory_order_relaxed);
            return 1;
        }
    }
    return 0;
}

SPECVIZ_EXPORT void specviz_set_threads(int threads) { specviz::set_threads(threads); }
SPECVIZ_EXPORT int specviz_threads() { return specviz::threads(); }
}
