// The hot buffer's fetch, as ops/gather/fetch.py specifies it. Mostly all blocks are there or few are
// missing, so what counts is how many steps wait for one another.
//
// Why not Triton: what threads tell each other at slots that the data says (which slots are hit, whom a miss
// replaces) has to go through global memory there, and without atomics on shared memory the oldest slots are searched
// for by counts of two thresholds, a dozen of them. Here a round is a histogram, and one or two are enough.
//
// Set by the compilation: THREADS; IDS and SLOTS that each has; QUADS of 16 bytes in a block; OLDEST, where ages stop;
// of a packed pool, whose blocks become halves on the way, UNPACK channels (else 0), and whether these are BF16.

#include "common.cuh"
#include "store.cuh"
#include "tensor.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int EACH = 8, BINS = 32 * EACH, ROUNDS = 2;  // 8 bits of an age's 16 in a round
constexpr int STEPS = 8;  // loads of 16 bytes that a thread has on their way: they may have to come from the host
constexpr unsigned NEVER = 0x7FFFFFFF;  // younger than any slot

static_assert(OLDEST < BINS * BINS && WARPS <= 32);

using Row = Packed<UNPACK ? UNPACK : 16>;
constexpr int ROWS = UNPACK ? QUADS / (2 * Row::NUMBERS) : 8, RUN = ROWS < 8 ? ROWS : 8;  // of a block; that a warp moves

struct __align__(16) Shared {
  uint4 scales[UNPACK ? WARPS : 1][RUN][Row::WORDS - Row::NUMBERS];
  int bins[ROUNDS * BINS];
  int missing[IDS * THREADS], ids[WARPS], slots[WARPS];  // of the last two: what each warp counts
  unsigned oldest[WARPS];
  unsigned short victims[IDS * THREADS];
  bool used[SLOTS * THREADS], last;
};

// What a thread has of a head: ids with their slots and the numbers of those missing; slots with the blocks in them,
// how old they are, and the numbers of the misses that take them (-1: none does).
struct Ids { int want[IDS], slot[IDS], number[IDS]; };
struct Slots { int block[SLOTS], age[SLOTS], number[SLOTS]; };
struct Counts { int misses, asked; };

// A warp has N runs of 32, one after the other, so that their order is that of warps, steps, lanes.
template <int N> __device__ int index(int step) { return (warp() * N + step) * 32 + lane(); }

// How many flags of this warp come before each; how many it has.
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

__device__ unsigned age_of(int age) { return min(age, OLDEST - 2); }  // as far as it counts

// Marks the slots that are hit; how many ids are missing, and which of its warp's each of these is.
__device__ Counts look_up(Ids& x, const Slots& y, const int* slot_of, Shared& s) {
  bool miss[IDS];
  int asked = 0;
  unsigned oldest = 0;
  for (int i = 0; i < IDS; i++) x.slot[i] = slot_of[max(x.want[i], 0)];  // unconditional, or not all at a time
  for (int i = 0; i < IDS; i++) x.slot[i] = x.want[i] >= 0 ? x.slot[i] : -1;
  for (int i = 0; i < SLOTS; i++) oldest = max(oldest, y.block[i] < 0 ? 0 : age_of(y.age[i]));
  oldest = __reduce_max_sync(ALL, oldest);
  for (int i = 0; i < IDS; i++) asked += __popc(__ballot_sync(ALL, x.want[i] >= 0));
  for (int i = 0; i < IDS; i++) {
    miss[i] = missing(x, i);
    if (x.slot[i] >= 0) s.used[x.slot[i]] = true;
  }
  const int misses = number(miss, x.number);
  if (lane() == 0) s.ids[warp()] = asked << 16 | misses, s.oldest[warp()] = oldest;
  __syncthreads();
  const int all = of_warps(s.ids, WARPS);
  return {all & 0xFFFF, all >> 16};
}

// Which slots are taken: those younger by less than `from` than the oldest can be, and the first `room` of those that
// are by less than `width` more.
struct Cut { unsigned from, width; int room; };

__device__ Cut cut(const unsigned (&young)[SLOTS], int misses, unsigned youngest, Shared& s) {
  unsigned from = 0;
  int shift = max(0, 24 - __clz(youngest)), round = 0;
  while (true) {
    for (int i = 0; i < SLOTS; i++) {
      const unsigned bin = young[i] - from >> shift;
      if (bin < BINS) atomicAdd(&s.bins[round * BINS + bin], 1);
    }
    __syncthreads();
    const Reached f = find<EACH>(s.bins + round++ * BINS, misses);
    from += (unsigned)f.bin << shift, misses -= f.before;
    if (shift == 0 || f.inside == misses) return {from, 1u << shift, misses};
    shift = 0;
  }
}

// The misses in order.
__device__ void list(Ids& x, Shared& s) {
  const int ahead = of_warps(s.ids, warp()) & 0xFFFF;
  for (int i = 0; i < IDS; i++) {
    x.number[i] += ahead;
    if (missing(x, i)) s.missing[x.number[i]] = x.want[i];
  }
  __syncthreads();
}

// The slots for them, in order: the oldest that are not hit, empty ones before all others.
__device__ void choose(Slots& y, int misses, Shared& s) {
  const unsigned oldest = __reduce_max_sync(ALL, lane() < WARPS ? s.oldest[lane()] : 0);
  unsigned young[SLOTS];
  for (int i = 0; i < SLOTS; i++) {
    young[i] = y.block[i] < 0 ? 0 : 1 + oldest - age_of(y.age[i]);
    if (s.used[index<SLOTS>(i)]) young[i] = NEVER;
  }
  const Cut c = cut(young, misses, 1 + oldest, s);
  bool over[SLOTS], tie[SLOTS];
  int ties[SLOTS];
  for (int i = 0; i < SLOTS; i++) over[i] = young[i] < c.from, tie[i] = young[i] - c.from < c.width;
  const int total = number(over, y.number) | number(tie, ties) << 16;
  if (lane() == 0) s.slots[warp()] = total;
  __syncthreads();
  const int before = of_warps(s.slots, warp());
  for (int i = 0; i < SLOTS; i++) {
    const int level = ties[i] + (before >> 16);
    const bool taken = over[i] || tie[i] && level < c.room;
    y.number[i] = taken ? y.number[i] + (before & 0xFFFF) + min(level, c.room) : -1;
    if (taken) s.victims[y.number[i]] = index<SLOTS>(i);
  }
}

// What the head has from now on. A block that leaves is none of those that come, so all may be written at once.
__device__ void commit(
    const Ids& x, const Slots& y, int* slot_of, int* block_of, int* age, int* out, int n, int slots, const Shared& s) {
  for (int i = 0; i < IDS; i++) {
    if (index<IDS>(i) < n) out[index<IDS>(i)] = missing(x, i) ? s.victims[x.number[i]] : x.slot[i];
  }
  for (int i = 0; i < SLOTS; i++) {
    const int at = index<SLOTS>(i);
    if (at < slots) age[at] = y.number[i] >= 0 | s.used[at] ? 0 : min(y.age[i] + 1, OLDEST);
  }
  for (int i = 0; i < SLOTS; i++) {
    const int at = index<SLOTS>(i);
    if (y.number[i] < 0) continue;
    const int block = s.missing[y.number[i]];
    if (y.block[i] >= 0) slot_of[y.block[i]] = -1;
    block_of[at] = block, slot_of[block] = at;
  }
}

// The missing blocks as they are, 512 bytes at a time per warp; to programs first, so that a few are spread over all of
// them. This thread's 16 bytes of STEPS of these: first they are asked for, and where they go may be found while they
// come.
struct MoveAsTheyAre {
  const int count, stride = gridDim.y * THREADS;
  int at = (warp() * gridDim.y + blockIdx.y) * 32 + lane();
  uint4 quad[STEPS];

  __device__ MoveAsTheyAre(int misses) : count(misses * QUADS) {}
  __device__ bool next() { return (at += STEPS * stride) < count; }

  __device__ void load(const uint4* pool, const Shared& s) {
    for (int i = 0; i < STEPS; i++) {
      const int q = at + i * stride;
      if (q >= count) break;  // mostly after the first
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

// The missing blocks of packed rows, RUN rows at a time per warp. A row has its scales behind it, so lines of 128 bytes
// begin and end anywhere in it; whole lines are what the link is fast at. So a warp asks for all words of its rows in
// order, and tells itself the scales when they are here.
struct MoveUnpacked {
  static constexpr int RUNS = ROWS / RUN, WORDS = RUN * Row::WORDS, LOADS = (WORDS + 31) / 32;  // of a block; of a run
  static constexpr int TOGETHER = LOADS > 6 ? 1 : LOADS > 1 ? 12 / LOADS : STEPS;  // runs that a warp has on their way
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
      __syncwarp();  // the scales of the run before are read
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

  // 16 numbers, which become 32 bytes.
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

// A head that keeps its slots: they are attended to.
__device__ void keep(const int* out, unsigned long long* counts, int n) {
  int held = 0;
  for (int i = 0; i < IDS; i++) held += index<IDS>(i) < n && out[index<IDS>(i)] >= 0;
  held = __reduce_add_sync(ALL, held);
  if (lane() == 0) atomicAdd(counts + counter::SELECTED, held);
}

extern "C" __global__ void __launch_bounds__(THREADS) fetch(
    const int* retrieve_now, const int* blocks, const uint4* pool, uint4* hot, int* slot_of, int* block_of, int* age,
    int* done_count, unsigned long long* counts, int* out, int n, int slots, int total) {
  __shared__ Shared s;
  const long long bh = blockIdx.x;
  blocks += bh * n, out += bh * n, slot_of += bh * total, block_of += bh * slots, age += bh * slots, counts = counters_of(counts, bh);
  const int *ids = blocks + index<IDS>(0), *have = block_of + index<SLOTS>(0), *idle = age + index<SLOTS>(0);
  for (int i = threadIdx.x; i < ROUNDS * BINS; i += THREADS) s.bins[i] = 0;
  for (int i = threadIdx.x; i < SLOTS * THREADS; i += THREADS) s.used[i] = i >= slots;
  now(ids), now(have), now(idle), now(slot_of);
  __syncthreads();
  Ids x;
  Slots y;
  wait_for_previous();
  for (int i = 0; i < IDS; i++) x.want[i] = index<IDS>(i) < n ? ids[32 * i] : -1;
  for (int i = 0; i < SLOTS; i++) {
    const bool there = index<SLOTS>(i) < slots;
    y.block[i] = there ? have[32 * i] : -1, y.age[i] = there ? idle[32 * i] : 0, y.number[i] = -1;
  }
  if (retrieve_now && retrieve_now[bh] == 0) {
    if (blockIdx.y == 0) keep(out, counts, n);
    return;
  }
  const Counts count = look_up(x, y, slot_of, s);
  bool last = blockIdx.y == 0;  // without misses the plan is made of nothing that is written
  Move m(count.misses);
  pool += bh * total * (UNPACK ? ROWS * Row::WORDS : QUADS), hot += bh * slots * QUADS;
  if (count.misses > 0) {
    // Its loads are done, as they were used: this program has read the state.
    const int before = threadIdx.x == 0 ? atomicAdd(done_count + bh, 1) : 0;
    list(x, s);
    m.load(pool, s);
    choose(y, count.misses, s);
    if (threadIdx.x == 0) s.last = before == gridDim.y - 1;
    __syncthreads();
    last = s.last;
  }
  if (last) {
    commit(x, y, slot_of, block_of, age, out, n, slots, s);
    if (threadIdx.x == 0) atomicAdd(counts + counter::SELECTED, count.asked), atomicAdd(counts + counter::MISSED, count.misses), done_count[bh] = 0;
  }
  if (m.at >= m.count) return;
  m.store(hot, s);
  while (m.next()) m.load(pool, s), m.store(hot, s);
}
