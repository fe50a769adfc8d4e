// The k best of a row of scores, as ops/select/top_blocks.py specifies it. There are few rows, a program each, so what
// counts is how many steps wait for one another (search.cuh says why not Triton).
//
// Set by the compilation: THREADS; SCORES that each can look at; PEAKS that each looks at before, to find the groups
// that have them (0: the row has no more scores than can be looked at); GROUP scores that share a peak.

#include "search.cuh"

constexpr int MOST = THREADS * SCORES / GROUP;  // groups that can be looked into
using Shared = Grouped<MOST>;

// What a program reads and writes of its row.
struct Row {
  const float *scores, *peaks;
  const int* ids;
  int *out, n, width;
};

// Rows that are returned whole: the first of all ids.
__device__ bool whole(const Row& row, const int* counter, int counted, int few) {
  if (counter == nullptr || counted > few) return false;
  for (int i = threadIdx.x; i < row.width; i += THREADS) row.out[i] = i < row.n ? row.ids[i] : -1;
  return true;
}

// The k best of the first `count` places, which are scores of the groups chosen, or of the row.
__device__ void take(const Row& row, int count, int k, int lanes, Range r, Shared& s) {
  const Span span(count, 32);
  unsigned key[SCORES];
  int name[SCORES];
  look_at(key, name, row.scores, row.n, span, PEAKS > 0, s);
  if (!PEAKS) r = range_of(key, k, lanes, s);
  if (row.ids)  // on their way while it is found whose are needed
    for (int i = 0; i < SCORES; i++)
      if (key[i] >= r.from) name[i] = row.ids[name[i]];
  const unsigned least = cut(key, span, count, r, 0, FEW, s.bins + ROUNDS / 2, s);
  const int taken = compact(key, least, s.totals[1], [&](int i, int at) { row.out[at] = name[i]; });
  for (int i = taken + threadIdx.x; i < row.width; i += THREADS) row.out[i] = -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) top(
    const float* scores, const float* peaks, const int* ids, int* out, const int* counter, int per, int n, int k,
    int few, int width) {
  __shared__ Shared s;
  const long long at = blockIdx.x;
  const int groups = (n + GROUP - 1) / GROUP;
  const int lanes = lanes_of(k);
  Row row = {scores + at * n, peaks + at * groups, ids ? ids + at * n : nullptr, out + at * width, n, width};
  if (counter) counter += blockIdx.x / per;
  prepare(s);
  const Span span(groups);
  const float* mine = row.peaks + span.place(0);
  now(mine), now(span.stop), now(counter), now(row.scores);
  Range r;
  int count = n;
  chain();
  const int counted = counter ? *counter : 0;
  if constexpr (PEAKS > 0) {
    float peak[PEAKS ? PEAKS : 1];
    for (int i = 0; i < PEAKS; i++) peak[i] = span.place(i) < span.stop ? mine[32 * i] : none();
    if (whole(row, counter, counted, few)) return;
    count = GROUP * choose(peak, span, groups, k, lanes, r, s);
    __syncthreads();
  } else if (whole(row, counter, counted, few)) {
    return;
  }
  take(row, count, k, lanes, r, s);
}
