// CUDA C++ on a CPU: what kernels of csrc/ call, for one program at a time. Its threads are fibers. A warp runs to the
// next barrier of the program, then the next warp, in the order of their numbers or in reverse; so do the threads of a
// warp between two exchanges, and the programs of a cluster until all threads of one wait for the others. A missing
// barrier then shows as a wrong result in one of the two orders. Shared memory starts with bytes of 255.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

template <class A, class B> std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}
template <class A, class B> std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}

#define __device__
#define __global__
#define __constant__ static const
#define __shared__ static __attribute__((section("of_program"), used))
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

#define VECTOR(name, type, n, ...) struct alignas(4 * n) name { type __VA_ARGS__; };
VECTOR(int2, int, 2, x, y)
VECTOR(uint2, unsigned, 2, x, y)
VECTOR(float2, float, 2, x, y)
VECTOR(int4, int, 4, x, y, z, w)
VECTOR(uint4, unsigned, 4, x, y, z, w)
VECTOR(float4, float, 4, x, y, z, w)
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

#ifndef GROUP  // C++ looks it up in templates of search.cuh that visit_nodes does not use
#define GROUP 1
#endif

extern char __start_of_program, __stop_of_program;  // static shared memory
__shared__ char at_least_this;

namespace emulator {

struct Index { unsigned x = 1, y = 1, z = 1; };
struct Barrier { int arrived = 0, round = 0; };

constexpr int MOST_THREADS = 1024, STACK = 1 << 16;
alignas(16) char dynamic_shared[1 << 18];
const int static_bytes = &__stop_of_program - &__start_of_program;

// A program of the cluster that runs.
struct Program {
  Index index;
  Barrier barrier, of_warps[MOST_THREADS / 32];
  char exchanged[MOST_THREADS][32];
  ucontext_t fibers[MOST_THREADS];
  bool ended[MOST_THREADS], waiting[MOST_THREADS];  // for all threads of the program
  int round[MOST_THREADS];                          // of the barrier of the cluster, when the thread arrived
  std::unique_ptr<char[]> stacks{new char[MOST_THREADS * STACK]};
  std::vector<char> statics, dynamic;  // its shared memory while another program runs
};

std::vector<std::unique_ptr<Program>> cluster;
Program* running;
Index thread, program, programs;
int threads, dynamic_bytes;
Barrier of_cluster;
std::vector<std::pair<int, unsigned>> remote;  // a program and an address in its shared memory
ucontext_t scheduler;
std::function<void()> kernel;
std::string failure;  // why the emulator gave up
int arrivals;         // at barriers, at bells, and at the end of the kernel

inline int self() { return thread.x; }
inline void let_others_run() { swapcontext(&running->fibers[self()], &scheduler); }

// Count a thread that arrives at a barrier of `size` threads. Returns whether it is the last.
inline bool arrive(Barrier& barrier, int size) {
  arrivals++;
  if (++barrier.arrived < size) return false;
  barrier.arrived = 0, barrier.round++;
  return true;
}
inline bool wait(Barrier& barrier, int size) {
  const int round = barrier.round;
  if (arrive(barrier, size)) return true;
  while (barrier.round == round) let_others_run();
  return false;
}
inline void wait_for_warp() { wait(running->of_warps[self() / 32], 32); }
inline void wait_for_program() {
  bool* const waiting = running->waiting;
  waiting[self()] = true;
  if (wait(running->barrier, threads)) std::fill(waiting, waiting + threads, false);
}

// What the lanes of a warp pass to this function, as an array.
template <class T> struct OfLanes { T at[32]; };
template <class T> OfLanes<T> of_lanes(T x) {
  auto& exchanged = running->exchanged;
  const int first = self() / 32 * 32;
  std::memcpy(exchanged[self()], &x, sizeof x);
  wait_for_warp();
  OfLanes<T> all;
  for (int i = 0; i < 32; i++) std::memcpy(&all.at[i], exchanged[first + i], sizeof x);
  wait_for_warp();
  return all;
}

inline void run_fiber() {
  kernel();
  running->ended[self()] = true, arrivals++;
  let_others_run();
}

inline bool is_over(const Program& p) { return std::all_of(p.ended, p.ended + threads, [](bool x) { return x; }); }

inline void begin(Program& p) {
  p.barrier = {}, std::fill(p.of_warps, p.of_warps + threads / 32, Barrier{});
  p.statics.assign(static_bytes, char(255)), p.dynamic.assign(dynamic_bytes, char(255));
  for (int i = 0; i < threads; i++) {
    p.ended[i] = p.waiting[i] = false;
    getcontext(&p.fibers[i]);
    p.fibers[i].uc_stack.ss_sp = &p.stacks[i * STACK], p.fibers[i].uc_stack.ss_size = STACK, p.fibers[i].uc_link = &scheduler;
    makecontext(&p.fibers[i], run_fiber, 0);
  }
}

// Run the threads of a program until they have ended, or wait for other programs.
inline void run(Program& p, bool backward) {
  running = &p, program = p.index;
  std::memcpy(&__start_of_program, p.statics.data(), static_bytes), std::memcpy(dynamic_shared, p.dynamic.data(), dynamic_bytes);
  for (int n = 0, at_start = -1; failure.empty();) {
    if (n == 0 && at_start == arrivals) break;
    if (n == 0) at_start = arrivals;
    const int before = arrivals;
    for (int i = n; i < n + 32 && failure.empty(); i++) {
      const int at = backward ? threads - 1 - i : i;
      if (p.ended[at] || p.waiting[at]) continue;
      thread.x = at;
      swapcontext(&scheduler, &p.fibers[at]);
    }
    if (arrivals == before) n += 32;
    if (n == threads) n = 0;
  }
  std::memcpy(p.statics.data(), &__start_of_program, static_bytes), std::memcpy(p.dynamic.data(), dynamic_shared, dynamic_bytes);
}

inline void run_cluster(bool backward) {
  of_cluster = {}, remote.clear();
  for (auto& p : cluster) begin(*p);
  for (int i = 0, at_start = -1, size = cluster.size(); failure.empty(); i = (i + 1) % size) {
    if (i == 0 && std::all_of(cluster.begin(), cluster.end(), [](auto& p) { return is_over(*p); })) return;
    if (i == 0 && at_start == arrivals) failure = "threads wait for one another for ever";
    if (i == 0) at_start = arrivals;
    run(*cluster[backward ? size - 1 - i : i], backward);
  }
}

template <class... P, size_t... I> void call(void (*f)(P...), void** args, std::index_sequence<I...>) {
  f(*static_cast<std::remove_cv_t<P>*>(args[I])...);
}
template <class... P> void call(void (*f)(P...), void** args) { call(f, args, std::index_sequence_for<P...>{}); }

// of: programs of a cluster.
template <class F> void launch(F* f, const int* grid, int count, int shared, bool backward, void** args, Index of) {
  failure.clear(), threads = count, dynamic_bytes = shared;
  programs = {unsigned(grid[0]), unsigned(grid[1]), unsigned(grid[2])};
  kernel = [=] { call(f, args); };
  while (cluster.size() < of.x * of.y) cluster.push_back(std::make_unique<Program>());
  cluster.resize(of.x * of.y);
  for (unsigned z = 0; z < programs.z; z++)
    for (unsigned y = 0; y < programs.y; y += of.y)
      for (unsigned x = 0; x < programs.x; x += of.x) {
        for (unsigned i = 0; i < cluster.size(); i++) cluster[i]->index = {x + i % of.x, y + i / of.x, z};
        run_cluster(backward);
      }
}

// A place in the shared memory of a program of the cluster.
inline char* place_in(int rank, unsigned at) {
  char* const here = dynamic_shared + int(at);
  Program& p = *cluster[rank];
  if (&p == running) return here;
  const bool is_static = &__start_of_program <= here && here < &__stop_of_program;
  return is_static ? p.statics.data() + (here - &__start_of_program) : p.dynamic.data() + int(at);
}

}  // namespace emulator

#define threadIdx emulator::thread
#define blockIdx emulator::program
#define gridDim emulator::programs

inline void __syncthreads() { emulator::wait_for_program(); }
inline void __syncwarp() { emulator::wait_for_warp(); }
inline int __syncthreads_count(bool x) {
  static int count;
  __syncthreads();
  if (emulator::self() == 0) count = 0;
  __syncthreads();
  count += x;
  __syncthreads();
  return count;
}

template <class T> T __shfl_sync(unsigned, T x, int from) { return emulator::of_lanes(x).at[from & 31]; }
template <class T> T __shfl_xor_sync(unsigned, T x, int by) { return emulator::of_lanes(x).at[emulator::self() % 32 ^ by]; }
template <class T> T __shfl_up_sync(unsigned, T x, int by) {
  const int lane = emulator::self() % 32;
  return emulator::of_lanes(x).at[lane < by ? lane : lane - by];
}
template <class T> T __shfl_down_sync(unsigned, T x, int by) {
  const int lane = emulator::self() % 32;
  return emulator::of_lanes(x).at[lane + by > 31 ? lane : lane + by];
}
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  const auto all = emulator::of_lanes(x);
  for (int i = 0; i < 32; i++) bits |= unsigned(all.at[i]) << i;
  return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline int __reduce_add_sync(unsigned, int x) {
  int sum = 0;
  for (int y : emulator::of_lanes(x).at) sum += y;
  return sum;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  for (unsigned y : emulator::of_lanes(x).at) x = max(x, y);
  return x;
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
  for (unsigned y : emulator::of_lanes(x).at) x = min(x, y);
  return x;
}

template <class T, class U> T atomicAdd(T* at, U x) { return std::exchange(*at, *at + x); }
template <class T, class U> T atomicOr(T* at, U x) { return std::exchange(*at, *at | x); }
template <class T, class U> T atomicMin(T* at, U x) { return std::exchange(*at, min(*at, T(x))); }
template <class T, class U, class V> T atomicCAS(T* at, U was, V x) { return std::exchange(*at, *at == T(was) ? T(x) : *at); }
template <class T> T __ldcg(const T* at) { return *at; }
inline bool __isGlobal(const void*) { return true; }
#define __builtin_assume(x)

template <class To, class From> To bits_of(From x) {
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline int __float2int_rn(float x) { return std::nearbyint(x); }
inline int __float2int_rz(float x) { return x != x ? 0 : int(min(max(double(x), -0x1p31), 0x1p31 - 1)); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
inline float __log2f(float x) { return std::log2(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, int by) {
  return (unsigned long long)high << 32 >> (by & 31) | (unsigned long long)low >> (by & 31);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned at) {
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned x = 0;
  for (int i = 0; i < 4; i++) x |= unsigned(both >> 8 * (at >> 4 * i & 7) & 255) << 8 * i;
  return x;
}

// f(a, b) of each of the 32 / BITS unsigned numbers in two words.
template <int BITS, class F> unsigned each(unsigned a, unsigned b, F f) {
  unsigned x = 0;
  const unsigned mask = (1u << BITS) - 1;
  for (int i = 0; i < 32; i += BITS) x |= (f(a >> i & mask, b >> i & mask) & mask) << i;
  return x;
}
inline unsigned __vmaxu2(unsigned a, unsigned b) { return each<16>(a, b, [](unsigned x, unsigned y) { return max(x, y); }); }
inline unsigned __vcmpeq2(unsigned a, unsigned b) {
  return each<16>(a, b, [](unsigned x, unsigned y) { return x == y ? 0xFFFFu : 0; });
}
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
  return each<8>(a, b, [](unsigned x, unsigned y) { return x == y ? 255u : 0; });
}
inline unsigned __vcmpgtu4(unsigned a, unsigned b) {
  return each<8>(a, b, [](unsigned x, unsigned y) { return x > y ? 255u : 0; });
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
  return sum;
}

// Addresses in dynamic shared memory.
inline unsigned __cvta_generic_to_shared(const void* at) { return static_cast<const char*>(at) - emulator::dynamic_shared; }

// fp16 and bf16 numbers as fp32, and to the nearest of them.
inline float of_half(unsigned short half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float x = exponent == 31 ? (fraction ? NAN : INFINITY)
                                 : std::ldexp(exponent ? 1024 + fraction : fraction, max(exponent, 1) - 25);
  return half >> 15 ? -x : x;
}
inline unsigned to_half(float x) {
  const unsigned sign = bits_of<unsigned>(x) >> 16 & 0x8000, bits = bits_of<unsigned>(std::fabs(x));
  if (x != x) return 0x7FFF;
  if (std::fabs(x) >= 65520) return sign | 0x7C00;
  if (std::fabs(x) < std::ldexp(1.0f, -14)) return sign | unsigned(std::nearbyint(std::ldexp(std::fabs(x), 24)));
  return sign | (bits + 0xFFF + (bits >> 13 & 1) >> 13) - (112 << 10);
}
inline float of_brain(unsigned short half) { return bits_of<float>(unsigned(half) << 16); }
inline unsigned to_brain(float x) {
  const unsigned bits = bits_of<unsigned>(x);
  return x != x ? 0x7FFF : bits + 0x7FFF + (bits >> 16 & 1) >> 16;
}

// Instructions of PTX, with their operands in order; T stands for a type that a macro inserts, the first operand here.
template <class F> void halves_of(unsigned& x, unsigned a, unsigned b, F f) {
  x = each<16>(a, b, [&](unsigned a, unsigned b) { return to_half(f(of_half(a), of_half(b))); });
}
inline void ptx_add_f16x2(unsigned& x, unsigned a, unsigned b) { halves_of(x, a, b, [](float a, float b) { return a + b; }); }
inline void ptx_sub_f16x2(unsigned& x, unsigned a, unsigned b) { halves_of(x, a, b, [](float a, float b) { return a - b; }); }
inline void ptx_mul_f16x2(unsigned& x, unsigned a, unsigned b) { halves_of(x, a, b, [](float a, float b) { return a * b; }); }
inline void ptx_fma_rn_bf16x2(unsigned& x, unsigned a, unsigned b, unsigned c) {
  const auto of = [=](int at) { return to_brain(std::fma(of_brain(a >> at), of_brain(b >> at), of_brain(c >> at))); };
  x = of(0) | of(16) << 16;
}
inline void ptx_cvt_f32_f16(float& x, unsigned short half) { x = of_half(half); }
inline void ptx_cvt_rn_f16x2_f32(unsigned& x, float upper, float lower) { x = to_half(upper) << 16 | to_half(lower); }
inline void ptx_cvt_rn_bf16x2_f32(unsigned& x, float upper, float lower) { x = to_brain(upper) << 16 | to_brain(lower); }
inline void ptx_prmt_b32(unsigned& x, unsigned low, unsigned high, unsigned at) {
  x = __byte_perm(low, high, at & 0x7777);
  for (int i = 0; i < 4; i++)  // the sign of a byte instead of the byte
    if (at >> 4 * i & 8) x = x & ~(255u << 8 * i) | (x >> 8 * i & 128 ? 255u : 0) << 8 * i;
}
inline void ptx_lop3_b32(unsigned& x, unsigned a, unsigned b, unsigned c, int table) {
  x = 0;
  for (int i = 0; i < 32; i++) x |= (table >> (a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1) & 1u) << i;
}
inline void ptx_ld_shared_u32(unsigned& x, unsigned at) { std::memcpy(&x, emulator::dynamic_shared + at, 4); }
inline void ptx_ld_global_L1_no_allocate_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* from) {
  const unsigned* x = static_cast<const unsigned*>(from);
  a = x[0], b = x[1], c = x[2], d = x[3];
}
// Two fp8 numbers (e4m3) as fp16: the upper or the lower two bytes.
inline void ptx_e4m3x2(unsigned& x, unsigned bytes, bool upper) {
  const auto of = [=](int at) {
    const unsigned byte = bytes >> at & 255, exponent = byte >> 3 & 15, fraction = byte & 7;
    float y = std::ldexp(exponent ? 8 + fraction : fraction, max(int(exponent), 1) - 10);
    if ((byte & 127) == 127) y = NAN;
    return to_half(byte >> 7 ? -y : y);
  };
  x = of(16 * upper) | of(16 * upper + 8) << 16;
}
// Copies to shared memory; they are done at once.
inline void ptx_cp_async_cg_shared_global_L2_128B(unsigned to, const void* from, int bytes) {
  std::memcpy(emulator::dynamic_shared + to, from, bytes);
}
inline void ptx_cp_async_commit_group() {}
inline void ptx_cp_async_wait_group(int) {}
inline void ptx_prefetch_global_L2(const void*) {}
inline void ptx_barrier_cluster_arrive_release_aligned() {
  using namespace emulator;
  running->round[self()] = of_cluster.round;
  arrive(of_cluster, cluster.size() * threads);
}
inline void ptx_barrier_cluster_arrive_relaxed_aligned() { ptx_barrier_cluster_arrive_release_aligned(); }
inline void ptx_barrier_cluster_wait_acquire_aligned() {
  while (emulator::of_cluster.round == emulator::running->round[emulator::self()]) emulator::let_others_run();
}
// A bell counts the bytes and the arrival that it waits for. `remote` addresses are numbers of pairs.
struct Bytes { int bytes, arrivals; };
inline Bytes& bell_at(unsigned at) { return *reinterpret_cast<Bytes*>(emulator::dynamic_shared + int(at)); }
inline void ptx_mbarrier_init_shared_cta_b64(unsigned at, int arrivals) { bell_at(at) = {0, arrivals}; }
inline void ptx_fence_mbarrier_init_release_cluster() {}
inline void ptx_mbarrier_arrive_expect_tx_shared_cta_b64(unsigned at, int bytes) {
  bell_at(at).bytes += bytes, bell_at(at).arrivals--;
}
inline void ptx_mapa_shared_cluster_u32(unsigned& x, unsigned at, int rank) {
  x = emulator::remote.size(), emulator::remote.emplace_back(rank, at);
}
inline void ptx_st_async_weak_shared_cluster_mbarrier_complete_tx_bytes_u32(unsigned to, unsigned x, unsigned bell) {
  const auto at = [](unsigned i) { return emulator::place_in(emulator::remote[i].first, emulator::remote[i].second); };
  std::memcpy(at(to), &x, sizeof x);
  reinterpret_cast<Bytes*>(at(bell))->bytes -= sizeof x, emulator::arrivals++;
}
inline void ptx_mbarrier_try_wait(unsigned at) {
  while (bell_at(at).bytes || bell_at(at).arrivals) emulator::let_others_run();
}
inline void ptx_unknown(const char* what) {
  emulator::failure = std::string("the emulator has no ") + what;
  emulator::let_others_run();
}

// sum [16, 8] += a [16, 16] b [16, 8]; csrc/tensor.cuh says which thread holds what.
struct Factors { unsigned a[4], b[2]; };
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_T_T_f32(
    const char* type, float& s0, float& s1, float& s2, float& s3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned b0, unsigned b1, float, float, float, float) {
  const auto all = emulator::of_lanes(Factors{{a0, a1, a2, a3}, {b0, b1}});
  const auto number = [=](unsigned two, int k) {
    const unsigned short half = two >> k % 2 * 16;
    return std::strcmp(type, "bf16") ? of_half(half) : of_brain(half);
  };
  float* const sums[] = {&s0, &s1, &s2, &s3};
  const int g = emulator::self() % 32 / 4, t = emulator::self() % 4;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 16; k++)
      *sums[i] += number(all.at[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], k) *
                  number(all.at[column * 4 + k % 8 / 2].b[k / 8], k);
  }
}
