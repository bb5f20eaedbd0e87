// The units of attention: how q, K and V of one type are multiplied, and what is done to them before.
//
// `Stored` is what the cache holds, and one `Step` is what a multiply-add takes of one query: a float, or a pair of
// bfloat16. Lanes are keys (q · k) or value features (p · v), so no sum ever runs across lanes.

#pragma once

#include "kernels.h"
#include "products.h"
#include "simd.h"

namespace specviz {
namespace {

// Registers: kTileQueries × kPanelVectors accumulators, a vector of each of the panel's, and the broadcast operand.
constexpr int kPanelVectors = kLanes == 16 ? 4 : 2;
constexpr int kTileQueries = kLanes == 16 ? 6 : 5;
constexpr int64_t kPanel = kPanelVectors * kLanes;
// Lanes come in pairs of vectors: that is what a unit packs at a time, and the width of a narrow panel.
constexpr int64_t kPair = 2 * kLanes;

// The width of the panel that starts at lane `at` of `lanes`, a multiple of kPair.
inline int64_t panel_width(int64_t lanes, int64_t at) { return lanes - at >= kPanel ? kPanel : kPair; }

// Rows become columns.
#if defined(__AVX512F__)
// Within quarters of the registers first: those shuffles take no index registers.
inline void transpose(vi* rows) {
    __m512i pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    // fours[4 r + c]: in quarter q, column 4 q + c of rows 4 r … 4 r + 3.
    for (int c = 0; c < 4; c++) {
        const __m512i even01 = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0x88);
        const __m512i even23 = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0x88);
        const __m512i odd01 = _mm512_shuffle_i32x4(fours[c], fours[4 + c], 0xdd);
        const __m512i odd23 = _mm512_shuffle_i32x4(fours[8 + c], fours[12 + c], 0xdd);
        rows[c] = (vi)_mm512_shuffle_i32x4(even01, even23, 0x88);
        rows[4 + c] = (vi)_mm512_shuffle_i32x4(odd01, odd23, 0x88);
        rows[8 + c] = (vi)_mm512_shuffle_i32x4(even01, even23, 0xdd);
        rows[12 + c] = (vi)_mm512_shuffle_i32x4(odd01, odd23, 0xdd);
    }
}
#else
// log2(kLanes) rounds that each interleave the first half of the rows with the second.
inline void transpose(vi* rows) {
    vi low, high;
    for (int lane = 0; lane < kLanes; lane++) {
        low[lane] = lane / 2 + (lane % 2) * kLanes;
        high[lane] = low[lane] + kLanes / 2;
    }
    for (int round = 1; round < kLanes; round *= 2) {
        vi mixed[kLanes];
        for (int i = 0; i < kLanes / 2; i++) {
            const vi a = rows[i], b = rows[i + kLanes / 2];
#if defined(__clang__)
            for (int lane = 0; lane < kLanes; lane++) {
                mixed[2 * i][lane] = lane % 2 ? b[lane / 2] : a[lane / 2];
                mixed[2 * i + 1][lane] = lane % 2 ? b[(lane + kLanes) / 2] : a[(lane + kLanes) / 2];
            }
#else
            mixed[2 * i] = __builtin_shuffle(a, b, low);
            mixed[2 * i + 1] = __builtin_shuffle(a, b, high);
#endif
        }
        for (int i = 0; i < kLanes; i++) rows[i] = mixed[i];
    }
}
#endif

// 2 to the power x for x ≤ 0 (more is allowed, up to 127); 0 far below, NaN stays NaN. To 2 units in the last place, or
// with `Coarse` to 3 · 10^-6, a thousandth of what rounding to bfloat16 loses.
template <bool Coarse = false>
inline vf exp2(vf x) {
#if defined(__AVX512F__)
    // The second operand is what comes of NaN.
    const vf clamped = (vf)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
    const vf n = (vf)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    constexpr float kMagic = 12582912.0f;  // 1.5 · 2^23: adding it rounds to integers
    const vf clamped = max(splat(-127.0f), x);
    const vf shifted = clamped + kMagic;
    const vf n = shifted - kMagic;
#endif
    const vf f = clamped - n;
    vf p;
    if (Coarse) {
        p = splat(9.570101276e-3f);
        p = p * f + 5.591785908e-2f;
        p = p * f + 2.402474433e-1f;
        p = p * f + 6.931217909e-1f;
    } else {
        p = splat(1.534581243e-4f);
        p = p * f + 1.339993090e-3f;
        p = p * f + 9.618489072e-3f;
        p = p * f + 5.550328642e-2f;
        p = p * f + 2.402264625e-1f;
        p = p * f + 6.931471825e-1f;
    }
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (vf)(((vi)shifted - 0x4b400000 + 127) << 23);  // −127 gives the bits of zero
#endif
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

// float32 caches.
struct FloatUnit32 {
    using Stored = float;
    using Step = float;
    static constexpr int kTerms = 1;        // terms in a step
    static constexpr bool kCoarse = false;  // whether probabilities are stored with fewer bits than float32
    // kLanes steps of a row of keys.
    static vi steps(const Stored* row) { return load<vi>(row); }
    static Step step(const Stored* x) { return *x; }
    // kPair value features of the kTerms rows of one step, as two vectors in an order of the unit's own.
    static void values(const Stored* row, int64_t, Step* to) { std::memcpy(to, row, kPair * sizeof(Step)); }
    // Two vectors that `values` ordered, back in their natural order.
    static void restore(vf&, vf&) {}
    // Keeps the probabilities of kPair keys as steps; the sum of what was kept, over pairs of lanes.
    static vf keep(Step* to, vf first, vf second) {
        store(to, first);
        store(to + kLanes, second);
        return first + second;
    }
    static vf multiply_add(vf acc, Step a, const Step* b) { return acc + splat(a) * load<vf>(b); }
};

#if defined(__AVX512BF16__)
// bfloat16 caches: pairs of head features, and of keys, multiplied and added in one instruction.
struct Bfloat16Pairs {
    using Stored = uint16_t;
    using Step = uint32_t;
    static constexpr int kTerms = 2;
    static constexpr bool kCoarse = true;
    static vi steps(const Stored* row) { return load<vi>(row); }
    static Step step(const Stored* x) { return load<Step>(x); }
    static void values(const Stored* row, int64_t stride, Step* to) {
        const __m512i first = _mm512_loadu_si512(row), second = _mm512_loadu_si512(row + stride);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(first, second));
        _mm512_storeu_si512(to + kLanes, _mm512_unpackhi_epi16(first, second));
    }
    // Unpacking works within quarters of a register: the first holds features 0–3, 8–11, 16–19, 24–27.
    static void restore(vf& first, vf& second) {
        const vi low = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
        const vi high = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};
        const vf a = first, b = second;
        first = (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)low, (__m512)b);
        second = (vf)_mm512_permutex2var_ps((__m512)a, (__m512i)high, (__m512)b);
    }
    static vf keep(Step* to, vf first, vf second) {
        const vu pairs = (vu)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
        store(to, pairs);
        return (vf)(pairs << 16) + (vf)(pairs & 0xffff0000u);
    }
    static vf multiply_add(vf acc, Step a, const Step* b) {
        return (vf)_mm512_dpbf16_ps((__m512)acc, load<__m512bh>(b), (__m512bh)_mm512_set1_epi32(static_cast<int>(a)));
    }
};
using BfloatUnit16 = Bfloat16Pairs;
#else
// bfloat16 caches, widened to float32 when they are packed.
struct Bfloat16Widened : FloatUnit32 {
    using Stored = uint16_t;
    static vi steps(const Stored* row) { return (vi)widen(load<vh>(row)); }
    static Step step(const Stored* x) { return to_float(*x); }
    static void values(const Stored* row, int64_t, Step* to) {
        store(to, widen(load<vh>(row)));
        store(to + kLanes, widen(load<vh>(row + kLanes)));
    }
};
using BfloatUnit16 = Bfloat16Widened;
#endif

}  // namespace
}  // namespace specviz
