#pragma once

constexpr unsigned ALL = 0xFFFFFFFF;  // threads of a warp

// Programmatic dependent launch: the kernels before this one are done; the next one may come. Whatever a kernel reads
// ahead of this must be older than the kernel before it, which waited in the same way.
__device__ inline void chain() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
