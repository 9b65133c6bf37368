// How the attention of a step is cut into units of work and shared out among threads.
//
// A context is cut into splits of SPLIT tokens at fixed positions (0, 128, 256, ...). Neighbouring
// rows of one request form a group and share the reading of keys and values. A unit is (group,
// split, kv head), in this order; each thread takes a contiguous range of about equal cost. The few
// groups that a border between threads cuts are `shared`: their parts are stored, and whoever
// finishes last merges them.
#pragma once
#include <stdatomic.h>
#include <stdlib.h>
#include "linear.h"

#define SPLIT 128         // as attention/reference.py
#define GROUP_QUERIES 48  // rows of a group times query heads per kv head, at most

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
    while (g->rows < s->max_group_rows && row + g->rows < b->rows &&
           same_run(b, row, row + g->rows))
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

static void plan_attention(AttentionPlan *plan, const AttentionShape *s, const Rows *b,
                           int threads) {
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
