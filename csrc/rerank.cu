// Stage II of ParisKV, as ops/pariskv/rerank.py specifies it, for subspaces of 8 dimensions and up to 8 query heads.
//
// Why not Triton: a dot product may take the channels in any order. So four threads each take a quarter of the codes of
// a candidate, 16 of 64 bytes at dim 128, and unpack them in the registers that the tensor cores read. Triton moves
// them through shared memory, and its programs are too large to hide the latency of scattered rows.
//
// Compile-time constants: B subspaces (8, 16 or 32); F query heads; WARPS of a program; programs RESIDENT on a
// multiprocessor; GROUP scores that share a peak; the fp16 bits of the 8 magnitudes, low bytes (LOW0, LOW1) and high
// bytes (HIGH0, HIGH1); PAGE tokens of a block, or 0 where each row has a pool of its own.

#include "common.cuh"
#include "table.cuh"
#include "tensor.cuh"

constexpr int PER_WARP = 32;  // candidates of a warp
constexpr int WORDS = B / 4;  // subspaces of a candidate that a thread holds: words of codes, and weights
constexpr int TILES = PER_WARP / 16, ROWS = 2 * TILES;  // a product takes 16 candidates; a thread holds codes of ROWS

static_assert(GROUP == 16, "a peak is of the candidates of one product");

__device__ unsigned lookup(unsigned low, unsigned high, unsigned at) {
  unsigned x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(at));
  return x;
}

// The 8 directions of a word of codes, in pairs of fp16, times the weight of their subspace. A code is a sign bit (1:
// positive) and the number of a magnitude. One `prmt` looks up four magnitudes, or spreads four sign bits.
__device__ void unpack(unsigned (&pairs)[4], unsigned word, unsigned weight) {
  const unsigned at = word & 0x77777777, signs = word << 4;
  for (int half = 0; half < 2; half++) {
    const unsigned low = lookup(LOW0, LOW1, at >> 16 * half);
    const unsigned positive = lookup(signs, word, half ? 0xFBEA : 0xD9C8);
    const unsigned high = lookup(HIGH0, HIGH1, at >> 16 * half) ^ (~positive & 0x80808080);
    pairs[2 * half] = times(lookup(low, high, 0x5140), weight);
    pairs[2 * half + 1] = times(lookup(low, high, 0x7362), weight);
  }
}

// The codes and weights that a thread holds of the candidates of its warp.
struct Rows {
  Run<WORDS> word[ROWS];
  Run<WORDS / 2> weight[ROWS];
};

// Load codes and weights of the 32 candidates of the warp. Each thread has the pool row of one candidate in
// `pool_rows`. Empty candidates get zeros.
__device__ Rows load(const unsigned* codes, const unsigned short* weights, int pool_rows) {
  Rows x = {};
  for (int r = 0; r < ROWS; r++) {
    const int at = __shfl_sync(ALL, pool_rows, threadIdx.x % 32 / 4 + 8 * r);
    if (at >= 0) {
      x.word[r] = load<2 * WORDS>(codes + (long long)at * B);
      x.weight[r] = load<WORDS>(weights + (long long)at * B);
    }
  }
  return x;
}

// The best estimate of each candidate over the query heads. All four threads of a candidate get it.
__device__ void estimate(float (&best)[ROWS], const Rows& x, const unsigned (&query)[B]) {
  const int quarter = threadIdx.x % 4;
  for (int tile = 0; tile < TILES; tile++) {
    float sum[4] = {};
    for (int w = 0; w < WORDS; w++) {
      unsigned upper[4], lower[4];
      const int splat = w % 2 ? 0x3232 : 0x1010;
      unpack(upper, x.word[2 * tile].at[w], __byte_perm(x.weight[2 * tile].at[w / 2], 0, splat));
      unpack(lower, x.word[2 * tile + 1].at[w], __byte_perm(x.weight[2 * tile + 1].at[w / 2], 0, splat));
      for (int half = 0; half < 2; half++)
        multiply_add(sum, {upper[2 * half], lower[2 * half], upper[2 * half + 1], lower[2 * half + 1]},
                     query[4 * w + 2 * half], query[4 * w + 2 * half + 1]);
    }
    for (int r = 0; r < 2; r++) {
      float best_of_heads = 2 * quarter < F ? sum[2 * r] : none();
      if (2 * quarter + 1 < F) best_of_heads = fmaxf(best_of_heads, sum[2 * r + 1]);
      best_of_heads = fmaxf(best_of_heads, __shfl_xor_sync(ALL, best_of_heads, 1));
      best[2 * tile + r] = fmaxf(best_of_heads, __shfl_xor_sync(ALL, best_of_heads, 2));
    }
  }
}

// Write the scores of 32 candidates and their peaks. best[r] belongs to candidate `row` + 8 r.
__device__ void write(
    float* out, float* peaks, const float (&best)[ROWS], int first, int pool_rows, int total, int groups) {
  const int row = lane() / 4, quarter = lane() % 4, at = row + 8 * quarter;
  float score = best[0];  // becomes that of candidate `at`
  for (int r = 1; r < ROWS; r++) score = quarter == r ? best[r] : score;
  if (__shfl_sync(ALL, pool_rows, at) < 0) score = none();
  if (first + at < total) out[first + at] = score;
  float peak = fmaxf(score, none());  // a NaN is no peak
  for (int d = 4; d < 32; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, d));
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
  const int group = first / GROUP + quarter / 2;
  if (row == 0 && quarter % 2 == 0 && group < groups) peaks[group] = peak;
}

// Write the scores and peaks of 32 places without a candidate.
__device__ void write_none(float* out, float* peaks, int first, int total, int groups) {
  const int group = first / GROUP + lane();
  if (first + lane() < total) out[first + lane()] = none();
  if (lane() < PER_WARP / GROUP && group < groups) peaks[group] = none();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) rerank(
    const float* rotated, const unsigned* codes, const unsigned short* weights, const int* candidates, float* out,
    float* peaks, const int* blocks, int places, int heads, int rows, int total, int groups) {
  const long long bh = blockIdx.x;
  const int row = lane() / 4, quarter = lane() % 4, step = gridDim.y * WARPS * PER_WARP;
  int first = (blockIdx.y * WARPS + warp()) * PER_WARP;
  const Table<PAGE> pool(blocks, places, blockIdx.x, heads, rows);
  candidates += bh * total, out += bh * total, peaks += bh * groups;
  codes += pool.first * B + quarter * WORDS, weights += pool.first * B + quarter * WORDS;
  auto candidate = [&](int first) { return first + lane() < total ? candidates[first + lane()] : -1; };
  auto row_of = [&](int position) {
    return position < 0 ? -1 : (int)pool.row(pool.block(position, position + 1), position);
  };
  wait_for_previous();
  int pool_rows = row_of(candidate(first)), next_rows = row_of(candidate(first + step));
  int after_next = candidate(first + 2 * step);
  Rows here = load(codes, weights, pool_rows);
  unsigned query[B] = {};  // of head `row`, in the layout of the second factor: four pairs per word
  if (row < F) {
    const float4* from = reinterpret_cast<const float4*>(rotated + ((bh * F + row) * B + quarter * WORDS) * 8);
    for (int i = 0; i < 2 * WORDS; i++) {
      const float4 v = from[i];
      query[2 * i] = halves(v.x, v.y), query[2 * i + 1] = halves(v.z, v.w);
    }
  }
  for (; first < total; first += step) {
    Rows ahead = {};
    if (__any_sync(ALL, next_rows >= 0)) ahead = load(codes, weights, next_rows);  // in flight during the products
    const int rows_after_next = row_of(after_next);
    after_next = candidate(first + 3 * step);
    if (__any_sync(ALL, pool_rows >= 0)) {
      float best[ROWS];
      estimate(best, here, query);
      write(out, peaks, best, first, pool_rows, total, groups);
    } else {  // behind the last candidate of the row
      write_none(out, peaks, first, total, groups);
    }
    here = ahead, pool_rows = next_rows, next_rows = rows_after_next;
  }
}
