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
    if constexpr (Bits == 3) {
        unpack_plane<2, 0>(group, codes);
        unpack_plane<1, 2>(group + 8, codes);
    } else {
        unpack_plane<Bits, 0>(group, codes);
    }
}

#if defined(__AVX512BF16__)

// A small integer as bfloat16, exactly.
constexpr uint16_t bf16_integer(int n) {
    if (n == 0) return 0;
    int size = n < 0 ? -n : n, exponent = 0;
    while (size >> (exponent + 1)) exponent++;
    return static_cast<uint16_t>((n < 0) << 15 | (127 + exponent) << 7 | ((size << 7 >> exponent) & 0x7f));
}

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
        const __m512i by_two = _mm512_set_epi64(0x6000600060006, 0x6000600060006, 0x4000400040004, 0x4000400040004,
                                                0x2000200020002, 0x2000200020002, 0, 0);
        const __m512i low = _mm512_and_si512(_mm512_srlv_epi16(two_bits, by_two), _mm512_set1_epi16(3));
        if constexpr (Bits == 2) return low;
        int32_t singles;
        std::memcpy(&singles, group + 8, 4);
        const __m512i one_bit = _mm512_cvtepu8_epi16(_mm256_set1_epi32(singles));
        const __m512i by_one = _mm512_set_epi64(0x7000700070007, 0x6000600060006, 0x5000500050005, 0x4000400040004,
                                                0x3000300030003, 0x2000200020002, 0x1000100010001, 0);
        const __m512i high = _mm512_and_si512(_mm512_srlv_epi16(one_bit, by_one), _mm512_set1_epi16(1));
        return _mm512_or_si512(low, _mm512_slli_epi16(high, 2));
    }
}

// Pairs (code − 2^(Bits − 1), 1) for codes 0 … 15.
template <int Bits>
struct CodePairs {
    alignas(64) uint16_t of[32];

    constexpr CodePairs() : of() {
        for (int code = 0; code < 16; code++) {
            of[2 * code] = bf16_integer(code - (1 << (Bits - 1)));
            of[2 * code + 1] = bf16_integer(1);
        }
    }
};

// The 16 values that codes of up to 4 bits stand for, as float32. The instruction that multiplies pairs of bfloat16
// numbers computes code · scale + 1 · zero at once, rounded once: products of bfloat16 numbers are exact in float32.
template <int Bits>
inline __m512 values(const uint16_t* scale_and_zero) {
    static constexpr CodePairs<Bits> kPairs;
    int32_t pair;
    std::memcpy(&pair, scale_and_zero, 4);
    return _mm512_dpbf16_ps(_mm512_setzero_ps(), load<__m512bh>(kPairs.of), (__m512bh)_mm512_set1_epi32(pair));
}

// A group as 32 bfloat16 weights. Up to 4 bits a weight there are at most 16 values: they are computed once, and
// looked up by code. (The table is there twice, so that bit 4 of a lane does not matter.)
template <int Bits>
inline void dequantize_group(const uint8_t* group, const uint16_t* scale_and_zero, uint16_t* weights) {
    const __m512i codes = spread<Bits>(group);
    if constexpr (Bits == 8) {
        const __m512 scale = _mm512_set1_ps(to_float(scale_and_zero[0])),
                     zero = _mm512_set1_ps(to_float(scale_and_zero[1]));
        const __m512 middle = _mm512_set1_ps(128);
        const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(codes)));
        const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(codes, 1)));
        store(weights, _mm512_cvtne2ps_pbh(_mm512_fmadd_ps(_mm512_sub_ps(high, middle), scale, zero),
                                           _mm512_fmadd_ps(_mm512_sub_ps(low, middle), scale, zero)));
    } else {
        const __m256i table = (__m256i)_mm512_cvtneps_pbh(values<Bits>(scale_and_zero));
        store(weights, _mm512_permutexvar_epi16(codes, _mm512_inserti64x4(_mm512_castsi256_si512(table), table, 1)));
    }
}

// Two groups of 4-bit codes at once: one conversion makes both tables, and bit 4 of a lane says which one counts.
inline void dequantize_two(const uint8_t* groups, const uint16_t* scales, uint16_t* weights) {
    const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(groups)));
    const __m512i nibble = _mm512_set1_epi16(15);
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    constexpr int kAndOr = 0xea;  // (a & b) | c
    const __m512i low = _mm512_ternarylogic_epi64(bytes, nibble, second, kAndOr);
    const __m512i high = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), second);
    const __m512i tables = (__m512i)_mm512_cvtne2ps_pbh(values<4>(scales + 2), values<4>(scales));
    const __m512i starts = _mm512_permutexvar_epi16(low, tables);  // codes 0 … 15 of both groups
    const __m512i ends = _mm512_permutexvar_epi16(high, tables);   // codes 16 … 31
    store(weights, _mm512_inserti64x4(starts, _mm512_castsi512_si256(ends), 1));
    store(weights + kGroup, _mm512_shuffle_i64x2(starts, ends, 0xee));
}

#elif defined(__AVX2__)

// Codes 16 · half … 16 · half + 15 of a group, of up to 4 bits, one a byte.
template <int Bits>
inline __m128i spread(const uint8_t* group, int half) {
    if constexpr (Bits == 4) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group));
        return _mm_and_si128(half ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
    } else {
        uint64_t pairs;
        std::memcpy(&pairs, group, 8);
        pairs >>= 4 * half;
        uint64_t low = pairs & 0x0303030303030303, high = pairs >> 2 & 0x0303030303030303;
        if constexpr (Bits == 3) {
            uint32_t singles;
            std::memcpy(&singles, group + 8, 4);
            const auto bits = [&](int n) { return static_cast<uint64_t>(singles >> (4 * half + n) & 0x01010101) << 2; };
            low |= bits(0) | bits(1) << 32;
            high |= bits(2) | bits(3) << 32;
        }
        return _mm_set_epi64x(high, low);
    }
}

// A group as 32 bfloat16 weights. Up to 4 bits a weight there are at most 16 values: they are computed once, and their
// two bytes looked up by code.
template <int Bits>
inline void dequantize_group(const uint8_t* group, const uint16_t* scale_and_zero, uint16_t* weights) {
    const __m256 scale = _mm256_set1_ps(to_float(scale_and_zero[0])),
                 zero = _mm256_set1_ps(to_float(scale_and_zero[1]));
    // As `narrow` rounds, but left in 32-bit lanes and without its check for NaN: of bfloat16 factors, NaN has no bits
    // set in its lower half that rounding could carry up. With `narrow` and `unpack_group` INT4 takes about twice as
    // long.
    const auto rounded = [&](__m256 codes) {
        const __m256i bits = _mm256_castps_si256(_mm256_fmadd_ps(codes, scale, zero));
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        return _mm256_srli_epi32(up, 16);
    };
    if constexpr (Bits == 8) {
        const auto eight = [&](int at) {
            const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(group + at));
            return rounded(_mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_cvtepu8_epi32(codes), _mm256_set1_epi32(128))));
        };
        for (int i = 0; i < kGroup; i += 16)
            store(weights + i, _mm256_permute4x64_epi64(_mm256_packus_epi32(eight(i), eight(i + 8)), 0xd8));
    } else {
        constexpr float kMiddle = 1 << (Bits - 1);
        const __m256 middle = _mm256_set1_ps(kMiddle);
        // In the order in which packing two registers, half by half, makes 0 … 7 and 8 … 15 of them.
        const __m256i values =
            _mm256_packus_epi32(rounded(_mm256_sub_ps(_mm256_setr_ps(0, 1, 2, 3, 8, 9, 10, 11), middle)),
                                rounded(_mm256_sub_ps(_mm256_setr_ps(4, 5, 6, 7, 12, 13, 14, 15), middle)));
        const __m128i few = _mm256_castsi256_si128(values), more = _mm256_extracti128_si256(values, 1);
        const __m128i byte = _mm_set1_epi16(0xff);
        const __m128i lower = _mm_packus_epi16(_mm_and_si128(few, byte), _mm_and_si128(more, byte));
        const __m128i upper = _mm_packus_epi16(_mm_srli_epi16(few, 8), _mm_srli_epi16(more, 8));
        for (int half = 0; half < 2; half++) {
            const __m128i codes = spread<Bits>(group, half);
            const __m128i low = _mm_shuffle_epi8(lower, codes), high = _mm_shuffle_epi8(upper, codes);
            store(weights + 16 * half, _mm_unpacklo_epi8(low, high));
            store(weights + 16 * half + 8, _mm_unpackhi_epi8(low, high));
        }
    }
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

// One row of codes, or a part of it: `groups` groups. Both streams are asked for so many bytes ahead.
template <int Bits>
inline void dequantize_row(const uint8_t* codes, const uint16_t* scales, int64_t groups, int64_t codes_ahead,
                           int64_t scales_ahead, uint16_t* weights) {
    int64_t g = 0;
    const auto ask = [&] {
        __builtin_prefetch(codes + g * group_bytes(Bits) + codes_ahead, 0, 2);
        __builtin_prefetch(reinterpret_cast<const char*>(scales + 2 * g) + scales_ahead, 0, 2);
    };
#if defined(__AVX512BF16__)
    for (; Bits == 4 && g + 2 <= groups; g += 2) {
        ask();
        dequantize_two(codes + g * group_bytes(4), scales + 2 * g, weights + g * kGroup);
    }
#endif
    for (; g < groups; g++) {
        ask();
        dequantize_group<Bits>(codes + g * group_bytes(Bits), scales + 2 * g, weights + g * kGroup);
    }
}

inline void dequantize(const uint8_t* codes, const uint16_t* scales, int bits, int64_t groups, int64_t codes_ahead,
                       int64_t scales_ahead, uint16_t* weights) {
    switch (bits) {
        case 8:
            return dequantize_row<8>(codes, scales, groups, codes_ahead, scales_ahead, weights);
        case 4:
            return dequantize_row<4>(codes, scales, groups, codes_ahead, scales_ahead, weights);
        case 3:
            return dequantize_row<3>(codes, scales, groups, codes_ahead, scales_ahead, weights);
        case 2:
            return dequantize_row<2>(codes, scales, groups, codes_ahead, scales_ahead, weights);
    }
}

}  // namespace
}  // namespace specviz
