// Pages by turns of the query heads, as ops/icecache/union_pages.py specifies it: a program for each kv head, a thread for
// each page of each query head.
//
// Why not Triton: it has no atomics on shared memory, so that it tells what is there already by comparing every page with
// every other; here a table tells (turns.cuh).
//
// Set by the compilation: G query heads of a kv head; THREADS, a power of two.

#include "turns.cuh"

struct Shared : Turns {
  unsigned long long key[THREADS];
  int order[THREADS];
};

// Of equal scores that of the lower page is greater; all are greater than those of no page, which keep their order.
__device__ unsigned long long key_of(float score, int id) {
  return id < 0 ? THREADS - threadIdx.x : (unsigned long long)ordered(score) << 32 | ~(unsigned)id;
}

extern "C" __global__ void __launch_bounds__(THREADS) union_pages(
    const float* scores, const int* ids, int* out, int blocks, int n) {
  __shared__ Shared s;
  const long long bh = blockIdx.x;
  const int i = threadIdx.x, head = i / n;
  const bool live = i < G * n;
  prepare(s);
  s.order[i] = EMPTY;
  scores += bh * G * blocks, ids += bh * G * n;
  chain();
  const int id = live ? ids[i] : EMPTY;
  s.key[i] = key_of(id < 0 ? 0 : scores[(long long)head * blocks + id], id);
  __syncthreads();
  int rank = 0;
#pragma unroll 8
  for (int j = 0; j < n && live; j++) rank += s.key[head * n + j] > s.key[i];
  const int turn = rank * G + head;
  if (is_first(s, id, turn)) s.order[turn] = id;
  __syncthreads();
  compact(s, out + bh * n, s.order[i], n);
}
