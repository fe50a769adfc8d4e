// The rotated query and the votes of every centroid, as ops/pariskv/centroid_votes.py specifies them, for subspaces of
// 8 dimensions (256 centroids). A program handles one subspace of up to four queries.
//
// Compile-time constants: B subspaces (8, 16 or 32); F queries of a kv head, each the sum of G query heads; D channels;
// KIND, the type of the query (0 float, 1 half, 2 bfloat16).

#include "common.cuh"
#include "tensor.cuh"

constexpr int SIZE = 256, HALF = SIZE / 2, PACK = 4;
constexpr int FIELDS = F < PACK ? F : PACK, THREADS = HALF * FIELDS;
constexpr int LANES = 16;  // threads that sum up one coordinate
constexpr unsigned long long WALSH = 0x963C5AF066CCAA00;  // byte j: signs of row j of the 8 x 8 Hadamard matrix
__constant__ int PERCENT[6] = {5, 15, 30, 50, 75, 100};

struct Flips { unsigned at[8]; };  // one bit per channel: whether its sign is flipped

// Add eight channels of a query to `x`, from channel `first` on; channels beyond D count as 0.
__device__ void add(float (&x)[8], const void* q, int first) {
  if constexpr (KIND == 0) {
    for (int i = 0; i < 8; i++)
      if (first + i < D) x[i] += static_cast<const float*>(q)[first + i];
    return;
  }
  const unsigned short* at = static_cast<const unsigned short*>(q) + first;
  unsigned word[4] = {};
  if (first + 8 <= D && reinterpret_cast<unsigned long long>(at) % 16 == 0) {
    const uint4 v = *reinterpret_cast<const uint4*>(at);
    word[0] = v.x, word[1] = v.y, word[2] = v.z, word[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (first + i < D) word[i / 2] |= (unsigned)at[i] << 16 * (i % 2);
  }
  for (int i = 0; i < 8; i++) {
    const unsigned half = word[i / 2] >> 16 * (i % 2) & 0xFFFF;
    x[i] += KIND == 1 ? number(half) : __uint_as_float(half << 16);
  }
}

// One coordinate of the rotated query, before scaling. LANES threads compute it together, and each of them returns it.
__device__ float rotate(const char* q, int stride, int coordinate, const Flips& flips) {
  constexpr int BYTES = KIND ? 2 : 4;
  float y = 0;
  for (int eight = threadIdx.x % LANES; eight < B; eight += LANES) {
    float x[8] = {};
    for (int g = 0; g < G; g++) add(x, q + (long long)g * stride * BYTES, 8 * eight);
    unsigned minus = flips.at[eight / 4] >> eight % 4 * 8 ^ (unsigned)(WALSH >> coordinate % 8 * 8);
    if (__popc(coordinate & 8 * eight) % 2) minus = ~minus;
    for (int i = 0; i < 8; i++) y += minus >> i & 1 ? -x[i] : x[i];
  }
  for (int d = LANES / 2; d; d /= 2) y += __shfl_xor_sync(ALL, y, d);
  return y;
}

// Prefix sums of two numbers over the HALF threads of a query (`upto`), and their totals (`all`); `warps` is scratch.
__device__ void scan(int2& upto, int2& all, int2 (&warps)[HALF / 32]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % HALF / 32;
  for (int d = 1; d < 32; d *= 2) {  // as `sum_upto`, for both numbers
    const int x = __shfl_up_sync(ALL, upto.x, d), y = __shfl_up_sync(ALL, upto.y, d);
    if (lane >= d) upto.x += x, upto.y += y;
  }
  if (lane == 31) warps[warp] = upto;
  __syncthreads();
  all = {0, 0};
  for (int i = 0; i < HALF / 32; i++) {
    if (i == warp) upto.x += all.x, upto.y += all.y;
    all.x += warps[i].x, all.y += warps[i].y;
  }
}

// The number of absolute scores of a query above `s`.
__device__ int above(const float (&scores)[HALF], float s) {
  float count = 0;
  for (int i = 0; i < HALF; i += 4) {
    const float4 t = *reinterpret_cast<const float4*>(&scores[i]);
    if (t.x > s) count += 1;
    if (t.y > s) count += 1;
    if (t.z > s) count += 1;
    if (t.w > s) count += 1;
  }
  return count;
}

// Opposite patterns have opposite scores, so it suffices to rank the absolute scores of the pairs. The rank of a pair
// is the number of pairs above it. Pairs of equal score share a rank, and `keys[rank]` sums their numbers of keys.
extern "C" __global__ void __launch_bounds__(THREADS) votes(
    const char* q, const int* counts, float* rotated, unsigned* table, const int* ring_begin, int q_b, int q_h, int heads,
    int sink, float scale, ShareByLength rho, const __grid_constant__ Flips flips) {
  __shared__ __align__(16) float scores[FIELDS][HALF];
  __shared__ int2 keys[FIELDS][HALF], warps[FIELDS][HALF / 32];
  __shared__ float x[FIELDS][8];
  __shared__ int limits[6];
  __shared__ __align__(4) unsigned char got[SIZE][PACK];
  const long long bh = blockIdx.x, b = blockIdx.x / heads, h = blockIdx.x % heads;  // a 32-bit division
  const int space = blockIdx.y, pack = blockIdx.z, f = threadIdx.x / HALF, pair = threadIdx.x % HALF;
  const int field = pack * PACK + f;
  for (int i = threadIdx.x; i < SIZE; i += THREADS) reinterpret_cast<unsigned*>(got)[i] = 0;
  keys[f][pair] = {0, 0};
  wait_for_previous();
  int up = 0, down = 0;
  if (field < F) {
    const int* count = counts + (bh * B + space) * SIZE;
    up = count[pair], down = count[SIZE - 1 - pair];
    const int j = pair / LANES, coordinate = space * 8 + j;
    const float y = rotate(q + (b * q_b + (h * F + field) * G * q_h) * (KIND ? 2 : 4), q_h, coordinate, flips);
    if (pair % LANES == 0) x[f][j] = y, rotated[(bh * F + field) * B * 8 + coordinate] = y * scale;
  }
  if (threadIdx.x < 6) {
    const int n = max(ring_begin[b] - sink, 0);
    limits[threadIdx.x] = (int)((n * share_by_length(rho, n) * PERCENT[threadIdx.x] + 99999999) / 100000000);
  }
  __syncthreads();
  float s = 0;
  for (int j = 0; j < 8; j++) s += pair >> j & 1 ? x[f][j] : -x[f][j];
  const bool negative = s < 0;
  s = fabsf(s), scores[f][pair] = s;
  __syncthreads();
  const int rank = above(scores[f], s);
  atomicAdd(&keys[f][rank].x, negative ? down : up), atomicAdd(&keys[f][rank].y, negative ? up : down);
  __syncthreads();
  const int2 here = keys[f][pair];  // keys of rank `pair`: of positive and of negative scores
  int2 upto = here, all;
  scan(upto, all, warps[f]);
  keys[f][pair] = {upto.x - here.x, all.x + all.y - upto.y};  // keys of centroids with strictly better scores
  __syncthreads();
  if (field < F) {
    const int2 before = keys[f][rank];
    int high = 0, low = 0;
    for (int i = 0; i < 6; i++) high += before.x < limits[i], low += before.y < limits[i];
    const int c = negative ? SIZE - 1 - pair : pair;
    got[c][f] = high;
    got[SIZE - 1 - c][f] = s == 0 ? high : low;
  }
  __syncthreads();
  table += (bh * gridDim.z + pack) * SIZE * B + space;
  for (int i = threadIdx.x; i < SIZE; i += THREADS) table[i * B] = reinterpret_cast<unsigned*>(got)[i];
}
