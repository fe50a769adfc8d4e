// The k best of each row of scores, as ops/select/top_blocks.py specifies it. A program takes a row. There are few
// rows, so the time depends on the number of operations that wait for one another. search.cuh says why this is not in
// Triton.
//
// Compile-time constants: THREADS of the program; SCORES per thread; PEAKS per thread, which lead to the groups of the
// best scores (0: the program can read all scores of the row); GROUP, the number of scores that share a peak.

#include "search.cuh"

constexpr int MOST = THREADS * SCORES / GROUP;  // groups whose scores a program can read
using Shared = Grouped<MOST>;

// The row of a program: its inputs and its output.
struct Row {
  const float *scores, *peaks;
  const int* ids;
  int *out, n, width;
};

// If the row takes all its ids, write the first `width` of them. Returns whether it does.
__device__ bool take_all(const Row& row, const int* row_sizes, int size, int take_all_up_to) {
  if (row_sizes == nullptr || size > take_all_up_to) return false;
  for (int i = threadIdx.x; i < row.width; i += THREADS) row.out[i] = i < row.n ? row.ids[i] : -1;
  return true;
}

// Write the k best of `count` scores: those of the chosen groups, or of the whole row.
__device__ void take(const Row& row, int count, int k, int lanes, Range r, Shared& s) {
  const Span span(count, 32);
  unsigned key[SCORES];
  int name[SCORES];
  look_at(key, name, row.scores, row.n, span, PEAKS > 0, s);
  if (!PEAKS) r = range_of(key, k, lanes, s);
  if (row.ids)  // the loads are in flight while the search finds which ids are needed
    for (int i = 0; i < SCORES; i++)
      if (key[i] >= r.from) name[i] = row.ids[name[i]];
  const unsigned least = cut(key, span, count, r, 0, FEW, s.bins + ROUNDS / 2, s);
  const int taken = compact(key, least, s.totals[1], [&](int i, int at) { row.out[at] = name[i]; });
  for (int i = taken + threadIdx.x; i < row.width; i += THREADS) row.out[i] = -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) top(
    const float* scores, const float* peaks, const int* ids, int* out, const int* row_sizes, int heads, int n,
    int k, int take_all_up_to, int width) {
  __shared__ Shared s;
  const long long at = blockIdx.x;
  const int groups = (n + GROUP - 1) / GROUP;
  const int lanes = lanes_of(k);
  Row row = {scores + at * n, peaks + at * groups, ids ? ids + at * n : nullptr, out + at * width, n, width};
  if (row_sizes) row_sizes += blockIdx.x / heads;
  prepare(s);
  const Span span(groups);
  const float* mine = row.peaks + span.place(0);
  now(mine), now(span.stop), now(row_sizes), now(row.scores);
  Range r;
  int count = n;
  wait_for_previous();
  const int size = row_sizes ? *row_sizes : 0;
  if constexpr (PEAKS > 0) {
    float peak[PEAKS ? PEAKS : 1];
    for (int i = 0; i < PEAKS; i++) peak[i] = span.place(i) < span.stop ? mine[32 * i] : none();
    if (take_all(row, row_sizes, size, take_all_up_to)) return;
    count = GROUP * choose(peak, span, groups, k, lanes, r, s);
    __syncthreads();
  } else if (take_all(row, row_sizes, size, take_all_up_to)) {
    return;
  }
  take(row, count, k, lanes, r, s);
}
