#pragma once

// Attention of up to 8 query heads of a kv head by the warps of a program: the running softmax of a warp, and the sum over
// the warps.
//
// Compile-time constants: D channels (a multiple of 64); G query heads; WARPS of a program.

#include "common.cuh"

constexpr int TILE = 16, HEADS = 8;  // tokens and query heads of a product
constexpr int THREADS = 32 * WARPS;
constexpr int PAIRS = D / 16;  // pairs of channels that a thread adds up, for two query heads
constexpr int STRIDE = D + 4;  // between query heads in shared memory: the threads of a warp use all banks

// The softmax of a warp so far. Thread 4 g + t has the largest logit of query head g, a part of the total, and the sums of
// its channels for heads 2 t and 2 t + 1.
struct State {
  float top, total, sum[PAIRS][4];
};

// The numbers of query heads 2 t and 2 t + 1; thread 4 g + t has the number of head g.
__device__ float2 of_columns(float x) {
  const int t = threadIdx.x % 4;
  return {__shfl_sync(ALL, x, 8 * t), __shfl_sync(ALL, x, 8 * t + 4)};
}

// exp(x - peak); 0 if x is -inf, even if `peak` is -inf too.
__device__ float share(float x, float peak) { return x == none() ? 0 : __expf(x - peak); }

__device__ void scale_by(State& s, float factor) {
  const float2 f = of_columns(factor);
  s.total *= factor;
  for (int j = 0; j < PAIRS; j++)
    for (int c = 0; c < 4; c++) s.sum[j][c] *= c % 2 ? f.y : f.x;
}

// The row (of 16) of a thread's r-th number.
__device__ int column(int r) { return 2 * (threadIdx.x % 4) + r % 2 + r / 2 * 8; }

__device__ float capped(float logit, float softcap) {
  if (softcap > 0)  // tanh; rounded alike wherever it is inlined
    logit = __fsub_rn(softcap, __fdividef(2 * softcap, 1 + __expf(__fdividef(2 * logit, softcap))));
  return logit;
}

// The largest number of a query head over 16 rows.
__device__ float over_columns(const float (&x)[4]) {
  float peak = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
  return fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
}

// The channel of number c of a head in the order of the products: numbers 2 j and 2 j + 1 of `State::sum` come from it.
__device__ int channel_of(int c) { return c / 64 * 64 + c % 8 * 8 + c / 16 % 4 * 2 + c / 8 % 2; }

// Add up over the warps of a program. Calls sum(i, x) once for each i < G * D: number i % D, in the order of the products,
// of head i / D. Every warp calls end(head, top, total) once for each head. `parts`: shared memory [WARPS, G, STRIDE].
template <class Sum, class End> __device__ void join_warps(State& s, float* parts, Sum sum, End end) {
  __shared__ float tops[WARPS][HEADS], totals[WARPS][HEADS];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (t == 0) tops[warp][g] = s.top;
  __syncthreads();
  float top = none();
  for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][g]);
  scale_by(s, share(s.top, top));
  s.total += __shfl_xor_sync(ALL, s.total, 1), s.total += __shfl_xor_sync(ALL, s.total, 2);
  if (t == 0) totals[warp][g] = s.total;
  for (int j = 0; j < PAIRS; j++)
    for (int c = 0; c < 4; c++)
      if (2 * t + c % 2 < G) parts[(warp * G + 2 * t + c % 2) * STRIDE + (2 * j + c / 2) * 8 + g] = s.sum[j][c];
  __syncthreads();
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    float x = 0;
    for (int w = 0; w < WARPS; w++) x += parts[(w * G + i / D) * STRIDE + i % D];
    sum(i, x);
  }
  if (t == 0 && g < G) {
    float total = 0;
    for (int w = 0; w < WARPS; w++) total += totals[w][g];
    end(g, top, total);
  }
}
