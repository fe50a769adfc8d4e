#pragma once

// Pages by turns of the query heads, of a program with a thread for each page of each query head: what comes again is told
// by a table, in which a page has its place, and which keeps the first turn that brings it.
//
// Set by the compilation: THREADS, a power of two.

#include "common.cuh"

constexpr int PLACES = 2 * THREADS, EMPTY = -1, LATE = THREADS;

struct Turns {
  int page[PLACES], turn[PLACES], totals[THREADS / 32];
};

__device__ void prepare(Turns& s) {
  for (int place = threadIdx.x; place < PLACES; place += THREADS) s.page[place] = EMPTY, s.turn[place] = LATE;
}

// The place of a page in the table, of which every page that is looked up has its own.
__device__ int place_of(Turns& s, int id) {
  for (unsigned place = id * 0x9E3779B1u >> 16;; place++) {
    const int there = atomicCAS(&s.page[place % PLACES], EMPTY, id);
    if (there == EMPTY || there == id) return place % PLACES;
  }
}

// Whether no earlier turn brings the page `id`; -1 is no page.
__device__ bool is_first(Turns& s, int id, int turn) {
  int place = 0;
  if (id >= 0) place = place_of(s, id), atomicMin(&s.turn[place], turn);
  __syncthreads();
  return id >= 0 && s.turn[place] == turn;
}

// A page a thread, -1 for none: the first n of them one behind the other into `out`, and -1 behind them.
__device__ void compact(Turns& s, int* out, int id, int n) {
  const unsigned taken = __ballot_sync(ALL, id >= 0);
  if (lane() == 0) s.totals[warp()] = __popc(taken);
  __syncthreads();
  const int total = lane() < THREADS / 32 ? s.totals[lane()] : 0;
  const int place = __reduce_add_sync(ALL, lane() < warp() ? total : 0) + __popc(taken & (1u << lane()) - 1);
  if (id >= 0 && place < n) out[place] = id;
  const int rest = __reduce_add_sync(ALL, total) + threadIdx.x;
  if (rest < n) out[rest] = EMPTY;
}
