// Attention of one query token over the ring and the chosen blocks, as ops/attend/sparse_attention.py specifies it, for
// up to 8 query heads of a kv head, in fp16 and bf16.
//
// Why not Triton: there attention takes two launches, and the results of the programs of a head go through memory. Here the
// programs of a head are a cluster. Each program adds up a slice of the output, and the others send their parts of it. A
// product may take the channels in any order, so a row goes straight into the registers that the tensor cores read. A warp
// has loads of 16 tokens in flight, 8 KiB at head_dim 128.
//
// With the estimate of the rest (ops/rest/__init__.py) the sums of groups are further rows, in fp16. Exact tokens are
// those that the step attends to exactly. A group without exact tokens is attended to as one row. A group g with exact
// tokens i and m remaining tokens is computed without a subtraction from its row:
//
//   logit of g = (q.sum of keys - sum of q.k_i) / m + log m, and w = exp(logit) / m
//   out += w (sum of values) - sum of w v_i
//
// A warp takes up to 16 such groups with all their exact tokens. A 0/1 matrix says which token is in which group. Products
// with this matrix give the sums over i, and give each token the w of its group.
//
// Compile-time constants: D channels (a multiple of 64); G query heads; P rows of a block; FILLED, whether blocks may
// be partly empty; BF16; WARPS of a program; programs RESIDENT on a multiprocessor; programs of a CLUSTER; pool rows of
// a GROUP of the rest (0: no rest).

#include "cluster.cuh"
#include "common.cuh"
#include "store.cuh"
#include "tensor.cuh"

constexpr int TILE = 16, HEADS = 8;  // tokens and query heads of a product
constexpr int THREADS = 32 * WARPS;
constexpr int OF_KEY = D / 32, OF_VALUE = D / 64;  // 8-channel loads of a thread for one token
constexpr int PAIRS = 4 * OF_VALUE;  // pairs of channels that a thread adds up, for two query heads
constexpr int STRIDE = D + 4;  // between query heads in shared memory: the threads of a warp use all banks
constexpr int SLICE = G * D / CLUSTER;  // numbers of the output for each program of the cluster
static_assert(D % 64 == 0 && G <= HEADS && 32 % CLUSTER == 0 && CLUSTER <= WARPS && GROUP % P == 0);

// The softmax of a warp so far. Thread 4 g + t has the largest logit of query head g, a part of the total, and the sums of
// its channels for heads 2 t and 2 t + 1.
struct State {
  float top, total, sum[PAIRS][4];
};

struct End { float top, total; };

// The numbers of query heads 2 t and 2 t + 1; thread 4 g + t has the number of head g.
__device__ float2 of_columns(float x) {
  const int t = threadIdx.x % 4;
  return {__shfl_sync(ALL, x, 8 * t), __shfl_sync(ALL, x, 8 * t + 4)};
}

// exp(x - peak); 0 if x is -inf, even if `peak` is -inf too.
__device__ float share(float x, float peak) { return x == none() ? 0 : __expf(x - peak); }

__device__ void scale_by(State& s, float factor) {
  const float2 f = of_columns(factor);
  s.total *= factor;
  for (int j = 0; j < PAIRS; j++)
    for (int c = 0; c < 4; c++) s.sum[j][c] *= c % 2 ? f.y : f.x;
}

// Add the values of a tile, weighted by `p`.
template <bool BRAIN>
__device__ void add_values(State& s, const Words (&value)[4][OF_VALUE], const float (&p)[4]) {
  const unsigned early = halves<BRAIN>(p[0], p[1]), late = halves<BRAIN>(p[2], p[3]);
  for (int i = 0; i < OF_VALUE; i++)
    for (int j = 0; j < 4; j++) {  // a pair of channels: the lower channel of all tokens, then the upper
      const unsigned a = value[0][i].at[j], b = value[1][i].at[j], c = value[2][i].at[j], d = value[3][i].at[j];
      multiply_add<BRAIN>(s.sum[4 * i + j],
                          {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                           __byte_perm(c, d, 0x7632)}, early, late);
    }
}

// Load the values of 16 rows. `row` in threads i and 16 + i is the number of row i, counted from `rows`; negative: no
// row.
__device__ void load_values(Words (&value)[4][OF_VALUE], const char* rows, int row) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int r = 0; r < 4; r++) {  // rows 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t
    const int at = __shfl_sync(ALL, row, 2 * t + r % 2 + r / 2 * 8);
    for (int i = 0; i < OF_VALUE; i++)
      value[r][i] = at >= 0 ? load_once(value_of<D>(row_at<D>(rows, at)) + (g + 8 * i) * 16) : Words{};
  }
}

// The products of head g with the keys of the same rows, in fp16, or in bf16 with BRAIN. z[r][2] and z[r][3] are
// unused.
template <bool BRAIN>
__device__ void products(float (&z)[2][4], const unsigned short* query, const char* rows, int row) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Words key[2][OF_KEY];
  for (int r = 0; r < 2; r++) {  // rows g and 8 + g
    const int at = __shfl_sync(ALL, row, g + 8 * r);
    for (int i = 0; i < OF_KEY; i++)
      key[r][i] = at >= 0 ? load_once(row_at<D>(rows, at) + (t + 4 * i) * 16) : Words{};
  }
  for (int r = 0; r < 2; r++)
    for (int c = 0; c < 4; c++) z[r][c] = 0;
  for (int i = 0; i < OF_KEY; i++) {  // load the query from the caches each time: 4 registers, not D / 8
    Words x = {};
    if (g < G) x = *reinterpret_cast<const Words*>(query + (t + 4 * i) * 8);
    if (BF16 && !BRAIN)
      for (unsigned& two : x.at) two = halves(number<true>(two & 0xFFFF), number<true>(two >> 16));
    for (int half = 0; half < 4; half += 2)
      for (int r = 0; r < 2; r++)
        multiply_add<BRAIN>(z[r], {x.at[half], 0, x.at[half + 1], 0}, key[r][i].at[half], key[r][i].at[half + 1]);
  }
}

__device__ float capped(float logit, float softcap) {
  if (softcap > 0) logit = softcap - __fdividef(2 * softcap, 1 + __expf(__fdividef(2 * logit, softcap)));  // tanh
  return logit;
}

// Turn the logits `p` of four rows into weights.
__device__ void weigh(State& s, float (&p)[4]) {
  float peak = fmaxf(fmaxf(fmaxf(p[0], p[1]), fmaxf(p[2], p[3])), s.top);
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1)), peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
  scale_by(s, share(s.top, peak));
  s.top = peak;
  for (float& x : p) x = share(x, peak);
}

// Attend to 16 tokens, or with SUMS to 16 groups. The row of a group is the sum of its `held` tokens, divided by GROUP.
template <bool SUMS = false>
__device__ void fold(
    State& s, const unsigned short* query, const char* rows, int row, float scale, float softcap, int held = 1) {
  constexpr bool BRAIN = BF16 && !SUMS;
  const int t = threadIdx.x % 4;
  Words value[4][OF_VALUE];
  load_values(value, rows, row);  // before the keys, for whose loads the products wait
  float z[2][4], p[4], tokens[4];
  products<BRAIN>(z, query, rows, row);
  for (int r = 0; r < 4; r++) {
    const int from = 2 * t + r % 2 + r / 2 * 8;
    const bool live = __shfl_sync(ALL, row, from) >= 0;
    p[r] = z[r / 2][r % 2] * scale;
    if (SUMS) tokens[r] = max(__shfl_sync(ALL, held, from), 1), p[r] *= __fdividef(GROUP, tokens[r]);
    p[r] = capped(p[r], softcap);
    if (SUMS) p[r] += __logf(tokens[r]);
    if (!live) p[r] = none();
  }
  weigh(s, p);
  for (int r = 0; r < 4; r++) {
    s.total += p[r];
    if (SUMS) p[r] *= __fdividef(GROUP, tokens[r]);
  }
  add_values<BRAIN>(s, value, p);
}

// The places of the tokens: first the rows of the ring, then the rows of the chosen blocks.
struct Tokens {
  const int *slots, *block_of, *fill;  // slots of the chosen blocks; the block in each slot; rows of a block that count
  Ring ring;
  int end, chosen;

  __device__ int near_tiles() const { return (ring.rows + TILE - 1) / TILE; }
  __device__ int tiles() const { return near_tiles() + (chosen + TILE - 1) / TILE; }

  // The place of this thread's token of a tile; -1 for none.
  __device__ int row(int tile) const {
    const int row = tile * TILE + threadIdx.x % TILE;
    if (tile < near_tiles()) {
      return row < ring.rows && ring.position(row) < end ? row : -1;
    }
    const int token = row - near_tiles() * TILE;
    const int slot = token < chosen ? slots[token / P] : -1;
    if (slot < 0 || FILLED && token % P >= fill[block_of[slot]]) return -1;
    return slot * P + token % P;
  }
};

// A warp prefetches a tile of rows into the L2.
__device__ void ask_for(const char* rows, int tile, int of_rows) {
  const int row = tile * TILE + lane() % TILE;
  if (row < of_rows)
    for (int at = lane() / TILE * 128; at < row_bytes<D>; at += 256) ask(row_at<D>(rows, row) + at);
}

#if GROUP
constexpr int BLOCKS = GROUP / P;  // blocks of a group
constexpr int WINDOW = P < TILE ? TILE / P : 1;  // entries among which a warp looks for groups that begin
constexpr int NO_ENTRY = 0x7FFFFFFF;

// Two numbers, 1 if a condition holds, else 0, as fp16, or as bf16 with BRAIN.
template <bool BRAIN>
__device__ unsigned ones(bool first, bool second) {
  constexpr unsigned ONE = BRAIN ? 0x3F80 : 0x3C00;
  return (first ? ONE : 0) | (second ? ONE << 16 : 0);
}

// The groups of the rest. Exact tokens are in chosen blocks, or have positions from `begin` up to `end`: the latter are
// both in the ring and in the sums.
struct Rest {
  const char *sums, *hot, *ring;
  const int* fill;
  Ring of_ring;
  int groups, blocks, entries, begin, end;  // an entry: a chosen block, or none
  // In shared memory: slot and block of each entry, room for both again, and the first entry of each group.
  int *slot, *block, *first;

  // The number of tokens in the sums of a group.
  __device__ int held(int g) const {
    if (g < 0 || g >= groups) return 0;
    if (!FILLED) return max(min((g + 1) * GROUP, end) - max(g * GROUP, of_ring.sink), 0);
    int tokens = 0;
    for (int i = g * BLOCKS; i < min((g + 1) * BLOCKS, blocks); i++) tokens += fill[i];
    return tokens;
  }

  __device__ int tiles() const { return ((end + GROUP - 1) / GROUP + TILE - 1) / TILE; }

  // Whether the ring has exact tokens of a group.
  __device__ bool near(int g) const { return begin < end && g >= begin / GROUP && g <= (end - 1) / GROUP; }
  __device__ bool touched(int g) const { return first[g] != NO_ENTRY || near(g); }

  // Units of work, which cover the groups with exact tokens: a unit for each window of entries, with the groups that
  // begin in it, and a unit for each group of the ring. Program r of the cluster has neighbouring windows, so that runs
  // of blocks do not all begin in the windows of one program.
  __device__ int windows() const { return (entries + WINDOW - 1) / WINDOW; }
  __device__ int windows_each() const { return (windows() + CLUSTER - 1) / CLUSTER; }
  __device__ int units() const {
    return CLUSTER * windows_each() + (begin < end ? (end - 1) / GROUP - begin / GROUP + 1 : 0);
  }

  // Called by all threads. Sort the blocks in ascending order, empty entries last, and find the first entry of each group.
  __device__ void arrange() {
    __syncthreads();
    bool ascend = true;
    for (int j = threadIdx.x; j + 1 < entries; j += THREADS) ascend &= unsigned(block[j]) <= unsigned(block[j + 1]);
    if (!__syncthreads_and(ascend)) {
      int *const sorted_slot = block + entries, *const sorted = sorted_slot + entries;
      for (int j = threadIdx.x; j < entries; j += THREADS) {
        const unsigned x = block[j];
        int rank = 0;
        for (int i = 0; i < entries; i++) rank += unsigned(block[i]) < x || unsigned(block[i]) == x && i < j;
        sorted_slot[rank] = slot[j], sorted[rank] = block[j];
      }
      slot = sorted_slot, block = sorted;
      __syncthreads();
    }
    for (int j = threadIdx.x; j < entries; j += THREADS)
      if (block[j] >= 0 && (j == 0 || block[j] / BLOCKS != block[j - 1] / BLOCKS)) first[block[j] / BLOCKS] = j;
    __syncthreads();
  }

  // The end of the entries of group g. `from` is an entry of the group, or the end already.
  __device__ int end_of(int g, int from) const {
    for (;; from += 32) {
      const int j = from + lane();
      const unsigned others = ~__ballot_sync(ALL, j < entries && block[j] >= 0 && block[j] / BLOCKS == g);
      if (others) return from + __ffs(others) - 1;
    }
  }
};

// A unit: up to 16 groups of the rest with all their exact tokens.
struct Unit {
  const Rest& rest;
  int group;  // in threads i and 16 + i: the group of column i of the products; -1 for none
  int from, upto, origin;  // entries; a group's column is its first entry less `origin`
  int near_from, near_upto;  // positions of exact tokens in the ring, all of one group

  __device__ Unit(const Rest& r, int number)
      : rest(r), group(-1), from(0), upto(0), origin(0), near_from(0), near_upto(0) {
    const int i = threadIdx.x % TILE, behind = number - CLUSTER * r.windows_each();
    if (behind >= 0) {
      const int g = r.begin / GROUP + behind;
      if (i == 0) group = g;
      if (r.first[g] != NO_ENTRY) from = origin = r.first[g], upto = r.end_of(g, from);
      near_from = max(r.begin, g * GROUP), near_upto = min(r.end, (g + 1) * GROUP);
      return;
    }
    origin = (number % CLUSTER * r.windows_each() + number / CLUSTER) * WINDOW;
    const int j = origin + i, its = i < WINDOW && j < r.entries && r.block[j] >= 0 ? r.block[j] / BLOCKS : -1;
    if (its >= 0 && r.first[its] == j && !r.near(its)) group = its;
    if (const unsigned begins = __ballot_sync(ALL, group >= 0) & 0xFFFF) {
      const int last = 31 - __clz(begins);
      from = origin + __ffs(begins) - 1;
      upto = r.end_of(__shfl_sync(ALL, group, last), origin + last + 1);
    }
  }

  __device__ bool empty() const { return !__any_sync(ALL, group >= 0); }

  // Call f(rows, row, column) for 16 exact tokens at a time, with -1 for none.
  template <class F>
  __device__ void each(F f) const {
    const int i = threadIdx.x % TILE, chosen = ((upto - from) * P + TILE - 1) / TILE;
    const int tiles = chosen + (near_upto - near_from + TILE - 1) / TILE;
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
      int row = -1, column = -1;
      if (tile < chosen) {
        const int token = tile * TILE + i, j = from + token / P;
        if (j < upto) {
          const int block = rest.block[j], in_block = token % P, position = block * P + in_block;
          const int at = rest.first[block / BLOCKS] - origin;
          const bool live = FILLED ? in_block < rest.fill[block] : position >= rest.of_ring.sink && position < rest.begin;
          // A group of the ring that begins in a window belongs to another unit.
          if (live && (near_from < near_upto || !rest.near(block / BLOCKS))) row = rest.slot[j] * P + in_block, column = at;
        }
      } else if (const int position = near_from + (tile - chosen) * TILE + i; position < near_upto) {
        row = rest.of_ring.row(position), column = 0;
      }
      f(tile < chosen ? rest.hot : rest.ring, row, column);
    }
  }
};

// Attend to what remains of the groups of a unit.
__device__ void fold_remaining(State& s, const unsigned short* query, const Unit& unit, float scale, float softcap) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  // For head g and columns 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t: the sum of the products of their exact tokens. In thread
  // t, taken[r][2] and taken[r][3] count these tokens.
  float taken[2][4] = {}, z[2][4], p[4], left[4];
  const int held = unit.rest.held(unit.group), group = held > 0 ? unit.group : -1;
  unit.each([&](const char* rows, int row, int column) {
    products<BF16>(z, query, rows, row);
    unsigned high[2], low[2];
    for (int r = 0; r < 2; r++) {
      const float x = z[r][0] * scale, y = z[r][1] * scale;
      high[r] = halves(x, y);
      low[r] = halves(x - number(high[r] & 0xFFFF), y - number(high[r] >> 16));
    }
    const unsigned count = g == 0 ? ones<false>(true, true) : 0;
    int of[4];
    for (int r = 0; r < 4; r++) of[r] = __shfl_sync(ALL, column, 2 * t + r % 2 + r / 2 * 8);
    for (int r = 0; r < 2; r++) {
      const int at = g + 8 * r;
      const unsigned early = ones<false>(of[0] == at, of[1] == at), late = ones<false>(of[2] == at, of[3] == at);
      multiply_add<false>(taken[r], {high[0], count, high[1], count}, early, late);
      multiply_add<false>(taken[r], {low[0], 0, low[1], 0}, early, late);
    }
  });
  Words value[4][OF_VALUE];
  load_values(value, unit.rest.sums, group);
  products<false>(z, query, unit.rest.sums, group);
  for (int r = 0; r < 4; r++) {
    const float exact = __shfl_sync(ALL, taken[r / 2][2 + r % 2], t);
    left[r] = __shfl_sync(ALL, held, 2 * t + r % 2 + r / 2 * 8) - exact;
    const float mean = __fdividef(z[r / 2][r % 2] * scale * GROUP - taken[r / 2][r % 2], fmaxf(left[r], 1));
    p[r] = left[r] > 0 ? capped(mean, softcap) + __logf(left[r]) : none();
  }
  weigh(s, p);
  float whole[4];
  for (int r = 0; r < 4; r++) {  // rounded first, so that sums and tokens get the same weight
    p[r] = number<BF16>(halves<BF16>(__fdividef(p[r], fmaxf(left[r], 1)), 0));
    if (left[r] > 0) s.total += p[r] * left[r];
    whole[r] = p[r] * GROUP;
  }
  add_values<false>(s, value, whole);
  const unsigned early = halves<BF16>(-p[0], -p[1]), late = halves<BF16>(-p[2], -p[3]);
  unit.each([&](const char* rows, int row, int column) {
    load_values(value, rows, row);
    float weight[2][4] = {};
    for (int r = 0; r < 2; r++) {
      const int of = __shfl_sync(ALL, column, g + 8 * r);
      multiply_add<BF16>(weight[r], {early, 0, late, 0}, ones<BF16>(of == 2 * t, of == 2 * t + 1),
                         ones<BF16>(of == 8 + 2 * t, of == 9 + 2 * t));
    }
    add_values<BF16>(s, value, {weight[0][0], weight[0][1], weight[1][0], weight[1][1]});
  });
}
#endif

// What each program of the cluster sends for one slice of the output, the program of the slice included: its sums, and the
// largest logit and total of every query head.
struct Found {
  float sum[CLUSTER][SLICE];
  End end[CLUSTER][G];
  Bell<CLUSTER> bell;
};
constexpr int NUMBERS = CLUSTER * (SLICE + 2 * G);  // numbers that a program receives

// Add up over the warps of a program, and send the sums to the other programs. Channels keep the order of the products.
__device__ void add_warps(Found& found, int rank, State& s, float* parts) {
  __shared__ float tops[WARPS][HEADS], totals[WARPS][HEADS];
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if (t == 0) tops[warp][g] = s.top;
  __syncthreads();
  float top = none();
  for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w][g]);
  scale_by(s, share(s.top, top));
  s.total += __shfl_xor_sync(ALL, s.total, 1), s.total += __shfl_xor_sync(ALL, s.total, 2);
  if (t == 0) totals[warp][g] = s.total;
  for (int j = 0; j < PAIRS; j++)
    for (int c = 0; c < 4; c++)
      if (2 * t + c % 2 < G) parts[(warp * G + 2 * t + c % 2) * STRIDE + (2 * j + c / 2) * 8 + g] = s.sum[j][c];
  __syncthreads();
  wait();  // until all programs are ready to receive
  for (int i = threadIdx.x; i < G * D; i += THREADS) {
    float sum = 0;
    for (int w = 0; w < WARPS; w++) sum += parts[(w * G + i / D) * STRIDE + i % D];
    found.bell.send(i / SLICE, &found.sum[rank][i % SLICE], __float_as_uint(sum));
  }
  if (warp < CLUSTER && t == 0 && g < G) {
    float total = 0;
    for (int w = 0; w < WARPS; w++) total += totals[w][g];
    found.bell.send(warp, &found.end[rank][g].top, __float_as_uint(top));
    found.bell.send(warp, &found.end[rank][g].total, __float_as_uint(total));
  }
}

// Add up a program's slice over the programs that sent it, with one thread for each sender of a number.
__device__ void add_programs(
    Found& found, int rank, const unsigned short* sink_logits, unsigned short* out, bool broken) {
  const int from = threadIdx.x % CLUSTER;
  found.bell.receive();
  for (int i = threadIdx.x / CLUSTER; i < SLICE; i += THREADS / CLUSTER) {
    const int head = (rank * SLICE + i) / D, c = (rank * SLICE + i) % D;
    const int channel = c / 64 * 64 + c % 8 * 8 + c / 16 % 4 * 2 + c / 8 % 2;
    const End end = found.end[from][head];
    const float logit = sink_logits ? number<BF16>(sink_logits[head]) : none();
    float sum = found.sum[from][i], top = fmaxf(end.top, logit);
    for (int d = 1; d < CLUSTER; d *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, d));
    const float mine = share(end.top, top);
    float total = mine * end.total;
    sum *= mine;
    for (int d = 1; d < CLUSTER; d *= 2)
      total += __shfl_xor_sync(ALL, total, d), sum += __shfl_xor_sync(ALL, sum, d);
    total += share(logit, top);
    // No token: zero. A row past its capacity: NaN, so that it cannot be mistaken for an answer.
    const float answer = broken ? __int_as_float(0x7FC00000) : total > 0 || total != total ? sum / total : sum;
    if (from == 0) out[head * D + channel] = halves<BF16>(answer, 0);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, RESIDENT) attend(
    const unsigned short* q, const char* ring, const char* hot, const int* slots, const int* block_of, const int* fill,
    const int* length, const int* begins, const unsigned short* sink_logits, const char* sums, const int* ring_begin,
    unsigned short* out, int q_b, int q_h, int heads, int per, int ring_rows, int hot_rows, int blocks, int chosen, int groups,
    int sink, float scale, float softcap) {
  extern __shared__ __align__(16) float parts[];  // [WARPS, G, STRIDE]; before that, the tables of the rest
  __shared__ Found found;
  const int rank = blockIdx.x % CLUSTER, bh = blockIdx.x / CLUSTER, b = bh / heads, h = bh % heads;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  slots += (long long)bh * (chosen / P), block_of += (long long)bh * (hot_rows / P), fill += (long long)bh * blocks;
  ring = head_of<D>(ring, bh, ring_rows), hot = head_of<D>(hot, bh, hot_rows);
  found.bell.expect(NUMBERS);
  arrive();
  ask_for(ring, rank + CLUSTER * warp, ring_rows);
  int tile = rank + CLUSTER * warp;
#if GROUP
  sums = head_of<D>(sums, bh, groups);
  int* const first = reinterpret_cast<int*>(parts);
  for (int i = threadIdx.x; i < groups; i += THREADS) first[i] = NO_ENTRY;
  // ring_begin may still be that of an earlier step: it only decides how much is prefetched.
  const int exact = (ring_rows + TILE - 1) / TILE + (chosen + TILE - 1) / TILE, asked = min(ring_begin[b], groups * GROUP);
  for (int t = tile - exact; t * TILE * GROUP < asked; t += CLUSTER * WARPS)
    if (t >= 0) ask_for(sums, t, groups);
#endif
  wait_for_previous();
  const Tokens tokens = {slots, block_of, fill, {ring_rows, sink, begins[bh / per]}, length[b], chosen};
  q += (long long)b * q_b + (long long)(h * G + g) * q_h;  // of head g
#if GROUP
  const int entries = chosen / P, all = groups * GROUP, end = FILLED ? all : min(ring_begin[b], all);
  Rest rest = {sums, hot, ring, fill, tokens.ring, groups, blocks, entries, FILLED ? all : tokens.ring.begin, end,
               first + groups, first + groups + entries, first};
  for (int j = threadIdx.x; j < entries; j += THREADS) {
    const int slot = slots[j];
    rest.slot[j] = slot, rest.block[j] = slot < 0 ? -1 : block_of[slot];
  }
#endif
  State s = {none()};
  for (; tile < tokens.tiles(); tile += CLUSTER * WARPS) {
    const int row = tokens.row(tile);
    if (__any_sync(ALL, row >= 0)) fold(s, q, tile < tokens.near_tiles() ? ring : hot, row, scale, softcap);
  }
#if GROUP
  rest.arrange();
#pragma unroll 1
  for (tile -= tokens.tiles(); tile < rest.units(); tile += CLUSTER * WARPS) {
    const Unit unit(rest, tile);
    if (!unit.empty()) fold_remaining(s, q, unit, scale, softcap);
  }
#pragma unroll 1
  for (tile -= rest.units(); tile < rest.tiles(); tile += CLUSTER * WARPS) {
    const int group = tile * TILE + threadIdx.x % TILE, held = rest.held(group);
    const bool whole = held > 0 && !rest.touched(group);
    if (__any_sync(ALL, whole)) fold<true>(s, q, sums, whole ? group : -1, scale, softcap, held);
  }
#endif
  add_warps(found, rank, s, parts);
  add_programs(found, rank, sink_logits ? sink_logits + h * G : nullptr, out + (long long)bh * G * D, tokens.end < 0);
}
