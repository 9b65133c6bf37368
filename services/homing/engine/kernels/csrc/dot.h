// Sums of products of pairs of 16-bit numbers, for which some CPUs have one instruction. A pair is
// a 32-bit word: a vector holds one pair of inputs of LANES outputs, to be multiplied by `pair`,
// the same inputs of a row of activations.
#pragma once
#include "vector.h"

typedef int16_t vpair __attribute__((vector_size(4 * LANES)));

// ---- integers, exact: products of 16-bit numbers, summed in 32 bits

INLINE vi dot_int16(vi sum, vpair weights, int32_t pair) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX512BW__)
  return sum + (vi)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(pair));
#elif LANES == 8
  return sum + (vi)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair));
#elif LANES == 4 && defined(__SSE2__)
  return sum + (vi)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(pair));
#else
  vi words = (vi)weights;
  return sum + ((words << 16 >> 16) * (int16_t)pair + (words >> 16) * (pair >> 16));
#endif
}

// ---- bf16, summed in fp32. Without the instruction weights are better unpacked once for all rows.

#if defined(__AVX512BF16__) || defined(EMULATE_AVX512)
#define HAS_DOT_BF16 1
#else
#define HAS_DOT_BF16 0
#endif

INLINE vf flush(vf x) {  // subnormal numbers are 0, with their sign
  vu bits = (vu)x;
  vu is_normal = (vu)((bits & 0x7f800000u) != 0);
  return (vf)(bits & (is_normal | 0x80000000u));
}

// VDPBF16PS adds the product of the odd numbers, then that of the even ones, each time rounding
// once, to nearest, ties to even. It reads and writes subnormal numbers as 0 (Intel SDM, volume 2).
INLINE vf dot_bf16(vf sum, vu weights, uint32_t pair) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
#else
  vu pairs = pair + (vu){0};
  vf odd_weights = (vf)(weights & 0xffff0000u), even_weights = (vf)(weights << 16);
  vf odd = (vf)(pairs & 0xffff0000u), even = (vf)(pairs << 16);
  sum = flush(fma_v(flush(odd_weights), flush(odd), flush(sum)));
  return flush(fma_v(flush(even_weights), flush(even), sum));
#endif
}

// To nearest, ties to even, as `to_bf16`.
INLINE vh round_bf16(vf x) {
  vu bits = (vu)x;
  vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  vu is_nan = (vu)(x != x);
  return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), vh);
}
