// y[m][n] = sum_k a[m][k] * w[n][k], with weights packed in panels of PANEL output columns:
//
//   FP32, FP16, FP8   [k][PANEL]
//   BF16              [k / 2][PANEL][2]   a pair is one 32-bit word
//   INT8, INT4        [k / 2][PANEL][2]   see linear_int.h, which multiplies these
//
// Activations and sums are fp32. Where the CPU multiplies pairs of bf16 (HAS_DOT_BF16), activations
// that meet weights in bf16 are rounded to it, too. Each output has one accumulator and k ascends,
// so the bits of a row depend on nothing but the row: not on how many rows there are, nor on how
// rows, panels and threads are cut.
#pragma once
#include "dot.h"
#include "formats.h"

#define PANEL 16
#define PANEL_VECTORS (PANEL / LANES)
#define MAX_TILE_ROWS (LANES == 16 ? 12 : 6)
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

INLINE int columns_of_step(const enum dtype dtype) { return dtype == BF16 ? 2 : 1; }

typedef vf Sums[MAX_TILE_ROWS][PANEL_VECTORS];  // of a panel

// One step: a column, or two in BF16, of each of `panels` panels, `bytes` apart, times the same
// inputs, at `x`, of each row.
INLINE void add_columns(const int rows, const int panels, const enum dtype dtype,
                        const char *column, size_t bytes, const char *x, size_t stride, Sums *sum) {
#pragma GCC unroll 2
  for (int odd = 0; odd < columns_of_step(dtype); odd++) {
    vf weight[MAX_TILE_PANELS][PANEL_VECTORS];
    // Hides that both halves of a pair are loaded from one place: reading it twice is cheaper
    // than the registers that keeping it costs (99 against 68 GFLOP/s with 6 rows, AVX2).
    if (dtype == BF16) __asm__("" : "+r"(column));
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) load_column(dtype, column + p * bytes, odd, weight[p]);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int p = 0; p < panels; p++)
        add_products(sum[p][r], (const float *)(x + r * stride) + odd, weight[p]);
  }
}

// The same of panels of BF16 and rows of bf16.
INLINE void add_pairs(const int rows, const int panels, const char *column, size_t bytes,
                      const char *x, size_t stride, Sums *sum) {
  vu weight[MAX_TILE_PANELS][PANEL_VECTORS];
#pragma GCC unroll 4
  for (int p = 0; p < panels; p++) memcpy(weight[p], column + p * bytes, sizeof weight[p]);
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    uint32_t pair;
    memcpy(&pair, x + r * stride, sizeof pair);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; v++)
        sum[p][r][v] = dot_bf16(sum[p][r][v], weight[p][v], pair);
  }
}

// Of a tile's panels, how many a step works on at a time. Weights of several do not fit into 16
// registers. Into 32 they do; and panel by panel GCC would keep each row's input for the next,
// and spill.
INLINE int panels_at_once(int panels) { return LANES == 16 ? panels : 1; }

// The micro-kernel, the one place to specialise for a CPU with matrix instructions:
// tile[panel][row][PANEL] = `rows` rows of a, `stride` bytes apart, times `panels` neighbouring
// panels of `bytes` each. Both counts and the dtype are constants where it is inlined.
INLINE void multiply(const int rows, const int panels, const enum dtype dtype, const char *a,
                     size_t stride, const char *w, int k, float *tile, Ahead ahead) {
  const int step = columns_of_step(dtype), at_once = panels_at_once(panels);
  const int is_paired = HAS_DOT_BF16 && dtype == BF16;
  const size_t column_bytes = PANEL * weight_bits(dtype) / 8, bytes = k * column_bytes;
  const size_t number_bytes = is_paired ? sizeof(bf16) : sizeof(float);
  Sums sum[MAX_TILE_PANELS];
#pragma GCC unroll 4
  for (int p = 0; p < panels; p++)
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; v++) sum[p][r][v] = splat(0.f);
  for (int i = 0; i < k; i += step, ahead.line += ahead.step) {
    const char *column = w + i * column_bytes, *x = a + i * number_bytes;
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++) __builtin_prefetch(ahead.line + p * bytes);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p += at_once, column += at_once * bytes)
      if (is_paired) add_pairs(rows, at_once, column, bytes, x, stride, sum + p);
      else add_columns(rows, at_once, dtype, column, bytes, x, stride, sum + p);
  }
#pragma GCC unroll 4
  for (int p = 0; p < panels; p++)
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; v++)
        store(tile + (p * rows + r) * PANEL + v * LANES, sum[p][r][v]);
}

// The tiles that there are. Few rows take several panels at once, to have enough sums in flight to
// hide the latency of adding.
#define IS_TILE(ROWS, PANELS)  \
  ((ROWS) <= MAX_TILE_ROWS && \
   ((PANELS) == 1 || (ROWS) * (PANELS) * PANEL_VECTORS <= SUM_REGISTERS))
INLINE int panels_per_tile(int rows) {
  int panels = MAX_TILE_PANELS;
  while (!IS_TILE(rows, panels)) panels--;
  return panels;
}

// switch (tile_number(rows, panels)) { TILES(MULTIPLY) } calls MULTIPLY with constants.
INLINE int tile_number(int rows, int panels) { return rows * 8 + panels; }
#define TILE(ROWS, PANELS, MULTIPLY)                   \
  case (ROWS) * 8 + (PANELS):                          \
    if (IS_TILE(ROWS, PANELS)) MULTIPLY(ROWS, PANELS); \
    break;
#define ROW_TILES(ROWS, MULTIPLY)                 \
  TILE(ROWS, 1, MULTIPLY) TILE(ROWS, 2, MULTIPLY) \
  TILE(ROWS, 3, MULTIPLY) TILE(ROWS, 4, MULTIPLY)
#define TILES(MULTIPLY)                                                \
  ROW_TILES(1, MULTIPLY) ROW_TILES(2, MULTIPLY) ROW_TILES(3, MULTIPLY) \
  ROW_TILES(4, MULTIPLY) ROW_TILES(5, MULTIPLY) ROW_TILES(6, MULTIPLY) \
  ROW_TILES(7, MULTIPLY) ROW_TILES(8, MULTIPLY) ROW_TILES(9, MULTIPLY) \
  ROW_TILES(10, MULTIPLY) ROW_TILES(11, MULTIPLY) ROW_TILES(12, MULTIPLY)

typedef void Multiply(int rows, int panels, const char *a, size_t stride, const char *w, int k,
                      float *tile, Ahead ahead);
#define MULTIPLY(ROWS, PANELS) multiply(ROWS, PANELS, dtype, a, stride, w, k, tile, ahead)
#define MULTIPLY_OF(NAME, DTYPE)                                                             \
  static void NAME(int rows, int panels, const char *a, size_t stride, const char *w, int k, \
                   float *tile, Ahead ahead) {                                               \
    const enum dtype dtype = DTYPE;                                                          \
    switch (tile_number(rows, panels)) { TILES(MULTIPLY) }                                   \
  }
MULTIPLY_OF(multiply_fp32, FP32)
MULTIPLY_OF(multiply_bf16, BF16)
MULTIPLY_OF(multiply_fp16, FP16)
MULTIPLY_OF(multiply_fp8, FP8)
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

// Rows of activations, in fp32, in bf16, or as integers of 16 bits and what to multiply them by.
typedef struct {
  const char *rows;
  size_t stride;        // bytes from row to row
  const float *scales;  // [rows], or NULL
} Activations;

static Activations to_bf16_rows(const float *a, int rows, int k, void *scratch) {
  bf16 *numbers = scratch;
  for (size_t i = 0; i < (size_t)rows * k; i += LANES) {
    vh rounded = round_bf16(load(a + i));
    memcpy(numbers + i, &rounded, sizeof rounded);
  }
  return (Activations){scratch, k * sizeof(bf16), NULL};
}

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
  const char *x = a.rows + row * a.stride;
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
  int unpack = linear->dtype == FP8 && tiles > 1;  // one panel at a time
  int most = unpack ? 1 : panels_per_tile((rows + tiles - 1) / tiles), panels;
  for (int panel = begin; panel < end; panel += panels) {
    const char *w = panel_at(linear, panel);
    panels = end - panel < most ? end - panel : most;
    const float *copy = unpack ? unpacked_panel(linear, panel, scratch) : NULL;
    for (int i = 0; i < tiles; i++) {  // of nearly equal height
      int row = rows * i / tiles, height = rows * (i + 1) / tiles - row;
      // One tile: some way ahead in each panel. Several: each a share of the next panels.
      Ahead ahead = tiles == 1 ? (Ahead){w + PREFETCH_BYTES, step}
                               : (Ahead){w + panels * bytes + bytes * i / tiles, step / tiles};
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
// Bytes of scratch memory that `apply_linear` takes for inputs of up to `k` numbers: a chunk in 16
// bits a number, with scales of its rows, or a panel in fp32.
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
    Activations x = {(const char *)a, k * sizeof(float), NULL};
    if (linear->dtype >= INT8) x = to_int16(a, count, k, scratch);
    if (linear->dtype == BF16 && HAS_DOT_BF16) x = to_bf16_rows(a, count, k, scratch);
    Epilogue part = {e.kind, e.out + first * e.out_stride, e.out_stride};
    multiply_panels(linear, x, count, begin, end, part, scratch);
  }
}
