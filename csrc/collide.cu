// Stage I of ParisKV, as ops/select/collide.py specifies it, for subspaces of 8 dimensions (ids of 256 centroids).
//
// Why not Triton: it has neither atomics on shared memory, so that a histogram costs as much as the lookups, nor a
// say in which thread asks which bank. Here a lookup never meets a bank conflict: row c of `lookup` holds what centroid
// c earns in every subspace, B words, repeated to fill all 32 banks, and the threads of a warp begin at different
// subspaces. Points are words of four bytes, one per query head, and sums of them stay below 256.
//
// Set by the compilation: B subspaces (8, 16 or 32), F query heads, BINS (a power of two above 6 B + 1).

#include "common.cuh"

constexpr int SIZE = 256, HALF = SIZE / 2, PACK = 4, BANKS = 32;
constexpr int PACKS = (F + PACK - 1) / PACK, FIELDS = F < PACK ? F : PACK;
constexpr int BATCH = 4;  // keys of a thread on their way at a time
constexpr int POINTS_THREADS = HALF * FIELDS, SCORES_THREADS = 512, COMPACT_THREADS = 512;
constexpr int STEP = SCORES_THREADS;  // spans are multiples of it
__constant__ int PERCENT[6] = {5, 15, 30, 50, 75, 100};

struct Lengths { int below[3], share[4]; };  // a share of a row, in millionths, by its number of keys

__device__ long long by_length(const Lengths& x, int n) {
  return n < x.below[0] ? x.share[0] : n < x.below[1] ? x.share[1] : n < x.below[2] ? x.share[2] : x.share[3];
}

// Keys per program: the rows in use, not the capacity, are dealt out.
__device__ int span_of(int end) {
  int each = (end + gridDim.y - 1) / gridDim.y;
  return (each + STEP - 1) / STEP * STEP;
}

// One subspace of up to four query heads: what each centroid earns. Opposite patterns have opposite scores, so that
// comparing the absolute scores of the pairs says all.
extern "C" __global__ void __launch_bounds__(POINTS_THREADS) points(
    const float* rotated, const int* counts, unsigned* table, int* totals, const int* retired, int heads, int sink,
    Lengths rho) {
  __shared__ __align__(16) float scores[FIELDS][HALF];
  __shared__ __align__(16) float better[FIELDS][HALF], worse[FIELDS][HALF];  // numbers of keys, exact below 2^24
  __shared__ int whole[FIELDS], limits[6];
  __shared__ unsigned char earned[SIZE][PACK];
  const long long bh = blockIdx.x;
  const int space = blockIdx.y, pack = blockIdx.z, f = threadIdx.x / HALF, pair = threadIdx.x % HALF;
  const int field = pack * PACK + f;
  chain();
  if (space == 0 && pack == 0)
    for (int i = threadIdx.x; i < BINS; i += POINTS_THREADS) totals[bh * BINS + i] = 0;
  for (int i = threadIdx.x; i < SIZE; i += POINTS_THREADS) reinterpret_cast<unsigned*>(earned)[i] = 0;
  if (threadIdx.x < 6) {
    int n = max(retired[bh / heads] - sink, 0);
    limits[threadIdx.x] = (int)((n * by_length(rho, n) * PERCENT[threadIdx.x] + 99999999) / 100000000);
  }
  if (threadIdx.x < FIELDS) whole[threadIdx.x] = 0;
  float s = 0;
  int c = pair;
  if (field < F) {
    const float* x = rotated + ((bh * F + field) * B + space) * 8;
    const int* count = counts + (bh * B + space) * SIZE;
    const int up = count[pair], down = count[SIZE - 1 - pair];
    for (int j = 0; j < 8; j++) s += pair >> j & 1 ? x[j] : -x[j];
    if (s < 0) c = SIZE - 1 - pair;
    scores[f][pair] = fabsf(s), better[f][pair] = s < 0 ? down : up, worse[f][pair] = s < 0 ? up : down;
    s = fabsf(s);
  }
  __syncthreads();
  if (field < F) {
    int keys = __reduce_add_sync(ALL, (int)better[f][pair]);
    if (pair % 32 == 0) atomicAdd(&whole[f], keys);
    float above = 0, below = 0;
    for (int i = 0; i < HALF; i += 4) {
      float4 t = *reinterpret_cast<float4*>(&scores[f][i]);
      float4 up = *reinterpret_cast<float4*>(&better[f][i]), down = *reinterpret_cast<float4*>(&worse[f][i]);
      if (t.x > s) above += up.x;
      if (t.y > s) above += up.y;
      if (t.z > s) above += up.z;
      if (t.w > s) above += up.w;
      if (t.x < s) below += down.x;
      if (t.y < s) below += down.y;
      if (t.z < s) below += down.z;
      if (t.w < s) below += down.w;
    }
    int high = 0, low = 0;
    __syncthreads();
    below += whole[f];
    for (int i = 0; i < 6; i++) high += (int)above < limits[i], low += (int)below < limits[i];
    earned[c][f] = high;
    earned[SIZE - 1 - c][f] = s == 0 ? high : low;
  } else {
    __syncthreads();
  }
  __syncthreads();
  table += (bh * PACKS + pack) * SIZE * B + space;
  for (int i = threadIdx.x; i < SIZE; i += POINTS_THREADS) table[i * B] = reinterpret_cast<unsigned*>(earned)[i];
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

// The bytes from number `by` on, and then those before it.
__device__ Ids turned(Ids x, int by) {
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

// The largest sum of points that a query head gives a key: `row[i]` is where row 0 of the lookup has what byte i asks.
__device__ int score(const Ids& names, const unsigned (&row)[B]) {
  unsigned best = 0;
  for (int w = 0; w < PACKS; w++) {
    unsigned sum = 0;
    for (int i = 0; i < B; i++)
      sum += load_shared(row[i] + (w * SIZE + __byte_perm(names.word[i / 4], 0, 0x4440 + i % 4)) * (4 * BANKS));
    best = __vmaxu2(best, __vmaxu2(sum & 0x00FF00FF, sum >> 8 & 0x00FF00FF));
  }
  return max(best & 0xFFFF, best >> 16);
}

// Score a span of keys; count how many of them reach each score.
extern "C" __global__ void __launch_bounds__(SCORES_THREADS, 2) scores(
    const unsigned char* ids, const uint4* table, unsigned char* out, int* reach, int* totals, const int* retired,
    int heads, int rows, int stride, int sink) {
  extern __shared__ uint4 lookup[];  // [PACKS, SIZE, BANKS / 4]
  __shared__ int tally[BINS];
  const long long bh = blockIdx.x;
  const int tid = threadIdx.x, lane = tid % 32, end = retired[bh / heads], span = span_of(end);
  const int first = blockIdx.y * span, stop = min(first + span, end);
  ids += (bh * rows + first + tid) * B, out += bh * stride + first + tid;
  Ids ahead[BATCH] = {};
  for (int k = 0; k < BATCH; k++)
    if (first + tid + k * STEP < stop) ahead[k] = load(ids + k * STEP * B);
  unsigned row[B];
  for (int i = 0; i < B; i++) row[i] = __cvta_generic_to_shared(lookup) + 4 * (lane / B * B + (lane + i) % B);
  for (int i = tid; i < BINS; i += SCORES_THREADS) tally[i] = 0;
  chain();
  if (first >= end) return;
  table += bh * PACKS * SIZE * B / 4;
  for (int i = tid; i < PACKS * SIZE * B / 4; i += SCORES_THREADS)
    for (int copy = 0; copy < BANKS / B; copy++)
      lookup[i / (B / 4) * (BANKS / 4) + copy * (B / 4) + i % (B / 4)] = table[i];
  __syncthreads();
  for (int at = first + tid; at < stop; at += BATCH * STEP, ids += BATCH * STEP * B, out += BATCH * STEP) {
    Ids now[BATCH];
    for (int k = 0; k < BATCH; k++) now[k] = ahead[k];
    for (int k = 0; k < BATCH; k++)
      if (at + (BATCH + k) * STEP < stop) ahead[k] = load(ids + (BATCH + k) * STEP * B);
    for (int k = 0; k < BATCH; k++) {
      const int best = score(turned(now[k], lane % B), row);
      if (at + k * STEP >= sink && at + k * STEP < stop) {
        atomicAdd(&tally[best], 1);
        out[k * STEP] = best;
      }
    }
  }
  __syncthreads();
  if (tid < BINS) {  // of keys that reach a score: in this warp's 32, and in those beyond
    int upto = tally[tid];
    for (int d = 1; d < 32; d *= 2) {
      const int beyond = __shfl_down_sync(ALL, upto, d);
      if (lane + d < 32) upto += beyond;
    }
    for (int i = (tid / 32 + 1) * 32 + lane; i < BINS; i += 32) upto += __reduce_add_sync(ALL, tally[i]);
    reach[(bh * gridDim.y + blockIdx.y) * BINS + tid] = upto;
    if (upto) atomicAdd(&totals[bh * BINS + tid], upto);
  }
}

// Sums over the threads before this one, and over all.
__device__ int scan(int x, int* warps, int& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int upto = x;
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(ALL, upto, d);
    if (lane >= d) upto += before;
  }
  __syncthreads();  // `warps` is free
  if (lane == 31) warps[warp] = upto;
  __syncthreads();
  const int others = lane < COMPACT_THREADS / 32 ? warps[lane] : 0;
  all = __reduce_add_sync(ALL, others);
  return __reduce_add_sync(ALL, lane < warp ? others : 0) + upto - x;
}

// Bit i: whether byte i of the 16 is above the threshold, or at it.
__device__ unsigned bits(uint4 bytes, unsigned threshold, bool at) {
  const unsigned four = threshold * 0x01010101, word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  unsigned all = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned hit = at ? __vcmpeq4(word[i], four) : __vcmpgtu4(word[i], four);
    all |= (hit & 0x01010101) * 0x10204080 >> 28 << 4 * i;
  }
  return all;
}

// Write the candidates of a span to where those of the spans before it end.
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS) compact(
    const unsigned char* scores, const int* reach, const int* totals, int* out, const int* retired, int heads,
    int stride, int sink, int least, int dense, int capacity, Lengths beta) {
  constexpr int TILE = 16 * COMPACT_THREADS;
  __shared__ int warps[COMPACT_THREADS / 32], room_of, above_of, ties_of;
  const long long bh = blockIdx.x;
  const int tid = threadIdx.x, part = blockIdx.y, end = retired[bh / heads], span = span_of(end);
  const int n = max(end - sink, 0), share = (int)((n * by_length(beta, n) + 999999) / 1000000);
  const int count = n <= dense ? n : min(n, max(share, least)), stop = min(part * span + span, end);
  out += bh * capacity, scores += bh * stride, totals += bh * BINS, reach += bh * gridDim.y * BINS;
  if (tid == 0) above_of = ties_of = 0;
  chain();
  if (part * span < end && count > 0) {
    auto load = [&](int row) {
      return row < stop ? *reinterpret_cast<const uint4*>(scores + row) : make_uint4(0, 0, 0, 0);
    };
    uint4 next = load(part * span + 16 * tid);
    const int total = tid < BINS ? totals[tid] : 0;  // they fall, to 0 beyond the best score
    const int reached = __syncthreads_count(tid < BINS && total >= count), threshold = reached - 1;
    if (tid == reached) room_of = count - total;  // for keys at the threshold, after those above it
    int above = 0, ties = 0;
    for (int p = tid; p < part; p += COMPACT_THREADS) {
      const int over = reach[p * BINS + reached];
      above += over, ties += reach[p * BINS + threshold] - over;
    }
    if (tid / 32 * 32 < part) {
      above = __reduce_add_sync(ALL, above), ties = __reduce_add_sync(ALL, ties);
      if (tid % 32 == 0) atomicAdd(&above_of, above), atomicAdd(&ties_of, ties);
    }
    __syncthreads();
    above = above_of, ties = ties_of;
    const int room = room_of;
    for (int first = part * span; first < stop; first += TILE) {
      const int row = first + 16 * tid;
      const uint4 s = next;
      next = load(row + TILE);
      const unsigned from = min(max(sink - row, 0), 16), to = min(max(stop - row, 0), 16);
      const unsigned live = (1u << to) - 1 & ~((1u << from) - 1);
      const unsigned more = bits(s, threshold, false) & live, tie = bits(s, threshold, true) & live;
      int all;
      const int before = scan(__popc(more) + (__popc(tie) << 16), warps, all);  // a tile has fewer than 2^15 keys
      int over = above + (before & 0xFFFF), level = ties + (before >> 16);
      for (unsigned left = more | tie; left; left &= left - 1) {
        const int i = __ffs(left) - 1;
        const bool is_tie = tie >> i & 1;
        if (!is_tie || level < room) out[over + min(level, room)] = row + i;
        is_tie ? level++ : over++;
      }
      above += all & 0xFFFF, ties += all >> 16;
    }
  }
  for (int i = count + part * COMPACT_THREADS + tid; i < capacity; i += gridDim.y * COMPACT_THREADS) out[i] = -1;
}
