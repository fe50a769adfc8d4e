// The fetch of the hot buffer; ops/gather/fetch.py is the specification. Usually few blocks are missing or none, so the
// time depends on the number of operations that wait for one another.
//
// Why not Triton: there threads exchange data (hit slots, slots of misses) through global memory. Here the data stays
// in shared memory, and the kernel loads the slots at the hand while it looks up the ids.
//
// Compile-time constants: THREADS; IDS per thread; QUADS, the 16-byte parts of a block in the hot buffer. UNPACK is 0,
// or for a packed pool the channels of a row, which is unpacked to fp16, or to bf16 with BF16.

#include "common.cuh"
#include "store.cuh"
#include "tensor.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int EACH = 4, WINDOW = EACH * THREADS;  // slots that a thread and a program look at, at a time
constexpr int STEPS = 8;  // 16-byte loads of a thread in flight; they may come from the host

static_assert(WARPS <= 32);

using Row = Packed<UNPACK ? UNPACK : 16>;
constexpr int ROWS = UNPACK ? QUADS / (2 * Row::NUMBERS) : 8, RUN = ROWS < 8 ? ROWS : 8;  // of a block; of a run

struct __align__(16) Shared {
  uint4 scales[UNPACK ? WARPS : 1][RUN][Row::WORDS - Row::NUMBERS];
  int missing[IDS * THREADS], victims[IDS * THREADS];
  int ids[WARPS], slots[2][WARPS];  // of each warp: ids << 16 | misses; slots taken in a window
  int passed;
  bool last;
};

extern __shared__ __align__(16) unsigned hit[];  // one bit per slot, in whole 16 bytes

// The ids of a thread, their slots, and for each miss its number among the misses.
struct Ids { int want[IDS], slot[IDS], number[IDS]; };
// The slots of a thread in a window. used: as in the hot buffer; -1 beyond the second round of the hand.
struct Window { int slot[EACH], used[EACH]; };
struct Counts { int misses, asked; };

// The index of element `step` of this lane. A warp has N consecutive runs of 32 elements: the order is warp, step,
// lane.
template <int N> __device__ int index(int step) { return (warp() * N + step) * 32 + lane(); }

// before[i]: the number of set flags of this warp before flag i. Returns the number of set flags of this warp.
template <int N> __device__ int number(const bool (&flag)[N], int (&before)[N]) {
  int total = 0;
  for (int i = 0; i < N; i++) {
    const unsigned set = __ballot_sync(ALL, flag[i]);
    before[i] = total + __popc(set & (1u << lane()) - 1), total += __popc(set);
  }
  return total;
}

__device__ int of_warps(const int* count, int upto) {
  return __reduce_add_sync(ALL, lane() < upto ? count[lane()] : 0);
}

__device__ bool missing(const Ids& x, int i) { return x.want[i] >= 0 && x.slot[i] < 0; }

__device__ bool is_hit(int slot) { return hit[slot / 32] >> slot % 32 & 1; }

// The slot that a hand at `hand` reaches after `step` steps, for less than two rounds.
__device__ int slot_at(int hand, int step, int slots) {
  int slot = hand + step;
  if (slot >= 2 * slots) slot -= 2 * slots;
  return slot >= slots ? slot - slots : slot;
}

// The window that begins `first` steps ahead of the hand.
__device__ Window look(const int* used, int hand, int first, int slots) {
  Window y;
  for (int i = 0; i < EACH; i++) {
    const int step = first + index<EACH>(i);
    y.slot[i] = step < 2 * slots ? slot_at(hand, step, slots) : 0;
    y.used[i] = step < 2 * slots ? used[y.slot[i]] : -1;
  }
  return y;
}

// Look the ids up and mark the slots of hits. Returns the numbers of misses and ids.
__device__ Counts look_up(Ids& x, const int* slot_of, Shared& s) {
  bool miss[IDS];
  int asked = 0;
  for (int i = 0; i < IDS; i++) x.slot[i] = slot_of[max(x.want[i], 0)];  // no condition, so that all loads overlap
  for (int i = 0; i < IDS; i++) x.slot[i] = x.want[i] >= 0 ? x.slot[i] : -1;
  for (int i = 0; i < IDS; i++) asked += __popc(__ballot_sync(ALL, x.want[i] >= 0));
  for (int i = 0; i < IDS; i++) {
    miss[i] = missing(x, i);
    if (x.slot[i] >= 0) atomicOr(&hit[x.slot[i] / 32], 1u << x.slot[i] % 32);
  }
  const int misses = number(miss, x.number);
  if (lane() == 0) s.ids[warp()] = asked << 16 | misses;
  __syncthreads();
  const int all = of_warps(s.ids, WARPS);
  return {all & 0xFFFF, all >> 16};
}

// Write the missing ids to shared memory, in order.
__device__ void list(Ids& x, Shared& s) {
  const int ahead = of_warps(s.ids, warp()) & 0xFFFF;
  for (int i = 0; i < IDS; i++) {
    x.number[i] += ahead;
    if (missing(x, i)) s.missing[x.number[i]] = x.want[i];
  }
  __syncthreads();
}

// Choose slots for the misses, in the order of the hand, from window `y` on. In the first round the hand takes slots
// with `used` 0, in the second round the slots that it spared. Returns the number of slots that the hand passes.
__device__ int choose(Window y, const int* used, int hand, int slots, int misses, Shared& s) {
  for (int first = 0, found = 0, parity = 0;; first += WINDOW, parity ^= 1) {
    bool taken[EACH];
    int before[EACH];
    for (int i = 0; i < EACH; i++) {
      const int round = first + index<EACH>(i) >= slots;
      taken[i] = y.used[i] == round && !is_hit(y.slot[i]);
    }
    const int total = number(taken, before);
    if (lane() == 0) s.slots[parity][warp()] = total;  // free: all warps have read the count of two windows ago
    __syncthreads();
    const int ahead = found + of_warps(s.slots[parity], warp());
    for (int i = 0; i < EACH; i++) {
      const int at = ahead + before[i];
      if (!taken[i] || at >= misses) continue;
      s.victims[at] = y.slot[i];
      if (at == misses - 1) s.passed = first + index<EACH>(i) + 1;
    }
    found += of_warps(s.slots[parity], WARPS);
    if (found >= misses) break;
    y = look(used, hand, first + WINDOW, slots);
  }
  __syncthreads();
  return s.passed;
}

// Write the new state of the head. No block both leaves and comes in one call, so all threads may write at once.
__device__ void commit(
    const Ids& x, int* slot_of, int* block_of, int* used, int* hand, int* out, int n, int slots, int from, int misses,
    int passed, const Shared& s) {
  for (int i = 0; i < IDS; i++) {
    if (index<IDS>(i) < n) out[index<IDS>(i)] = missing(x, i) ? s.victims[x.number[i]] : x.slot[i];
    if (x.slot[i] >= 0) used[x.slot[i]] = 1;
  }
  for (int step = threadIdx.x; step < min(passed, slots); step += THREADS) {
    const int slot = slot_at(from, step, slots);
    if (!is_hit(slot)) used[slot] = 0;
  }
  for (int i = threadIdx.x; i < misses; i += THREADS) {
    const int slot = s.victims[i], leaves = block_of[slot], comes = s.missing[i];
    if (leaves >= 0) slot_of[leaves] = -1;
    block_of[slot] = comes, slot_of[comes] = slot;
  }
  if (threadIdx.x == 0) *hand = slot_at(from, passed, slots);
}

// Copy the missing blocks without conversion, 512 bytes at a time per warp. Consecutive pieces go to different
// programs, so that all programs share even a few blocks. A thread issues STEPS loads, and computes the targets while
// they are in flight.
struct MoveAsTheyAre {
  const int count, stride = gridDim.y * THREADS;
  int at = (warp() * gridDim.y + blockIdx.y) * 32 + lane();
  uint4 quad[STEPS];

  __device__ MoveAsTheyAre(int misses) : count(misses * QUADS) {}
  __device__ bool next() { return (at += STEPS * stride) < count; }

  __device__ void load(const uint4* pool, const Shared& s) {
    for (int i = 0; i < STEPS; i++) {
      const int q = at + i * stride;
      if (q >= count) break;  // usually after the first
      quad[i] = pool[(long long)s.missing[q / QUADS] * QUADS + q % QUADS];
    }
  }

  __device__ void store(uint4* hot, Shared& s) const {
    for (int i = 0; i < STEPS; i++) {
      const int q = at + i * stride;
      if (q >= count) break;
      hot[(long long)s.victims[q / QUADS] * QUADS + q % QUADS] = quad[i];
    }
  }
};

// Copy the missing blocks of packed rows, RUN rows at a time per warp. The scales of a row follow its numbers, so a
// line of 128 bytes may begin and end anywhere in a row. The link is fast only for whole lines. So a warp loads all
// words of its rows in order, and its lanes exchange the scales through shared memory.
struct MoveUnpacked {
  static constexpr int RUNS = ROWS / RUN, WORDS = RUN * Row::WORDS, LOADS = (WORDS + 31) / 32;  // per block; per run
  static constexpr int TOGETHER = LOADS > 6 ? 1 : LOADS > 1 ? 12 / LOADS : STEPS;  // runs of a warp in flight
  const int count, stride = gridDim.y * WARPS;
  int at = warp() * gridDim.y + blockIdx.y;
  uint4 quad[TOGETHER][LOADS];

  __device__ MoveUnpacked(int misses) : count(misses * RUNS) {}
  __device__ bool next() { return (at += TOGETHER * stride) < count; }

  __device__ void load(const uint4* pool, const Shared& s) {
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      const int run = at + r * stride;
      if (run >= count) break;
      const uint4* words = pool + ((long long)s.missing[run / RUNS] * RUNS + run % RUNS) * WORDS;
#pragma unroll
      for (int i = 0; i < LOADS; i++)
        if (32 * i + lane() < WORDS) quad[r][i] = words[32 * i + lane()];
    }
  }

  __device__ void store(uint4* hot, Shared& s) const {
#pragma unroll
    for (int r = 0; r < TOGETHER; r++) {
      const int run = at + r * stride;
      if (run >= count) break;
      __syncwarp();  // all lanes have read the scales of the run before
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int word = 32 * i + lane(), in_row = word % Row::WORDS - Row::NUMBERS;
        if (word < WORDS && in_row >= 0) s.scales[warp()][word / Row::WORDS][in_row] = quad[r][i];
      }
      __syncwarp();
      uint4* rows = hot + (long long)s.victims[run / RUNS] * QUADS + run % RUNS * RUN * 2 * Row::NUMBERS;
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int word = 32 * i + lane(), row = word / Row::WORDS, in_row = word % Row::WORDS;
        if (word < WORDS && in_row < Row::NUMBERS)
          unpack(rows + 2 * (row * Row::NUMBERS + in_row), quad[r][i], Row::scale(s.scales[warp()][row], in_row));
      }
    }
  }

  // 16 numbers become 32 bytes.
  __device__ static void unpack(uint4* to, uint4 from, float scale) {
    const auto two = [=](unsigned four, int i) {
      return halves<BF16>(Row::number(four, i) * scale, Row::number(four, i + 1) * scale);
    };
    to[0] = {two(from.x, 0), two(from.x, 2), two(from.y, 0), two(from.y, 2)};
    to[1] = {two(from.z, 0), two(from.z, 2), two(from.w, 0), two(from.w, 2)};
  }
};

template <bool> struct Which { using Move = MoveAsTheyAre; };
template <> struct Which<true> { using Move = MoveUnpacked; };
using Move = Which<(UNPACK > 0)>::Move;

// Count the selected blocks of a head that keeps the selection of an earlier step.
__device__ void keep(const int* out, unsigned long long* counts, int n) {
  int held = 0;
  for (int i = 0; i < IDS; i++) held += index<IDS>(i) < n && out[index<IDS>(i)] >= 0;
  held = __reduce_add_sync(ALL, held);
  if (lane() == 0) atomicAdd(counts + counter::SELECTED, held);
}

extern "C" __global__ void __launch_bounds__(THREADS) fetch(
    const int* retrieve_now, const int* blocks, const uint4* pool, uint4* hot, int* slot_of, int* block_of, int* used,
    int* hand, int* done_count, unsigned long long* counts, int* out, int n, int slots, int total) {
  __shared__ Shared s;
  const long long bh = blockIdx.x;
  blocks += bh * n, out += bh * n, slot_of += bh * total, block_of += bh * slots, used += bh * slots, hand += bh;
  counts = counters_of(counts, bh);
  const int* ids = blocks + index<IDS>(0);
  for (int i = threadIdx.x; i < (slots + 127) / 128; i += THREADS) reinterpret_cast<uint4*>(hit)[i] = {};
  now(ids), now(slot_of), now(used), now(hand);
  __syncthreads();
  Ids x;
  wait_for_previous();
  for (int i = 0; i < IDS; i++) x.want[i] = index<IDS>(i) < n ? ids[32 * i] : -1;
  const int from = *hand;
  if (retrieve_now && retrieve_now[bh] == 0) {
    if (blockIdx.y == 0) keep(out, counts, n);
    return;
  }
  const Window window = look(used, from, 0, slots);  // overlaps with the look-up of the ids
  const Counts count = look_up(x, slot_of, s);
  if (count.misses == 0) {  // without misses no program reads what program 0 writes
    if (blockIdx.y > 0) return;
    commit(x, slot_of, block_of, used, hand, out, n, slots, from, 0, 0, s);
    if (threadIdx.x == 0) atomicAdd(counts + counter::SELECTED, count.asked);
    return;
  }
  Move m(count.misses);
  pool += bh * total * (UNPACK ? ROWS * Row::WORDS : QUADS), hot += bh * slots * QUADS;
  list(x, s);
  m.load(pool, s);
  const int passed = choose(window, used, from, slots, count.misses, s);
  // All threads of this program have read the state. The last program that gets here writes it.
  if (threadIdx.x == 0) s.last = atomicAdd(done_count + bh, 1) == gridDim.y - 1;
  if (m.at < m.count) m.store(hot, s);
  __syncthreads();
  if (s.last) {
    commit(x, slot_of, block_of, used, hand, out, n, slots, from, count.misses, passed, s);
    if (threadIdx.x == 0) atomicAdd(counts + counter::SELECTED, count.asked), atomicAdd(counts + counter::MISSED, count.misses), done_count[bh] = 0;
  }
  if (m.at >= m.count) return;
  while (m.next()) m.load(pool, s), m.store(hot, s);
}
