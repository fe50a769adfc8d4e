#pragma once

constexpr unsigned ALL = 0xFFFFFFFF;  // threads of a warp

__device__ inline float none() { return __int_as_float(0xFF800000); }  // -inf

constexpr unsigned LEAST = 0x00800000;  // the key of the lowest finite score

// In the order of the scores, -0 beside +0; NaN and -inf, which are never chosen, are below LEAST.
__device__ inline unsigned ordered(float x) {
  const int bits = __float_as_int(fmaxf(x, none()) + 0.0f);
  return bits ^ (bits >> 31 | 0x80000000);
}

// And back.
__device__ inline float number_of(unsigned key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000 : ~key); }

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }

// The sum over the threads of a warp up to this one.
__device__ inline int sum_upto(int x) {
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(ALL, x, d);
    if (lane() >= d) x += before;
  }
  return x;
}

// Of 32 * EACH bins, 16 bytes aligned: the one in which the sum from the first on reaches `wanted`, or the last; the sum
// before it, and what it holds. For a whole warp.
struct Reached { int bin, before, inside; };

template <int EACH> __device__ inline Reached find(const int* bins, int wanted) {
  int each[EACH], all = 0;
  if constexpr (EACH % 4 == 0) {
    for (int i = 0; i < EACH; i += 4) {
      const int4 x = reinterpret_cast<const int4*>(bins)[(EACH * lane() + i) / 4];
      each[i] = x.x, each[i + 1] = x.y, each[i + 2] = x.z, each[i + 3] = x.w;
    }
  } else {
    for (int i = 0; i < EACH; i++) each[i] = bins[EACH * lane() + i];
  }
  for (int i = 0; i < EACH; i++) all += each[i];
  const int upto = sum_upto(all), from = __ffs(__ballot_sync(ALL, upto >= wanted)) - 1;  // -1 is lane 31 to a shuffle
  int bin = EACH * lane(), before = upto - all, inside = each[0];
  for (int i = 1; i < EACH; i++)
    if (before + inside < wanted) before += inside, inside = each[i], bin++;
  return {__shfl_sync(ALL, bin, from), __shfl_sync(ALL, before, from), __shfl_sync(ALL, inside, from)};
}

// To be computed here, and not where it is first used: what is done ahead of `chain` costs nothing.
__device__ inline void now(const void* x) { asm volatile("" ::"l"(x)); }
__device__ inline void now(int x) { asm volatile("" ::"r"(x)); }

// To be held in registers: the compiler would rather compute it anew wherever it is used.
template <class T> __device__ inline void hold(T*& x) { asm("" : "+l"(x)); }
__device__ inline void hold(unsigned& x) { asm("" : "+r"(x)); }

// Programmatic dependent launch: the kernels before this one are done; the next one may come. What a kernel reads
// ahead of this must be older than the kernel before it, if that one waited in the same way; so only what comes from
// before an earlier kernel of the same op may be.
__device__ inline void chain() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Ask for the 128 bytes at `x`, ahead of `chain`: they come to the L2 while the kernels before still run. Nothing is read,
// so it does not matter who writes them.
__device__ inline void ask(const void* x) { asm volatile("prefetch.global.L2 [%0];" ::"l"(x)); }

// A share of a row, in millionths, by its number of keys: share[i] for the first i with n < below[i], else share[3].
struct ShareByLength { int below[3], share[4]; };

__device__ inline long long share_by_length(const ShareByLength& x, int n) {
  return n < x.below[0] ? x.share[0] : n < x.below[1] ? x.share[1] : n < x.below[2] ? x.share[2] : x.share[3];
}
