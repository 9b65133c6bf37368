// One unit of attention: some rows of one request, the query heads of one kv head, and the tokens of
// one split. It yields a part: for each query the largest score, the sum of weights, and the weighted
// sum of values.
//
// The order of every sum follows from the row's own position: its bits depend on neither the batch
// nor the threads.
#pragma once
#include "attention_plan.h"

#define TILE_QUERIES 3  // with TILE_TOKENS: sums that fit the registers
#define TILE_TOKENS 4
#define UNPACK_QUERIES 6  // more read the same keys and values from an fp32 copy

typedef struct {
  const AttentionShape *shape;
  const Rows *rows;
  AttentionPlan *plan;
  enum dtype dtype;
  const float *queries;  // [rows][stride], the heads first
  size_t stride;
  const char *keys, *values;  // [slots][kv_heads] heads of `dtype`: see formats.h
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
  const float *key_scales, *value_scales;  // of each token; NULL but in INT8
} Unit;

typedef struct {
  float *values, *best, *total;  // [queries][head_dim], [queries], [queries]
} Part;

INLINE Part part_at(const AttentionShape *s, float *memory) {
  size_t queries = (size_t)s->max_group_rows * s->group;
  return (Part){memory, memory + queries * s->head_dim, memory + queries * (s->head_dim + 1)};
}

INLINE size_t token_bytes(const Attention *a) {
  return a->shape->num_kv_heads * head_bytes(a->dtype, a->shape->head_dim);
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
  return (Prefetch){base, next->offset, token_bytes(a), token, token << 16,
                    (next->tokens << 16) / (heads * iterations)};
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
      vf key = load_numbers(dtype, keys + offset[t], d);
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

INLINE void multiply_by(float *numbers, const float *factors, int count) {
  for (int i = 0; i < count; i += LANES) store(numbers + i, load(numbers + i) * load(factors + i));
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
      vf value = load_numbers(dtype, u->values + u->offset[t], d + i * LANES);
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
  for (int i = 0; i < count; i++) {
    if (u->key_scales) multiply_by(scores + i * SPLIT, u->key_scales, tokens);
    softmax(scores + i * SPLIT, tokens, q->visible_from[i], q->visible_to[i], a->shape->scale,
            part.best + i, part.total + i);
    if (u->value_scales) multiply_by(scores + i * SPLIT, u->value_scales, tokens);
  }
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

static void attend_tiles_fp32(const Attention *a, const Unit *u, Part part, const Split *next) {
  attend_tiles(FP32, a, u, part, next);
}

// Many queries read the same keys and values: unpack them once. Exact, so no bit changes.
INLINE size_t unpacked_floats(const AttentionShape *s) {
  return 2 * (size_t)(SPLIT + TILE_TOKENS) * s->head_dim;
}
INLINE Unit unpacked(const enum dtype dtype, const Unit *u, int head_dim, float *memory,
                     size_t *offset) {
  float *to = memory;
  for (int t = 0; t < u->split->tokens + TILE_TOKENS; t++, to += 2 * head_dim) {
    const char *key = u->keys + u->offset[t], *value = u->values + u->offset[t];
    for (int i = 0; i < head_dim; i += LANES) {
      store(to + i, load_numbers(dtype, key, i));
      store(to + head_dim + i, load_numbers(dtype, value, i));
    }
    offset[t] = (char *)to - (char *)memory;
  }
  Unit copy = *u;
  copy.keys = (char *)memory;
  copy.values = (char *)(memory + head_dim);
  copy.offset = offset;
  return copy;
}

INLINE void attend_unit_of(const enum dtype dtype, const Attention *a, const Unit *u, Part part,
                           float *memory, const Split *next) {
  if (dtype == FP32 || u->split->group->rows * a->shape->group <= UNPACK_QUERIES) {
    attend_tiles(dtype, a, u, part, next);
    return;
  }
  size_t offset[SPLIT + TILE_TOKENS];
  Unit copy = unpacked(dtype, u, a->shape->head_dim, memory, offset);
  attend_tiles_fp32(a, &copy, part, next);
}

static void attend_int8(const Attention *a, Unit *u, Part part, float *memory, const Split *next) {
  float key_scales[SPLIT + LANES], value_scales[SPLIT + LANES];
  int head_dim = a->shape->head_dim;
  for (int t = 0; t < u->split->tokens; t++) {
    key_scales[t] = head_scale(u->keys + u->offset[t], head_dim);
    value_scales[t] = head_scale(u->values + u->offset[t], head_dim);
  }
  for (int t = u->split->tokens; t % LANES; t++) key_scales[t] = value_scales[t] = 0;
  u->key_scales = key_scales;
  u->value_scales = value_scales;
  attend_unit_of(INT8, a, u, part, memory, next);
}

// The part of one unit: every row of the group, the query heads of one kv head, one split.
static void attend_unit(const Attention *a, Unit *u, Part part, float *memory, const Split *next) {
  switch (a->dtype) {
  case BF16: attend_unit_of(BF16, a, u, part, memory, next); break;
  case FP16: attend_unit_of(FP16, a, u, part, memory, next); break;
  case FP8: attend_unit_of(FP8, a, u, part, memory, next); break;
  case INT8: attend_int8(a, u, part, memory, next); break;
  default: attend_unit_of(FP32, a, u, part, memory, next);
  }
}
