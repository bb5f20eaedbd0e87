// Linear layers and routed experts, on top of products.h.

#pragma once

#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "products.h"
#include "quantized.h"
#include "simd.h"

namespace specviz {
namespace {

// Weight rows (output features) of one task: enough work to be worth handing out, few enough to balance.
constexpr int64_t kTaskRows = 32;

// Whether a second thread would help: reading so many weights, or multiplying each with so many activation rows,
// takes longer than waking it.
inline bool worthwhile(int64_t weights, int64_t rows) { return weights > 400'000 || weights * rows > 1'500'000; }

// A weight matrix (rows, depth), plain or quantized.
struct Weights {
    const void* data;
    const uint16_t* scales;
    int bits;  // 0: plain
    int64_t depth;
};

// How many bytes ahead of their use weights are asked for, with rows of so many bytes taken `rows` at a time: the
// same place in the next rows, or further on when rows are short. The hardware's own prefetching gives up at the end
// of a row; without this, rows of 400 bytes stream at a third of the memory's speed.
inline int64_t ahead(int64_t row_bytes, int64_t rows) { return most(8192, rows * row_bytes); }

// out[r · stride + i]: activation row r of `rows` packed ones, times weight row first + i of n.
template <class Unit>
inline void product(const Weights& weights, int64_t first, int64_t n, const typename Unit::Element* packed,
                    int64_t rows, float* out, int64_t stride) {
    using Weight = typename Unit::Weight;
    const int64_t depth = weights.depth, groups = (depth + kGroup - 1) / kGroup;
    alignas(64) typename Unit::Acc acc[kMostRows * Unit::kRows];
    alignas(64) Weight block[Unit::kRows * kDepthBlock];
    const Weight* w[Unit::kRows];
    const int64_t codes_ahead = ahead(groups * group_bytes(weights.bits), Unit::kRows);
    const int64_t scales_ahead = ahead(4 * groups, Unit::kRows);
    const int64_t plain_ahead = weights.bits == 0 ? ahead(depth * sizeof(Weight), Unit::kRows) : 0;
    for (int64_t i = 0; i < n; i += Unit::kRows) {
        const int count = static_cast<int>(least(Unit::kRows, n - i));
        // Codes are unpacked for all rows of a block first: alone, each row waits for its own.
        const int together = rows > Unit::kAloneRows || weights.bits ? count : 1;
        for (int j = 0; j < count; j += together) {
            for (int64_t begin = 0; begin < depth; begin += kDepthBlock) {
                const int64_t part = least(kDepthBlock, depth - begin);
                for (int t = 0; t < together; t++) {
                    const int64_t row = first + i + j + t;
                    if (weights.bits == 0) {
                        w[t] = static_cast<const Weight*>(weights.data) + row * depth + begin;
                    } else if constexpr (sizeof(Weight) == 2) {
                        const int64_t at = row * groups + begin / kGroup;
                        dequantize(static_cast<const uint8_t*>(weights.data) + at * group_bytes(weights.bits),
                                   weights.scales + 2 * at, weights.bits, (part + kGroup - 1) / kGroup, codes_ahead,
                                   scales_ahead, block + t * kDepthBlock);
                        w[t] = block + t * kDepthBlock;
                    }
                }
                Unit::accumulate(acc + j, w, together, packed, depth, begin, part, rows, plain_ahead);
            }
        }
        Unit::finish(acc, count, rows, out + i, stride);
    }
}

// Sums of one row for output features first … first + n: with the bias, rounded once.
inline void write_row(const LinearArgs& a, int64_t row, int64_t first, int64_t n, const float* sums) {
    const int64_t to = row * a.out_features + first;
    if (a.type == Type::f32) {
        const float* bias = static_cast<const float*>(a.bias);
        for (int64_t i = 0; i < n; i++) static_cast<float*>(a.out)[to + i] = bias ? sums[i] + bias[first + i] : sums[i];
    } else {
        const uint16_t* bias = static_cast<const uint16_t*>(a.bias);
        for (int64_t i = 0; i < n; i++)
            static_cast<uint16_t*>(a.out)[to + i] = to_bf16(bias ? sums[i] + to_float(bias[first + i]) : sums[i]);
    }
}

template <class Unit>
void run_linear(const LinearArgs& a) {
    static thread_local Scratch scratch;
    const int64_t depth = a.in_features, chunks = (a.rows + kMostRows - 1) / kMostRows;
    // Each chunk of rows is packed on its own: the layout may depend on how many there are.
    const int64_t chunk_size = Unit::packed(kMostRows, depth);
    auto* packed = scratch.get<typename Unit::Element>(chunks * chunk_size);
    const auto rows_of = [&](int64_t chunk) { return least(kMostRows, a.rows - chunk * kMostRows); };
    const bool wide = worthwhile(depth * a.out_features, a.rows);
    parallel_for(chunks, wide && chunks > 1, [&](int64_t chunk) {
        auto* to = packed + chunk * chunk_size;
        for (int64_t r = 0; r < rows_of(chunk); r++) pack_row<Unit>(to, depth, r, a.x, a.type, chunk * kMostRows + r);
        Unit::pad(to, depth, rows_of(chunk));
    });
    const Weights weights{a.weight, nullptr, 0, depth};
    parallel_for((a.out_features + kTaskRows - 1) / kTaskRows, wide, [&](int64_t task) {
        const int64_t first = task * kTaskRows, n = least(kTaskRows, a.out_features - first);
        float sums[kTaskRows * kMostRows];
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            const int64_t rows = rows_of(chunk);
            product<Unit>(weights, first, n, packed + chunk * chunk_size, rows, sums, kTaskRows);
            for (int64_t r = 0; r < rows; r++) write_row(a, chunk * kMostRows + r, first, n, sums + r * kTaskRows);
        }
    });
}

void linear(const LinearArgs& args) {
    if (args.type == Type::f32) return run_linear<FloatUnit>(args);
    run_linear<Bfloat16Unit>(args);
}

inline vf tanh(vf x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

inline vf activate(vf x, Activation activation) {
    if (activation == Activation::silu) return x / (1.0f + exp(-x));
    if (activation == Activation::gelu_tanh)
        return 0.5f * x * (1.0f + tanh(0.797884560802865f * (x + 0.044715f * x * x * x)));
    float lanes[kLanes];
    store(lanes, x);
    for (float& lane : lanes) lane *= 0.5f * (1.0f + std::erf(lane * 0.707106781186548f));
    return load<vf>(lanes);
}

// Which expert and which of its tasks a task number stands for, and where its rows are packed.
struct Place {
    int64_t pairs, x, h;  // pairs before this chunk; elements before its packed x and h
    int64_t expert, rows;
};

// Pairs of one expert, in chunks of at most kMostRows: chunk by chunk, everything is laid out one after the other.
template <class Unit>
void run_experts(const ExpertsArgs& a) {
    using Element = typename Unit::Element;
    static thread_local Scratch place_scratch, x_scratch, h_scratch;
    int64_t chunks = 0;
    for (int64_t e = 0; e < a.n_experts; e++) chunks += (a.offsets[e + 1] - a.offsets[e] + kMostRows - 1) / kMostRows;
    Place* places = place_scratch.get<Place>(chunks + 1);
    Place at{0, 0, 0, 0, 0};
    chunks = 0;
    for (int64_t e = 0; e < a.n_experts; e++) {
        for (int64_t p = a.offsets[e]; p < a.offsets[e + 1]; p += kMostRows) {
            at.expert = e;
            at.pairs = p;
            at.rows = least(kMostRows, a.offsets[e + 1] - p);
            places[chunks++] = at;
            at.x += Unit::packed(at.rows, a.hidden);
            at.h += Unit::packed(at.rows, a.intermediate);
        }
    }
    Element* x = x_scratch.get<Element>(at.x);
    Element* h = h_scratch.get<Element>(at.h);

    const int64_t pairs = a.offsets[a.n_experts];
    // Each expert's weights are read once, whatever its rows.
    const bool wide = worthwhile(3 * chunks * a.hidden * a.intermediate, (pairs + chunks - 1) / chunks);
    parallel_for(chunks, wide && pairs * a.hidden > 100'000, [&](int64_t chunk) {
        const Place& place = places[chunk];
        for (int64_t r = 0; r < place.rows; r++)
            pack_row<Unit>(x + place.x, a.hidden, r, a.x, a.type, a.rows[place.pairs + r]);
        Unit::pad(x + place.x, a.hidden, place.rows);
        Unit::pad(h + place.h, a.intermediate, place.rows);
    });

    const int64_t up_tasks = (a.intermediate + kTaskRows - 1) / kTaskRows;
    parallel_for(chunks * up_tasks, wide, [&](int64_t task) {
        const Place& place = places[task / up_tasks];
        const int64_t first = task % up_tasks * kTaskRows, n = least(kTaskRows, a.intermediate - first);
        const ExpertWeights& expert = a.experts[place.expert];
        const Weights weights{expert.gate_up, expert.gate_up_scales, a.bits, a.hidden};
        alignas(64) float gate[kTaskRows * kMostRows], up[kTaskRows * kMostRows];
        product<Unit>(weights, first, n, x + place.x, place.rows, gate, kTaskRows);
        product<Unit>(weights, a.intermediate + first, n, x + place.x, place.rows, up, kTaskRows);
        for (int64_t r = 0; r < place.rows; r++) {
            float* row = gate + r * kTaskRows;
            for (int64_t i = 0; i < n; i += kLanes)
                store(row + i, activate(load<vf>(row + i), a.activation) * load<vf>(up + r * kTaskRows + i));
            for (int64_t i = 0; i < n; i++)
                *Unit::at(h + place.h, a.intermediate, r, first + i) = Unit::element(row[i]);
        }
    });

    const int64_t down_tasks = (a.hidden + kTaskRows - 1) / kTaskRows;
    parallel_for(chunks * down_tasks, wide, [&](int64_t task) {
        const Place& place = places[task / down_tasks];
        const int64_t first = task % down_tasks * kTaskRows, n = least(kTaskRows, a.hidden - first);
        const ExpertWeights& expert = a.experts[place.expert];
        const Weights weights{expert.down, expert.down_scales, a.bits, a.intermediate};
        float sums[kTaskRows * kMostRows];
        product<Unit>(weights, first, n, h + place.h, place.rows, sums, kTaskRows);
        for (int64_t r = 0; r < place.rows; r++)
            std::memcpy(a.out + a.slots[place.pairs + r] * a.hidden + first, sums + r * kTaskRows, n * sizeof(float));
    });
}

void experts(const ExpertsArgs& args) {
    // Quantized weights become bfloat16, whatever the activations are.
    if (args.type == Type::f32 && args.bits == 0) return run_experts<FloatUnit>(args);
    run_experts<Bfloat16Unit>(args);
}

void combine(const CombineArgs& a) {
    for (int64_t row = 0; row < a.rows; row++) {
        for (int64_t i = 0; i < a.hidden; i++) {
            float total = 0;
            for (int64_t p = 0; p < a.top_k; p++)
                total += a.weights[row * a.top_k + p] * a.outputs[(row * a.top_k + p) * a.hidden + i];
            if (a.type == Type::f32)
                static_cast<float*>(a.out)[row * a.hidden + i] = total;
            else
                static_cast<uint16_t*>(a.out)[row * a.hidden + i] = to_bf16(total);
        }
    }
}

}  // namespace
}  // namespace specviz
