// Products of weight rows with a few activation rows: the inner loops of every linear layer and expert.
//
// A *unit* is one way to multiply. It says how weights lie in memory (`Weight`), how activations are packed for it
// (`Element`), and how a block of `kRows` weight rows meets them. All units promise the same: an output's terms are
// added in an order that depends on the depth alone, never on how many rows, columns or experts share the call.

#pragma once

#include <cstdlib>
#include <new>

#include "kernels.h"
#include "simd.h"
#if defined(__AMX_BF16__)
#include "amx.h"
#endif

namespace specviz {
namespace {

// Activation rows that one product takes; more are cut into several.
constexpr int64_t kMostRows = 64;
// Depth that is dequantized at a time: 4 rows of bfloat16 fill a quarter of a 32 KiB first-level cache.
constexpr int64_t kDepthBlock = 1024;
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// What the row-major units share: activations lie row after row, padded with zeros to whole vectors; a block of
// accumulators, one vector for each (activation row, weight row), lives in registers within a depth block.
template <class Traits>
struct RowMajor : Traits {
    using Weight = typename Traits::Weight;
    using Element = typename Traits::Element;
    using Acc = vf;
    static constexpr int kRows = 4;
    // Registers: kRows × this many accumulators, and the operands.
    static constexpr int kTileRows = kLanes == 16 ? 6 : 2;
    // Up to so many activation rows meet one weight row after the other, just as they lie in memory: one thread then
    // streams 28 GB/s with the hardware's own prefetching, where four rows side by side, asked for in software, reach
    // 16. With more activation rows, weight rows side by side share what is loaded of them. Narrow vectors have so many
    // additions a row, each of which waits for the one before it, that four rows side by side are quicker: on 8 lanes
    // by 5 to 35 % for 1 and 2 rows of float32.
    static constexpr int64_t kAloneRows = kLanes == 16 ? 2 : 0;

    static int64_t padded(int64_t depth) { return round_up(depth, Traits::kStep); }
    static int64_t packed(int64_t rows, int64_t depth) { return rows * padded(depth); }

    static Element* at(Element* packed, int64_t depth, int64_t row, int64_t k) {
        return packed + row * padded(depth) + Traits::position(k);
    }

    // Zeros behind the depth of `rows` rows.
    static void pad(Element* packed, int64_t depth, int64_t rows) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = depth; k < padded(depth); k++) *at(packed, depth, r, k) = 0;
    }

    template <int N, int R>
    static void tile(Acc* acc, const Weight* const* w, const Element* x, int64_t stride, int64_t begin, int64_t depth,
                     int64_t ahead) {
        typename Traits::Vector weights[N];
        vf sums[R][N];
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) sums[r][n] = begin ? acc[r * kRows + n] : vf{};
        int64_t k = 0;
        for (; k + Traits::kStep <= depth; k += Traits::kStep) {
            for (int n = 0; n < N; n++) {
                weights[n] = Traits::weights(w[n] + k);
                if (N > 1) __builtin_prefetch(reinterpret_cast<const char*>(w[n] + k) + ahead, 0, 2);
            }
            for (int r = 0; r < R; r++) {
                const auto row = Traits::elements(x + r * stride + begin + k);
                for (int n = 0; n < N; n++) sums[r][n] = Traits::multiply_add(sums[r][n], weights[n], row);
            }
        }
        if (k < depth) {
            for (int n = 0; n < N; n++) {
                Weight rest[Traits::kStep] = {};
                std::memcpy(rest, w[n] + k, (depth - k) * sizeof(Weight));
                weights[n] = Traits::weights(rest);
            }
            for (int r = 0; r < R; r++) {
                const auto row = Traits::elements(x + r * stride + begin + k);
                for (int n = 0; n < N; n++) sums[r][n] = Traits::multiply_add(sums[r][n], weights[n], row);
            }
        }
        for (int r = 0; r < R; r++)
            for (int n = 0; n < N; n++) acc[r * kRows + n] = sums[r][n];
    }

    template <int N>
    static void tiles(Acc* acc, const Weight* const* w, const Element* x, int64_t stride, int64_t begin, int64_t depth,
                      int64_t rows, int64_t ahead) {
        for (; rows >= kTileRows; rows -= kTileRows, acc += kTileRows * kRows, x += kTileRows * stride)
            tile<N, kTileRows>(acc, w, x, stride, begin, depth, ahead);
        switch (rows) {
            case 1:
                return tile<N, 1>(acc, w, x, stride, begin, depth, ahead);
            case 2:
                return tile<N, 2>(acc, w, x, stride, begin, depth, ahead);
            case 3:
                return tile<N, 3>(acc, w, x, stride, begin, depth, ahead);
            case 4:
                return tile<N, 4>(acc, w, x, stride, begin, depth, ahead);
            case 5:
                return tile<N, 5>(acc, w, x, stride, begin, depth, ahead);
        }
    }

    // Adds to `acc` the terms begin … begin + depth of n ≤ kRows weight rows with `rows` activation rows of `packed`,
    // whose full depth is `whole`; begin 0 starts from zero. w[i] points at term `begin` of weight row i, and what
    // lies `ahead` bytes behind it is asked for.
    static void accumulate(Acc* acc, const Weight* const* w, int n, const Element* packed, int64_t whole, int64_t begin,
                           int64_t depth, int64_t rows, int64_t ahead) {
        if (n == kRows) return tiles<kRows>(acc, w, packed, padded(whole), begin, depth, rows, ahead);
        for (int i = 0; i < n; i++) tiles<1>(acc + i, w + i, packed, padded(whole), begin, depth, rows, ahead);
    }

    // out[r · stride + i]: the sums of activation row r and weight row i.
    static void finish(const Acc* acc, int n, int64_t rows, float* out, int64_t stride) {
        for (int64_t r = 0; r < rows; r++) {
            float sums[kRows];
            sum4(acc + r * kRows, sums);
            for (int i = 0; i < n; i++) out[r * stride + i] = sums[i];
        }
    }
};

struct Float32 {
    using Weight = float;
    using Element = float;
    using Vector = vf;
    static constexpr int64_t kStep = kLanes;
    static int64_t position(int64_t k) { return k; }
    static Element element(float x) { return x; }
    static vf weights(const Weight* w) { return load<vf>(w); }
    static vf elements(const Element* x) { return load<vf>(x); }
    static vf multiply_add(vf acc, vf w, vf x) { return acc + w * x; }
};

#if defined(__AVX512BF16__)
// bfloat16 pairs multiplied and added in one instruction.
struct Bfloat16 {
    using Weight = uint16_t;
    using Element = uint16_t;
    using Vector = __m512bh;
    static constexpr int64_t kStep = 32;
    static int64_t position(int64_t k) { return k; }
    static Element element(float x) { return to_bf16(x); }
    static __m512bh weights(const Weight* w) { return load<__m512bh>(w); }
    static __m512bh elements(const Element* x) { return load<__m512bh>(x); }
    static vf multiply_add(vf acc, __m512bh w, __m512bh x) { return (vf)_mm512_dpbf16_ps((__m512)acc, w, x); }
};
#else
// bfloat16 weights widened to float32; activations are rounded to bfloat16 and kept as float32. A bfloat16 is the upper
// half of its float32, so that neighbours need one instruction each: the first of two is shifted up, the second is what
// the lower half is masked from. Activations are packed alike: of each step, the first ones before the second ones.
struct Bfloat16 {
    struct Vector {
        vf first, second;
    };
    using Weight = uint16_t;
    using Element = float;
    static constexpr int64_t kStep = 2 * kLanes;
    static int64_t position(int64_t k) { return k / kStep * kStep + k % 2 * kLanes + k % kStep / 2; }
    static Element element(float x) { return to_float(to_bf16(x)); }
    static Vector weights(const Weight* w) {
        const vu pairs = load<vu>(w);
        return {(vf)(pairs << 16), (vf)(pairs & 0xffff0000u)};
    }
    static Vector elements(const Element* x) { return {load<vf>(x), load<vf>(x + kLanes)}; }
    static vf multiply_add(vf acc, Vector w, Vector x) { return acc + w.first * x.first + w.second * x.second; }
};
#endif

using FloatUnit = RowMajor<Float32>;
#if defined(__AMX_BF16__)
using Bfloat16Unit = Tiles;
#else
using Bfloat16Unit = RowMajor<Bfloat16>;
#endif

// Row `row` of x, of any type, into row `to` of the packed activations.
template <class Unit>
inline void pack_row(typename Unit::Element* packed, int64_t depth, int64_t to, const void* x, Type type, int64_t row) {
    if (type == Type::f32) {
        const float* from = static_cast<const float*>(x) + row * depth;
        for (int64_t k = 0; k < depth; k++) *Unit::at(packed, depth, to, k) = Unit::element(from[k]);
    } else {
        const uint16_t* from = static_cast<const uint16_t*>(x) + row * depth;
        for (int64_t k = 0; k < depth; k++) *Unit::at(packed, depth, to, k) = Unit::element(to_float(from[k]));
    }
}

// Memory of a calling thread that is kept between calls, and grows.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    ~Scratch() { std::free(memory_); }

    // At least `bytes` bytes at a multiple of 64; what was in it is lost. Throws std::bad_alloc.
    template <class T>
    T* get(int64_t count) {
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        if (bytes > size_) {
            std::free(memory_);
            size_ = round_up(bytes, 4096);
            memory_ = std::aligned_alloc(64, size_);
            if (!memory_) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        return static_cast<T*>(memory_);
    }

  private:
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace
}  // namespace specviz
