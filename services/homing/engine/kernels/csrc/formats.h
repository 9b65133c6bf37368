// The formats that numbers are kept in, and what they are as fp32. All but the rounding on the way
// in is exact.
//
//   FP32, BF16, FP16   plain
//   FP8                e4m3 without infinities: at most 448
//   INT8, INT4         integers; what multiplies them is beside them
//
// Keys and values of a head in the cache are `head_dim` numbers; in INT8 their scale, an fp32,
// follows. In weights scales have a place of their own: see linear.h.
#pragma once
#include "vector.h"

enum dtype { FP32, BF16, FP16, FP8, INT8, INT4 };

INLINE size_t weight_bits(enum dtype dtype) {
  return dtype == FP32 ? 32 : dtype == BF16 || dtype == FP16 ? 16 : dtype == INT4 ? 4 : 8;
}

// ---- small floats: shifted into the fields of an fp32, whose exponent then lacks the difference of
// the biases. Multiplying by a power of two mends that, for subnormal numbers and 0 too.
#define FP16_BIAS_GAP 112
#define FP8_BIAS_GAP 120

INLINE float power_of_two(int exponent) {
  uint32_t bits = (uint32_t)(exponent + 127) << 23;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE vf load_fp16(const void *p) {
#if defined(__AVX512BW__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(p));
#elif LANES == 8 && defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(p));
#else
  int16_t half __attribute__((vector_size(2 * LANES)));
  memcpy(&half, p, sizeof half);
  vu bits = (vu)(__builtin_convertvector(half, vi) << 13);
  return (vf)(bits & 0x8fffe000u) * splat(power_of_two(FP16_BIAS_GAP));
#endif
}
INLINE vi load_int8(const void *p) {
#if defined(__AVX512BW__)  // GCC 12 converts in several steps
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(p));
#elif LANES == 8
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p));
#else
  int8_t bytes __attribute__((vector_size(LANES)));
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, vi);
#endif
}
INLINE vf load_fp8(const void *p) {
  vu bits = (vu)(load_int8(p) << 20);
  return (vf)(bits & 0x87f00000u) * splat(power_of_two(FP8_BIAS_GAP));
}
// LANES numbers from index `i` on, scales left out.
INLINE vf load_numbers(enum dtype dtype, const void *p, size_t i) {
  switch (dtype) {
  case BF16: return load_bf16((const bf16 *)p + i);
  case FP16: return load_fp16((const uint16_t *)p + i);
  case FP8: return load_fp8((const char *)p + i);
  case INT8: return __builtin_convertvector(load_int8((const char *)p + i), vf);
  default: return load((const float *)p + i);
  }
}

// The magnitude's bits in a float of `mantissa` bits, to nearest, ties to even; at most `largest`.
INLINE uint32_t narrow(float x, int mantissa, int bias_gap, uint32_t largest) {
  uint32_t bits, rounded, drop = 23 - mantissa;
  memcpy(&bits, &x, 4);
  bits &= 0x7fffffff;
  if (bits < (uint32_t)(bias_gap + 1) << 23)  // below the least normal number
    rounded = (uint32_t)lrintf(fabsf(x) * power_of_two(126 - bias_gap + mantissa));
  else
    rounded = ((bits + (1u << (drop - 1)) - 1 + (bits >> drop & 1)) >> drop) -
              ((uint32_t)bias_gap << mantissa);
  return rounded < largest ? rounded : largest;
}
INLINE uint8_t to_fp8(float x) { return narrow(x, 3, FP8_BIAS_GAP, 0x7e) | (signbit(x) ? 0x80 : 0); }
INLINE uint16_t to_fp16(float x) {
  return narrow(x, 10, FP16_BIAS_GAP, 0x7bff) | (signbit(x) ? 0x8000 : 0);
}

INLINE float max_abs(const float *x, int n) {
  vf most = splat(0.f);
  for (int i = 0; i < n; i += LANES) {
    vf v = load(x + i);
    most = max_v(max_v(v, splat(0.f) - v), most);
  }
  return max_lanes(most);
}
// x * scale as integers, to nearest. They must be below 2^22.
INLINE vi to_integers(vf x, float scale) {
  vf shifted = fma_v(x, splat(scale), splat(12582912.f));  // 1.5 * 2^23: its last bit counts ones
  return (vi)shifted - 0x4b400000;
}

// ---- a head's keys or values in the cache

INLINE size_t head_bytes(enum dtype dtype, int head_dim) {
  return head_dim * weight_bits(dtype) / 8 + (dtype == INT8 ? sizeof(float) : 0);
}
INLINE float head_scale(const char *head, int head_dim) {
  float scale;
  memcpy(&scale, head + head_dim, sizeof scale);
  return scale;
}
static void write_int8_head(int8_t *to, const float *head, int n) {
  float most = max_abs(head, n), scale = most / 127;
  for (int i = 0; i < n; i += LANES) {
    vi numbers = to_integers(load(head + i), most > 0 ? 127 / most : 0);
    for (int k = 0; k < LANES; k++) to[i + k] = (int8_t)numbers[k];
  }
  memcpy(to + n, &scale, sizeof scale);
}
static void write_head(enum dtype dtype, void *to, const float *head, int n) {
  switch (dtype) {
  case BF16:
    for (int i = 0; i < n; i++) ((bf16 *)to)[i] = to_bf16(head[i]);
    break;
  case FP16:
    for (int i = 0; i < n; i++) ((uint16_t *)to)[i] = to_fp16(head[i]);
    break;
  case FP8:
    for (int i = 0; i < n; i++) ((uint8_t *)to)[i] = to_fp8(head[i]);
    break;
  case INT8: write_int8_head(to, head, n); break;
  default: memcpy(to, head, n * sizeof(float));
  }
}
