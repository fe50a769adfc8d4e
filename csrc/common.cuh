#pragma once

constexpr unsigned ALL = 0xFFFFFFFF;  // the mask of all threads of a warp

__device__ inline float none() { return __int_as_float(0xFF800000); }  // -inf

constexpr unsigned LEAST = 0x00800000;  // the key of the lowest finite score

// An unsigned key in the order of the scores; -0 equals +0. NaN and -inf, which are never selected, are below LEAST.
__device__ inline unsigned ordered(float x) {
  const int bits = __float_as_int(fmaxf(x, none()) + 0.0f);
  return bits ^ (bits >> 31 | 0x80000000);
}

// The score of a key of `ordered`.
__device__ inline float number_of(unsigned key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000 : ~key); }

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }

// The address in shared memory of this program.
__device__ inline unsigned here(const void* at) { return __cvta_generic_to_shared(at); }

// The sum of x over the lanes of the warp up to this lane, inclusive.
__device__ inline int sum_upto(int x) {
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(ALL, x, d);
    if (lane() >= d) x += before;
  }
  return x;
}

// find(bins, wanted): the first of 32 * EACH bins at which the running sum reaches `wanted` (else the last bin), the
// sum before that bin, and the count inside it. The whole warp calls it; bins are aligned to 16 bytes.
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
  const int upto = sum_upto(all), from = __ffs(__ballot_sync(ALL, upto >= wanted)) - 1;  // -1: lane 31
  int bin = EACH * lane(), before = upto - all, inside = each[0];
  for (int i = 1; i < EACH; i++)
    if (before + inside < wanted) before += inside, inside = each[i], bin++;
  return {__shfl_sync(ALL, bin, from), __shfl_sync(ALL, before, from), __shfl_sync(ALL, inside, from)};
}

// Make the compiler compute x here and not at its first use. Work ahead of `wait_for_previous` costs no time, because
// the kernel would only wait there.
__device__ inline void now(const void* x) { asm volatile("" ::"l"(x)); }
__device__ inline void now(int x) { asm volatile("" ::"r"(x)); }

// Keep x in a register. Without this the compiler computes x again at each use.
template <class T> __device__ inline void hold(T*& x) { asm("" : "+l"(x)); }
__device__ inline void hold(unsigned& x) { asm("" : "+r"(x)); }

// Programmatic dependent launch: wait until the kernels before this one are done, then let the next one start. So a
// kernel starts when the kernel directly before it is past this call. Ahead of this call a kernel may read only what
// kernels before that one wrote, and not through the L1. The kernel directly before it may still write all other data.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Prefetch the 128 bytes at `x` into the L2. It may be called ahead of `wait_for_previous`, while kernels before this
// one still write these bytes: a prefetch reads no value.
__device__ inline void ask(const void* x) { asm volatile("prefetch.global.L2 [%0];" ::"l"(x)); }

// A share of a row, in millionths, by the row's number of keys n: share[i] for the first i with n < below[i], else
// share[3].
struct ShareByLength { int below[3], share[4]; };

__device__ inline long long share_by_length(const ShareByLength& x, int n) {
  return n < x.below[0] ? x.share[0] : n < x.below[1] ? x.share[1] : n < x.below[2] ? x.share[2] : x.share[3];
}
