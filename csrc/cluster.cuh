#pragma once

// Programs of a cluster: each can read and write the shared memory of the others. Nothing but `meet` says that what was
// written before is there.

__device__ inline unsigned there(int rank, const void* at) {
  unsigned x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"((unsigned)__cvta_generic_to_shared(at)), "r"(rank));
  return x;
}

// What program number `rank` has at a place of its shared memory.
__device__ inline float load_from(int rank, const float* at) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there(rank, at)) : "memory");
  return x;
}

__device__ inline void store_to(int rank, void* at, unsigned x) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(there(rank, at)), "r"(x) : "memory");
}

// Wait for the other programs, in one or in two steps.
__device__ inline void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ inline void meet() { arrive(), wait(); }
