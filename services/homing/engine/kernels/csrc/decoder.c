// A step of a decoder of the Llama family: all its layers and the head, in one call and one
// parallel region. Called through ctypes; knows nothing of torch, of requests or of sampling.
//
// Residual stream and activations are fp32. Embedding, each linear and the KV cache have formats of
// their own: a bf16 model differs from an fp32 one only in the rounding of what is kept so.
//
// The phases of a layer, each shared out among all threads and followed by a barrier:
//   1 rms_norm, qkv    2 q/k norm, rope, KV write    3 attention    4 output, + residual
//   5 rms_norm, gate_up, silu * mul    6 down, + residual
#define _GNU_SOURCE
#include <omp.h>
#include <sched.h>
#include "attention.h"
#include "linear.h"
#include "vector.h"

#define SPINS_BEFORE_YIELD 4000  // fewer cost more beside a busy neighbour (100: 64 ms a step)
#define OWN_NORM_ROWS 16  // up to here every thread norms all rows for itself and saves a barrier
#define MAX_WINDOWS 2     // distinct attention windows among a model's layers

// ---- what Python fills in; the same order as in decoder.py

typedef struct {
  const float *attention_norm, *query_norm, *key_norm, *mlp_norm;  // q/k norms may be NULL
  Linear qkv, output, gate_up, down;
  int window_index;  // into Model.windows
} Layer;

typedef struct {
  int embedding_dtype, kv_dtype, num_layers, num_heads, num_kv_heads, head_dim, hidden, intermediate, num_windows;
  int windows[MAX_WINDOWS];
  float norm_eps, scale;
  const Layer *layers;
  const void *embedding;         // [vocab][hidden]
  const float *final_norm;       // [hidden]
  const float *cosines, *sines;  // [positions][head_dim / 2]
  Linear head;
} Model;

typedef struct {
  int rows, num_selected, max_blocks, block_size;
  const int32_t *token_ids, *positions, *slot_mapping, *request_index, *block_tables, *selected;
  void *const *keys, *const *values;  // per layer [slots][kv_heads] heads: formats.h
  float *logits;                      // [num_selected][vocab]
} Step;

// ---- the memory of one engine; nothing here is shared between engines

typedef struct {
  _Alignas(64) atomic_int arrived;
  _Alignas(64) atomic_int generation;
} Barrier;

typedef struct {
  Barrier barrier;
  AttentionShape shape;
  AttentionPlan plans[MAX_WINDOWS];
  float *hidden, *normed, *qkv, *attended, *activated;  // [rows][...]
  char *scratch;                                         // [threads][scratch_bytes]
  size_t hidden_size, normed_size, qkv_size, attended_size, activated_size, scratch_size;
  size_t scratch_bytes;
} Workspace;

Workspace *new_workspace(void) {
  Workspace *w = aligned_alloc(64, sizeof(Workspace));
  if (w) memset(w, 0, sizeof *w);
  return w;
}

void free_workspace(Workspace *w) {
  for (int i = 0; i < MAX_WINDOWS; i++) free_plan(&w->plans[i]);
  void *buffers[] = {w->hidden, w->normed, w->qkv, w->attended, w->activated, w->scratch};
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
  free(w);
}

static int most_inputs(const Model *m) {
  int attended = m->num_heads * m->head_dim, most = m->hidden;
  if (attended > most) most = attended;
  return m->intermediate > most ? m->intermediate : most;
}

static void grow_workspace(Workspace *w, const Model *m, int rows, int threads) {
  AttentionShape *s = &w->shape;
  *s = (AttentionShape){.num_heads = m->num_heads, .num_kv_heads = m->num_kv_heads,
                        .head_dim = m->head_dim, .group = m->num_heads / m->num_kv_heads,
                        .scale = m->scale};
  s->max_group_rows = attention_max_group_rows(s->group);
  size_t row = sizeof(float) * rows, head = m->head_dim;
  int norm_rows = rows > threads * OWN_NORM_ROWS ? rows : threads * OWN_NORM_ROWS;
  w->hidden = grown(w->hidden, &w->hidden_size, row * m->hidden);
  w->normed = grown(w->normed, &w->normed_size, sizeof(float) * norm_rows * m->hidden);
  w->qkv = grown(w->qkv, &w->qkv_size, row * (m->num_heads + 2 * m->num_kv_heads) * head);
  w->attended = grown(w->attended, &w->attended_size, row * m->num_heads * head);
  w->activated = grown(w->activated, &w->activated_size, row * m->intermediate);
  size_t for_attention = sizeof(float) * attention_scratch_floats(s);
  size_t for_linears = linear_scratch_bytes(most_inputs(m));
  size_t scratch = for_attention > for_linears ? for_attention : for_linears;
  w->scratch_bytes = (scratch + 63) / 64 * 64;
  w->scratch = grown(w->scratch, &w->scratch_size, w->scratch_bytes * threads);
}

// Spins a while, then yields: right too where threads outnumber cores, whatever OMP_WAIT_POLICY.
static void wait_for_all(Barrier *b, int threads) {
  if (threads == 1) return;
  int generation = atomic_load_explicit(&b->generation, memory_order_relaxed);
  if (atomic_fetch_add_explicit(&b->arrived, 1, memory_order_acq_rel) == threads - 1) {
    atomic_store_explicit(&b->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&b->generation, generation + 1, memory_order_release);
    return;
  }
  for (int spins = 0; atomic_load_explicit(&b->generation, memory_order_acquire) == generation;) {
    if (spins++ < SPINS_BEFORE_YIELD) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else {
      sched_yield();
    }
  }
}

// ---- the phases; `thread` of `threads`

typedef struct {
  const Model *m;
  const Step *b;
  Workspace *w;
  int thread, threads;
} Worker;

// This thread's scratch memory.
static void *scratch(Worker *k) { return k->w->scratch + k->w->scratch_bytes * k->thread; }

static void rms_norm(float *out, const float *x, const float *weight, int n, float eps) {
  vf squares = splat(0.f);
  for (int i = 0; i < n; i += LANES) squares = fma_v(load(x + i), load(x + i), squares);
  vf scale = splat(1.f / sqrtf(sum_lanes(squares) / n + eps));
  for (int i = 0; i < n; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

// Normed rows of the residual stream: `selected` ones, or the first `rows` where it is NULL.
static const float *norm_rows(Worker *k, const float *weight, const int32_t *selected, int rows) {
  const Model *m = k->m;
  int own = rows <= OWN_NORM_ROWS, begin = 0, end = rows;
  float *out = k->w->normed + (own ? (size_t)k->thread * OWN_NORM_ROWS * m->hidden : 0);
  if (!own) cut(rows, k->thread, k->threads, &begin, &end);
  for (int r = begin; r < end; r++) {
    const float *x = k->w->hidden + (size_t)(selected ? selected[r] : r) * m->hidden;
    rms_norm(out + (size_t)r * m->hidden, x, weight, m->hidden, m->norm_eps);
  }
  if (!own) wait_for_all(&k->w->barrier, k->threads);
  return out;
}

static void linear(Worker *k, const Linear *l, const float *x, int rows, enum epilogue kind,
                   float *out, size_t out_stride) {
  Epilogue e = {kind, out, out_stride};
  apply_linear(l, x, rows, e, scratch(k), k->thread, k->threads);
}

static void embed(Worker *k) {
  const Model *m = k->m;
  int begin, end, n = m->hidden;
  cut(k->b->rows, k->thread, k->threads, &begin, &end);
  for (int r = begin; r < end; r++) {
    size_t token = (size_t)k->b->token_ids[r] * n;
    for (int i = 0; i < n; i += LANES)
      store(k->w->hidden + (size_t)r * n + i, load_numbers(m->embedding_dtype, m->embedding, token + i));
  }
}

static void rotate(float *head, const float *cosines, const float *sines, int half) {
  for (int i = 0; i < half; i++) {
    float first = head[i], second = head[i + half];
    head[i] = first * cosines[i] - second * sines[i];
    head[i + half] = second * cosines[i] + first * sines[i];
  }
}

static void write_slot(const Model *m, char *cache, size_t index, const float *head) {
  write_head(m->kv_dtype, cache + index * head_bytes(m->kv_dtype, m->head_dim), head, m->head_dim);
}

static void place_heads(Worker *k, int index) {
  const Model *m = k->m;
  const Layer *layer = &m->layers[index];
  int keys_at = m->num_heads, values_at = keys_at + m->num_kv_heads;
  int heads = values_at + m->num_kv_heads, n = m->head_dim, begin, end;
  cut(k->b->rows * heads, k->thread, k->threads, &begin, &end);
  for (int i = begin; i < end; i++) {
    int row = i / heads, h = i % heads;
    float *head = k->w->qkv + (size_t)i * n;
    size_t slot = (size_t)k->b->slot_mapping[row] * m->num_kv_heads;
    if (h >= values_at) {
      write_slot(m, k->b->values[index], slot + h - values_at, head);
      continue;
    }
    const float *norm = h < keys_at ? layer->query_norm : layer->key_norm;
    if (norm) rms_norm(head, head, norm, n, m->norm_eps);
    size_t angle = (size_t)k->b->positions[row] * (n / 2);
    rotate(head, m->cosines + angle, m->sines + angle, n / 2);
    if (h >= keys_at) write_slot(m, k->b->keys[index], slot + h - keys_at, head);
  }
}

static void attention(Worker *k, int index) {
  const Model *m = k->m;
  Workspace *w = k->w;
  Rows rows = {k->b->positions, k->b->request_index, k->b->block_tables,
               k->b->rows, k->b->max_blocks, k->b->block_size};
  size_t stride = (size_t)(m->num_heads + 2 * m->num_kv_heads) * m->head_dim;
  Attention a = {&w->shape, &rows, &w->plans[m->layers[index].window_index], m->kv_dtype,
                 w->qkv, stride, k->b->keys[index], k->b->values[index], w->attended};
  attend(&a, scratch(k), k->thread);
}

static void run_layer(Worker *k, int index) {
  const Model *m = k->m;
  const Layer *layer = &m->layers[index];
  Workspace *w = k->w;
  int rows = k->b->rows;
  const float *x = norm_rows(k, layer->attention_norm, NULL, rows);
  linear(k, &layer->qkv, x, rows, STORE, w->qkv, layer->qkv.n);
  wait_for_all(&w->barrier, k->threads);
  place_heads(k, index);
  wait_for_all(&w->barrier, k->threads);
  attention(k, index);
  wait_for_all(&w->barrier, k->threads);
  linear(k, &layer->output, w->attended, rows, ADD, w->hidden, m->hidden);
  wait_for_all(&w->barrier, k->threads);
  x = norm_rows(k, layer->mlp_norm, NULL, rows);
  linear(k, &layer->gate_up, x, rows, SILU_MUL, w->activated, m->intermediate);
  wait_for_all(&w->barrier, k->threads);
  linear(k, &layer->down, w->activated, rows, ADD, w->hidden, m->hidden);
  wait_for_all(&w->barrier, k->threads);
}

static void plan_step(Worker *k) {
  Rows rows = {k->b->positions, k->b->request_index, k->b->block_tables,
               k->b->rows, k->b->max_blocks, k->b->block_size};
  for (int i = 0; i < k->m->num_windows; i++) {
    k->w->plans[i].window = k->m->windows[i];
    plan_attention(&k->w->plans[i], &k->w->shape, &rows, k->threads);
  }
}

// What this was compiled for.
const char *instructions(void) { return HAS_DOT_BF16 ? INSTRUCTIONS "_bf16" : INSTRUCTIONS; }

// One step. Not reentrant for one workspace; different workspaces are independent.
void run_step(const Model *model, const Step *step, Workspace *workspace, int threads) {
  grow_workspace(workspace, model, step->rows, threads);
#pragma omp parallel num_threads(threads)
  {
    // OpenMP may grant fewer threads than asked for, and the barrier counts on the true number.
    Worker k = {model, step, workspace, omp_get_thread_num(), omp_get_num_threads()};
    if (k.thread == 0) plan_step(&k);
    embed(&k);
    wait_for_all(&workspace->barrier, k.threads);
    for (int i = 0; i < model->num_layers; i++) run_layer(&k, i);
    if (step->num_selected) {
      const float *x = norm_rows(&k, model->final_norm, step->selected, step->num_selected);
      linear(&k, &model->head, x, step->num_selected, STORE, step->logits, model->head.n);
    }
  }
}
