// Stage I of ParisKV, as ops/pariskv/rank_by_votes.py specifies it, for subspaces of 8 dimensions (256 centroids).
//
// Why not Triton: it has no atomics on shared memory, so a histogram costs as much as the lookups. In Triton a kernel
// also cannot choose which thread reads which bank. Here lookups have no bank conflicts. Row c of `lookup` holds the
// votes of centroid c in all B subspaces, repeated to fill the 32 banks, and the threads of a warp start at different
// subspaces. Votes are words of four bytes, one byte per query head; sums of a byte stay below 256.
//
// Compile-time constants: B subspaces (8, 16 or 32); PACKS of four query heads; BINS, a power of two above 6 B + 1;
// THREADS of a program; PAGE tokens of a block, or 0 where each row has a pool of its own.

#include "common.cuh"
#include "table.cuh"

constexpr int SIZE = 256, BANKS = 32;
constexpr int BATCH = 2048 / THREADS;  // keys per thread that are loaded at a time
constexpr int STEP = THREADS;  // keys that a program scores at a time; spans are multiples of it
static_assert(THREADS % BINS == 0);

// Keys per program: the rows in use are divided among the programs.
__device__ int span_of(int end) {
  int each = (end + gridDim.y - 1) / gridDim.y;
  return (each + STEP - 1) / STEP * STEP;
}

struct Ids { unsigned word[B / 4]; };

__device__ Ids load(const unsigned char* ids) {
  Ids x;
  if constexpr (B == 8) {
    uint2 v = *reinterpret_cast<const uint2*>(ids);
    x.word[0] = v.x, x.word[1] = v.y;
  } else {
    for (int i = 0; i < B / 16; i++) {
      uint4 v = reinterpret_cast<const uint4*>(ids)[i];
      x.word[4 * i] = v.x, x.word[4 * i + 1] = v.y, x.word[4 * i + 2] = v.z, x.word[4 * i + 3] = v.w;
    }
  }
  return x;
}

// The bytes rotated by `by`: byte i of the result is byte (i + by) % B.
__device__ Ids rotated_bytes(Ids x, int by) {
  constexpr int WORDS = B / 4;
  Ids y;
  for (int half = 1; half < WORDS; half *= 2) {
    bool move = by / 4 & half;
    for (int i = 0; i < WORDS; i++) y.word[i] = move ? x.word[(i + half) % WORDS] : x.word[i];
    x = y;
  }
  for (int i = 0; i < WORDS; i++) y.word[i] = __funnelshift_r(x.word[i], x.word[(i + 1) % WORDS], by % 4 * 8);
  return y;
}

__device__ unsigned load_shared(unsigned at) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}

// The score of a key: the largest sum of votes of a query head. `row[i]` is the address, in row 0 of the lookup, of the
// subspace of byte i.
__device__ int score(const Ids& ids, const unsigned (&row)[B]) {
  unsigned best = 0;
  for (int w = 0; w < PACKS; w++) {
    unsigned sum = 0;
    for (int i = 0; i < B; i++)
      sum += load_shared(__dp4a(ids.word[i / 4], 4u * BANKS << 8 * (i % 4), row[i]) + w * SIZE * 4 * BANKS);
    best = __vmaxu2(best, __vmaxu2(sum & 0x00FF00FF, sum >> 8 & 0x00FF00FF));
  }
  return max(best & 0xFFFF, best >> 16);
}

// Copy the table of votes [PACKS, SIZE, B] to shared memory, each row repeated to fill the banks.
__device__ void fill_lookup(uint4* lookup, const uint4* table) {
  for (int i = threadIdx.x; i < PACKS * SIZE * B / 4; i += THREADS)
    for (int copy = 0; copy < BANKS / B; copy++)
      lookup[i / (B / 4) * (BANKS / 4) + copy * (B / 4) + i % (B / 4)] = table[i];
}

// Suffix sums: the number of keys with at least each score, from the number with exactly each score.
__device__ void suffix_sums(const int* tally, int* at_least) {
  const int tid = threadIdx.x, lane = tid % 32;
  if (tid >= BINS) return;
  int upto = tally[tid];  // first over the 32 scores of this warp, then also over those above them
  for (int d = 1; d < 32; d *= 2) {
    const int beyond = __shfl_down_sync(ALL, upto, d);
    if (lane + d < 32) upto += beyond;
  }
  for (int i = (tid / 32 + 1) * 32 + lane; i < BINS; i += 32) upto += __reduce_add_sync(ALL, tally[i]);
  at_least[tid] = upto;
}

// Score a span of keys, and count how many of them have at least each score.
extern "C" __global__ void __launch_bounds__(THREADS) scores(
    const unsigned char* ids, const uint4* table, unsigned char* out, int* at_least, const int* ring_begin,
    const int* blocks, int places, int heads, int rows, int stride, int sink) {
  extern __shared__ uint4 lookup[];  // [PACKS, SIZE, BANKS / 4]
  __shared__ int tally[BINS];
  const long long bh = blockIdx.x;
  const int tid = threadIdx.x, lane = tid % 32;
  unsigned row[B];
  for (int i = 0; i < B; i++) row[i] = here(lookup) + 4 * (lane / B * B + (lane + i) % B);
  for (int i = tid; i < BINS; i += THREADS) tally[i] = 0;
  const int end = __ldcg(ring_begin + blockIdx.x / heads);
  const int span = span_of(end), first = blockIdx.y * span, stop = min(first + span, end);
  wait_for_previous();
  if (first >= end || end <= sink) return;  // no key of this span can be retrieved
  fill_lookup(lookup, table + bh * PACKS * SIZE * B / 4);
  const Table<PAGE> pool(blocks, places, blockIdx.x, heads, rows);
  ids += pool.first * B, out += bh * stride + first + tid;
  int block[BATCH];  // of the keys whose ids are loaded next
  Ids ahead[BATCH] = {};
  for (int k = 0; k < BATCH; k++) block[k] = pool.block(first + tid + k * STEP, stop);
  for (int k = 0; k < BATCH; k++) {
    const int key = first + tid + k * STEP;
    if (key < stop) ahead[k] = load(ids + pool.row(block[k], key) * B);
    block[k] = pool.block(key + BATCH * STEP, stop);
  }
  __syncthreads();
  for (int at = first + tid; at < stop; at += BATCH * STEP, out += BATCH * STEP) {
    Ids now[BATCH];
    for (int k = 0; k < BATCH; k++) now[k] = ahead[k];
    for (int k = 0; k < BATCH; k++) {
      const int key = at + (BATCH + k) * STEP;
      if (key < stop) ahead[k] = load(ids + pool.row(block[k], key) * B);
      block[k] = pool.block(key + BATCH * STEP, stop);
    }
    int best[BATCH];
    for (int k = 0; k < BATCH; k++) best[k] = score(rotated_bytes(now[k], lane % B), row);
    const bool all = at - lane >= sink && at - lane + 31 + (BATCH - 1) * STEP < stop;  // all keys of the warp are live
    for (int k = 0; k < BATCH; k++)
      if (all || at + k * STEP >= sink && at + k * STEP < stop) {
        atomicAdd(&tally[best[k]], 1);
        out[k * STEP] = best[k];
      }
  }
  __syncthreads();
  suffix_sums(tally, at_least + (bh * gridDim.y + blockIdx.y) * BINS);
}

// The sum over the threads before this one, and in `all` the sum over all threads.
__device__ int scan(int x, int* warps, int& all) {
  const int upto = sum_upto(x);
  __syncthreads();  // `warps` is free
  if (lane() == 31) warps[warp()] = upto;
  __syncthreads();
  const int others = lane() < THREADS / 32 ? warps[lane()] : 0;
  all = __reduce_add_sync(ALL, others);
  return __reduce_add_sync(ALL, lane() < warp() ? others : 0) + upto - x;
}

// Bit i says whether byte i of the 16 is above the threshold, or with `at` whether it equals the threshold.
__device__ unsigned bits(uint4 bytes, unsigned threshold, bool at) {
  const unsigned four = threshold * 0x01010101, word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  unsigned all = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned hit = at ? __vcmpeq4(word[i], four) : __vcmpgtu4(word[i], four);
    all |= (hit & 0x01010101) * 0x10204080 >> 28 << 4 * i;
  }
  return all;
}

// threshold: the score at which `count` keys are reached. room: the number of keys with this score that still fit.
// above, ties: the numbers of keys in the spans before `part` with a higher score, and with this score.
struct Threshold { int threshold, room, above, ties; };

__device__ Threshold find_threshold(
    const int* at_least, int part, int parts, int count, int (&totals)[BINS], int (&before)[BINS]) {  // both start at 0
  const int tid = threadIdx.x;
  int total = 0, ahead = 0;  // keys with at least this score: in all spans, and in the spans before this one
#pragma unroll 8  // loads in flight
  for (int p = tid / BINS; p < parts; p += THREADS / BINS) {
    const int keys = at_least[p * BINS + tid % BINS];
    total += keys, ahead += p < part ? keys : 0;
  }
  atomicAdd(&totals[tid % BINS], total), atomicAdd(&before[tid % BINS], ahead);
  __syncthreads();
  // Totals fall with the score, to 0 above the best score.
  const int reached = __syncthreads_count(tid < BINS && totals[tid % BINS] >= count), above = before[reached];
  return {reached - 1, count - totals[reached], above, before[reached - 1] - above};
}

// Write the candidates of a span after those of the spans before it.
extern "C" __global__ void __launch_bounds__(THREADS) compact(
    const unsigned char* scores, const int* at_least, int* out, const int* ring_begin, int heads, int stride, int sink,
    int least, int dense, int capacity, ShareByLength beta) {
  constexpr int TILE = 16 * THREADS;
  __shared__ int warps[THREADS / 32], totals[BINS], before[BINS];
  const long long bh = blockIdx.x;
  const int tid = threadIdx.x, part = blockIdx.y, end = __ldcg(ring_begin + blockIdx.x / heads), span = span_of(end);
  const int n = max(end - sink, 0), share = (int)((n * share_by_length(beta, n) + 999999) / 1000000);
  const int count = n <= dense ? n : min(n, max(share, least)), stop = min(part * span + span, end);
  out += bh * capacity, scores += bh * stride, at_least += bh * gridDim.y * BINS;
  if (tid < BINS) totals[tid] = before[tid] = 0;
  __syncthreads();
  wait_for_previous();
  if (part * span < end && count > 0) {
    auto load = [&](int row) {
      return row < stop ? *reinterpret_cast<const uint4*>(scores + row) : make_uint4(0, 0, 0, 0);
    };
    uint4 next = load(part * span + 16 * tid);
    auto [threshold, room, above, ties] = find_threshold(at_least, part, (end + span - 1) / span, count, totals, before);
    for (int first = part * span; first < stop; first += TILE) {
      const int row = first + 16 * tid;
      const uint4 s = next;
      next = load(row + TILE);
      const unsigned from = min(max(sink - row, 0), 16), to = min(max(stop - row, 0), 16);
      const unsigned live = (1u << to) - 1 & ~((1u << from) - 1);
      const unsigned more = bits(s, threshold, false) & live, tie = bits(s, threshold, true) & live;
      int all;
      const int upto = scan(__popc(more) + (__popc(tie) << 16), warps, all);  // a tile has fewer than 2^15 keys
      int over = above + (upto & 0xFFFF), level = ties + (upto >> 16);
      for (unsigned left = more | tie; left; left &= left - 1) {
        const int i = __ffs(left) - 1;
        const bool is_tie = tie >> i & 1;
        if (!is_tie || level < room) out[over + min(level, room)] = row + i;
        is_tie ? level++ : over++;
      }
      above += all & 0xFFFF, ties += all >> 16;
    }
  }
  for (int i = count + part * THREADS + tid; i < capacity; i += gridDim.y * THREADS) out[i] = -1;
}
