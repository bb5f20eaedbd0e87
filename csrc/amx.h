// bfloat16 products with Intel's matrix tiles: a unit like RowMajor in products.h.
//
// One instruction adds A · B to C: A is 16 weight rows × 32 terms, as they lie in memory; B is the same 32 terms of
// 16 activation rows, packed in pairs of terms; C is 16 weight rows × 16 activation rows of float32 sums. The float32
// products of this variant stay with AVX-512: tiles know no float32 factors.
//
// Row-invariance holds by construction: a column of C takes terms from its own column of B alone, and the instructions
// that add to it are the same, in the same order of depth, however many columns and tiles stand beside it. Columns
// without an activation row hold leftovers of earlier calls, which reach nobody.

#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(SPECVIZ_EMULATE_AMX)
#include "amx_emulation.h"
#endif

namespace specviz {
namespace {

// What _tile_loadconfig reads (Intel's manual, volume 1, 18.3): bytes a row and rows of each tile register.
struct TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "the processor reads 64 bytes");

// The shapes for each number of weight rows: C in registers 0 … 3, A in 4, B in 5 … 7. Constants, because the
// compiler's intrinsic names only the first 8 bytes as what it reads: stores to the others could come too late.
struct AllTileShapes {
    alignas(64) TileShapes of[16];

    constexpr AllTileShapes() : of() {
        for (int n = 1; n <= 16; n++) {
            for (int tile = 0; tile < 8; tile++) {
                of[n - 1].row_bytes[tile] = 64;
                of[n - 1].rows[tile] = static_cast<uint8_t>(tile <= 4 ? n : 16);
            }
        }
    }
};

struct Tiles {
    using Weight = uint16_t;
    using Element = uint16_t;
    using Acc = float;
    static constexpr int kRows = 16;
    static constexpr int64_t kAloneRows = 0;  // a tile takes all of its weight rows at once
    static constexpr int64_t kColumns = 16;   // activation rows of one tile
    static constexpr int64_t kStep = 32;      // terms of one instruction

    static Element element(float x) { return to_bf16(x); }
    static int64_t padded(int64_t depth) { return (depth + kStep - 1) / kStep * kStep; }

    // Blocks of 16 activation rows, in each a row of 16 pairs for every two terms.
    static int64_t packed(int64_t rows, int64_t depth) {
        return (rows + kColumns - 1) / kColumns * kColumns * padded(depth);
    }

    static Element* at(Element* packed, int64_t depth, int64_t row, int64_t k) {
        return packed + row / kColumns * kColumns * padded(depth) + k / 2 * 2 * kColumns + row % kColumns * 2 + k % 2;
    }

    // Zeros behind the depth of `rows` rows.
    static void pad(Element* packed, int64_t depth, int64_t rows) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t k = depth; k < padded(depth); k++) *at(packed, depth, r, k) = 0;
    }

    // One step of depth: `w` holds weight rows of `stride` elements, `x` the pairs of the first of `Blocks` blocks.
    // Here and below, a register's number is part of the instruction, so that no loop can count through them.
    template <int Blocks>
    static void step(const Weight* w, int64_t stride, const Element* x, int64_t block) {
        _tile_loadd(4, w, stride * 2);
        _tile_loadd(5, x, 64);
        _tile_dpbf16ps(0, 4, 5);
        if constexpr (Blocks > 1) {
            _tile_loadd(6, x + block, 64);
            _tile_dpbf16ps(1, 4, 6);
        }
        if constexpr (Blocks > 2) {
            _tile_loadd(7, x + 2 * block, 64);
            _tile_dpbf16ps(2, 4, 7);
        }
        if constexpr (Blocks > 3) {
            _tile_loadd(5, x + 3 * block, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
    }

    // The intrinsics that load tiles do not say that they read memory: what was stored there must not come later.
    static void stores_before_loads() { asm volatile("" ::: "memory"); }

    template <int Blocks>
    static void tiles(Acc* acc, const Weight* const* w, int n, const Element* x, int64_t block, int64_t begin,
                      int64_t depth, int64_t ahead) {
        constexpr int64_t kSums = kRows * kColumns;
        stores_before_loads();
        if (begin == 0) {
            _tile_zero(0);
            if constexpr (Blocks > 1) _tile_zero(1);
            if constexpr (Blocks > 2) _tile_zero(2);
            if constexpr (Blocks > 3) _tile_zero(3);
        } else {
            _tile_loadd(0, acc, 64);
            if constexpr (Blocks > 1) _tile_loadd(1, acc + kSums, 64);
            if constexpr (Blocks > 2) _tile_loadd(2, acc + 2 * kSums, 64);
            if constexpr (Blocks > 3) _tile_loadd(3, acc + 3 * kSums, 64);
        }
        // Weight rows lie at one distance from each other, in the matrix as in a dequantized block.
        const int64_t stride = n > 1 ? w[1] - w[0] : kStep;
        x += begin * kColumns;
        int64_t k = 0;
        for (; k + kStep <= depth; k += kStep) {
            for (int i = 0; i < n; i++) __builtin_prefetch(reinterpret_cast<const char*>(w[i] + k) + ahead, 0, 2);
            step<Blocks>(w[0] + k, stride, x + k * kColumns, block);
        }
        if (k < depth) {
            // Behind a row lies the next one, or nothing.
            alignas(64) Weight rest[kRows * kStep] = {};
            for (int i = 0; i < n; i++) std::memcpy(rest + i * kStep, w[i] + k, (depth - k) * sizeof(Weight));
            stores_before_loads();
            step<Blocks>(rest, kStep, x + k * kColumns, block);
        }
        _tile_stored(0, acc, 64);
        if constexpr (Blocks > 1) _tile_stored(1, acc + kSums, 64);
        if constexpr (Blocks > 2) _tile_stored(2, acc + 2 * kSums, 64);
        if constexpr (Blocks > 3) _tile_stored(3, acc + 3 * kSums, 64);
    }

    // As RowMajor's. Tiles are configured by the first block of depth and released by `finish`: in between the thread
    // does nothing but this product, and outside of it no context switch has to save 8 KiB of tiles.
    static void accumulate(Acc* acc, const Weight* const* w, int n, const Element* packed, int64_t whole, int64_t begin,
                           int64_t depth, int64_t rows, int64_t ahead) {
        static constexpr AllTileShapes kShapes;
        if (begin == 0) _tile_loadconfig(&kShapes.of[n - 1]);
        const int64_t block = kColumns * padded(whole);
        switch ((rows + kColumns - 1) / kColumns) {
            case 1:
                return tiles<1>(acc, w, n, packed, block, begin, depth, ahead);
            case 2:
                return tiles<2>(acc, w, n, packed, block, begin, depth, ahead);
            case 3:
                return tiles<3>(acc, w, n, packed, block, begin, depth, ahead);
            case 4:
                return tiles<4>(acc, w, n, packed, block, begin, depth, ahead);
        }
    }

    // out[r · stride + i]: the sums of activation row r and weight row i.
    static void finish(const Acc* acc, int n, int64_t rows, float* out, int64_t stride) {
        _tile_release();
        for (int64_t r = 0; r < rows; r++) {
            const Acc* column = acc + r / kColumns * kRows * kColumns + r % kColumns;
            for (int i = 0; i < n; i++) out[r * stride + i] = column[i * kColumns];
        }
    }
};

}  // namespace
}  // namespace specviz
