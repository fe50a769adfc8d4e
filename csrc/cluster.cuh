#pragma once

// Programs of a cluster: each can write to the shared memory of the others. Nothing but a Bell, or to `arrive` and to
// `wait`, says that what was written before is there.

__device__ inline unsigned here(const void* at) { return __cvta_generic_to_shared(at); }

__device__ inline unsigned there(int rank, const void* at) {
  unsigned x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(here(at)), "r"(rank));
  return x;
}

// Wait for the other programs, in two steps.
__device__ inline void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// In the shared memory of a program: it rings when as many numbers have come as it expects. That is quicker than to wait
// for all programs, until all that was written anywhere is seen by all. One program alone waits for its threads: it is no
// cluster, and memcheck of compute-sanitizer does not let it write as if it were.
template <int PROGRAMS> struct Bell {
  unsigned long long barrier;

  // Once only; called by all threads of the first warp at least, before the programs meet. One thread makes the bell and
  // tells it what to expect; without the __syncwarp between, racecheck of compute-sanitizer warns of the two.
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

  // To the program of this rank, whose bell it is that rings. `to` is where the number would be here.
  __device__ void send(int rank, void* to, unsigned x) {
    if (PROGRAMS == 1)
      *static_cast<unsigned*>(to) = x;
    else
      asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                   ::"r"(there(rank, to)), "r"(x), "r"(there(rank, &barrier)) : "memory");
  }

  // By all threads.
  __device__ void receive() {
    if (PROGRAMS == 1) return __syncthreads();
    asm volatile("{ .reg .pred there; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 there, [%0], 0;"
                 " @!there bra again; }" ::"r"(here(&barrier)) : "memory");
  }
};
