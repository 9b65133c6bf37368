// y[m][n] = sum_k a[m][k] * w[n][k], with weights packed in panels of PANEL output columns:
//
//   fp32 panel  [k][PANEL]
//   bf16 panel  [k / 2][PANEL][2]    a pair is one 32-bit word, unpacked by a shift and a mask
//
// Activations and sums are fp32. Each output has one accumulator and k ascends, so the bits of a
// row depend on nothing but the row: not on how many rows there are, nor on how rows, panels and
// threads are cut.
#pragma once
#include "vector.h"

enum dtype { FP32, BF16 };

#define PANEL 16
#define PANEL_VECTORS (PANEL / LANES)
#define MAX_TILE_ROWS 6
#define MAX_TILE_PANELS 4
#define TILE_FLOATS (MAX_TILE_ROWS * MAX_TILE_PANELS * PANEL)
// How far ahead weights are asked for: the hardware's own prefetch ends at each page. Where weights
// come from memory, 2 to 16 rows gain up to a quarter; one row gains nothing.
#define PREFETCH_BYTES 4096
// Rows of activations that are multiplied while they are in the L2 cache.
#define L2_FLOATS (64 * 1024)

typedef struct {
  const void *packed;  // [ceil(n / PANEL)] panels
  const float *bias;   // [n], or NULL
  int n, k;
} Linear;

// What becomes of a product. `out` is [rows][out_stride].
enum epilogue { STORE, ADD, SILU_MUL };
typedef struct {
  enum epilogue kind;
  float *out;
  size_t out_stride;
} Epilogue;

INLINE size_t weight_bytes(enum dtype dtype) {
  return dtype == BF16 ? sizeof(bf16) : sizeof(float);
}

// sum[v] += *x * weight[v]. As vector code, GCC hoists the broadcasts of x and picks FMA forms that
// overwrite a factor; six rows then spill (70 instead of 100 GFLOP/s with bf16 weights and AVX2).
INLINE void add_products(vf *sum, const float *x, const vf *weight) {
#if LANES == 8 && defined(__FMA__)
  vf broadcast;
  __asm__(
      "vbroadcastss %[x], %[broadcast]\n\t"
      "vfmadd231ps %[w0], %[broadcast], %[sum0]\n\t"
      "vfmadd231ps %[w1], %[broadcast], %[sum1]"
      : [sum0] "+x"(sum[0]), [sum1] "+x"(sum[1]), [broadcast] "=&x"(broadcast)
      : [x] "m"(*x), [w0] "x"(weight[0]), [w1] "x"(weight[1]));
#else
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS; v++) sum[v] = fma_v(splat(*x), weight[v], sum[v]);
#endif
}

// What a multiplication prefetches: one line a step, from `line` on.
typedef struct {
  const char *line;
  size_t step;
} Ahead;

// The micro-kernel, the one place to specialise for a CPU with bf16 or matrix instructions:
// tile[panel][row][PANEL] = `rows` rows of a, times `panels` neighbouring panels. Both counts and
// the dtype are constants where it is inlined.
INLINE void multiply(const int rows, const int panels, const enum dtype dtype, const float *a,
                     size_t stride, const char *w, int k, float *tile, Ahead ahead) {
  const int step = dtype == BF16 ? 2 : 1;
  const size_t column_bytes = PANEL * weight_bytes(dtype), panel_bytes = k * column_bytes;
  vf sum[MAX_TILE_PANELS][MAX_TILE_ROWS][PANEL_VECTORS];
#pragma GCC unroll 4
  for (int p = 0; p < panels; p++)
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; v++) sum[p][r][v] = splat(0.f);
  for (int i = 0; i < k; i += step, ahead.line += ahead.step) {
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) {
      const char *column = w + p * panel_bytes + i * column_bytes;
      __builtin_prefetch(ahead.line + p * panel_bytes);
#pragma GCC unroll 2
      for (int odd = 0; odd < step; odd++) {
        vf weight[PANEL_VECTORS];
        // Hides that both halves of a pair are loaded from one place: reading it twice is cheaper
        // than the registers that keeping it costs (99 against 68 GFLOP/s with 6 rows, AVX2).
        if (dtype == BF16) __asm__("" : "+r"(column));
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECTORS; v++) {
          vu bits;
          memcpy(&bits, column + v * sizeof bits, sizeof bits);
          weight[v] = (vf)(dtype == FP32 ? bits : odd ? bits & 0xffff0000u : bits << 16);
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) add_products(sum[p][r], a + r * stride + i + odd, weight);
      }
    }
  }
#pragma GCC unroll 4
  for (int p = 0; p < panels; p++)
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; v++)
        store(tile + (p * rows + r) * PANEL + v * LANES, sum[p][r][v]);
}

// Few rows take several panels at once, to have enough sums in flight to hide the FMA's latency;
// more than half of the registers as sums made GCC spill.
INLINE int panels_per_tile(int rows) {
  int panels = VECTOR_REGISTERS / 2 / (rows * PANEL_VECTORS);
  return panels < 1 ? 1 : panels > MAX_TILE_PANELS ? MAX_TILE_PANELS : panels;
}

#define TILE(ROWS, PANELS)                                              \
  case (ROWS) * 8 + (PANELS):                                           \
    if ((PANELS) <= panels_per_tile(ROWS))                              \
      multiply(ROWS, PANELS, dtype, a, stride, w, k, tile, ahead);      \
    break;
#define TILES(ROWS) TILE(ROWS, 1) TILE(ROWS, 2) TILE(ROWS, 3) TILE(ROWS, 4)

INLINE void multiply_any(int rows, int panels, const enum dtype dtype, const float *a,
                         size_t stride, const char *w, int k, float *tile, Ahead ahead) {
  switch (rows * 8 + panels) { TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6) }
}
static void multiply_fp32(int rows, int panels, const float *a, size_t stride, const char *w,
                          int k, float *tile, Ahead ahead) {
  multiply_any(rows, panels, FP32, a, stride, w, k, tile, ahead);
}
static void multiply_bf16(int rows, int panels, const float *a, size_t stride, const char *w,
                          int k, float *tile, Ahead ahead) {
  multiply_any(rows, panels, BF16, a, stride, w, k, tile, ahead);
}

// SwiGLU: a panel holds 8 gate columns, then the 8 up columns of the same outputs.
static void silu_mul(float *out, const float *tile) {
  float value[PANEL];
  for (int i = 0; i < PANEL / 2; i += LANES) {  // with 16 lanes the upper half is not used
    vf gate = load(tile + i);
    store(value + i, gate / (splat(1.f) + exp_v(splat(0.f) - gate)));
  }
  for (int i = 0; i < PANEL / 2; i++) out[i] = value[i] * tile[PANEL / 2 + i];
}

// One panel's tile of `rows` rows, beginning at row `row`.
static void finish_tile(const Linear *linear, Epilogue e, int row, int rows, int panel,
                        const float *tile) {
  int column = panel * PANEL, width = linear->n - column < PANEL ? linear->n - column : PANEL;
  for (int r = 0; r < rows; r++, tile += PANEL) {
    float *out = e.out + (row + r) * e.out_stride + column;
    switch (e.kind) {
    case STORE:
      if (linear->bias)
        for (int i = 0; i < width; i++) out[i] = tile[i] + linear->bias[column + i];
      else
        memcpy(out, tile, width * sizeof(float));
      break;
    case ADD:
      for (int i = 0; i < width; i++) out[i] += tile[i];
      break;
    case SILU_MUL:
      silu_mul(out - column + panel * (PANEL / 2), tile);
      break;
    }
  }
}

INLINE void cut(int n, int part, int parts, int *begin, int *end) {
  *begin = (int)((int64_t)n * part / parts);
  *end = (int)((int64_t)n * (part + 1) / parts);
}

// Rows [first, last) of a times panels [begin, end).
static void multiply_panels(const Linear *linear, enum dtype dtype, const float *a, size_t stride,
                            int first, int last, int begin, int end, Epilogue e) {
  float tile[TILE_FLOATS] __attribute__((aligned(64)));
  size_t panel_bytes = PANEL * linear->k * weight_bytes(dtype);
  int tiles = (last - first + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  int most = tiles == 1 ? panels_per_tile(last - first) : 1, panels;
  for (int panel = begin; panel < end; panel += panels) {
    const char *w = (const char *)linear->packed + panel * panel_bytes;
    panels = end - panel < most ? end - panel : most;
    for (int i = 0; i < tiles; i++) {  // of nearly equal height
      int row = first + (last - first) * i / tiles;
      int height = first + (last - first) * (i + 1) / tiles - row;
      // One tile: some way ahead in each panel. Several: each a share of the next panel.
      Ahead ahead = tiles == 1
                        ? (Ahead){w + PREFETCH_BYTES, 64}
                        : (Ahead){w + panel_bytes + panel_bytes * i / tiles, 64 / tiles};
      (dtype == BF16 ? multiply_bf16 : multiply_fp32)(height, panels, a + row * stride, stride, w,
                                                      linear->k, tile, ahead);
      for (int p = 0; p < panels; p++)
        finish_tile(linear, e, row, height, panel + p, tile + p * height * PANEL);
    }
  }
}

// This thread's panels of one linear, for `rows` rows of a.
static void apply_linear(const Linear *linear, enum dtype dtype, const float *a, size_t stride,
                         int rows, Epilogue e, int thread, int num_threads) {
  int begin, end, chunk = L2_FLOATS / linear->k / MAX_TILE_ROWS * MAX_TILE_ROWS;
  if (chunk < 4 * MAX_TILE_ROWS) chunk = 4 * MAX_TILE_ROWS;
  cut((linear->n + PANEL - 1) / PANEL, thread, num_threads, &begin, &end);
  for (int first = 0; first < rows; first += chunk) {
    int last = first + chunk < rows ? first + chunk : rows;
    multiply_panels(linear, dtype, a, stride, first, last, begin, end, e);
  }
}
