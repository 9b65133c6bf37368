// Linears whose weights are integers: products of 16-bit integers, exact sums in 32 bits.
//
// Activations are rounded to 16 bits a row, each row by its own largest: far finer than the weights,
// and an AVX2 machine multiplies 16-bit integers at twice the rate of fp32. (8 bits would bring it
// nothing more: vpmaddubsw needs a second multiplication to get from 16 to 32 bits, and saturates.)
// A group's sum is at most 2^15 * 2^7 * group: groups of up to 256 cannot overflow.
//
// A pair of inputs is one 32-bit word, in activations as in unpacked weights. Packed panels:
//
//   INT8   [k / 2][PANEL][2] bytes
//   INT4   [k / 2][PANEL] bytes; byte i holds number i of the pairs of the first PANEL / 2 outputs
//          in its low half, and that of the others in its high half
//
// 256 bits wide on AVX-512 machines, too: wider code could not be run where this was written.
#pragma once
#include "formats.h"

#if defined(__AVX2__)
#define INT_LANES 8
#else
#define INT_LANES 4
#endif
#define INT_VECTORS (PANEL / INT_LANES)  // of a panel
#define INT_REGISTERS 16

typedef int32_t vsum __attribute__((vector_size(4 * INT_LANES)));
typedef int16_t vpair __attribute__((vector_size(4 * INT_LANES)));
typedef int8_t vbyte __attribute__((vector_size(2 * INT_LANES)));
typedef float vtile __attribute__((vector_size(4 * INT_LANES)));
typedef uint16_t vscale __attribute__((vector_size(2 * INT_LANES)));
typedef uint32_t vbits __attribute__((vector_size(4 * INT_LANES)));

INLINE vpair load_bytes(const char *p) {
#if defined(__AVX2__)
  return (vpair)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
#else
  vbyte bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, vpair);
#endif
}

// One pair of inputs of every output of a panel.
INLINE void load_pairs(const enum dtype dtype, const char *p, vpair *weight) {
  if (dtype == INT8) {
#pragma GCC unroll 4
    for (int v = 0; v < INT_VECTORS; v++) weight[v] = load_bytes(p + v * sizeof(vbyte));
    return;
  }
#pragma GCC unroll 2
  for (int v = 0; v < INT_VECTORS / 2; v++) {
    vpair both = load_bytes(p + v * sizeof(vbyte));
    weight[v] = both << 12 >> 12;
    weight[v + INT_VECTORS / 2] = both >> 4;
  }
}

// Products of pairs, summed in each.
INLINE vsum dot_pairs(vpair weight, int32_t pair) {
#if defined(__AVX2__)
  return (vsum)_mm256_madd_epi16((__m256i)weight, _mm256_set1_epi32(pair));
#elif defined(__SSE2__)
  return (vsum)_mm_madd_epi16((__m128i)weight, _mm_set1_epi32(pair));
#else
  vsum words = (vsum)weight;
  return (words << 16 >> 16) * (int16_t)pair + (words >> 16) * (pair >> 16);
#endif
}

// tile[p][row][PANEL] (+)= sums * the group's scales
INLINE void add_group(const int rows, const int panels,
                      vsum sum[MAX_TILE_PANELS][MAX_TILE_ROWS][INT_VECTORS], const bf16 *scales,
                      size_t panel_scales, int is_first, float *tile) {
#pragma GCC unroll 4
  for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
    for (int v = 0; v < INT_VECTORS; v++) {
      vscale half;
      memcpy(&half, scales + p * panel_scales + v * INT_LANES, sizeof half);
      vtile scale = (vtile)(__builtin_convertvector(half, vbits) << 16);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        float *to = tile + (p * rows + r) * PANEL + v * INT_LANES;
        vtile product = __builtin_convertvector(sum[p][r][v], vtile) * scale, old;
        memcpy(&old, to, sizeof old);
        if (!is_first) product += old;
        memcpy(to, &product, sizeof product);
      }
    }
}

INLINE void multiply_int(const int rows, const int panels, const enum dtype dtype, const Linear *l,
                         const int16_t *a, size_t stride, int panel, float *tile, Ahead ahead) {
  const size_t pair_bytes = step_bytes(dtype), bytes = panel_bytes(l);
  const bf16 *scales = scales_of_panel(l, panel);
  const size_t panel_scales = scales_of_panel(l, panel + 1) - scales;
  const char *w = panel_at(l, panel);
  for (int begin = 0; begin < l->k; begin += l->group, scales += PANEL) {
    int end = begin + l->group < l->k ? begin + l->group : l->k;
    vsum sum[MAX_TILE_PANELS][MAX_TILE_ROWS][INT_VECTORS] = {0};
    for (int i = begin; i < end; i += 2, w += pair_bytes, ahead.line += ahead.step) {
#pragma GCC unroll 4
      for (int p = 0; p < panels; p++) {
        vpair weight[INT_VECTORS];
        __builtin_prefetch(ahead.line + p * bytes);
        load_pairs(dtype, w + p * bytes, weight);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
          int32_t pair;
          memcpy(&pair, a + r * stride + i, sizeof pair);
#pragma GCC unroll 4
          for (int v = 0; v < INT_VECTORS; v++) sum[p][r][v] += dot_pairs(weight[v], pair);
        }
      }
    }
    add_group(rows, panels, sum, scales, panel_scales, begin == 0, tile);
  }
}

INLINE int int_panels_per_tile(int rows) {
  return panels_of_registers(rows, INT_REGISTERS, INT_VECTORS);
}

#define INT_TILE(ROWS, PANELS)                                                \
  case (ROWS) * 8 + (PANELS):                                                 \
    if ((PANELS) <= int_panels_per_tile(ROWS))                                \
      multiply_int(ROWS, PANELS, dtype, l, x, a.stride, panel, tile, ahead);  \
    break;
#define INT_TILES(ROWS) \
  INT_TILE(ROWS, 1) INT_TILE(ROWS, 2) INT_TILE(ROWS, 3) INT_TILE(ROWS, 4)

INLINE void multiply_any_int(const enum dtype dtype, const Linear *l, Activations a, int row,
                             int rows, int panel, int panels, float *tile, Ahead ahead) {
  const int16_t *x = (const int16_t *)a.rows + row * a.stride;
  switch (rows * 8 + panels) {
    INT_TILES(1) INT_TILES(2) INT_TILES(3) INT_TILES(4) INT_TILES(5) INT_TILES(6)
  }
}

static void multiply_integers(const Linear *l, Activations a, int row, int rows, int panel,
                              int panels, float *tile, Ahead ahead) {
  if (l->dtype == INT8) multiply_any_int(INT8, l, a, row, rows, panel, panels, tile, ahead);
  else multiply_any_int(INT4, l, a, row, rows, panel, panels, tile, ahead);
  for (int p = 0; p < panels; p++)
    for (int r = 0; r < rows; r++, tile += PANEL)
      for (int i = 0; i < PANEL; i += LANES)
        store(tile + i, load(tile + i) * splat(a.scales[row + r]));
}

// Each row by its own largest number.
static Activations to_int16(const float *a, int rows, int k, void *scratch) {
  float *scales = scratch;
  int16_t *numbers = (int16_t *)(scales + L2_FLOATS / PANEL);
  for (int r = 0; r < rows; r++) {
    const float *x = a + (size_t)r * k;
    float most = max_abs(x, k);
    scales[r] = most / 32767;
    for (int i = 0; i < k; i += LANES) {
      vi integers = to_integers(load(x + i), most > 0 ? 32767 / most : 0);
      int16_t half __attribute__((vector_size(2 * LANES))) =
          __builtin_convertvector(integers, __typeof__(half));
      memcpy(numbers + (size_t)r * k + i, &half, sizeof half);
    }
  }
  return (Activations){numbers, k, scales};
}
