// Pages by turns of the query heads, as ops/select/union_pages.py specifies it: a program for each kv head, a thread for
// each page of each query head.
//
// Why not Triton: it has no atomics on shared memory, so that it tells what is there already by comparing every page with
// every other. Here a page has its place in a table, which keeps the first turn that brings it.
//
// Set by the compilation: G query heads of a kv head; THREADS, a power of two.

#include "common.cuh"

constexpr int WARPS = THREADS / 32, PLACES = 2 * THREADS, EMPTY = -1, LATE = THREADS;

struct Shared {
  unsigned long long key[THREADS];
  int page[PLACES], turn[PLACES], order[THREADS], totals[WARPS];
};

// Of equal scores that of the lower page is greater; all are greater than those of no page, which keep their order.
__device__ unsigned long long key_of(float score, int id) {
  return id < 0 ? THREADS - threadIdx.x : (unsigned long long)ordered(score) << 32 | ~(unsigned)id;
}

// The place of a page in the table, of which every page that is looked up has its own.
__device__ int place_of(Shared& s, int id) {
  for (unsigned place = id * 0x9E3779B1u >> 16;; place++) {
    const int there = atomicCAS(&s.page[place % PLACES], EMPTY, id);
    if (there == EMPTY || there == id) return place % PLACES;
  }
}

// A page a thread, -1 for none: one behind the other into `out`, and -1 behind them.
__device__ void compact(Shared& s, int* out, int id, int n) {
  const unsigned taken = __ballot_sync(ALL, id >= 0);
  if (lane() == 0) s.totals[warp()] = __popc(taken);
  __syncthreads();
  const int total = lane() < WARPS ? s.totals[lane()] : 0;
  const int place = __reduce_add_sync(ALL, lane() < warp() ? total : 0) + __popc(taken & (1u << lane()) - 1);
  if (id >= 0 && place < n) out[place] = id;
  const int rest = __reduce_add_sync(ALL, total) + threadIdx.x;
  if (rest < n) out[rest] = EMPTY;
}

extern "C" __global__ void __launch_bounds__(THREADS) union_pages(
    const float* scores, const int* ids, int* out, int blocks, int n) {
  __shared__ Shared s;
  const long long bh = blockIdx.x;
  const int i = threadIdx.x, head = i / n;
  const bool live = i < G * n;
  for (int place = i; place < PLACES; place += THREADS) s.page[place] = EMPTY, s.turn[place] = LATE;
  s.order[i] = EMPTY;
  scores += bh * G * blocks, ids += bh * G * n;
  chain();
  const int id = live ? ids[i] : EMPTY;
  s.key[i] = key_of(id < 0 ? 0 : scores[(long long)head * blocks + id], id);
  __syncthreads();
  int rank = 0, place = 0;
#pragma unroll 8
  for (int j = 0; j < n && live; j++) rank += s.key[head * n + j] > s.key[i];
  const int turn = rank * G + head;
  if (id >= 0) place = place_of(s, id), atomicMin(&s.turn[place], turn);
  __syncthreads();
  if (id >= 0 && s.turn[place] == turn) s.order[turn] = id;
  __syncthreads();
  compact(s, out + bh * n, s.order[i], n);
}
