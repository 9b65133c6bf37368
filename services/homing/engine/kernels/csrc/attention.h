// Causal attention of a step's rows over the paged KV cache, read in place.
//
// Each split of a row's context yields, for each head, a part: its largest score, the sum of its
// weights, and the weighted sum of values. Parts are merged in ascending order. Where splits begin,
// and the order of every sum, follow from the row's own position: its bits depend on neither the
// batch nor the threads.
#pragma once
#include "attention_plan.h"

#define TILE_QUERIES 3  // with TILE_TOKENS: sums that fit the registers
#define TILE_TOKENS 4
#define UNPACK_QUERIES 6  // more read the same bf16 keys and values from an fp32 copy

typedef struct {
  const AttentionShape *shape;
  const Rows *rows;
  AttentionPlan *plan;
  enum dtype dtype;
  const float *queries;  // [rows][stride], the heads first
  size_t stride;
  const char *keys, *values;  // [slots][kv_heads][head_dim] of `dtype`
  float *out;                 // [rows][heads][head_dim]
} Attention;

// Where a split's tokens lie: index 0 is the token `aligned`, a multiple of 16, so that a token's
// lane in sums over tokens does not depend on where a window begins. Before the first and beyond
// the last token a neighbour's offset is repeated: slots that nobody wrote are never read.
typedef struct {
  const Group *group;
  int index;  // of the split in its request
  int aligned, tokens;
  size_t offset[SPLIT + TILE_TOKENS];  // bytes from the first slot's
} Split;

typedef struct {
  const Split *split;
  int head;
  const char *keys, *values;  // of this kv head: token t's are at `offset[t]`
  const size_t *offset;
} Unit;

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

// ---- prefetching. Blocks are scattered over memory, and in decode waiting for them is most of the
// time. While a split is computed the next one is asked for, whole tokens (all heads) at a time:
// keys while keys are read, values while values are, each unit its head's share.

typedef struct {
  const char *base;
  const size_t *offset;
  size_t token_bytes;
  uint32_t token, position, step;  // `position` and `step` are tokens in 16.16 fixed point
} Prefetch;

// For a loop of `iterations`; fetches nothing where `next` is NULL.
INLINE Prefetch prefetch_of(const Split *next, const char *base, const Unit *u,
                            const Attention *a, int iterations) {
  int heads = a->shape->num_kv_heads;
  if (!next) return (Prefetch){0};
  uint32_t token = next->tokens * u->head / heads;
  return (Prefetch){base, next->offset, heads * a->shape->head_dim * weight_bytes(a->dtype), token,
                    token << 16, (next->tokens << 16) / (heads * iterations)};
}

INLINE void prefetch_more(Prefetch *p) {
  for (p->position += p->step; p->token < p->position >> 16; p->token++)
    for (size_t i = 0; i < p->token_bytes; i += 64)
      __builtin_prefetch(p->base + p->offset[p->token] + i, 0, 2);
}

// ---- one part: some query vectors of one kv head against the tokens of one split

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

INLINE void score_queries(const int count, const enum dtype dtype, const float *const *queries,
                          const Unit *u, int head_dim, float *scores, Prefetch ahead) {
  for (int t = 0; t < u->split->tokens; t += TILE_TOKENS) {
    prefetch_more(&ahead);
    score_tile(count, dtype, queries, u->keys, u->offset + t, head_dim, scores + t);
  }
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

// values[q][d ..] = sum over tokens of weights[q][t] * v[t][d ..], `vectors` vectors of d.
INLINE void mix_tile(const int count, const int vectors, const enum dtype dtype,
                     const float *weights, const Unit *u, int d, float *values, int head_dim,
                     Prefetch *ahead) {
  vf sum[TILE_QUERIES][4];
#pragma GCC unroll 3
  for (int q = 0; q < count; q++)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) sum[q][i] = splat(0.f);
  for (int t = 0; t < u->split->tokens; t++) {
    prefetch_more(ahead);
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

INLINE void mix_values(const int count, const enum dtype dtype, const float *weights,
                       const Unit *u, float *values, int head_dim, Prefetch ahead) {
  int d = 0;
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES)
    mix_tile(count, 4, dtype, weights, u, d, values, head_dim, &ahead);
  for (; d < head_dim; d += LANES)
    mix_tile(count, 1, dtype, weights, u, d, values, head_dim, &ahead);
}

typedef struct {
  const float *vector[TILE_QUERIES];
  int visible_from[TILE_QUERIES], visible_to[TILE_QUERIES];  // from the split's `aligned`
} Queries;

INLINE void attend_tile(const int count, const enum dtype dtype, const Attention *a, const Unit *u,
                        const Queries *q, Part part, const Split *next) {
  float scores[TILE_QUERIES * SPLIT] __attribute__((aligned(64)));
  int tokens = u->split->tokens, head_dim = a->shape->head_dim;
  int score_steps = (tokens + TILE_TOKENS - 1) / TILE_TOKENS;
  int mix_steps = tokens * (head_dim / LANES / 4 + head_dim / LANES % 4);
  score_queries(count, dtype, q->vector, u, head_dim, scores,
                prefetch_of(next, a->keys, u, a, score_steps));
  for (int i = 0; i < count; i++)
    softmax(scores + i * SPLIT, tokens, q->visible_from[i], q->visible_to[i], a->shape->scale,
            part.best + i, part.total + i);
  mix_values(count, dtype, scores, u, part.values, head_dim,
             prefetch_of(next, a->values, u, a, mix_steps));
}

INLINE void attend_tiles(const enum dtype dtype, const Attention *a, const Unit *u, Part part,
                         const Split *next) {
  const AttentionShape *s = a->shape;
  const Group *g = u->split->group;
  int total = g->rows * s->group, tiles = (total + TILE_QUERIES - 1) / TILE_QUERIES;
  for (int tile = 0; tile < tiles; tile++, next = NULL) {
    int first = total * tile / tiles, count = total * (tile + 1) / tiles - first;
    Queries q;
    for (int i = 0; i < count; i++) {
      int row = g->row + (first + i) / s->group, position = a->rows->positions[row];
      int head = u->head * s->group + (first + i) % s->group;
      q.vector[i] = a->queries + row * a->stride + head * s->head_dim;
      q.visible_from[i] = first_visible(position, a->plan->window) - u->split->aligned;
      q.visible_to[i] = position + 1 - u->split->aligned;
    }
    Part rest = {part.values + first * s->head_dim, part.best + first, part.total + first};
    switch (count) {
    case 1: attend_tile(1, dtype, a, u, &q, rest, next); break;
    case 2: attend_tile(2, dtype, a, u, &q, rest, next); break;
    case 3: attend_tile(3, dtype, a, u, &q, rest, next); break;
    }
  }
}

// Many queries read the same keys and values: unpack bf16 once. Exact, so no bit changes.
INLINE size_t unpacked_floats(const AttentionShape *s) {
  return 2 * (size_t)(SPLIT + TILE_TOKENS) * s->head_dim;
}
static Unit unpacked(const Unit *u, int head_dim, float *memory, size_t *offset) {
  float *to = memory;
  for (int t = 0; t < u->split->tokens + TILE_TOKENS; t++, to += 2 * head_dim) {
    const bf16 *key = (const bf16 *)(u->keys + u->offset[t]);
    const bf16 *value = (const bf16 *)(u->values + u->offset[t]);
    for (int i = 0; i < head_dim; i += LANES) {
      store(to + i, load_bf16(key + i));
      store(to + head_dim + i, load_bf16(value + i));
    }
    offset[t] = (char *)to - (char *)memory;
  }
  return (Unit){u->split, u->head, (char *)memory, (char *)(memory + head_dim), offset};
}

// The part of one unit: every row of the group, the query heads of one kv head, one split.
static void attend_unit(const Attention *a, const Unit *u, Part part, float *memory,
                        const Split *next) {
  if (a->dtype == FP32) attend_tiles(FP32, a, u, part, next);
  else if (u->split->group->rows * a->shape->group <= UNPACK_QUERIES)
    attend_tiles(BF16, a, u, part, next);
  else {
    size_t offset[SPLIT + TILE_TOKENS];
    Unit copy = unpacked(u, a->shape->head_dim, memory, offset);
    attend_tiles(FP32, a, &copy, part, next);
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

static void write_attended(const AttentionShape *s, const Group *g, int head, Part sum,
                           float *out) {
  for (int q = 0; q < g->rows * s->group; q++) {
    float *to = out + (size_t)(g->row + q / s->group) * s->num_heads * s->head_dim +
                (head * s->group + q % s->group) * s->head_dim;
    vf scale = splat(1.f / sum.total[q]);
    for (int d = 0; d < s->head_dim; d += LANES)
      store(to + d, load(sum.values + q * s->head_dim + d) * scale);
  }
}

// Where the parts of a shared group are, by unit; NULL for a group of one thread.
static float *stored_parts(const Attention *a, const Group *g) {
  size_t parts = (size_t)a->plan->max_splits * a->shape->num_kv_heads;
  return g->shared < 0 ? NULL : a->plan->parts + g->shared * parts * part_floats(a->shape);
}

static void merge_stored(const AttentionShape *s, const Group *g, float *parts, Part sum,
                         float *out) {
  for (int head = 0; head < s->num_kv_heads; head++) {
    for (int k = 0; k < g->num_splits; k++) {
      float *part = parts + (size_t)(k * s->num_kv_heads + head) * part_floats(s);
      merge_part(sum, part_at(s, part), g->rows * s->group, s->head_dim, k == 0);
    }
    write_attended(s, g, head, sum, out);
  }
}

// ---- one thread's units

// Floats of scratch memory for each thread: one part, a running sum a kv head, unpacked tokens.
INLINE size_t attention_scratch_floats(const AttentionShape *s) {
  return (s->num_kv_heads + 1) * part_floats(s) + unpacked_floats(s);
}

static void locate_split(Split *split, const Attention *a, const Group *g, int index) {
  const Rows *b = a->rows;
  const int32_t *table = b->block_tables + (size_t)b->request_index[g->row] * b->max_blocks;
  size_t token_bytes = a->shape->num_kv_heads * a->shape->head_dim * weight_bytes(a->dtype);
  int begin, end;
  split_tokens(a->plan, g, b, index, &begin, &end);
  split->group = g;
  split->index = index;
  split->aligned = begin / 16 * 16;
  split->tokens = end - split->aligned;
  size_t *offset = split->offset;
  for (int t = begin; t < end;) {
    int block_end = (t / b->block_size + 1) * b->block_size;
    size_t slot = (size_t)table[t / b->block_size] * b->block_size + t % b->block_size;
    for (; t < end && t < block_end; t++) offset[t - split->aligned] = slot++ * token_bytes;
  }
  for (int i = 0; i < begin - split->aligned; i++) offset[i] = offset[begin - split->aligned];
  for (int i = split->tokens; i < SPLIT + TILE_TOKENS; i++) offset[i] = offset[split->tokens - 1];
}

// A thread's way through its units: the split it is in, and the one that follows, if it has any.
typedef struct {
  const Attention *a;
  int end;  // unit after its last
  Split splits[2];
  const Split *now, *next;
} Walk;

static void look_ahead(Walk *w) {
  const Group *g = w->now->group;
  int index = w->now->index + 1;
  w->next = NULL;
  if (g->unit + (index - g->split) * w->a->shape->num_kv_heads >= w->end) return;
  if (index == g->split + g->num_splits) index = (++g)->split;
  Split *unused = &w->splits[w->now == &w->splits[0]];
  locate_split(unused, w->a, g, index);
  w->next = unused;
}

static void start_walk(Walk *w, int thread) {
  const AttentionPlan *plan = w->a->plan;
  const Group *g = &plan->groups[plan->thread_group[thread]];
  int index = g->split + (plan->thread_unit[thread] - g->unit) / w->a->shape->num_kv_heads;
  locate_split(&w->splits[0], w->a, g, index);
  w->now = &w->splits[0];
  look_ahead(w);
}

static void enter_next_split(Walk *w) {
  w->now = w->next;
  look_ahead(w);
}

// Merge a finished part, if its group is this thread's alone; else count it as stored, and merge
// the group's parts if it was the last.
static void settle_part(const Attention *a, const Split *split, int head, Part part, float *stored,
                        float *scratch) {
  const AttentionShape *s = a->shape;
  const Group *g = split->group;
  if (!stored) {
    Part sum = part_at(s, scratch + (head + 1) * part_floats(s));
    merge_part(sum, part, g->rows * s->group, s->head_dim, split->index == g->split);
    if (split->index + 1 == g->split + g->num_splits) write_attended(s, g, head, sum, a->out);
    return;
  }
  atomic_int *done = &a->plan->done[g->shared];
  if (atomic_fetch_add(done, 1) + 1 < g->num_splits * s->num_kv_heads) return;
  atomic_store(done, 0);  // for the next layer
  merge_stored(s, g, stored, part_at(s, scratch), a->out);
}

static void attend(const Attention *a, float *scratch, int thread) {
  const AttentionShape *s = a->shape;
  int heads = s->num_kv_heads;
  size_t floats = part_floats(s), head_bytes = s->head_dim * weight_bytes(a->dtype);
  int begin = a->plan->thread_unit[thread];
  Walk w = {.a = a, .end = a->plan->thread_unit[thread + 1]};
  for (int unit = begin; unit < w.end; unit++) {
    if (unit == begin) start_walk(&w, thread);
    else if ((unit - w.now->group->unit) % heads == 0) enter_next_split(&w);
    const Group *g = w.now->group;
    int head = (unit - g->unit) % heads;
    float *stored = stored_parts(a, g);
    Part part = part_at(s, stored ? stored + (unit - g->unit) * floats : scratch);
    Unit u = {w.now, head, a->keys + head * head_bytes, a->values + head * head_bytes,
              w.now->offset};
    attend_unit(a, &u, part, scratch + (heads + 1) * floats, w.next);
    settle_part(a, w.now, head, part, stored, scratch);
  }
}
