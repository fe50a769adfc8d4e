// The best pages of query heads by turns, as ops/icecache/best_pages.py specifies it: a program for each query head, which
// ranks its own; those of a kv head are a cluster, and the first of them takes the turns.
//
// Why not Triton: what search.cuh and turns.cuh say. In one launch the pages of a query head need not go through memory.
//
// Set by the compilation: THREADS, SCORES, PEAKS and GROUP as for top_blocks.cu; K pages of a query head; G query heads of a
// kv head.

#include "cluster.cuh"
#include "search.cuh"
#include "turns.cuh"

constexpr int LEFT = 2 * K < THREADS ? 2 * K : THREADS;  // pages of a query head that are ranked at most
constexpr int EACH = THREADS / LEFT > 3 ? 4 : THREADS / LEFT > 1 ? 2 : 1;  // threads for one of them
static_assert(G * K <= THREADS && G <= 8);

struct Shared : Grouped<THREADS * SCORES / GROUP> {
  Turns turns;
  unsigned long long key[LEFT];
  int left;
  int order[THREADS];  // of all query heads, in the first program
  Bell<G> bell;  // of this
};

// Of equal scores that of the lower page is greater.
__device__ unsigned long long key_of(unsigned score, int page) { return (unsigned long long)score << 32 | ~(unsigned)page; }

// Of this query head's pages the best and a few others, in any order; how many.
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
  const unsigned least = cut(key, span, count, r, LEFT - K, 0, s.bins + ROUNDS / 2, s);
  for (int i = 0; i < SCORES; i++)
    if (key[i] >= least) s.key[atomicAdd(&s.left, 1)] = key_of(key[i], page[i]);
  __syncthreads();
  return s.left;
}

// Tell the first program by rank which pages of this query head are the best; EMPTY where there are not so many.
__device__ void send_ranked(int head, int left, Shared& s) {
  const int one = threadIdx.x / EACH;
  const unsigned long long own = one < left ? s.key[one] : 0;
  int rank = 0;
#pragma unroll 8
  for (int j = threadIdx.x % EACH; j < left; j += EACH) rank += s.key[j] > own;
  for (int d = 1; d < EACH; d *= 2) rank += __shfl_xor_sync(ALL, rank, d);
  if (threadIdx.x % EACH == 0 && one < left && rank < K) s.bell.send(0, &s.order[rank * G + head], ~(unsigned)own);
  if (left <= threadIdx.x && threadIdx.x < K) s.bell.send(0, &s.order[threadIdx.x * G + head], (unsigned)EMPTY);
}

extern "C" __global__ void __cluster_dims__(G) __launch_bounds__(THREADS, 1) best(
    const float* scores, const float* peaks, int* out, int n) {
  __shared__ Shared s;
  const int head = blockIdx.x % G, i = threadIdx.x;
  prepare(s);
  prepare(s.turns);
  s.order[i] = EMPTY;
  if (i == 0) s.left = 0;
  if (head == 0) s.bell.expect(G * K);
  arrive();
  chain();
  const int left = take(scores + blockIdx.x * (long long)n, peaks + blockIdx.x * ((n + GROUP - 1) / GROUP), n, s);
  wait();
  send_ranked(head, left, s);
  if (head > 0) return;
  s.bell.receive();
  const int page = s.order[i];
  compact(s.turns, out + blockIdx.x / G * K, is_first(s.turns, page, i) ? page : EMPTY, K);
}
