#pragma once

// PTX without a name in C++: products on tensor cores, conversions between their types, and loads that bypass the L1.
struct __align__(16) Words { unsigned at[4]; };

template <int N>
struct Run { unsigned at[N]; };

// N values of 2 bytes, in one load up to N = 8.
template <int N>
__device__ inline Run<N / 2> load(const void* from) {
  Run<N / 2> x;
  if constexpr (N == 2) {
    x.at[0] = *static_cast<const unsigned*>(from);
  } else if constexpr (N == 4) {
    const uint2 v = *static_cast<const uint2*>(from);
    x.at[0] = v.x, x.at[1] = v.y;
  } else {
    for (int i = 0; i < N / 8; i++) {
      const uint4 v = static_cast<const uint4*>(from)[i];
      x.at[4 * i] = v.x, x.at[4 * i + 1] = v.y, x.at[4 * i + 2] = v.z, x.at[4 * i + 3] = v.w;
    }
  }
  return x;
}

// 16 bytes that no other thread reads: they take no room in the L1.
__device__ inline Words load_once(const void* from) {
  Words x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.at[0]), "=r"(x.at[1]), "=r"(x.at[2]), "=r"(x.at[3]) : "l"(from) : "memory");
  return x;
}

// Two numbers as fp16, or as bf16 with BRAIN; the first in the lower bits.
template <bool BRAIN = false>
__device__ inline unsigned halves(float first, float second) {
  unsigned x;
  if (BRAIN)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
  return x;
}

// Two fp8 (e4m3) numbers, the lower or the UPPER two bytes, as fp16. The conversion is exact.
template <bool UPPER>
__device__ inline unsigned halves_of(unsigned bytes) {
  unsigned x;
  if (UPPER)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }" : "=r"(x) : "r"(bytes));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(x) : "r"(bytes));
  return x;
}

// Numbers 0 and 2 of four int8 numbers, as fp16, or as bf16 with BRAIN. The conversion is exact: the bits of a number become
// the lower bits of a larger one, from which the excess is subtracted.
template <bool BRAIN>
__device__ inline unsigned numbers_0_2(unsigned four) {
  unsigned x;
  if (BRAIN)  // (128 + the lower 7 bits) - (128, or 256 for a negative number); fma, as sm_80 cannot add bf16
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(x) : "r"(four & 0x007F007F | 0x43004300), "r"(0x3F803F80), "r"(four & 0x00800080 | 0xC300C300));
  else  // (1024 + the number + 128) - 1152
    asm("add.f16x2 %0, %1, %2;" : "=r"(x) : "r"(four & 0x00FF00FF ^ 0x64806480), "r"(0xE480E480));
  return x;
}

// The products of two pairs of fp16 numbers.
__device__ inline unsigned times(unsigned x, unsigned y) {
  unsigned z;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

// An fp16 number, or with BRAIN a bf16 number, as fp32.
template <bool BRAIN = false>
__device__ inline float number(unsigned short half) {
  if (BRAIN) return __uint_as_float(half << 16);
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
  return x;
}

// Numbers 0 and 2, or with `odd` 1 and 3, of four fp16 (or with BRAIN bf16) numbers, as fp16.
template <bool BRAIN>
__device__ inline unsigned every_other(uint2 x, bool odd) {
  const unsigned two = __byte_perm(x.x, x.y, odd ? 0x7632 : 0x5410);
  return BRAIN ? halves(number<true>(two & 0xFFFF), number<true>(two >> 16)) : two;
}

// sum [16 rows, 8 columns] += a [16 rows, 16] b [16, 8 columns] in fp16, or with BRAIN in bf16. Thread 4 g + t holds
//   a[0..3]  rows g, g + 8, g, g + 8 at inner indices 2 t and 2 t + 1; the last two 8 inner indices further
//   b, b_8   column g at inner indices 2 t and 2 t + 1, and 8 further
//   sum      rows g, g, g + 8, g + 8 of columns 2 t, 2 t + 1, 2 t, 2 t + 1
template <bool BRAIN = false>
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b, unsigned b_8) {
#define MULTIPLY_ADD(type)                                                                                         \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                               \
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                            \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                     \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(b_8))
  if (BRAIN)
    MULTIPLY_ADD("bf16");
  else
    MULTIPLY_ADD("f16");
#undef MULTIPLY_ADD
}
