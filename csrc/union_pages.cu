// Merge the pages of the query heads of a kv head round-robin; ops/icecache/union_pages.py is the specification. A
// program takes a kv head, and a thread takes a page of a query head.
//
// Why not Triton: without atomics on shared memory it compares every page with every other to find repeats. Here a hash
// table finds them (round_robin.cuh).
//
// Compile-time constants: G query heads of a kv head; THREADS, a power of two.

#include "round_robin.cuh"

struct Shared : RoundRobin {
  unsigned long long key[THREADS];
  int order[THREADS];
};

// A larger key is a better page. Of two pages with equal scores the lower page is better. Entries without a page keep
// their order after all pages.
__device__ unsigned long long key_of(float score, int page) {
  return page < 0 ? THREADS - threadIdx.x : (unsigned long long)ordered(score) << 32 | ~(unsigned)page;
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
  wait_for_previous();
  const int page = live ? ids[i] : EMPTY;
  s.key[i] = key_of(page < 0 ? 0 : scores[(long long)head * blocks + page], page);
  __syncthreads();
  int rank = 0;
#pragma unroll 8
  for (int j = 0; j < n && live; j++) rank += s.key[head * n + j] > s.key[i];
  const int position = rank * G + head;
  if (is_first(s, page, position)) s.order[position] = page;
  __syncthreads();
  compact(s, out + bh * n, s.order[i], n);
}
