// Stage II of ParisKV, as ops/pariskv/rerank.py specifies it, for subspaces of 8 dimensions and up to 8 query heads.
//
// Why not Triton: a dot product does not care in which order it takes the channels. So each thread of four takes a
// quarter of a candidate's codes, 16 bytes of the usual 64, and they are unpacked right where the tensor cores want
// them; Triton moves them there through shared memory, and its programs are too large to hide that the rows are
// scattered all over memory.
//
// Set by the compilation: B subspaces (8, 16 or 32), F query heads, WARPS of a program, programs RESIDENT on a
// multiprocessor, GROUP scores that share a peak, and the fp16 bits of the 8 magnitudes, low bytes (LOW0, LOW1) and
// high bytes (HIGH0, HIGH1) apart.

#include "common.cuh"
#include "tensor.cuh"

constexpr int PER_WARP = 32;
constexpr int WORDS = B / 4;  // of codes, a subspace each, and of weights, that a thread has of a candidate
constexpr int TILES = PER_WARP / 16, ROWS = 2 * TILES;  // a product is of 16 candidates; those a thread has codes of

static_assert(GROUP == 16, "a product, a peak");

__device__ unsigned lookup(unsigned low, unsigned high, unsigned at) {
  unsigned x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(high), "r"(at));
  return x;
}

// The 8 directions behind a word of codes, in pairs, times the weight of their subspace. A code is a sign (1: positive)
// and a magnitude; `prmt` looks up four of these at a time, and spreads four signs.
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

// What a thread has of the candidates of its warp.
struct Rows {
  Run<WORDS> word[ROWS];
  Run<WORDS / 2> weight[ROWS];
};

// Those of the warp's 32 `names`, one a thread; 0 of empty ones.
__device__ Rows load(const unsigned* codes, const unsigned short* weights, int names) {
  Rows x = {};
  for (int r = 0; r < ROWS; r++) {
    const int at = __shfl_sync(ALL, names, threadIdx.x % 32 / 4 + 8 * r);
    if (at >= 0) {
      x.word[r] = load<2 * WORDS>(codes + (long long)at * B);
      x.weight[r] = load<WORDS>(weights + (long long)at * B);
    }
  }
  return x;
}

// The best estimate of a candidate over the query heads, for all four threads.
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
      float most = 2 * quarter < F ? sum[2 * r] : none();
      if (2 * quarter + 1 < F) most = fmaxf(most, sum[2 * r + 1]);
      most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
      best[2 * tile + r] = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
    }
  }
}

// The scores of 32 candidates, and their peaks: `best` is of candidates `row`, `row` + 8 and so on of these.
__device__ void write(
    float* out, float* peaks, const float (&best)[ROWS], int first, int names, int total, int groups) {
  const int row = lane() / 4, quarter = lane() % 4, at = row + 8 * quarter;
  float score = best[0];  // of candidate number `at`
  for (int r = 1; r < ROWS; r++) score = quarter == r ? best[r] : score;
  if (__shfl_sync(ALL, names, at) < 0) score = none();
  if (first + at < total) out[first + at] = score;
  float peak = fmaxf(score, none());  // NaN is nobody's best
  for (int d = 4; d < 32; d *= 2) peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, d));
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
  const int group = first / GROUP + quarter / 2;
  if (row == 0 && quarter % 2 == 0 && group < groups) peaks[group] = peak;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) rerank(
    const float* rotated, const unsigned* codes, const unsigned short* weights, const int* candidates, float* out,
    float* peaks, int rows, int total, int groups) {
  const long long bh = blockIdx.x;
  const int row = lane() / 4, quarter = lane() % 4, step = gridDim.y * WARPS * PER_WARP;
  int first = (blockIdx.y * WARPS + warp()) * PER_WARP;
  candidates += bh * total, out += bh * total, peaks += bh * groups;
  codes += bh * rows * B + quarter * WORDS, weights += bh * rows * B + quarter * WORDS;
  auto name = [&](int first) { return first + lane() < total ? candidates[first + lane()] : -1; };
  chain();
  int names = name(first), soon = name(first + step);
  Rows here = load(codes, weights, names);
  unsigned query[B] = {};  // of head number `row`, as the second factor wants it: a word's four pairs in turn
  if (row < F) {
    const float4* from = reinterpret_cast<const float4*>(rotated + ((bh * F + row) * B + quarter * WORDS) * 8);
    for (int i = 0; i < 2 * WORDS; i++) {
      const float4 v = from[i];
      query[2 * i] = halves(v.x, v.y), query[2 * i + 1] = halves(v.z, v.w);
    }
  }
  for (; first < total; first += step) {
    const Rows ahead = load(codes, weights, soon);  // on their way during the products
    const int later = name(first + 2 * step);
    float best[ROWS];
    estimate(best, here, query);
    write(out, peaks, best, first, names, total, groups);
    here = ahead, names = soon, soon = later;
  }
}
