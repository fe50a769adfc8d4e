// Attention of one query token over the ring and the chosen blocks, as ops/attend/sparse_attention.py specifies it, for
// up to 8 query heads of a kv head, in fp16 and bf16.
//
// Why not Triton: there it is two launches, and in between what the programs of a head found goes through memory. Here
// they are a cluster: each adds up a slice of the output, of which the others send it what they have. A product does not
// care in which order it takes the channels, so a row goes straight into the registers that the tensor cores read: a warp
// has 16 tokens, 8 KiB at head_dim 128, on their way at a time.
//
// With the rest (ops/rest/__init__.py) the sums of groups are more rows to attend to, in fp16. The sums of a group with no
// exact token go straight to the tensor cores. For each other group a warp first takes its exact tokens out of the sums,
// in shared memory.
//
// Set by the compilation: D channels (a multiple of 64), G query heads, P rows of a block, whether blocks may be partly
// FILLED, BF16, WARPS of a program, programs RESIDENT on a multiprocessor, programs of a CLUSTER, pool rows of a
// GROUP of the rest (0: there is no rest), and REMAINDERS: groups of which a warp takes exact tokens out at a time.

#include "cluster.cuh"
#include "common.cuh"
#include "store.cuh"
#include "tensor.cuh"

constexpr int TILE = 16, HEADS = 8;  // tokens and query heads of a product
constexpr int THREADS = 32 * WARPS;
constexpr int OF_KEY = D / 32, OF_VALUE = D / 64;  // loads of 8 channels that a thread has of a token
constexpr int PAIRS = 4 * OF_VALUE;  // of channels that a thread adds up, for two query heads each
constexpr int STRIDE = D + 4;  // of query heads in shared memory: the threads of a warp meet all banks
constexpr int SLICE = G * D / CLUSTER;  // of the output, a program of the cluster each
static_assert(D % 64 == 0 && G <= HEADS && 32 % CLUSTER == 0 && CLUSTER <= WARPS && GROUP % P == 0);

// A softmax as far as a warp has come. Thread 4 g + t has the largest logit of query head g and its share of the total,
// and of heads 2 t and 2 t + 1 the sums of its channels.
struct State {
  float top, total, sum[PAIRS][4];
};

struct End { float top, total; };

// The numbers of query heads 2 t and 2 t + 1, where thread 4 g + t has that of head g.
__device__ float2 of_columns(float x) {
  const int t = threadIdx.x % 4;
  return {__shfl_sync(ALL, x, 8 * t), __shfl_sync(ALL, x, 8 * t + 4)};
}

// exp(x - peak), where -inf is nothing, even of nothing.
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
    for (int j = 0; j < 4; j++) {  // a pair of channels: the lower ones of the tokens together, then the upper ones
      const unsigned a = value[0][i].at[j], b = value[1][i].at[j], c = value[2][i].at[j], d = value[3][i].at[j];
      multiply_add<BRAIN>(s.sum[4 * i + j],
                          {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                           __byte_perm(c, d, 0x7632)}, early, late);
    }
}

// What a row is: a token, or the sums of a group in device or in shared memory.
enum Kind { TOKEN, SUMS, REMAINDER };

template <Kind KIND>
__device__ Words part_of(const char* row) {
  if constexpr (KIND == REMAINDER) return *reinterpret_cast<const Words*>(row);
  return load_once(row);
}

// Take in 16 rows: `row` of thread i or 16 + i is that of row i behind `rows`, or below 0 where there is none. Sums are
// those of `left` tokens, divided by GROUP.
template <Kind KIND = TOKEN>
__device__ void fold(
    State& s, const unsigned short* query, const char* rows, int row, float scale, float softcap, int left = 1) {
  constexpr bool BRAIN = BF16 && KIND == TOKEN;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Words key[2][OF_KEY] = {}, value[4][OF_VALUE] = {};
  bool live[4];
  for (int r = 0; r < 4; r++) {  // of tokens 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t; before the keys, which are waited for
    const int at = __shfl_sync(ALL, row, 2 * t + r % 2 + r / 2 * 8);
    live[r] = at >= 0;
    for (int i = 0; i < OF_VALUE; i++)
      if (live[r]) value[r][i] = part_of<KIND>(value_of<D>(row_at<D>(rows, at)) + (g + 8 * i) * 16);
  }
  for (int r = 0; r < 2; r++) {  // of tokens g and 8 + g
    const int at = __shfl_sync(ALL, row, g + 8 * r);
    for (int i = 0; i < OF_KEY; i++)
      if (at >= 0) key[r][i] = part_of<KIND>(row_at<D>(rows, at) + (t + 4 * i) * 16);
  }
  float z[2][4] = {};  // of head g and the same tokens as the values; the upper two are of heads that there are not
  for (int i = 0; i < OF_KEY; i++) {  // of the query from the caches each time: 4 registers, not D / 8
    Words x = {};
    if (g < G) x = *reinterpret_cast<const Words*>(query + (t + 4 * i) * 8);
    if (BF16 && !BRAIN)
      for (unsigned& two : x.at) two = halves(number<true>(two & 0xFFFF), number<true>(two >> 16));
    for (int half = 0; half < 4; half += 2)
      for (int r = 0; r < 2; r++)
        multiply_add<BRAIN>(z[r], {x.at[half], 0, x.at[half + 1], 0}, key[r][i].at[half], key[r][i].at[half + 1]);
  }
  float p[4], peak = s.top, tokens[4];
  for (int r = 0; r < 4; r++) {
    p[r] = z[r / 2][r % 2] * scale;
    if (KIND != TOKEN) {
      tokens[r] = max(__shfl_sync(ALL, left, 2 * t + r % 2 + r / 2 * 8), 1);
      p[r] *= __fdividef(GROUP, tokens[r]);
    }
    if (softcap > 0) p[r] = softcap - __fdividef(2 * softcap, 1 + __expf(__fdividef(2 * p[r], softcap)));  // tanh
    if (KIND != TOKEN) p[r] += __logf(tokens[r]);
    if (!live[r]) p[r] = none();
    peak = fmaxf(peak, p[r]);
  }
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1)), peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
  scale_by(s, share(s.top, peak));
  s.top = peak;
  for (int r = 0; r < 4; r++) {
    p[r] = share(p[r], peak), s.total += p[r];
    if (KIND != TOKEN) p[r] *= __fdividef(GROUP, tokens[r]);
  }
  add_values<BRAIN>(s, value, p);
}

// Where the tokens stand: first the rows of the ring, then those of the chosen blocks.
struct Tokens {
  const int *slots, *block_of, *fill;  // the chosen blocks; what is in each slot; how many rows of a block count
  Ring ring;
  int end, chosen;

  __device__ int near_tiles() const { return (ring.rows + TILE - 1) / TILE; }
  __device__ int tiles() const { return near_tiles() + (chosen + TILE - 1) / TILE; }

  // Of this thread's token of a tile; -1 where there is none.
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

// A warp asks for a tile of rows.
__device__ void ask_for(const char* rows, int tile, int of_rows) {
  const int row = tile * TILE + lane() % TILE;
  if (row < of_rows)
    for (int at = lane() / TILE * 128; at < row_bytes<D>; at += 256) ask(row_at<D>(rows, row) + at);
}

#if GROUP
constexpr int BLOCKS = GROUP / P;  // of a group
constexpr int NO_ENTRY = 0x7FFFFFFF;

// Number i of 8.
template <bool BRAIN>
__device__ float number_at(const Words& x, int i) { return number<BRAIN>(x.at[i / 2] >> i % 2 * 16); }

// What a step does not attend to exactly, by groups. Exact tokens are those of the chosen blocks, and those from `begin`
// up to `end`, which are in the ring and in the sums.
struct Rest {
  const char *sums, *hot, *ring;
  const int* fill;
  Ring of_ring;
  int groups, blocks, entries, begin, end;  // an entry: a chosen block, or none
  // In shared memory: slot and block of each entry, and the first entry of each group.
  int *slot, *block, *first;

  // The tokens in the sums of a group.
  __device__ int held(int g) const {
    if (g >= groups) return 0;
    if (!FILLED) return max(min((g + 1) * GROUP, end) - max(g * GROUP, of_ring.sink), 0);
    int tokens = 0;
    for (int i = g * BLOCKS; i < min((g + 1) * BLOCKS, blocks); i++) tokens += fill[i];
    return tokens;
  }

  __device__ int tiles() const { return ((end + GROUP - 1) / GROUP + TILE - 1) / TILE; }

  // Whether the ring has exact tokens of a group.
  __device__ bool near(int g) const { return begin < end && g >= begin / GROUP && g <= (end - 1) / GROUP; }
  __device__ bool touched(int g) const { return first[g] != NO_ENTRY || near(g); }

  // The groups with exact tokens are among the items: the group of each entry that is the first of its group, then those
  // of the ring. -1: an item that is none.
  __device__ int items() const { return entries + (begin < end ? (end - 1) / GROUP - begin / GROUP + 1 : 0); }
  __device__ int group(int item) const {
    if (item >= entries) return begin / GROUP + item - entries;
    const int g = block[item] / BLOCKS;
    return block[item] >= 0 && first[g] == item && !near(g) ? g : -1;
  }

  // Find the first entry of each group, by all threads. True if the blocks ascend.
  __device__ bool find_first() const {
    __syncthreads();
    bool ascend = true;
    for (int j = threadIdx.x; j < entries; j += THREADS) {
      if (block[j] >= 0) atomicMin(first + block[j] / BLOCKS, j);
      ascend &= j + 1 == entries || unsigned(block[j]) <= unsigned(block[j + 1]);
    }
    return __syncthreads_and(ascend);
  }

  // A warp writes the sums of a group without its exact tokens to `to`. Returns the number of tokens that remain.
  __device__ int take_out(char* to, int g, bool ascend) const {
    constexpr int EACH = (D / 4 + 31) / 32;  // runs of 8 numbers of a row that a thread has, 32 runs apart
    float x[EACH][8];
    for (int e = 0; e < EACH; e++) {
      const int at = lane() + 32 * e;
      const Words sum = at < D / 4 ? load_once(row_at<D>(sums, g) + at * 16) : Words{};
      for (int i = 0; i < 8; i++) x[e][i] = number_at<false>(sum, i);
    }
    const auto subtract = [&](const char* row) {
      for (int e = 0; e < EACH; e++) {
        const int at = lane() + 32 * e;
        const Words token = at < D / 4 ? load_once(row + at * 16) : Words{};
        for (int i = 0; i < 8; i++) x[e][i] -= number_at<BF16>(token, i) * (1.0f / GROUP);
      }
    };
    int tokens = held(g);
    for (int some = first[g] / 32 * 32; some < entries; some += 32) {
      const int at = some + lane() < entries ? block[some + lane()] : -1;
      unsigned members = __ballot_sync(ALL, at >= 0 && at / BLOCKS == g);
      for (; members; members &= members - 1) {
        const int j = some + __ffs(members) - 1, row = block[j] * P;
        const int from = FILLED ? 0 : max(of_ring.sink - row, 0), upto = FILLED ? fill[block[j]] : min(begin - row, P);
#pragma unroll 8
        for (int i = from; i < upto; i++) subtract(row_at<D>(hot, slot[j] * P + i));
        tokens -= max(upto - from, 0);
      }
      if (ascend && __any_sync(ALL, unsigned(at) >= unsigned((g + 1) * BLOCKS))) break;
    }
    const int from = max(begin, g * GROUP), upto = min(end, (g + 1) * GROUP);
#pragma unroll 8
    for (int i = from; i < upto; i++) subtract(row_at<D>(ring, of_ring.row(i)));
    for (int e = 0; e < EACH; e++) {
      const float* y = x[e];
      if (lane() + 32 * e < D / 4)
        reinterpret_cast<Words*>(to)[lane() + 32 * e] = {
            halves(y[0], y[1]), halves(y[2], y[3]), halves(y[4], y[5]), halves(y[6], y[7])};
    }
    return tokens - max(upto - from, 0);
  }
};
#endif

// What a program is sent for its slice of the output, by itself too: by each program the sums, and what belongs to them of
// all query heads.
struct Found {
  float sum[CLUSTER][SLICE];
  End end[CLUSTER][G];
  Bell<CLUSTER> bell;
};
constexpr int NUMBERS = CLUSTER * (SLICE + 2 * G);  // of these

// Add up over the warps of a program, and send it to the others. Channels stand in the order in which the products left
// them.
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
  wait();  // until all expect something
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

// Add up a program's slice over those that sent it, by as many threads for each number.
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
  extern __shared__ __align__(16) float parts[];  // [WARPS, G, STRIDE]; before that, what the rest needs
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
  char* const remainders = reinterpret_cast<char*>(parts) + warp * REMAINDERS * row_bytes<D>;
  int* const first = reinterpret_cast<int*>(reinterpret_cast<char*>(parts) + WARPS * REMAINDERS * row_bytes<D>);
  for (int i = threadIdx.x; i < groups; i += THREADS) first[i] = NO_ENTRY;
  // The ring begin of an earlier step would do too: it only says how much to ask for.
  const int exact = (ring_rows + TILE - 1) / TILE + (chosen + TILE - 1) / TILE, asked = min(ring_begin[b], groups * GROUP);
  for (int t = tile - exact; t * TILE * GROUP < asked; t += CLUSTER * WARPS)
    if (t >= 0) ask_for(sums, t, groups);
#endif
  wait_for_previous();
  const Tokens tokens = {slots, block_of, fill, {ring_rows, sink, begins[bh / per]}, length[b], chosen};
  q += (long long)b * q_b + (long long)(h * G + g) * q_h;  // of head g
#if GROUP
  const int entries = chosen / P, all = groups * GROUP, end = FILLED ? all : min(ring_begin[b], all);
  const Rest rest = {sums, hot, ring, fill, tokens.ring, groups, blocks, entries, FILLED ? all : tokens.ring.begin, end,
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
  const bool ascend = rest.find_first();
  for (tile -= tokens.tiles(); tile < rest.tiles(); tile += CLUSTER * WARPS) {
    const int group = tile * TILE + threadIdx.x % TILE, held = rest.held(group);
    const bool whole = held > 0 && !rest.touched(group);
    if (__any_sync(ALL, whole)) fold<SUMS>(s, q, sums, whole ? group : -1, scale, softcap, held);
  }
  tile -= rest.tiles();
  while (tile < rest.items()) {
    int left = 0;
    for (int i = 0; i < REMAINDERS && tile < rest.items(); tile += CLUSTER * WARPS) {
      const int group = rest.group(tile);
      if (group < 0) continue;
      const int remain = rest.take_out(remainders + i * row_bytes<D>, group, ascend);
      if (threadIdx.x % TILE == i++) left = remain;
    }
    __syncwarp();
    const int row = left > 0 ? threadIdx.x % TILE : -1;
    if (__any_sync(ALL, row >= 0)) fold<REMAINDER>(s, q, remainders, row, scale, softcap, left);
    __syncwarp();
  }
#endif
  add_warps(found, rank, s, parts);
  add_programs(found, rank, sink_logits ? sink_logits + h * G : nullptr, out + (long long)bh * G * D, tokens.end < 0);
}
