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
#pragma once
#include "dot.h"
#include "formats.h"

typedef int8_t vbyte __attribute__((vector_size(2 * LANES)));

INLINE vpair load_bytes(const char *p) {
#if defined(__AVX512BW__)  // GCC 12 converts in several steps
  return (vpair)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)p));
#elif LANES == 8
  return (vpair)_mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)p));
#else
  vbyte bytes;
  memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, vpair);
#endif
}

#if LANES == 16
// A panel of INT4: each byte twice, shifted up so that its low or high half is left, and back.
INLINE vpair load_int4(const char *p) {
  static const int16_t up[2 * LANES] = {[0 ... LANES - 1] = 12, [LANES ... 2 * LANES - 1] = 8};
  vpair shifts;
  memcpy(&shifts, up, sizeof shifts);
#if defined(__AVX512BW__)
  __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)p));
  vpair bytes = (vpair)_mm512_cvtepi8_epi16(twice);
#else
  vbyte twice;
  memcpy(&twice, p, LANES);
  memcpy((char *)&twice + LANES, p, LANES);
  vpair bytes = __builtin_convertvector(twice, vpair);
#endif
  return bytes << shifts >> 12;
}
#endif

// One pair of inputs of every output of a panel.
INLINE void load_pairs(const enum dtype dtype, const char *p, vpair *weight) {
  if (dtype == INT8) {
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) weight[v] = load_bytes(p + v * sizeof(vbyte));
    return;
  }
#if LANES == 16
  weight[0] = load_int4(p);
#else
#pragma GCC unroll 2
  for (int v = 0; v < PANEL_VECTORS / 2; v++) {
    vpair both = load_bytes(p + v * sizeof(vbyte));
    weight[v] = both << 12 >> 12;
    weight[v + PANEL_VECTORS / 2] = both >> 4;
  }
#endif
}

typedef vi IntSums[MAX_TILE_ROWS][PANEL_VECTORS];  // of a panel

// A pair of inputs of each of `panels` panels, `bytes` apart, times the same inputs of each row.
INLINE void add_int_pairs(const int rows, const int panels, const enum dtype dtype, const char *w,
                          size_t bytes, const int16_t *x, size_t stride, IntSums *sum) {
  vpair weight[MAX_TILE_PANELS][PANEL_VECTORS];
#pragma GCC unroll 4
  for (int p = 0; p < panels; p++) load_pairs(dtype, w + p * bytes, weight[p]);
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    int32_t pair;
    memcpy(&pair, x + r * stride, sizeof pair);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; v++)
        sum[p][r][v] = dot_int16(sum[p][r][v], weight[p][v], pair);
  }
}

// tile[p][row][PANEL] (+)= sums * the group's scales
INLINE void add_group(const int rows, const int panels, const IntSums *sum, const bf16 *scales,
                      size_t panel_scales, int is_first, float *tile) {
#pragma GCC unroll 4
  for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) {
      vf scale = load_bf16(scales + p * panel_scales + v * LANES);
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        float *to = tile + (p * rows + r) * PANEL + v * LANES;
        vf product = __builtin_convertvector(sum[p][r][v], vf) * scale;
        store(to, is_first ? product : product + load(to));
      }
    }
}

INLINE void multiply_int(const int rows, const int panels, const enum dtype dtype, const Linear *l,
                         const int16_t *a, size_t stride, int panel, float *tile, Ahead ahead) {
  const size_t pair_bytes = step_bytes(dtype), bytes = panel_bytes(l);
  const bf16 *scales = scales_of_panel(l, panel);
  const size_t panel_scales = scales_of_panel(l, panel + 1) - scales;
  const char *w = panel_at(l, panel);
  const int at_once = panels_at_once(panels);
  for (int begin = 0; begin < l->k; begin += l->group, scales += PANEL) {
    int end = begin + l->group < l->k ? begin + l->group : l->k;
    IntSums sum[MAX_TILE_PANELS] = {0};
    for (int i = begin; i < end; i += 2, w += pair_bytes, ahead.line += ahead.step) {
#pragma GCC unroll 4
      for (int p = 0; p < panels; p++) __builtin_prefetch(ahead.line + p * bytes);
#pragma GCC unroll 4
      for (int p = 0; p < panels; p += at_once)
        add_int_pairs(rows, at_once, dtype, w + p * bytes, bytes, a + i, stride, sum + p);
    }
    add_group(rows, panels, sum, scales, panel_scales, begin == 0, tile);
  }
}

#define MULTIPLY_INT(ROWS, PANELS) \
  multiply_int(ROWS, PANELS, dtype, l, x, stride, panel, tile, ahead)
INLINE void multiply_any_int(const enum dtype dtype, const Linear *l, Activations a, int row,
                             int rows, int panel, int panels, float *tile, Ahead ahead) {
  const size_t stride = a.stride / sizeof(int16_t);
  const int16_t *x = (const int16_t *)a.rows + row * stride;
  switch (tile_number(rows, panels)) { TILES(MULTIPLY_INT) }
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
  return (Activations){(const char *)numbers, k * sizeof *numbers, scales};
}
