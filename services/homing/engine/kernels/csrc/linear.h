// y[m][n] = sum_k a[m][k] * w[n][k], with weights packed in panels of PANEL output columns:
//
//   FP32, FP16, FP8   [k][PANEL]
//   BF16              [k / 2][PANEL][2]   a pair is one 32-bit word, unpacked by a shift and a mask
//   INT8, INT4        [k / 2][PANEL][2]   see linear_int.h, which multiplies these
//
// Activations and sums are fp32. Each output has one accumulator and k ascends, so the bits of a
// row depend on nothing but the row: not on how many rows there are, nor on how rows, panels and
// threads are cut.
#pragma once
#include "formats.h"

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
  const bf16 *scales;  // [panels][groups][PANEL], by which weights are multiplied, or NULL
  const float *bias;   // [n], or NULL
  int n, k;
  int dtype, group;  // `group` neighbouring inputs of an output share a scale
} Linear;

INLINE size_t panel_bytes(const Linear *l) { return PANEL * l->k * weight_bits(l->dtype) / 8; }
INLINE const char *panel_at(const Linear *l, int panel) {
  return (const char *)l->packed + panel * panel_bytes(l);
}
INLINE const bf16 *scales_of_panel(const Linear *l, int panel) {
  return l->scales + (size_t)panel * ((l->k + l->group - 1) / l->group) * PANEL;
}

// What becomes of a product. `out` is [rows][out_stride].
enum epilogue { STORE, ADD, SILU_MUL };
typedef struct {
  enum epilogue kind;
  float *out;
  size_t out_stride;
} Epilogue;

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

// What a multiplication prefetches: `step` bytes a step, from `line` on.
typedef struct {
  const char *line;
  size_t step;
} Ahead;

// Bytes of a panel that one step of a multiplication reads.
INLINE size_t step_bytes(enum dtype dtype) {
  int columns = dtype == BF16 || dtype == INT8 || dtype == INT4 ? 2 : 1;
  return columns * PANEL * weight_bits(dtype) / 8;
}

// Column `i` of a panel; in BF16 the even or odd half of a pair of columns.
INLINE void load_column(const enum dtype dtype, const char *column, int odd, vf *weight) {
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS; v++) {
    if (dtype != BF16) {
      weight[v] = load_numbers(dtype, column, v * LANES);
      continue;
    }
    vu bits;
    memcpy(&bits, column + v * sizeof bits, sizeof bits);
    weight[v] = (vf)(odd ? bits & 0xffff0000u : bits << 16);
  }
}

// The micro-kernel, the one place to specialise for a CPU with bf16 or matrix instructions:
// tile[panel][row][PANEL] = `rows` rows of a, times `panels` neighbouring panels of `bytes` each.
// Both counts and the dtype are constants where it is inlined.
INLINE void multiply(const int rows, const int panels, const enum dtype dtype, const float *a,
                     size_t stride, const char *w, int k, float *tile, Ahead ahead) {
  const int step = dtype == BF16 ? 2 : 1;
  const size_t column_bytes = PANEL * weight_bits(dtype) / 8, bytes = k * column_bytes;
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
      const char *column = w + p * bytes + i * column_bytes;
      __builtin_prefetch(ahead.line + p * bytes);
#pragma GCC unroll 2
      for (int odd = 0; odd < step; odd++) {
        vf weight[PANEL_VECTORS];
        // Hides that both halves of a pair are loaded from one place: reading it twice is cheaper
        // than the registers that keeping it costs (99 against 68 GFLOP/s with 6 rows, AVX2).
        if (dtype == BF16) __asm__("" : "+r"(column));
        load_column(dtype, column, odd, weight);
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
INLINE int panels_of_registers(int rows, int registers, int vectors) {
  int panels = registers / 2 / (rows * vectors);
  return panels < 1 ? 1 : panels > MAX_TILE_PANELS ? MAX_TILE_PANELS : panels;
}
INLINE int panels_per_tile(int rows) {
  return panels_of_registers(rows, VECTOR_REGISTERS, PANEL_VECTORS);
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
typedef void Multiply(int rows, int panels, const float *a, size_t stride, const char *w, int k,
                      float *tile, Ahead ahead);
#define MULTIPLY(NAME, DTYPE)                                                                \
  static void NAME(int rows, int panels, const float *a, size_t stride, const char *w, int k, \
                   float *tile, Ahead ahead) {                                               \
    multiply_any(rows, panels, DTYPE, a, stride, w, k, tile, ahead);                         \
  }
MULTIPLY(multiply_fp32, FP32)
MULTIPLY(multiply_bf16, BF16)
MULTIPLY(multiply_fp16, FP16)
MULTIPLY(multiply_fp8, FP8)
static Multiply *const multiply_of_dtype[] = {
    [FP32] = multiply_fp32, [BF16] = multiply_bf16, [FP16] = multiply_fp16, [FP8] = multiply_fp8};

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

// Rows of activations, in fp32, or as integers of 16 bits and what to multiply them by.
typedef struct {
  const void *rows;  // [rows][stride]
  size_t stride;
  const float *scales;  // [rows], or NULL
} Activations;

// tile[panel][row][PANEL] *= the weights' scales, one an output.
static void scale_columns(const Linear *l, int panel, int panels, int rows, float *tile) {
  for (int p = 0; p < panels; p++) {
    const bf16 *scales = scales_of_panel(l, panel + p);
    for (int r = 0; r < rows; r++, tile += PANEL)
      for (int i = 0; i < PANEL; i += LANES)
        store(tile + i, load(tile + i) * load_bf16(scales + i));
  }
}

#include "linear_int.h"

// Rows [row, row + rows) times panels [panel, panel + panels), or an fp32 copy of one.
static void multiply_tile(const Linear *l, Activations a, int row, int rows, int panel, int panels,
                          const float *copy, float *tile, Ahead ahead) {
  if (l->dtype == INT8 || l->dtype == INT4) {
    multiply_integers(l, a, row, rows, panel, panels, tile, ahead);
    return;
  }
  const float *x = (const float *)a.rows + row * a.stride;
  if (copy) multiply_fp32(rows, 1, x, a.stride, (const char *)copy, l->k, tile, ahead);
  else
    multiply_of_dtype[l->dtype](rows, panels, x, a.stride, panel_at(l, panel), l->k, tile, ahead);
  if (l->scales) scale_columns(l, panel, panels, rows, tile);
}

// Many rows read the same fp8: unpacked once it takes a fifth less time. Exact, so no bit changes.
static const float *unpacked_panel(const Linear *l, int panel, float *memory) {
  for (int i = 0; i < PANEL * l->k; i += LANES) store(memory + i, load_fp8(panel_at(l, panel) + i));
  return memory;
}

// Rows [0, rows) of a times panels [begin, end).
static void multiply_panels(const Linear *linear, Activations a, int rows, int begin, int end,
                            Epilogue e, float *scratch) {
  float tile[TILE_FLOATS] __attribute__((aligned(64)));
  size_t bytes = panel_bytes(linear), step = step_bytes(linear->dtype);
  int tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  int most = tiles > 1 ? 1 : a.scales ? int_panels_per_tile(rows) : panels_per_tile(rows), panels;
  for (int panel = begin; panel < end; panel += panels) {
    const char *w = panel_at(linear, panel);
    panels = end - panel < most ? end - panel : most;
    int unpack = linear->dtype == FP8 && tiles > 1;
    const float *copy = unpack ? unpacked_panel(linear, panel, scratch) : NULL;
    for (int i = 0; i < tiles; i++) {  // of nearly equal height
      int row = rows * i / tiles, height = rows * (i + 1) / tiles - row;
      // One tile: some way ahead in each panel. Several: each a share of the next panel.
      Ahead ahead = tiles == 1 ? (Ahead){w + PREFETCH_BYTES, step}
                               : (Ahead){w + bytes + bytes * i / tiles, step / tiles};
      multiply_tile(linear, a, row, height, panel, panels, copy, tile, ahead);
      for (int p = 0; p < panels; p++)
        finish_tile(linear, e, row, height, panel + p, tile + p * height * PANEL);
    }
  }
}

// Rows that are multiplied at a time.
INLINE int rows_of_chunk(int k) {
  int rows = L2_FLOATS / k / MAX_TILE_ROWS * MAX_TILE_ROWS;
  return rows < 4 * MAX_TILE_ROWS ? 4 * MAX_TILE_ROWS : rows;
}
// Bytes of scratch memory that `apply_linear` takes for inputs of up to `k` numbers: a chunk as
// 16-bit integers with its scales, or a panel in fp32.
INLINE size_t linear_scratch_bytes(int k) {
  size_t chunk = (size_t)4 * MAX_TILE_ROWS * k, panel = sizeof(float) * PANEL * k;
  size_t integers = sizeof(int16_t) * (chunk > L2_FLOATS ? chunk : L2_FLOATS);
  integers += sizeof(float) * L2_FLOATS / PANEL;
  return integers > panel ? integers : panel;
}

// This thread's panels of one linear, for `rows` rows of a.
static void apply_linear(const Linear *linear, const float *a, int rows, Epilogue e, void *scratch,
                         int thread, int num_threads) {
  int begin, end, chunk = rows_of_chunk(linear->k), k = linear->k;
  cut((linear->n + PANEL - 1) / PANEL, thread, num_threads, &begin, &end);
  for (int first = 0; first < rows; first += chunk, a += (size_t)chunk * k) {
    int count = rows - first < chunk ? rows - first : chunk;
    Activations x = {a, k, NULL};
    if (linear->dtype >= INT8) x = to_int16(a, count, k, scratch);
    Epilogue part = {e.kind, e.out + first * e.out_stride, e.out_stride};
    multiply_panels(linear, x, count, begin, end, part, scratch);
  }
}
