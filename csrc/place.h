// Between a projection and attention: norms and rotation of queries and keys, and the way into the KV cache
// (PlaceArgs in kernels.h). In torch some twenty small operations a layer.

#pragma once

#include "kernels.h"
#include "norm.h"
#include "parallel.h"
#include "simd.h"

namespace specviz {
namespace {

// Elements that are worth waking a thread for.
constexpr int64_t kLeastPlaced = 1 << 16;

// Each operation is rounded to the type, as modeling code does it.
inline vf rounded(vf x, const float*) { return x; }
inline vf rounded(vf x, const uint16_t*) { return widen(narrow(x)); }

// kLanes features of both halves: (a, b) to (a · cos − b · sin, b · cos + a · sin).
template <class T>
inline void rotate_pairs(const T* x, const T* cos, const T* sin, T* out, int64_t half) {
    const vf a = load_floats(x), b = load_floats(x + half);
    const vf low = rounded(a * load_floats(cos), x) - rounded(b * load_floats(sin), x);
    const vf high = rounded(b * load_floats(cos + half), x) + rounded(a * load_floats(sin + half), x);
    put_floats(out, low);
    put_floats(out + half, high);
}

// One head's features; `out` does not overlap `x`.
template <class T>
inline void rotate(const T* x, const T* cos, const T* sin, T* out, int64_t dim, int64_t rotary) {
    const int64_t half = rotary / 2;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) rotate_pairs(x + i, cos + i, sin + i, out + i, half);
    if (i < half) {
        // What is left of both halves, side by side in vectors of their own.
        T from[2 * kLanes]{}, c[2 * kLanes]{}, s[2 * kLanes]{}, to[2 * kLanes];
        const size_t bytes = (half - i) * sizeof(T);
        for (int64_t part = 0; part < 2; part++) {
            std::memcpy(from + part * kLanes, x + part * half + i, bytes);
            std::memcpy(c + part * kLanes, cos + part * half + i, bytes);
            std::memcpy(s + part * kLanes, sin + part * half + i, bytes);
        }
        rotate_pairs(from, c, s, to, kLanes);
        for (int64_t part = 0; part < 2; part++) std::memcpy(out + part * half + i, to + part * kLanes, bytes);
    }
    std::memcpy(out + rotary, x + rotary, (dim - rotary) * sizeof(T));
}

template <class T>
void place_row(const PlaceArgs& a, int64_t sequence, int64_t row) {
    T* q = static_cast<T*>(a.projected) + (sequence * a.rows + row) * (a.heads + 2 * a.kv_heads) * a.dim;
    T *k = q + a.heads * a.dim, *v = k + a.kv_heads * a.dim;
    if (a.q_norm)
        for (T* x = q; x < k; x += a.q_norm_size) norm_row(x, static_cast<const T*>(a.q_norm), x, a.q_norm_size, a.eps);
    if (a.k_norm)
        for (T* x = k; x < v; x += a.k_norm_size) norm_row(x, static_cast<const T*>(a.k_norm), x, a.k_norm_size, a.eps);
    const int64_t angles = sequence * a.angles_batch + row * a.rotary;
    const T *cos = static_cast<const T*>(a.cos) + angles, *sin = static_cast<const T*>(a.sin) + angles;
    T* queries = static_cast<T*>(a.q) + (sequence * a.rows + row) * a.heads * a.dim;
    for (int64_t h = 0; h < a.heads; h++) rotate(q + h * a.dim, cos, sin, queries + h * a.dim, a.dim, a.rotary);
    const int64_t slot = a.slots[sequence], at = a.starts[sequence] + row;
    for (int64_t h = 0; h < a.kv_heads; h++) {
        rotate(k + h * a.dim, cos, sin, static_cast<T*>(a.k) + slot * a.k_slot + h * a.k_head + at * a.k_row, a.dim,
               a.rotary);
        std::memcpy(static_cast<T*>(a.v) + slot * a.v_slot + h * a.v_head + at * a.v_row, v + h * a.dim,
                    a.dim * sizeof(T));
    }
}

void place(const PlaceArgs& a) {
    const int64_t tasks = a.batch * a.rows, elements = tasks * (a.heads + a.kv_heads) * a.dim;
    parallel_for(tasks, elements >= kLeastPlaced, [&](int64_t task) {
        if (a.type == Type::f32)
            place_row<float>(a, task / a.rows, task % a.rows);
        else
            place_row<uint16_t>(a, task / a.rows, task % a.rows);
    });
}

}  // namespace
}  // namespace specviz
