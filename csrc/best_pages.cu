// The best pages of query heads by turns, as ops/select/best_pages.py specifies it: a program for each query head, which
// ranks its own; those of a kv head are a cluster, and the first of them takes the turns.
//
// Why not Triton: what search.cuh and turns.cuh say. In one launch the pages of a query head need not go through memory.
//
// Set by the compilation: THREADS, SCORES, PEAKS and GROUP as for top_blocks.cu; K pages of a query head; G query heads of a
// kv head.

#include "cluster.cuh"
#include "search.cuh"
#include "turns.cuh"

static_assert(G * K <= THREADS && G <= 8);

struct Shared : Grouped<THREADS * SCORES / GROUP> {
  Turns turns;
  unsigned long long key[K];
  int order[THREADS];  // of all query heads, in the first program
  Bell bell;  // of this
};

// Of equal scores that of the lower page is greater.
__device__ unsigned long long key_of(unsigned score, int page) { return (unsigned long long)score << 32 | ~(unsigned)page; }

// This query head's best pages; how many.
__device__ int take(const float* scores, const float* peaks, int n, Shared& s) {
  const int groups = (n + GROUP - 1) / GROUP, lanes = lanes_of(K);
  int count = n;
  Range r;
  if constexpr (PEAKS > 0) {
    const Span span(groups);
    float peak[PEAKS ? PEAKS : 1];
    for (int i = 0; i < PEAKS; i++) peak[i] = span.place(i) < span.stop ? peaks[span.place(i)] : none();
    count = GROUP * choose(peak, span, groups, K, lanes, r, s);
    __syncthreads();
  }
  const Span span(count, 32);
  unsigned key[SCORES];
  int page[SCORES];
  look_at(key, page, scores, n, span, PEAKS > 0, s);
  if (PEAKS == 0) r = range_of(key, K, lanes, s);
  const unsigned least = cut(key, span, count, r, 0, FEW, s.bins + ROUNDS / 2, s);
  return compact(key, least, s.totals[1], [&](int i, int at) { s.key[at] = key_of(key[i], page[i]); });
}

extern "C" __global__ void __cluster_dims__(G) __launch_bounds__(THREADS, 1) best(
    const float* scores, const float* peaks, int* out, int n) {
  __shared__ Shared s;
  const int head = blockIdx.x % G, i = threadIdx.x;
  prepare(s);
  prepare(s.turns);
  s.order[i] = EMPTY;
  if (head == 0 && i == 0) expect(s.bell, G * K);
  arrive();
  chain();
  const int taken = take(scores + blockIdx.x * (long long)n, peaks + blockIdx.x * ((n + GROUP - 1) / GROUP), n, s);
  wait();
  __syncthreads();
  int rank = i;  // of those that it has not
  if (i < taken) {
    rank = 0;
#pragma unroll 8
    for (int j = 0; j < taken; j++) rank += s.key[j] > s.key[i];
  }
  if (i < K) send(0, &s.order[rank * G + head], s.bell, i < taken ? ~(unsigned)s.key[i] : EMPTY);
  if (head > 0) return;
  receive(s.bell);
  const int page = s.order[i];
  compact(s.turns, out + blockIdx.x / G * K, is_first(s.turns, page, i) ? page : EMPTY, K);
}
