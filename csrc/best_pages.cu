// Select the best pages of every query head and merge them round-robin; ops/icecache/best_pages.py is the
// specification. A program ranks the pages of one query head. The programs of a kv head form a cluster, and its first
// program merges.
//
// Why not Triton: search.cuh and union_pages.cu say why. One launch does both, so the pages of a query head stay in
// shared memory.
//
// Compile-time constants: THREADS, SCORES, PEAKS and GROUP as in top_blocks.cu; K pages of a query head; G query heads
// of a kv head.

#include "cluster.cuh"
#include "search.cuh"
#include "round_robin.cuh"

constexpr int CANDIDATES = 2 * K < THREADS ? 2 * K : THREADS;  // pages of a query head that are ranked, at most
constexpr int EACH = THREADS / CANDIDATES > 3 ? 4 : THREADS / CANDIDATES > 1 ? 2 : 1;  // threads that rank a candidate
static_assert(G * K <= THREADS && G <= 8);

struct Shared : Grouped<THREADS * SCORES / GROUP> {
  RoundRobin merged;
  unsigned long long key[CANDIDATES];
  int count;  // of candidates
  int order[THREADS];  // of the pages of all query heads; in the first program
  Bell<G> bell;  // rings when `order` is complete
};

// A larger key is a better page. Of two pages with equal scores the lower page is better.
__device__ unsigned long long key_of(unsigned score, int page) { return (unsigned long long)score << 32 | ~(unsigned)page; }

// Collect the candidates of this query head in any order: its best K pages, and a few other pages. Returns the number
// of candidates.
__device__ int collect(const float* scores, const float* peaks, int n, Shared& s) {
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
  const unsigned least = cut(key, span, count, r, CANDIDATES - K, 0, s.bins + ROUNDS / 2, s);
  for (int i = 0; i < SCORES; i++)
    if (key[i] >= least) s.key[atomicAdd(&s.count, 1)] = key_of(key[i], page[i]);
  __syncthreads();
  return s.count;
}

// Rank the candidates and send the best K pages to the first program, or EMPTY where there are fewer candidates.
__device__ void send_ranked(int head, int count, Shared& s) {
  const int candidate = threadIdx.x / EACH;
  const unsigned long long own = candidate < count ? s.key[candidate] : 0;
  int rank = 0;
#pragma unroll 8
  for (int j = threadIdx.x % EACH; j < count; j += EACH) rank += s.key[j] > own;
  for (int d = 1; d < EACH; d *= 2) rank += __shfl_xor_sync(ALL, rank, d);
  if (threadIdx.x % EACH == 0 && candidate < count && rank < K) s.bell.send(0, &s.order[rank * G + head], ~(unsigned)own);
  if (count <= threadIdx.x && threadIdx.x < K) s.bell.send(0, &s.order[threadIdx.x * G + head], (unsigned)EMPTY);
}

extern "C" __global__ void __cluster_dims__(G) __launch_bounds__(THREADS, 1) best(
    const float* scores, const float* peaks, int* out, int n) {
  __shared__ Shared s;
  const int head = blockIdx.x % G, i = threadIdx.x;
  prepare(s);
  prepare(s.merged);
  s.order[i] = EMPTY;
  if (i == 0) s.count = 0;
  if (head == 0) s.bell.expect(G * K);
  arrive();
  wait_for_previous();
  const int count = collect(scores + blockIdx.x * (long long)n, peaks + blockIdx.x * ((n + GROUP - 1) / GROUP), n, s);
  wait();
  send_ranked(head, count, s);
  if (head > 0) return;
  s.bell.receive();
  const int page = s.order[i];
  compact(s.merged, out + blockIdx.x / G * K, is_first(s.merged, page, i) ? page : EMPTY, K);
}
