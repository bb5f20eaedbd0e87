// Vectors as wide as the variant's registers, written once for all of them in the compilers' vector extension.
//
// Every file that includes this is compiled once for each variant, with other flags (see variant.cpp). All of it
// lives in an anonymous namespace and uses no templates of the standard library: a function that two variants
// shared by name would be merged by the linker, and a machine without AVX-512 would run the AVX-512 copy.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace specviz {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2 and NEON, which compilers for x86-64 and ARM use without being asked
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));
typedef uint8_t vb __attribute__((vector_size(kLanes)));

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

inline vf splat(float x) { return vf{} + x; }

inline float to_float(uint16_t bf16) {
    uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// To the nearest, ties to even, NaN stays NaN: as torch rounds.
inline uint16_t to_bf16(float x) {
    if (x != x) return 0x7fc0;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline vf widen(vh bf16) { return (vf)(__builtin_convertvector(bf16, vu) << 16); }

inline vh narrow(vf x) {
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vi nan = x != x;
    return __builtin_convertvector((vu)((nan & 0x7fc0) | (~nan & (vi)rounded)), vh);
}

// Both ways of keeping numbers, for code that is written once for both.
inline vf load_floats(const float* x) { return load<vf>(x); }
inline vf load_floats(const uint16_t* x) { return widen(load<vh>(x)); }
inline void put_floats(float* to, vf x) { store(to, x); }
inline void put_floats(uint16_t* to, vf x) { store(to, narrow(x)); }

inline vf max(vf a, vf b) { return a > b ? a : b; }

// Sum and maximum over the lanes, always in the same order.
inline float sum(vf x) {
    float lanes[kLanes];
    store(lanes, x);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

// The sums of four vectors.
inline void sum4(const vf* x, float* sums) {
#if defined(__AVX512F__)
    const __m512 a =
        _mm512_add_ps(_mm512_unpacklo_ps((__m512)x[0], (__m512)x[1]), _mm512_unpackhi_ps((__m512)x[0], (__m512)x[1]));
    const __m512 b =
        _mm512_add_ps(_mm512_unpacklo_ps((__m512)x[2], (__m512)x[3]), _mm512_unpackhi_ps((__m512)x[2], (__m512)x[3]));
    // Each 128 bits hold the four partial sums of their lanes: [0, 1, 2, 3].
    const __m512 c = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    for (int i = 0; i < 4; i++) sums[i] = sum(x[i]);
#endif
}

inline float largest(vf x) {
    float lanes[kLanes];
    store(lanes, x);
    float most = lanes[0];
    for (int i = 1; i < kLanes; i++) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

// e to the power x, to 2 units in the last place; 0 below -87 (the smallest normal numbers are not reached).
inline vf exp(vf x) {
    constexpr float kLog2e = 1.44269504088896341f, kMagic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to integers
    vf clamped = max(splat(-87.0f), x > 88.0f ? splat(88.0f) : x);
    vf shifted = clamped * kLog2e + kMagic;
    vf n = shifted - kMagic;
    vf r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi power = ((vi)shifted - 0x4b400000 + 127) << 23;
    vf result = p * (vf)power;
    return x < -87.0f ? vf{} : result;
}

}  // namespace
}  // namespace specviz
