#pragma once

// The union of the pages of all query heads in round-robin order. The program has a thread for each page of each query
// head. A page has a position in the round-robin order. A hash table keeps the first position of every page, and so
// finds repeats.
//
// Compile-time constants: THREADS, a power of two.

#include "common.cuh"

constexpr int PLACES = 2 * THREADS, EMPTY = -1, LAST_POSITION = THREADS;

struct RoundRobin {
  int page[PLACES], position[PLACES], totals[THREADS / 32];
};

__device__ void prepare(RoundRobin& s) {
  for (int place = threadIdx.x; place < PLACES; place += THREADS) s.page[place] = EMPTY, s.position[place] = LAST_POSITION;
}

// The place of a page in the table; it takes a free place if it has none.
__device__ int place_of(RoundRobin& s, int page) {
  for (unsigned place = page * 0x9E3779B1u >> 16;; place++) {
    const int found = atomicCAS(&s.page[place % PLACES], EMPTY, page);
    if (found == EMPTY || found == page) return place % PLACES;
  }
}

// Whether no earlier position has this page; false for EMPTY. All threads call this function.
__device__ bool is_first(RoundRobin& s, int page, int position) {
  int place = 0;
  if (page >= 0) place = place_of(s, page), atomicMin(&s.position[place], position);
  __syncthreads();
  return page >= 0 && s.position[place] == position;
}

// Write the first n pages to `out`, in the order of the threads, and EMPTY after them. A thread has one page, or
// EMPTY.
__device__ void compact(RoundRobin& s, int* out, int page, int n) {
  const unsigned taken = __ballot_sync(ALL, page >= 0);
  if (lane() == 0) s.totals[warp()] = __popc(taken);
  __syncthreads();
  const int total = lane() < THREADS / 32 ? s.totals[lane()] : 0;
  const int place = __reduce_add_sync(ALL, lane() < warp() ? total : 0) + __popc(taken & (1u << lane()) - 1);
  if (page >= 0 && place < n) out[place] = page;
  const int rest = __reduce_add_sync(ALL, total) + threadIdx.x;
  if (rest < n) out[rest] = EMPTY;
}
