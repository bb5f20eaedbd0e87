// A model in software of the tile instructions that amx.h uses, for tests on machines without them. Only a test build
// has it (-DSPECVIZ_EMULATE_AMX), which then runs the variant `amx` wherever AVX-512 with bfloat16 is.
//
// TDPBF16PS follows the operation in Intel's manual (volume 2): for each element of C, the even and the odd terms of
// the pairs are summed apart, from zero, with fused multiply-adds in the order of depth; the two sums are added, and
// then their sum is added to C. All of it rounds to the nearest, ties to even, takes denormal numbers for zero and
// gives zero instead of them. Anything for which the processor raises an exception ends the process.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps

namespace specviz {
namespace {

constexpr int kTileRegisters = 8, kTileRows = 16, kTileRowBytes = 64;

struct TileRegister {
    int rows, row_bytes;
    alignas(64) uint8_t data[kTileRows][kTileRowBytes];
};

thread_local TileRegister tile_registers[kTileRegisters];
thread_local bool tiles_configured = false;
int threads_with_tiles = 0;

inline void tile_check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "emulated tiles: %s\n", what);
    std::abort();
}

inline TileRegister& tile_register(int number) {
    tile_check(tiles_configured, "used before they were configured, or after they were released");
    tile_check(number >= 0 && number < kTileRegisters, "there is no such register");
    tile_check(tile_registers[number].rows > 0, "the register has no shape");
    return tile_registers[number];
}

inline void _tile_release() {
    if (tiles_configured) __atomic_fetch_sub(&threads_with_tiles, 1, __ATOMIC_SEQ_CST);
    tiles_configured = false;
    std::memset(tile_registers, 0, sizeof tile_registers);
}

inline void _tile_loadconfig(const void* config) {
    // palette 1 byte, start row 1, reserved 14, bytes a row 16 × 2, rows 16 × 1
    const uint8_t* bytes = static_cast<const uint8_t*>(config);
    _tile_release();
    tile_check(bytes[0] == 1, "palette 1 is the only one with tiles");
    for (int i = 1; i < 16; i++) tile_check(bytes[i] == 0, "a reserved byte, or the start row, is not 0");
    for (int i = 0; i < 16; i++) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
        const int rows = bytes[48 + i];
        tile_check(rows <= kTileRows && row_bytes <= kTileRowBytes, "a tile is too large");
        tile_check((rows == 0) == (row_bytes == 0), "a tile has rows without bytes, or bytes without rows");
        tile_check(i < kTileRegisters || rows == 0, "a tile that does not exist has a shape");
        if (i < kTileRegisters) {
            tile_registers[i].rows = rows;
            tile_registers[i].row_bytes = row_bytes;
        }
    }
    tiles_configured = true;
    __atomic_fetch_add(&threads_with_tiles, 1, __ATOMIC_SEQ_CST);
}

inline void _tile_zero(int number) {
    TileRegister& tile = tile_register(number);
    std::memset(tile.data, 0, sizeof tile.data);
}

inline void _tile_loadd(int number, const void* from, int64_t stride) {
    TileRegister& tile = tile_register(number);
    std::memset(tile.data, 0, sizeof tile.data);
    for (int i = 0; i < tile.rows; i++)
        std::memcpy(tile.data[i], static_cast<const uint8_t*>(from) + i * stride, tile.row_bytes);
}

inline void _tile_stored(int number, void* to, int64_t stride) {
    const TileRegister& tile = tile_register(number);
    for (int i = 0; i < tile.rows; i++)
        std::memcpy(static_cast<uint8_t*>(to) + i * stride, tile.data[i], tile.row_bytes);
}

inline float without_denormals(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// The numbers of one row of a tile: those at even places, then those at odd ones, 16 of each at most.
inline void widen_pairs(const uint8_t* row, float (*numbers)[16]) {
    uint16_t pairs[16][2];
    std::memcpy(pairs, row, sizeof pairs);
    for (int i = 0; i < 16; i++)
        for (int odd = 0; odd < 2; odd++) numbers[odd][i] = without_denormals(to_float(pairs[i][odd]));
}

inline void _tile_dpbf16ps(int to, int left, int right) {
    TileRegister& c = tile_register(to);
    const TileRegister &a = tile_register(left), &b = tile_register(right);
    tile_check(to != left && to != right && left != right, "the three registers must differ");
    tile_check(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows, "the shapes do not match");
    tile_check(c.row_bytes % 4 == 0, "a row of sums is not made of whole numbers");
    float terms[kTileRows][2][16];
    for (int k = 0; k < b.rows; k++) widen_pairs(b.data[k], terms[k]);
    for (int m = 0; m < c.rows; m++) {
        float weights[2][16], sums[2][16] = {}, totals[16];
        widen_pairs(a.data[m], weights);
        for (int k = 0; k < b.rows; k++)
            for (int odd = 0; odd < 2; odd++)
                for (int n = 0; n < 16; n++)
                    sums[odd][n] = without_denormals(__builtin_fmaf(weights[odd][k], terms[k][odd][n], sums[odd][n]));
        std::memcpy(totals, c.data[m], sizeof totals);
        for (int n = 0; n < 16; n++)
            totals[n] = without_denormals(without_denormals(totals[n]) + without_denormals(sums[0][n] + sums[1][n]));
        std::memcpy(c.data[m], totals, c.row_bytes);
    }
}

}  // namespace
}  // namespace specviz

// How many threads hold tiles: none between calls. For tests.
extern "C" __attribute__((visibility("default"))) int specviz_threads_with_tiles();
extern "C" int specviz_threads_with_tiles() { return __atomic_load_n(&specviz::threads_with_tiles, __ATOMIC_SEQ_CST); }
