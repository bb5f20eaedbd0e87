// The small matrix products of attention, for both q · k and p · v: c[query][lane] += Σ a[query][step] · b[step][lane].
//
// b is packed into panels of a few vectors of lanes. A sum's terms are added in the order of the steps: nothing of it
// depends on how many queries or lanes share the product.

#pragma once

#include "attention_units.h"
#include "kernels.h"
#include "products.h"
#include "simd.h"

namespace specviz {
namespace {

// Memory that will be read next. The products ask for it a few lines a step, so that it arrives while they compute:
// nothing is computed while keys are packed, and a burst of requests would only stall.
struct Ahead {
    const char* at;
    int64_t lines;

    // `rows` rows of `size` bytes, one every `stride` bytes.
    static Ahead rows(const void* from, int64_t rows, int64_t stride, int64_t size) {
        return {static_cast<const char*>(from), rows > 0 && stride < 2 * size ? (rows * stride + 63) / 64 : 0};
    }
};

// c[n][0 … V · kLanes) (+)= Σ over step of a[n][step] · b[step][…], for N queries; asks for `lines` lines a step.
template <class Unit, int N, int V>
inline void tile(const typename Unit::Step* a, int64_t a_stride, const typename Unit::Step* b, int64_t steps, float* c,
                 int64_t c_stride, bool fresh, const char* ahead, int64_t lines) {
    vf sums[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) sums[n][v] = fresh ? vf{} : load<vf>(c + n * c_stride + v * kLanes);
    for (int64_t s = 0; s < steps; s++, b += V * kLanes) {
        for (int64_t line = 0; line < lines; line++, ahead += 64) __builtin_prefetch(ahead);
        for (int n = 0; n < N; n++) {
            const auto broadcast = a[n * a_stride + s];
            for (int v = 0; v < V; v++) sums[n][v] = Unit::multiply_add(sums[n][v], broadcast, b + v * kLanes);
        }
    }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(c + n * c_stride + v * kLanes, sums[n][v]);
}

// The same for any number of queries, in tiles of nearly one size, and a panel of `width` lanes: kPanel or kPair.
template <class Unit>
void multiply(int64_t queries, const typename Unit::Step* a, int64_t a_stride, const typename Unit::Step* b,
              int64_t width, int64_t steps, float* c, int64_t c_stride, bool fresh, Ahead ahead) {
    int64_t left = (queries + kTileQueries - 1) / kTileQueries;
    const int64_t lines = (ahead.lines + left * steps - 1) / (left * steps);
    for (; left > 0; left--) {
        const int64_t n = (queries + left - 1) / left;
        const auto run = [&](auto wide, auto narrow) {
            (width == kPanel ? wide : narrow)(a, a_stride, b, steps, c, c_stride, fresh, ahead.at, lines);
        };
        switch (n) {
            case 1:
                run(tile<Unit, 1, kPanelVectors>, tile<Unit, 1, 2>);
                break;
            case 2:
                run(tile<Unit, 2, kPanelVectors>, tile<Unit, 2, 2>);
                break;
            case 3:
                run(tile<Unit, 3, kPanelVectors>, tile<Unit, 3, 2>);
                break;
            case 4:
                run(tile<Unit, 4, kPanelVectors>, tile<Unit, 4, 2>);
                break;
            case 5:
                run(tile<Unit, 5, kPanelVectors>, tile<Unit, 5, 2>);
                break;
            case 6:
                run(tile<Unit, 6, kPanelVectors>, tile<Unit, 6, 2>);
                break;
        }
        queries -= n;
        a += n * a_stride;
        c += n * c_stride;
        ahead.at += lines * steps * 64;
    }
}

// One row as steps, zeros behind its end.
template <class Unit>
inline void pack_query(const typename Unit::Stored* row, int64_t dim, typename Unit::Step* to) {
    const int64_t whole = dim / Unit::kTerms;
    for (int64_t s = 0; s < whole; s++) to[s] = Unit::step(row + s * Unit::kTerms);
    if (whole * Unit::kTerms < dim) {
        typename Unit::Stored rest[Unit::kTerms] = {row[dim - 1]};
        to[whole] = Unit::step(rest);
    }
}

// `count` elements of a row, zeros behind them.
template <int64_t N, class Stored>
inline void copy_part(const Stored* row, int64_t count, Stored* to) {
    std::memset(to, 0, N * sizeof(Stored));
    if (count > 0) std::memcpy(to, row, count * sizeof(Stored));
}

// Keys 0 … `width` as a panel [step][key]; keys outside of first … last are zeros, and are not read.
template <class Unit>
void pack_keys(const typename Unit::Stored* keys, int64_t stride, int64_t dim, int64_t first, int64_t last,
               int64_t width, typename Unit::Step* panel) {
    constexpr int64_t kTerms = Unit::kTerms, kChunk = kLanes * kTerms;
    const int64_t steps = (dim + kTerms - 1) / kTerms;
    for (int64_t at = 0; at < width; at += kLanes) {
        const bool all = at >= first && at + kLanes <= last;
        for (int64_t d = 0; d < dim; d += kChunk) {
            const int64_t s = d / kTerms;
            vi rows[kLanes];
            if (all && d + kChunk <= dim) {
                for (int i = 0; i < kLanes; i++) rows[i] = Unit::steps(keys + (at + i) * stride + d);
                transpose(rows);
                for (int i = 0; i < kLanes; i++) store(panel + (s + i) * width + at, rows[i]);
                continue;
            }
            for (int64_t key = at; key < at + kLanes; key++) {
                typename Unit::Stored part[kChunk];
                const bool there = key >= first && key < last;
                copy_part<kChunk>(keys + key * stride + d, there ? least(kChunk, dim - d) : 0, part);
                rows[key - at] = Unit::steps(part);
            }
            transpose(rows);
            const int64_t count = least(kLanes, steps - s);
            for (int64_t i = 0; i < count; i++) store(panel + (s + i) * width + at, rows[i]);
        }
    }
}

// Values of `keys` keys as panels [step][feature], one after the other: of kPanel features, then of kPair.
// Keys outside of first … last are zeros, and are not read.
template <class Unit>
void pack_values(const typename Unit::Stored* values, int64_t stride, int64_t dim, int64_t first, int64_t last,
                 int64_t keys, typename Unit::Step* panels) {
    using Stored = typename Unit::Stored;
    constexpr int kTerms = Unit::kTerms;
    const int64_t padded = round_up(dim, kPair), steps = keys / kTerms;
    for (int64_t s = 0; s < steps; s++) {
        const Stored* row = values + s * kTerms * stride;
        const bool all = s * kTerms >= first && (s + 1) * kTerms <= last;
        for (int64_t panel = 0, width; panel < padded; panel += width) {
            width = panel_width(padded, panel);
            auto* to = panels + panel * steps + s * width;
            for (int64_t d = panel; d < panel + width; d += kPair, to += kPair) {
                if (all && d + kPair <= dim) {
                    Unit::values(row + d, stride, to);
                    continue;
                }
                Stored part[kTerms][kPair];
                for (int i = 0; i < kTerms; i++) {
                    const bool there = s * kTerms + i >= first && s * kTerms + i < last;
                    copy_part<kPair>(row + i * stride + d, there ? least(kPair, dim - d) : 0, part[i]);
                }
                Unit::values(part[0], kPair, to);
            }
        }
    }
}

}  // namespace
}  // namespace specviz
