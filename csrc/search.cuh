#pragma once

// The k largest keys of a row that the threads of a program hold in registers.
//
// Why this is not in Triton: Triton has no atomics on shared memory, so its search takes about a dozen rounds of two
// counts. Here a round is a histogram of the keys in the range of the k-th largest key. After the first round mostly
// few keys are left, and the program compares these with one another.
//
// Compile-time constant: THREADS of the program.

#include "common.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int BINS = 128, DIGIT = 7, ROUNDS = 16;  // two searches, each with 5 rounds for keys and 3 for equal keys
constexpr int FEW = 64;  // up to this many keys are compared with one another

struct Pair { unsigned key, place; };
struct Last : Pair { bool shared; };  // shared: whether other keys are equal to it

using Bins = int[BINS + 32];  // the last 32, one per lane, take the keys outside the range; no thread reads them

struct __align__(16) Search {
  Bins bins[ROUNDS];
  unsigned low[WARPS], high[WARPS];
  int totals[2][WARPS];
  Reached found;
  Pair few[FEW];
  Last last;
  int listed;
};

// Clear the scratch; ahead of `wait_for_previous` this costs no time.
__device__ void prepare(Search& s) {
  for (int i = threadIdx.x; i < ROUNDS * BINS; i += THREADS) s.bins[i / BINS][i % BINS] = 0;
  for (int i = threadIdx.x; i < FEW; i += THREADS) s.few[i] = {0, 0};
  if (threadIdx.x == 0) s.listed = 0;
}

// Threads per group, such that there are at least 2 k groups if possible.
__device__ int lanes_of(int k) { return min(32, 1 << max(0, 31 - __clz(THREADS / 2 / k))); }

// The places of a warp among `count` places, in whole units; only the last unit may be cut off. Places are in the order
// of (warp, step, lane).
struct Span {
  int first, stop;
  __device__ explicit Span(int count, int unit = 1) {
    const int units = (count + unit - 1) / unit;
    first = warp() * units / WARPS * unit, stop = min((warp() + 1) * units / WARPS * unit, count);
  }
  __device__ int place(int step) const { return first + step * 32 + lane(); }
};

// The range of the k-th largest key. Keys above `to` are taken; of the `inside` keys between `from` and `to` the
// `wanted` largest are taken.
struct Range { unsigned from, to; int wanted, inside; };

// The first range: from the least of the maxima of groups of `lanes` threads, if at least k groups have one, to the
// largest key.
template <int N> __device__ Range range_of(const unsigned (&key)[N], int k, int lanes, Search& s) {
  unsigned best = 0;
  for (int i = 0; i < N; i++) best = max(best, key[i]);
  for (int d = 1; d < lanes; d *= 2) best = max(best, __shfl_xor_sync(ALL, best, d));
  const bool live = best >= LEAST;
  const unsigned low = __reduce_min_sync(ALL, live ? best : ALL), high = __reduce_max_sync(ALL, best);
  if (lane() == 0) s.low[warp()] = low, s.high[warp()] = high;
  const int groups = __syncthreads_count(live && (lane() & lanes - 1) == 0);
  const unsigned from = __reduce_min_sync(ALL, lane() < WARPS ? s.low[lane()] : ALL);
  const unsigned to = __reduce_max_sync(ALL, lane() < WARPS ? s.high[lane()] : 0);
  return {groups < k ? LEAST : from, max(to, LEAST), k, 0};
}

// Narrow the range until it holds at most `spare` keys more than wanted, or at most `few` keys, or equal keys only.
// If there are fewer keys than wanted, all keys are inside.
template <int N> __device__ Range narrow(const unsigned (&key)[N], Range r, int spare, int few, Bins*& bins, Search& s) {
  while (true) {
    const unsigned width = r.to - r.from;
    const int shift = max(0, 32 - DIGIT - __clz(width));
    for (int i = 0; i < N; i++) {
      const unsigned below = r.to - key[i];
      atomicAdd(&(*bins)[below <= width ? below >> shift : BINS + lane()], 1);  // cheaper than a branch
    }
    __syncthreads();
    if (warp() == 0) {  // one warp is faster than all warps, whose shuffles would wait for one another
      const Reached found = find<BINS / 32>(*bins, r.wanted);
      if (lane() == 0) s.found = found;
    }
    __syncthreads();
    const Reached f = s.found;
    bins++;
    r.inside = f.inside;
    if (f.before + f.inside < r.wanted) {
      r.inside += f.before;
      return r;
    }
    r.wanted -= f.before, r.to -= (unsigned)f.bin << shift;
    r.from = r.to - min((1u << shift) - 1, r.to - r.from);
    if (r.inside <= max(r.wanted + spare, few) || shift == 0) return r;
  }
}

// The last key that is taken of the few keys in the range. A warp compares one key with all of them. `s.few` is 0
// after them.
template <int N> __device__ Last last_of(const unsigned (&key)[N], const Span& span, const Range& r, Search& s) {
  for (int i = 0; i < N; i++)
    if (r.to - key[i] <= r.to - r.from) s.few[atomicAdd(&s.listed, 1)] = {key[i], (unsigned)span.place(i)};
  __syncthreads();
  for (int j = warp(); j < r.inside; j += WARPS) {
    const Pair one = s.few[j];
    int better = 0, equal = 0;
    for (int i = 0; i < r.inside; i += 32) {
      const Pair x = s.few[i + lane()];
      better += __popc(__ballot_sync(ALL, x.key > one.key || x.key == one.key && x.place < one.place));
      equal += __popc(__ballot_sync(ALL, x.key == one.key));
    }
    if (lane() == 0 && better == r.wanted - 1) s.last = {one, equal > 1};
  }
  __syncthreads();
  return s.last;
}

// The last key that is taken of equal keys: those at lower places go first.
template <int N> __device__ Last last_of_equals(
    const unsigned (&key)[N], const Span& span, int count, const Range& r, int spare, Bins* bins, Search& s) {
  unsigned early[N];
  for (int i = 0; i < N; i++) early[i] = key[i] == r.from ? ~span.place(i) : 0;
  return {{r.from, ~narrow(early, {(unsigned)-count, ALL, r.wanted, 0}, spare, 0, bins, s).from}, true};
}

// The least of the k largest keys, or of up to `spare` more. Ties go to the lower place: equal keys that are not taken
// become 0.
template <int N> __device__ unsigned cut(
    unsigned (&key)[N], const Span& span, int count, Range r, int spare, int few, Bins* bins, Search& s) {
  r = narrow(key, r, spare, few, bins, s);
  if (r.inside <= r.wanted + spare) return r.from;
  const Last last = r.inside <= few ? last_of(key, span, r, s) : last_of_equals(key, span, count, r, spare, bins, s);
  if (!last.shared) return last.key;
  for (int i = 0; i < N; i++)
    if (key[i] == last.key && span.place(i) > last.place) key[i] = 0;
  return last.key;
}

// The k-th largest of up to 32 keys in `s.few`. The first warp calls it.
__device__ unsigned key_in(int k, const Search& s) {
  const unsigned own = s.few[lane()].key;
  int better = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const unsigned other = s.few[i].key;
    better += other > own, equal += other == own;
  }
  return __reduce_max_sync(ALL, better < k & k <= better + equal ? own : 0);
}

// The k-th largest key, for the first thread; LEAST if there are fewer keys. The bins of the first round have equal
// widths in scores instead of keys. Fewer keys are then left if a few scores are far above the others.
template <int N> __device__ unsigned key_at(const unsigned (&key)[N], int k, Search& s) {
  Range r = range_of(key, k, lanes_of(k), s);
  const float high = number_of(r.to), bins = BINS / (high - number_of(r.from));
  int bin[N];
  for (int i = 0; i < N; i++) {
    bin[i] = key[i] < r.from ? BINS + lane() : min(__float2int_rz((high - number_of(key[i])) * bins), BINS - 1);
    atomicAdd(&s.bins[0][bin[i]], 1);
  }
  __syncthreads();
  const Reached found = find<BINS / 32>(s.bins[0], k);
  for (int i = 0; i < N && found.inside <= 32; i++)
    if (bin[i] == found.bin) s.few[atomicAdd(&s.listed, 1)] = {key[i], 0};
  __syncthreads();
  if (found.before + found.inside < k) return LEAST;
  if (found.inside <= 32) return warp() == 0 ? key_in(k - found.before, s) : 0;
  Bins* rest = s.bins + 1;
  r = narrow(key, r, 0, FEW, rest, s);
  if (r.inside <= FEW) return last_of(key, Span(N * THREADS), r, s).key;
  unsigned least = ALL;  // all keys inside are wanted, or equal
  for (int i = 0; i < N; i++) least = key[i] >= r.from ? min(least, key[i]) : least;
  least = __reduce_min_sync(ALL, least);
  if (lane() == 0) s.low[warp()] = least;
  __syncthreads();
  return __reduce_min_sync(ALL, lane() < WARPS ? s.low[lane()] : ALL);
}

// Call put(step, number) for each key that is not below `least`, numbered in the order of places. Returns the number of
// these keys.
template <int N, class Put> __device__ int compact(const unsigned (&key)[N], unsigned least, int* totals, Put put) {
  unsigned taken[N];
  int mine = 0;
  for (int i = 0; i < N; i++) taken[i] = __ballot_sync(ALL, key[i] >= least), mine += __popc(taken[i]);
  if (lane() == 0) totals[warp()] = mine;
  __syncthreads();
  const int total = lane() < WARPS ? totals[lane()] : 0;
  int at = __reduce_add_sync(ALL, lane() < warp() ? total : 0);
  for (int i = 0; i < N; i++) {
    if (key[i] >= least) put(i, at + __popc(taken[i] & (1u << lane()) - 1));
    at += __popc(taken[i]);
  }
  return __reduce_add_sync(ALL, total);
}

template <int N> __device__ void keys_of(unsigned (&key)[N], const float (&x)[N]) {
  for (int i = 0; i < N; i++) key[i] = ordered(x[i]);
}

template <int MOST> struct Grouped : Search {
  unsigned short group[MOST];  // the groups whose scores the program reads
  // The number in the row of the score at a place among these groups; a warp begins with a whole group.
  __device__ int number(const Span& span, int step) const {
    return group[span.place(0) / GROUP + step * (32 / GROUP)] * GROUP + lane() % GROUP;
  }
};

// Choose the groups of the highest peaks, k or more, and the range `r` of the k-th best score. Returns the number of
// groups.
template <int N, int MOST> __device__ int choose(
    const float (&peak)[N], const Span& span, int groups, int k, int lanes, Range& r, Grouped<MOST>& s) {
  unsigned key[N];
  keys_of(key, peak);
  r = range_of(key, k, lanes, s);
  r.from = cut(key, span, groups, r, MOST - k, 0, s.bins, s);
  return compact(key, r.from, s.totals[0], [&](int i, int at) { s.group[at] = span.place(i); });
}

// Read the scores of the chosen groups, or of the whole row of n scores: their numbers (`name`) and keys.
template <int N, int MOST> __device__ void look_at(
    unsigned (&key)[N], int (&name)[N], const float* scores, int n, const Span& span, bool grouped,
    const Grouped<MOST>& s) {
  float x[N];
  for (int i = 0; i < N; i++) name[i] = span.place(i) >= span.stop ? n : grouped ? s.number(span, i) : span.place(i);
  for (int i = 0; i < N; i++) x[i] = name[i] < n ? scores[name[i]] : none();
  keys_of(key, x);
}
