#pragma once

// Programs of a cluster: each can write to the shared memory of the others. Two things order these writes: a Bell, and
// the barrier of all programs (`arrive`, then `wait`).

#include "common.cuh"

// The address that `at` has in the shared memory of the program of that rank.
__device__ inline unsigned there(int rank, const void* at) {
  unsigned x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(here(at)), "r"(rank));
  return x;
}

// The barrier of all programs of the cluster, in two steps. After `wait`, what programs wrote ahead of `arrive` is visible.
// `announce` is a faster `arrive` that makes only bells visible.
__device__ inline void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A bell in the shared memory of a program rings when all 32-bit words that it expects have arrived. That is faster
// than the barrier, which waits until every write is visible to all programs. With PROGRAMS 1 there is no cluster. The
// bell is then a __syncthreads, because memcheck of compute-sanitizer refuses cluster writes without a cluster.
template <int PROGRAMS> struct Bell {
  unsigned long long barrier;

  // Set up the bell for this number of words, once, before the barrier. At least all threads of the first warp call
  // this function, and thread 0 does the work. Without the __syncwarp, racecheck of compute-sanitizer warns of its two
  // writes.
  __device__ void expect(int numbers) {
    if (PROGRAMS == 1) return;
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(here(&barrier)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    if (threadIdx.x == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                   ::"r"(here(&barrier)), "r"(4 * numbers) : "memory");
  }

  // Send x to the program of this rank, at the address that `to` has in this program. The bell of that program counts
  // the word.
  __device__ void send(int rank, void* to, unsigned x) {
    if (PROGRAMS == 1)
      *static_cast<unsigned*>(to) = x;
    else
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                   ::"r"(there(rank, to)), "r"(x), "r"(there(rank, &barrier)) : "memory");
  }

  // Wait until the bell of this program rings. All threads call it.
  __device__ void receive() {
    if (PROGRAMS == 1) return __syncthreads();
    asm volatile("{ .reg .pred there; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 there, [%0], 0;"
                 " @!there bra again; }" ::"r"(here(&barrier)) : "memory");
  }
};
