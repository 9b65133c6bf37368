// Causal attention of a step's rows over the paged KV cache, read in place.
//
// Each split of a row's context yields, for each head, a part: its largest score, the sum of its
// weights, and the weighted sum of values. Parts are merged in ascending order. Where splits begin,
// and the order of every sum, follow from the row's own position: its bits depend on neither the
// batch nor the threads.
#pragma once
#include "attention_unit.h"

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
  size_t bytes = token_bytes(a);
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
    for (; t < end && t < block_end; t++) offset[t - split->aligned] = slot++ * bytes;
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
  size_t floats = part_floats(s), bytes = head_bytes(a->dtype, s->head_dim);
  int begin = a->plan->thread_unit[thread];
  Walk w = {.a = a, .end = a->plan->thread_unit[thread + 1]};
  for (int unit = begin; unit < w.end; unit++) {
    if (unit == begin) start_walk(&w, thread);
    else if ((unit - w.now->group->unit) % heads == 0) enter_next_split(&w);
    const Group *g = w.now->group;
    int head = (unit - g->unit) % heads;
    float *stored = stored_parts(a, g);
    Part part = part_at(s, stored ? stored + (unit - g->unit) * floats : scratch);
    Unit u = {w.now, head, a->keys + head * bytes, a->values + head * bytes, w.now->offset,
              NULL, NULL};
    attend_unit(a, &u, part, scratch + (heads + 1) * floats, w.next);
    settle_part(a, w.now, head, part, stored, scratch);
  }
}
