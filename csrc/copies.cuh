#pragma once

// Copies from global memory to shared memory, which a warp starts and later waits for.
//
// From sm_90 on one thread copies many bytes at once, and a barrier in shared memory tells when they are there. Over a
// stream of tiles this reads 3.9 TB/s of an H200; copies of 16 bytes a thread read 3.6. Older GPUs have only the latter.

#include "common.cuh"

// The copies of a warp to N places, which it fills in turn. The object lies in shared memory. All threads of the warp call
// each function.
template <int N> struct Copies {
#if __CUDA_ARCH__ >= 900
  unsigned long long barriers[N];

  // Call it once. Copies that start later overwrite what the warp wrote to the places before.
  __device__ void prepare() {
    if (lane() < N) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(here(barriers + lane())) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }

  // Start to copy `bytes`, a multiple of 16 or none, to place `to` with number `i`. Nobody reads them again, so they are the
  // first to leave the L2.
  __device__ void start(int i, void* to, const void* from, int bytes) {
    constexpr unsigned long long EVICT_FIRST = 0x12F0000000000000;
    if (bytes == 0 || lane() > 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(here(barriers + i)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4;"
                 ::"r"(here(to)), "l"(from), "r"(bytes), "r"(here(barriers + i)), "l"(EVICT_FIRST) : "memory");
  }

  // Wait for the oldest copy. It went to place `i`, which had been filled `round` times before.
  __device__ void wait(int i, int round) {
    asm volatile("{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
                 " @!done bra again; }" ::"r"(here(barriers + i)), "r"(round & 1) : "memory");
  }
#else
  __device__ void prepare() { __syncwarp(); }

  __device__ void start(int i, void* to, const void* from, int bytes) {
    for (int at = 16 * lane(); at < bytes; at += 16 * 32)
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                   ::"r"(here(static_cast<char*>(to) + at)), "l"(static_cast<const char*>(from) + at) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ void wait(int i, int round) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N - 1) : "memory");
    __syncwarp();
  }
#endif
};
