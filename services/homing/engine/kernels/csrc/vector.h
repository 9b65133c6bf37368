// Vectors of the machine's own width, as GCC vector types (clang has them too): one source for
// AVX-512, AVX2, SSE2 and NEON. Wider types than the target's registers would be lowered to scalar
// code, hence the width by macro.
//
// EMULATE_AVX512, which only tests define, gives the code the shape that it has on a CPU with
// AVX-512 and its instructions for bf16, and what uses those instructions a body that runs without.
//
// Compile with -ffp-contract=off: what is fused is written `fma_v`, so no flag changes a result.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(EMULATE_AVX512)
#define INLINE static inline  // for a build in seconds
#else
#define INLINE static inline __attribute__((always_inline))
#endif

// SUM_REGISTERS: how many vectors of sums GCC keeps beside what is multiplied without spilling.
#if defined(__AVX512BW__) || defined(EMULATE_AVX512)
#define INSTRUCTIONS "avx512"
#define LANES 16
#define SUM_REGISTERS 24  // of 32
#elif defined(__AVX2__)
#define INSTRUCTIONS "avx2"
#define LANES 8
#define SUM_REGISTERS 8  // of 16
#elif defined(__ARM_NEON)
#define INSTRUCTIONS "neon"
#define LANES 4
#define SUM_REGISTERS 16  // of 32
#else
#define INSTRUCTIONS "baseline"
#define LANES 4
#define SUM_REGISTERS 8  // of 16
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;

INLINE vf load(const float *p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf fma_v(vf a, vf b, vf c) {  // a * b + c, rounded once where the machine can
#if defined(__AVX512BW__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(EMULATE_AVX512)
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#elif defined(__AVX2__) && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// *sum += a * b in place. Left to itself GCC picks FMA forms that overwrite a factor, and then
// spills where all registers hold sums.
INLINE void accumulate(vf *sum, vf a, vf b) {
#if LANES == 8 && defined(__FMA__)
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(*sum) : "x"(a), "x"(b));
#else
  *sum = fma_v(a, b, *sum);
#endif
}

// ---- bf16: the upper half of an fp32
INLINE vf load_bf16(const bf16 *p) {
#if defined(__AVX512BW__)  // GCC 12 makes three instructions of the conversion below
  __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
  return (vf)_mm512_slli_epi32(words, 16);
#elif LANES == 8
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16);
#else
  vh v;
  memcpy(&v, p, sizeof v);
  return (vf)(__builtin_convertvector(v, vu) << 16);
#endif
}
INLINE float from_bf16(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
INLINE bf16 to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? rounded : 0x7fc0;
}

// ---- sums over lanes, in a fixed order
INLINE float sum_lanes(vf v) {
  float lane[LANES];
  store(lane, v);
  for (int width = LANES / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lane[i] += lane[i + width];
  return lane[0];
}
#if defined(__AVX2__)
INLINE __m256 sum_halves(vf v) {  // where a vector has two
#if LANES == 8
  return (__m256)v;
#elif defined(__AVX512BW__)
  __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
  return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), upper);
#else
  __m256 half[2];
  memcpy(half, &v, sizeof v);
  return _mm256_add_ps(half[0], half[1]);
#endif
}
#endif
// Sums of the lanes of each of four vectors, always by the same tree.
INLINE void sum_lanes_of_4(const vf *v, float *out) {
#if defined(__AVX2__)
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(sum_halves(v[0]), sum_halves(v[1])),
                                _mm256_hadd_ps(sum_halves(v[2]), sum_halves(v[3])));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  for (int i = 0; i < 4; i++) out[i] = sum_lanes(v[i]);
#endif
}
INLINE float max_lanes(vf v) {
  float best = v[0];
  for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
  return best;
}
INLINE vf select_v(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf max_v(vf a, vf b) { return select_v((vi)(a > b), a, b); }

// exp by 2^n * polynomial (Cephes expf, error below 2 ulp); 0 below -87, capped at 88.
INLINE vf exp_v(vf x) {
  const vf round = splat(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer
  vi underflow = (vi)(x < splat(-87.f));
  x = select_v((vi)(x > splat(88.f)), splat(88.f), x);
  x = select_v(underflow, splat(-87.f), x);
  vf n = fma_v(x, splat(1.44269504f), round) - round;
  vf r = fma_v(n, splat(-0.693359375f), x);
  r = fma_v(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma_v(p, r, splat(1.3981999507e-3f));
  p = fma_v(p, r, splat(8.3334519073e-3f));
  p = fma_v(p, r, splat(4.1665795894e-2f));
  p = fma_v(p, r, splat(1.6666665459e-1f));
  p = fma_v(p, r, splat(0.5f));
  p = fma_v(p * r, r, r + splat(1.f));
  vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  return select_v(underflow, splat(0.f), p * (vf)power);
}
