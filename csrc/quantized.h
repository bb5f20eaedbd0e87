// Group-quantized weights: codes to bfloat16, a few rows and a depth block at a time.
//
// A weight is (code − 2^(bits − 1)) · scale + zero, computed in float32 and rounded once to bfloat16, as
// engine/offload/quantize.py defines. The codes of a group of 32 take 4 · bits bytes: planes of bits, low bits
// first, and in a plane of w bits, byte j holds codes j, j + 4w, j + 8w, …

#pragma once

#include "kernels.h"
#include "simd.h"

namespace specviz {
namespace {

constexpr int64_t group_bytes(int bits) { return kGroup / 8 * bits; }

// Plane of `Width` bits at `plane` into 32 bytes, added to `codes` at `Shift`.
template <int Width, int Shift>
inline void unpack_plane(const uint8_t* plane, uint8_t* codes) {
    constexpr int kBytes = 4 * Width;
    for (int part = 0; part < 8 / Width; part++)
        for (int j = 0; j < kBytes; j++)
            codes[part * kBytes + j] |= ((plane[j] >> (part * Width)) & ((1 << Width) - 1)) << Shift;
}

template <int Bits>
inline void unpack_group(const uint8_t* group, uint8_t* codes) {
    std::memset(codes, 0, kGroup);
    if (Bits == 3) {
        unpack_plane<2, 0>(group, codes);
        unpack_plane<1, 2>(group + 8, codes);
    } else {
        unpack_plane<Bits == 3 ? 8 : Bits, 0>(group, codes);
    }
}

#if defined(__AVX512BF16__)

// The 32 codes of a group as 16-bit lanes; for less than 8 bits, lanes whose low 4 bits are the code.
template <int Bits>
inline __m512i spread(const uint8_t* group) {
    if constexpr (Bits == 8) {
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group)));
    } else if constexpr (Bits == 4) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group));
        const __m512i words = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(bytes));
        const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        return _mm512_srlv_epi16(words, shifts);
    } else {
        int64_t pairs;
        std::memcpy(&pairs, group, 8);
        const __m512i two_bits = _mm512_cvtepu8_epi16(_mm256_set1_epi64x(pairs));
        const __m512i by_two =
            _mm512_set_epi64(0x6000600060006, 0x6000600060006, 0x4000400040004, 0x4000400040004, 0x2000200020002,
                             0x2000200020002, 0, 0);
        const __m512i low = _mm512_and_si512(_mm512_srlv_epi16(two_bits, by_two), _mm512_set1_epi16(3));
        if constexpr (Bits == 2) return low;
        int32_t singles;
        std::memcpy(&singles, group + 8, 4);
        const __m512i one_bit = _mm512_cvtepu8_epi16(_mm256_set1_epi32(singles));
        const __m512i by_one =
            _mm512_set_epi64(0x7000700070007, 0x6000600060006, 0x5000500050005, 0x4000400040004, 0x3000300030003,
                             0x2000200020002, 0x1000100010001, 0);
        const __m512i high = _mm512_and_si512(_mm512_srlv_epi16(one_bit, by_one), _mm512_set1_epi16(1));
        return _mm512_or_si512(low, _mm512_slli_epi16(high, 2));
    }
}

// A group as 32 bfloat16 weights. Up to 4 bits a weight there are at most 16 values: they are computed once, and
// looked up by code. (The table is there twice, so that bit 4 of a lane does not matter.)
template <int Bits>
inline __m512i dequantize_group(const uint8_t* group, const uint16_t* scale_and_zero) {
    uint32_t pair;
    std::memcpy(&pair, scale_and_zero, 4);
    const __m512i pairs = _mm512_set1_epi32(pair);
    const __m512 scale = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const __m512 zero = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
    const __m512i codes = spread<Bits>(group);
    if constexpr (Bits == 8) {
        const __m512 middle = _mm512_set1_ps(128);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1)));
        return (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(_mm512_sub_ps(high, middle), scale, zero),
                                            _mm512_fmadd_ps(_mm512_sub_ps(low, middle), scale, zero));
    } else {
        const __m512 counted = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512 values = _mm512_fmadd_ps(_mm512_sub_ps(counted, _mm512_set1_ps(1 << (Bits - 1))), scale, zero);
        const __m256i table = (__m256i)_mm512_cvtneps_pbh(values);
        return _mm512_permutexvar_epi16(codes, _mm512_inserti64x4(_mm512_castsi256_si512(table), table, 1));
    }
}

template <int Bits>
inline void dequantize_group(const uint8_t* group, const uint16_t* scale_and_zero, uint16_t* weights) {
    _mm512_storeu_si512(weights, dequantize_group<Bits>(group, scale_and_zero));
}

#else

template <int Bits>
inline void dequantize_group(const uint8_t* group, const uint16_t* scale_and_zero, uint16_t* weights) {
    const vf scale = splat(to_float(scale_and_zero[0])), zero = splat(to_float(scale_and_zero[1]));
    uint8_t codes[kGroup];
    unpack_group<Bits>(group, codes);
    for (int i = 0; i < kGroup; i += kLanes) {
        const vi code = __builtin_convertvector(load<vb>(codes + i), vi) - (1 << (Bits - 1));
        store(weights + i, narrow(__builtin_convertvector(code, vf) * scale + zero));
    }
}

#endif

// `groups` groups of one row of codes.
inline void dequantize(const uint8_t* codes, const uint16_t* scales, int bits, int64_t groups, uint16_t* weights) {
    const auto each = [&](auto group) {
        for (int64_t g = 0; g < groups; g++)
            group(codes + g * group_bytes(bits), scales + 2 * g, weights + g * kGroup);
    };
    switch (bits) {
        case 8: return each([](auto... a) { dequantize_group<8>(a...); });
        case 4: return each([](auto... a) { dequantize_group<4>(a...); });
        case 3: return each([](auto... a) { dequantize_group<3>(a...); });
        case 2: return each([](auto... a) { dequantize_group<2>(a...); });
    }
}

}  // namespace
}  // namespace specviz
