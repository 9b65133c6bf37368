// Causal attention of a step's rows over the paged KV cache, read in place.
//
// A context is cut into splits of SPLIT tokens at fixed positions (0, 128, 256, ...). Each split
// of each head yields a part: its largest score, the sum of its weights, and the weighted sum of
// values. Parts are merged in ascending order. All of this is fixed by the row's own position, so
// its bits depend on neither the batch nor the threads.
//
// Neighbouring rows of one request form a group and share the reading of keys and values. A unit
// of work is (group, split, kv head), in this order; each thread takes a contiguous range of about
// equal cost. A group that lies within one range is merged as it goes; the few that are cut by a
// border between threads store their parts, and whoever finishes last merges them.
#pragma once
#include <stdatomic.h>
#include <stdlib.h>
#include "linear.h"

#define SPLIT 128       // as attention/reference.py
#define GROUP_QUERIES 48  // query vectors (rows times query heads) per kv head of a group, at most
#define TILE_QUERIES 3
#define TILE_TOKENS 4

typedef struct {
  int num_heads, num_kv_heads, head_dim, group;  // group: query heads per kv head
  float scale;
  int max_group_rows;
} AttentionShape;

typedef struct {
  const int32_t *positions, *request_index, *block_tables;
  int rows, max_blocks, block_size;
} Rows;

typedef struct {
  int row, rows;         // rows [row, row + rows) of the batch
  int split, num_splits;  // splits [split, split + num_splits) hold all that any of them sees
  int unit;              // index of its first unit
  int shared;            // which stored parts, if it is cut by a border between threads, else -1
} Group;

// How one step's attention is shared out, for layers of one window.
typedef struct {
  int window;  // tokens that a row attends to, itself included; 0: all
  int num_groups, num_units, num_shared, max_splits;
  Group *groups;
  int *thread_unit;    // [threads + 1] borders
  int *thread_group;   // [threads] group of a thread's first unit
  atomic_int *done;    // [num_shared] units finished
  float *parts;        // [num_shared][max_splits][kv_heads] parts of shared groups
  size_t groups_size, shared_size, parts_size;
} AttentionPlan;

// ---- planning, by one thread

static int attention_max_group_rows(int group) {
  return group >= GROUP_QUERIES ? 1 : GROUP_QUERIES / group;
}

// Floats of one part: per query vector of a kv head, the values' sum, the best score, the total.
INLINE size_t part_floats(const AttentionShape *s) {
  return (size_t)s->max_group_rows * s->group * (s->head_dim + 2);
}

INLINE int first_visible(int position, int window) {
  return window && position >= window ? position - window + 1 : 0;
}

static void *grown(void *buffer, size_t *size, size_t wanted) {
  if (wanted <= *size) return buffer;
  free(buffer);
  *size = wanted + wanted / 2;
  return aligned_alloc(64, (*size + 63) / 64 * 64);
}

static int same_run(const Rows *b, int row, int next) {
  return b->request_index[next] == b->request_index[row] &&
         b->positions[next] == b->positions[row] + next - row;
}

static void find_groups(AttentionPlan *plan, const AttentionShape *s, const Rows *b) {
  plan->num_groups = plan->num_units = plan->max_splits = 0;
  for (int row = 0; row < b->rows;) {
    Group *g = &plan->groups[plan->num_groups++];
    g->row = row;
    g->rows = 1;
    while (row + g->rows < b->rows && g->rows < s->max_group_rows && same_run(b, row, row + g->rows))
      g->rows++;
    g->split = first_visible(b->positions[row], plan->window) / SPLIT;
    g->num_splits = b->positions[row + g->rows - 1] / SPLIT + 1 - g->split;
    g->unit = plan->num_units;
    g->shared = -1;
    plan->num_units += g->num_splits * s->num_kv_heads;
    if (g->num_splits > plan->max_splits) plan->max_splits = g->num_splits;
    row += g->rows;
  }
}

// Tokens of a split that some row of the group sees: [begin, end)
INLINE void split_tokens(const AttentionPlan *plan, const Group *g, const Rows *b, int split,
                         int *begin, int *end) {
  int first = first_visible(b->positions[g->row], plan->window);
  int last = b->positions[g->row + g->rows - 1] + 1;
  *begin = split * SPLIT > first ? split * SPLIT : first;
  *end = (split + 1) * SPLIT < last ? (split + 1) * SPLIT : last;
}

INLINE int64_t unit_cost(const AttentionPlan *plan, const Group *g, const Rows *b, int split) {
  int begin, end;
  split_tokens(plan, g, b, split, &begin, &end);
  return (int64_t)(end - begin + 8) * g->rows;
}

// Borders at equal shares of the cost; then number the groups that a border cuts.
static void cut_units(AttentionPlan *plan, const AttentionShape *s, const Rows *b, int threads) {
  int64_t total = 0, before = 0;
  for (int i = 0; i < plan->num_groups; i++)
    for (int k = 0; k < plan->groups[i].num_splits; k++)
      total += unit_cost(plan, &plan->groups[i], b, plan->groups[i].split + k) * s->num_kv_heads;
  int thread = 0;
  plan->num_shared = 0;
  for (int i = 0; i < plan->num_groups; i++) {
    Group *g = &plan->groups[i];
    int units = g->num_splits * s->num_kv_heads;
    for (int u = 0; u < units; u++) {
      while (thread < threads && before * threads >= total * thread) {
        plan->thread_unit[thread] = g->unit + u;
        plan->thread_group[thread++] = i;
        if (u > 0 && g->shared < 0) g->shared = plan->num_shared++;
      }
      before += unit_cost(plan, g, b, g->split + u / s->num_kv_heads);
    }
  }
  while (thread < threads) {
    plan->thread_unit[thread] = plan->num_units;
    plan->thread_group[thread++] = plan->num_groups;
  }
  plan->thread_unit[threads] = plan->num_units;
}

static void plan_attention(AttentionPlan *plan, const AttentionShape *s, const Rows *b, int threads) {
  plan->groups = grown(plan->groups, &plan->groups_size, b->rows * sizeof(Group));
  find_groups(plan, s, b);
  size_t borders = (threads + 1) * sizeof(int);
  char *shared = grown(plan->thread_unit, &plan->shared_size, 3 * borders);
  plan->thread_unit = (int *)shared;
  plan->thread_group = (int *)(shared + borders);
  plan->done = (atomic_int *)(shared + 2 * borders);
  cut_units(plan, s, b, threads);
  for (int i = 0; i < plan->num_shared; i++) atomic_init(&plan->done[i], 0);
  size_t parts = part_floats(s) * plan->num_shared * plan->max_splits * s->num_kv_heads;
  plan->parts = grown(plan->parts, &plan->parts_size, parts * sizeof(float));
}

static void free_plan(AttentionPlan *plan) {
  free(plan->groups);
  free(plan->thread_unit);
  free(plan->parts);
}

// ---- one part: `n` query vectors of one kv head against tokens [begin, end) of one split

typedef struct {
  float *values, *best, *total;  // [queries][head_dim], [queries], [queries]
} Part;

INLINE Part part_at(const AttentionShape *s, float *memory) {
  size_t queries = (size_t)s->max_group_rows * s->group;
  return (Part){memory, memory + queries * s->head_dim, memory + queries * (s->head_dim + 1)};
}

INLINE vf load_kv(enum dtype dtype, const void *p, int i) {
  return dtype == BF16 ? load_bf16((const bf16 *)p + i) : load((const float *)p + i);
}

// One unit of work and where its tokens lie: head t is at `keys` + `offset[t]`, its value likewise.
// Index 0 is the token `aligned`, a multiple of 16, so that a token's lane in sums over tokens does
// not depend on where a window begins. Before the first and beyond the last token a neighbour's
// offset is repeated: slots that nobody wrote are never read.
typedef struct {
  const Group *group;
  int split, head;
  int aligned, tokens;
  size_t head_bytes;
  const char *keys, *values;
  size_t offset[SPLIT + TILE_TOKENS];
} Unit;

// Sums of the lanes of each of four vectors, always by the same tree.
INLINE void sum_lanes_of_4(const vf *v, float *out) {
#if LANES == 8
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]),
                                _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  for (int i = 0; i < 4; i++) out[i] = sum_lanes(v[i]);
#endif
}

// scores[q][t] = queries[q] . keys[t] for TILE_TOKENS tokens and `count` queries.
INLINE void score_tile(const int count, const enum dtype dtype, const float *const *queries,
                       const char *keys, const size_t *offset, int head_dim, float *scores) {
  vf sum[TILE_QUERIES][TILE_TOKENS];
#pragma GCC unroll 3
  for (int q = 0; q < count; q++)
#pragma GCC unroll 4
    for (int t = 0; t < TILE_TOKENS; t++) sum[q][t] = splat(0.f);
  for (int d = 0; d < head_dim; d += LANES) {
    vf query[TILE_QUERIES];
#pragma GCC unroll 3
    for (int q = 0; q < count; q++) query[q] = load(queries[q] + d);
#pragma GCC unroll 4
    for (int t = 0; t < TILE_TOKENS; t++) {
      vf key = load_kv(dtype, keys + offset[t], d);
#pragma GCC unroll 3
      for (int q = 0; q < count; q++) accumulate(&sum[q][t], query[q], key);
    }
  }
#pragma GCC unroll 3
  for (int q = 0; q < count; q++) sum_lanes_of_4(sum[q], scores + q * SPLIT);
}

INLINE void prefetch_head(const void *head, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)head + i, 0, 2);
}

// values[q][d ..] = sum over tokens of weights[q][t] * v[t][d ..], `vectors` vectors of d.
INLINE void mix_tile(const int count, const int vectors, const enum dtype dtype,
                     const float *weights, const Unit *u, int d, float *values, int head_dim,
                     const Unit *next) {
  vf sum[TILE_QUERIES][4];
#pragma GCC unroll 3
  for (int q = 0; q < count; q++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) sum[q][i] = splat(0.f);
  for (int t = 0; t < u->tokens; t++) {
    if (next) prefetch_head(next->keys + next->offset[t], next->head_bytes);
    vf weight[TILE_QUERIES];
#pragma GCC unroll 3
    for (int q = 0; q < count; q++) weight[q] = splat(weights[q * SPLIT + t]);
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) {
      vf value = load_kv(dtype, u->values + u->offset[t], d + i * LANES);
#pragma GCC unroll 3
      for (int q = 0; q < count; q++) accumulate(&sum[q][i], weight[q], value);
    }
  }
#pragma GCC unroll 3
  for (int q = 0; q < count; q++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) store(values + q * head_dim + d + i * LANES, sum[q][i]);
}

// Meanwhile, like mix_values, asks for what is wanted next unless `next` is NULL: blocks are
// scattered over memory, and in decode their latency is most of the time.
INLINE void score_queries(const int count, const enum dtype dtype, const float *const *queries,
                          const Unit *u, int head_dim, float *scores, const Unit *next) {
  for (int t = 0; t < u->tokens; t += TILE_TOKENS) {
    for (int i = 0; next && i < TILE_TOKENS; i++)
      prefetch_head(u->values + u->offset[t + i], u->head_bytes);
    score_tile(count, dtype, queries, u->keys, u->offset + t, head_dim, scores + t);
  }
}

INLINE void mix_values(const int count, const enum dtype dtype, const float *weights,
                       const Unit *u, float *values, int head_dim, const Unit *next) {
  int d = 0;
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES, next = NULL)
    mix_tile(count, 4, dtype, weights, u, d, values, head_dim, next);
  for (; d < head_dim; d += LANES, next = NULL)
    mix_tile(count, 1, dtype, weights, u, d, values, head_dim, next);
}

// scores -> weights relative to their maximum; tokens outside of [begin, end) get weight 0.
static void softmax(float *scores, int tokens, int begin, int end, float scale, float *best,
                    float *total) {
  int padded = (tokens + LANES - 1) / LANES * LANES;
  for (int t = 0; t < begin && t < padded; t++) scores[t] = -INFINITY;
  for (int t = end > 0 ? end : 0; t < padded; t++) scores[t] = -INFINITY;
  vf highest = splat(-INFINITY), sum = splat(0.f);
  for (int t = 0; t < padded; t += LANES) {
    vf score = load(scores + t) * splat(scale);
    store(scores + t, score);
    highest = max_v(score, highest);
  }
  *best = max_lanes(highest);
  for (int t = 0; t < padded; t += LANES) {
    vf weight = *best == -INFINITY ? splat(0.f) : exp_v(load(scores + t) - splat(*best));
    store(scores + t, weight);
    sum = sum + weight;
  }
  *total = sum_lanes(sum);
}

static void locate_tokens(Unit *u, const AttentionPlan *plan, const AttentionShape *s,
                          const Rows *b) {
  const int32_t *table = b->block_tables + (size_t)b->request_index[u->group->row] * b->max_blocks;
  size_t token_bytes = s->num_kv_heads * u->head_bytes;
  int begin, end;
  split_tokens(plan, u->group, b, u->split, &begin, &end);
  u->aligned = begin / 16 * 16;
  u->tokens = end - u->aligned;
  size_t *offset = u->offset - u->aligned;  // [token]
  for (int t = begin; t < end;) {
    int block_end = (t / b->block_size + 1) * b->block_size;
    size_t slot = (size_t)table[t / b->block_size] * b->block_size + t % b->block_size;
    for (; t < end && t < block_end; t++) offset[t] = slot++ * token_bytes;
  }
  for (int t = u->aligned; t < begin; t++) offset[t] = offset[begin];
  for (int t = end; t < u->aligned + SPLIT + TILE_TOKENS; t++) offset[t] = offset[end - 1];
}

// Many queries read the same keys and values: unpack bf16 once. Exact, so no bit changes.
INLINE size_t unpacked_floats(const AttentionShape *s) {
  return 2 * (size_t)(SPLIT + TILE_TOKENS) * s->head_dim;
}
static void unpack_tokens(Unit *u, const AttentionShape *s, float *memory) {
  float *to = memory;
  for (int t = 0; t < u->tokens + TILE_TOKENS; t++, to += 2 * s->head_dim) {
    const bf16 *key = (const bf16 *)(u->keys + u->offset[t]);
    const bf16 *value = (const bf16 *)(u->values + u->offset[t]);
    for (int i = 0; i < s->head_dim; i += LANES) {
      store(to + i, load_bf16(key + i));
      store(to + s->head_dim + i, load_bf16(value + i));
    }
    u->offset[t] = (char *)to - (char *)memory;
  }
  u->keys = (const char *)memory;
  u->values = (const char *)(memory + s->head_dim);
}

typedef struct {
  const float *vector[TILE_QUERIES];
  int visible_from[TILE_QUERIES], visible_to[TILE_QUERIES];
} Queries;

INLINE void attend_tile(const int count, const enum dtype dtype, const Unit *u, const Queries *q,
                        const AttentionShape *s, Part part, const Unit *next) {
  float scores[TILE_QUERIES * SPLIT] __attribute__((aligned(64)));
  score_queries(count, dtype, q->vector, u, s->head_dim, scores, next);
  for (int i = 0; i < count; i++)
    softmax(scores + i * SPLIT, u->tokens, q->visible_from[i] - u->aligned,
            q->visible_to[i] - u->aligned, s->scale, part.best + i, part.total + i);
  mix_values(count, dtype, scores, u, part.values, s->head_dim, next);
}

INLINE void attend_tiles(const enum dtype dtype, const Unit *u, const AttentionPlan *plan,
                         const AttentionShape *s, const Rows *b, const float *queries,
                         size_t stride, Part part, const Unit *next) {
  int total = u->group->rows * s->group, tiles = (total + TILE_QUERIES - 1) / TILE_QUERIES;
  for (int tile = 0; tile < tiles; tile++, next = NULL) {
    int first = total * tile / tiles, count = total * (tile + 1) / tiles - first;
    Queries q;
    for (int i = 0; i < count; i++) {
      int row = u->group->row + (first + i) / s->group;
      int head = u->head * s->group + (first + i) % s->group;
      q.vector[i] = queries + row * stride + head * s->head_dim;
      q.visible_from[i] = first_visible(b->positions[row], plan->window);
      q.visible_to[i] = b->positions[row] + 1;
    }
    Part rest = {part.values + first * s->head_dim, part.best + first, part.total + first};
    switch (count) {
    case 1: attend_tile(1, dtype, u, &q, s, rest, next); break;
    case 2: attend_tile(2, dtype, u, &q, s, rest, next); break;
    case 3: attend_tile(3, dtype, u, &q, s, rest, next); break;
    }
  }
}

// The part of one unit: every row of the group, the query heads of one kv head, one split.
static void attend_unit(Unit *u, enum dtype dtype, const AttentionPlan *plan,
                        const AttentionShape *s, const Rows *b, const float *queries,
                        size_t stride, Part part, float *unpacked, const Unit *next) {
  if (dtype == FP32) attend_tiles(FP32, u, plan, s, b, queries, stride, part, next);
  else if (u->group->rows * s->group <= 2 * TILE_QUERIES)
    attend_tiles(BF16, u, plan, s, b, queries, stride, part, next);
  else {
    unpack_tokens(u, s, unpacked);
    attend_tiles(FP32, u, plan, s, b, queries, stride, part, NULL);
  }
}

// ---- merging the parts of one (group, kv head), in ascending order of splits

static void merge_part(Part sum, Part part, int queries, int head_dim, int is_first) {
  if (is_first) {
    memcpy(sum.values, part.values, sizeof(float) * queries * head_dim);
    memcpy(sum.best, part.best, sizeof(float) * queries);
    memcpy(sum.total, part.total, sizeof(float) * queries);
    return;
  }
  for (int q = 0; q < queries; q++) {
    if (part.best[q] == -INFINITY) continue;  // this row sees nothing of this split
    if (sum.best[q] == -INFINITY) sum.best[q] = part.best[q];  // nor of those before: total is 0
    vf best = max_v(splat(sum.best[q]), splat(part.best[q]));
    vf old = exp_v(splat(sum.best[q]) - best), new = exp_v(splat(part.best[q]) - best);
    sum.best[q] = best[0];
    sum.total[q] = fma_v(splat(sum.total[q]), old, splat(part.total[q]) * new)[0];
    float *to = sum.values + q * head_dim;
    const float *from = part.values + q * head_dim;
    for (int d = 0; d < head_dim; d += LANES)
      store(to + d, fma_v(load(to + d), old, load(from + d) * new));
  }
}

static void write_attended(const AttentionShape *s, const Group *g, int head, Part sum, float *out) {
  for (int q = 0; q < g->rows * s->group; q++) {
    float *to = out + (size_t)(g->row + q / s->group) * s->num_heads * s->head_dim +
                (head * s->group + q % s->group) * s->head_dim;
    vf scale = splat(1.f / sum.total[q]);
    for (int d = 0; d < s->head_dim; d += LANES) store(to + d, load(sum.values + q * s->head_dim + d) * scale);
  }
}

static void merge_stored(const AttentionShape *s, const Group *g,
                         float *parts, Part sum, float *out) {
  for (int head = 0; head < s->num_kv_heads; head++) {
    for (int k = 0; k < g->num_splits; k++) {
      float *part = parts + (size_t)(k * s->num_kv_heads + head) * part_floats(s);
      merge_part(sum, part_at(s, part), g->rows * s->group, s->head_dim, k == 0);
    }
    write_attended(s, g, head, sum, out);
  }
}

// ---- one thread's units

// Floats of scratch memory for each thread: a running sum a kv head, one part, unpacked tokens.
INLINE size_t attention_scratch_floats(const AttentionShape *s) {
  return (s->num_kv_heads + 1) * part_floats(s) + unpacked_floats(s);
}

// `index` is the first unit of a thread or follows `previous`, whose tokens it mostly shares.
static void locate_unit(Unit *u, int index, const Group *g, const Unit *previous,
                        const AttentionPlan *plan, const AttentionShape *s, const Rows *b,
                        const char *keys, const char *values, size_t head_bytes) {
  if (index == g->unit + g->num_splits * s->num_kv_heads) g++;
  u->group = g;
  u->split = g->split + (index - g->unit) / s->num_kv_heads;
  u->head = (index - g->unit) % s->num_kv_heads;
  u->head_bytes = head_bytes;
  u->keys = keys + u->head * head_bytes;
  u->values = values + u->head * head_bytes;
  if (previous && previous->group == g && previous->split == u->split) {
    u->aligned = previous->aligned;
    u->tokens = previous->tokens;
    memcpy(u->offset, previous->offset, sizeof u->offset);
  } else {
    locate_tokens(u, plan, s, b);
  }
}

// While a unit's keys are read its values are asked for, and while those are read the next one's
// keys.
static void attend(AttentionPlan *plan, const AttentionShape *s, const Rows *b, enum dtype dtype,
                   const float *queries, size_t stride, const void *keys, const void *values,
                   float *out, float *scratch, int thread) {
  int begin = plan->thread_unit[thread], end = plan->thread_unit[thread + 1];
  size_t floats = part_floats(s), head_bytes = s->head_dim * weight_bytes(dtype);
  float *unpacked = scratch + (s->num_kv_heads + 1) * floats;
  Unit units[2];
  if (begin < end)
    locate_unit(&units[begin % 2], begin, &plan->groups[plan->thread_group[thread]], NULL, plan, s,
                b, keys, values, head_bytes);
  for (int i = begin; i < end; i++) {
    Unit *u = &units[i % 2], *next = &units[(i + 1) % 2];
    const Group *g = u->group;
    float *stored = plan->parts + (size_t)g->shared * plan->max_splits * s->num_kv_heads * floats;
    Part sum = part_at(s, scratch + (u->head + 1) * floats);
    Part part = part_at(s, g->shared < 0 ? scratch : stored + (i - g->unit) * floats);
    if (i + 1 < end) locate_unit(next, i + 1, g, u, plan, s, b, keys, values, head_bytes);
    attend_unit(u, dtype, plan, s, b, queries, stride, part, unpacked, i + 1 < end ? next : u);
    if (g->shared < 0) {
      merge_part(sum, part, g->rows * s->group, s->head_dim, u->split == g->split);
      if (u->split + 1 == g->split + g->num_splits) write_attended(s, g, u->head, sum, out);
    } else if (atomic_fetch_add(&plan->done[g->shared], 1) + 1 == g->num_splits * s->num_kv_heads) {
      atomic_store(&plan->done[g->shared], 0);
      merge_stored(s, g, stored, part_at(s, scratch), out);
    }
  }
}
