// The rotated query and the votes of every centroid, as ops/pariskv/centroid_votes.py specifies them, for subspaces of
// 8 dimensions (256 centroids). A warp handles one subspace of one query, and a program PER_PROGRAM subspaces of up to four
// queries.
//
// Compile-time constants: B subspaces (8, 16 or 32), PER_PROGRAM of them (1 or 4) in a program; F queries of a kv head, each
// the sum of G query heads; D channels; KIND, the type of the query (0 float, 1 half, 2 bfloat16).

#include "common.cuh"
#include "tensor.cuh"

constexpr int SIZE = 256, HALF = SIZE / 2, EACH = HALF / 32;  // pairs of opposite centroids: HALF, EACH of a lane
constexpr int PACK = 4, FIELDS = F < PACK ? F : PACK, WARPS = FIELDS * PER_PROGRAM;
__constant__ int PERCENT[6] = {5, 15, 30, 50, 75, 100};
static_assert(EACH == 4 && B % PER_PROGRAM == 0);

struct Flips { unsigned at[8]; };  // one bit per channel: whether its sign is flipped
struct __align__(4 * PER_PROGRAM) Entries { unsigned at[PER_PROGRAM]; };  // of the table, beside one another

// Add eight channels of a query to `x`, from channel `first` on; channels beyond D count as 0.
__device__ void add(float (&x)[8], const void* q, int first) {
  if constexpr (KIND == 0) {
    for (int i = 0; i < 8; i++)
      if (first + i < D) x[i] += __ldcg(static_cast<const float*>(q) + first + i);
    return;
  }
  const unsigned short* at = static_cast<const unsigned short*>(q) + first;
  unsigned word[4] = {};
  if (first + 8 <= D && reinterpret_cast<unsigned long long>(at) % 16 == 0) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(at));
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (first + i < D) word[i / 2] |= (unsigned)__ldcg(at + i) << 16 * (i % 2);
  }
  for (int i = 0; i < 8; i++) {
    const unsigned half = word[i / 2] >> 16 * (i % 2) & 0xFFFF;
    x[i] += KIND == 1 ? number(half) : __uint_as_float(half << 16);
  }
}

// Eight coordinates of the rotated query, before scaling: lane 4 j returns coordinate j of the subspace, and so do the
// three lanes after it. A lane starts with eight channels: their products with the rows of the 8 x 8 Hadamard matrix. The
// sign of channel 8 l + i in coordinate j is the parity of the bits of `space` & l and of j & i.
__device__ float rotate(const char* q, int stride, int space, const Flips& flips) {
  float y[8] = {};
  if (lane() < B) {
    for (int g = 0; g < G; g++) add(y, q + (long long)g * stride * (KIND ? 2 : 4), 8 * lane());
    const unsigned minus = flips.at[lane() / 4] >> lane() % 4 * 8;
    for (int i = 0; i < 8; i++) y[i] = minus >> i & 1 ? -y[i] : y[i];
    for (int d = 1; d < 8; d *= 2)
      for (int i = 0; i < 8; i++)
        if (!(i & d)) {
          const float a = y[i], b = y[i + d];
          y[i] = a + b, y[i + d] = a - b;
        }
    if (__popc(space & lane()) % 2)
      for (int i = 0; i < 8; i++) y[i] = -y[i];
  }
  for (int n = 4; n; n /= 2)  // add up over the lanes; a lane keeps half of its coordinates, and sends the others
    for (int i = 0; i < n; i++) {
      const bool upper = lane() & 4 * n;
      const float sent = __shfl_xor_sync(ALL, upper ? y[i] : y[i + n], 4 * n);
      y[i] = (upper ? y[i + n] : y[i]) + sent;
    }
  y[0] += __shfl_xor_sync(ALL, y[0], 2);
  return y[0] + __shfl_xor_sync(ALL, y[0], 1);
}

// Sort the numbers of a warp, the largest first. Lane i has numbers EACH * i and the next. Sorted runs merge in pairs: the
// first number of a run is compared with the last number of the other, then numbers d apart with each other.
__device__ void sort(float (&x)[EACH]) {
#pragma unroll
  for (int run = 2; run <= HALF; run *= 2)  // the length after the merge
#pragma unroll
    for (int d = run / 2; d; d /= 2) {
      const int apart = d == run / 2 ? run - 1 : d;  // number `at` is compared with number `at` ^ `apart`
      if (apart < EACH) {
        for (int i = 0; i < EACH; i++)
          if (!(i & d)) {
            const float one = x[i], other = x[i ^ apart];
            x[i] = fmaxf(one, other), x[i ^ apart] = fminf(one, other);
          }
      } else {
        const bool smaller = lane() & d / EACH;
        float other[EACH];
        for (int i = 0; i < EACH; i++) other[i] = __shfl_xor_sync(ALL, x[i ^ apart % EACH], apart / EACH);
        for (int i = 0; i < EACH; i++) x[i] = (other[i] > x[i]) != smaller ? other[i] : x[i];
      }
    }
}

// For each score, how many of the sorted numbers are above its absolute value. (With pointers that move instead of numbers,
// NVRTC 13 makes wrong code of the last step.)
__device__ void rank(int (&above)[EACH], const float (&sorted)[HALF], const float (&score)[EACH]) {
  for (int i = 0; i < EACH; i++) above[i] = 0;
#pragma unroll
  for (int d = HALF / 2; d; d /= 2)
    for (int i = 0; i < EACH; i++)
      if (sorted[above[i] + d - 1] > fabsf(score[i])) above[i] += d;
}

// What a warp keeps in shared memory. keys[0] and keys[1]: the number of keys of the positive and of the negative scores of
// each rank. `vote` replaces keys[0] by the votes of the ranks: byte 0 for a positive score, byte 1 for a negative one.
struct Scratch {
  float sorted[HALF];
  int keys[2][HALF];
};

// Turn the numbers of keys into votes. Better than a positive score are the positive scores of lower ranks. Better than a
// negative score are all positive scores, and the negative scores of higher ranks.
__device__ void vote(Scratch& s, const int (&limits)[6]) {
  int4* const to = reinterpret_cast<int4*>(s.keys[0]) + lane();
  const int4 high = *to, low = reinterpret_cast<const int4*>(s.keys[1])[lane()];
  const int high_keys[EACH] = {high.x, high.y, high.z, high.w}, low_keys[EACH] = {low.x, low.y, low.z, low.w};
  const int high_upto = sum_upto(high.x + high.y + high.z + high.w), low_upto = sum_upto(low.x + low.y + low.z + low.w);
  int before_high = high_upto - (high.x + high.y + high.z + high.w);
  int before_low = __shfl_sync(ALL, high_upto + low_upto, 31) - low_upto + (low.x + low.y + low.z + low.w);
  int votes[EACH];
  for (int i = 0; i < EACH; i++) {
    int of_high = 0, of_low = 0;
    before_low -= low_keys[i];
    for (int limit : limits) {
      if (before_high < limit) of_high++;
      if (before_low < limit) of_low++;
    }
    before_high += high_keys[i];
    votes[i] = of_high | of_low << 8;
  }
  *to = {votes[0], votes[1], votes[2], votes[3]};
}

// Opposite patterns have opposite scores, so it suffices to rank the absolute scores of the pairs. The rank of a pair
// is the number of pairs above it. Pairs of equal score share a rank.
extern "C" __global__ void __launch_bounds__(32 * WARPS) votes(
    const char* q, const int* counts, float* rotated, unsigned* table, const int* ring_begin, int q_b, int q_h, int heads,
    int sink, float scale, ShareByLength rho, const __grid_constant__ Flips flips) {
  __shared__ __align__(16) Scratch scratch[WARPS];
  // Centroid c is at place c % 4 * 64 + c / 4, so that lanes write to different banks.
  __shared__ __align__(4) unsigned char entries[PER_PROGRAM][SIZE][PACK];
  __shared__ int limits[6];
  const long long bh = blockIdx.x, b = blockIdx.x / heads, h = blockIdx.x % heads;  // a 32-bit division
  const int own = warp() / FIELDS, f = warp() % FIELDS, space = blockIdx.y * PER_PROGRAM + own;
  const int field = blockIdx.z * PACK + f;
  Scratch& s = scratch[warp()];
  for (int i = 0; i < 2; i++) reinterpret_cast<int4*>(s.keys[i])[lane()] = {};
  if (F % PACK)
    for (int i = threadIdx.x; i < PER_PROGRAM * SIZE; i += 32 * WARPS) reinterpret_cast<unsigned*>(entries)[i] = 0;
  if (threadIdx.x < 6) {
    const int n = max(__ldcg(ring_begin + b) - sink, 0);
    limits[threadIdx.x] = (int)((n * share_by_length(rho, n) * PERCENT[threadIdx.x] + 99999999) / 100000000);
  }
  float y = 0, score[EACH] = {};  // y: a coordinate of the query. score: of the pair with pattern EACH * lane() + i
  int above[EACH];
  if (field < F) {
    y = rotate(q + (b * q_b + (h * F + field) * G * q_h) * (KIND ? 2 : 4), q_h, space, flips);
    float x[8];
    for (int j = 0; j < 8; j++) x[j] = __shfl_sync(ALL, y, 4 * j);
    float of_lane = -x[7];
    for (int j = 2; j < 7; j++) of_lane += lane() >> j - 2 & 1 ? x[j] : -x[j];
    float sorted[EACH];
    for (int i = 0; i < EACH; i++) {
      score[i] = of_lane + ((i & 1 ? x[0] : -x[0]) + (i & 2 ? x[1] : -x[1]));
      sorted[i] = fabsf(score[i]);
    }
    sort(sorted);
    reinterpret_cast<float4*>(s.sorted)[lane()] = {sorted[0], sorted[1], sorted[2], sorted[3]};
  }
  __syncthreads();
  if (field < F) rank(above, s.sorted, score);
  wait_for_previous();
  if (field < F) {
    if (lane() % 4 == 0) rotated[((bh * F + field) * B + space) * 8 + lane() / 4] = y * scale;
    const int4* const count = reinterpret_cast<const int4*>(counts + (bh * B + space) * SIZE);
    const int4 first = count[lane()], last = count[SIZE / EACH - 1 - lane()];
    const int up[EACH] = {first.x, first.y, first.z, first.w}, down[EACH] = {last.w, last.z, last.y, last.x};
    for (int i = 0; i < EACH; i++) {
      atomicAdd(&s.keys[0][above[i]], score[i] < 0 ? down[i] : up[i]);
      atomicAdd(&s.keys[1][above[i]], score[i] < 0 ? up[i] : down[i]);
    }
    __syncwarp();
    vote(s, limits);
    __syncwarp();
    for (int i = 0; i < EACH; i++) {
      const int both = s.keys[0][above[i]], pair = EACH * lane() + i, better = score[i] < 0 ? SIZE - 1 - pair : pair;
      const auto put = [&](int c, int count) { entries[own][c % EACH * (SIZE / EACH) + c / EACH][f] = count; };
      put(better, both & 255), put(SIZE - 1 - better, score[i] == 0 ? both & 255 : both >> 8);
    }
  }
  __syncthreads();
  table += (bh * gridDim.z + blockIdx.z) * SIZE * B + blockIdx.y * PER_PROGRAM;
  for (int i = threadIdx.x; i < SIZE; i += 32 * WARPS) {
    const int c = i % (SIZE / EACH) * EACH + i / (SIZE / EACH);
    Entries row;
    for (int k = 0; k < PER_PROGRAM; k++) row.at[k] = *reinterpret_cast<const unsigned*>(entries[k][i]);
    *reinterpret_cast<Entries*>(table + c * B) = row;
  }
}
