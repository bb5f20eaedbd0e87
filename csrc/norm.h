// Root-mean-square norm: in torch six small operations, which cost more between two kernels than a linear layer.

#pragma once

#include <cmath>

#include "kernels.h"
#include "simd.h"

namespace specviz {
namespace {

inline float to_float(float x) { return x; }
// x · scale is rounded to the type before the weight comes in, as modeling code does.
inline float scaled(float x, float scale, float weight) { return x * scale * weight; }
inline uint16_t scaled(uint16_t x, float scale, uint16_t weight) {
    return to_bf16(to_float(to_bf16(to_float(x) * scale)) * to_float(weight));
}

template <class T>
inline void norm_row(const T* x, const T* weight, T* out, int64_t size, float eps) {
    vf squares{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const vf v = load_floats(x + i);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < size; i++) total += to_float(x[i]) * to_float(x[i]);
    const float scale = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
    for (i = 0; i < size; i++) out[i] = scaled(x[i], scale, weight[i]);
}

void norm(const NormArgs& a) {
    for (int64_t row = 0; row < a.rows; row++) {
        const int64_t at = row * a.size;
        if (a.type == Type::f32)
            norm_row(static_cast<const float*>(a.x) + at, static_cast<const float*>(a.weight),
                     static_cast<float*>(a.out) + at, a.size, a.eps);
        else
            norm_row(static_cast<const uint16_t*>(a.x) + at, static_cast<const uint16_t*>(a.weight),
                     static_cast<uint16_t*>(a.out) + at, a.size, a.eps);
    }
}

}  // namespace
}  // namespace specviz
