// Parts of the kernels that only a whole decoder calls, for tests to call one by one.
#include "linear.h"

// sums[i] += weights[i] * pair for `count` vectors
void dot_bf16_of(float *sums, const uint32_t *weights, const uint32_t *pairs, int count) {
  for (int i = 0; i < count; i++) {
    vu pair_of_weights;
    memcpy(&pair_of_weights, weights + i * LANES, sizeof pair_of_weights);
    store(sums + i * LANES, dot_bf16(load(sums + i * LANES), pair_of_weights, pairs[i]));
  }
}

void round_bf16_of(bf16 *out, const float *numbers, int count) {
  for (int i = 0; i < count; i += LANES) {
    vh rounded = round_bf16(load(numbers + i));
    memcpy(out + i, &rounded, sizeof rounded);
  }
}

size_t scratch_bytes(int k) { return linear_scratch_bytes(k); }

void multiply_by_linear(const Linear *linear, const float *a, int rows, float *out, void *scratch) {
  apply_linear(linear, a, rows, (Epilogue){STORE, out, linear->n}, scratch, 0, 1);
}
