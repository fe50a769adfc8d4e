// Attention of one query token over the ring and the chosen blocks, as ops/attend/sparse_attention.py specifies it, for
// up to 8 query heads of a kv head, in fp16 and bf16.
//
// Why not Triton: there attention takes two launches, and the results of the programs of a head go through memory. Here the
// programs of a head are a cluster. Each program adds up a slice of the output, and the others send their parts of it. A
// product may take the channels in any order, so a row goes straight into the registers that the tensor cores read. A warp
// has loads of 16 tokens in flight, 8 KiB at head_dim 128.
//
// With the estimate of the rest (ops/rest/__init__.py) the sums of groups are further rows, in fp16. Exact tokens are
// those that the step attends to exactly. A group g with exact tokens i and m remaining tokens is computed without a
// subtraction from its row:
//
//   logit of g = (q.sum of keys - sum of q.k_i) / m + log m, and w = exp(logit) / m
//   out += w (sum of values) - sum of w v_i
//
// Each program of the cluster holds the products of the query with the sums of some groups in its shared memory. The programs
// subtract the products with their exact tokens there. After a barrier a warp attends to its tiles of tokens and of groups,
// and looks up the w of the group of each exact token.
//
// Compile-time constants: D channels (a multiple of 64); G query heads; P rows of a block; FILLED, whether blocks may
// be partly empty; BF16; WARPS of a program; programs RESIDENT on a multiprocessor; programs of a CLUSTER; pool rows of
// a GROUP of the rest (0: no rest); whether sums, lengths, frontier, `fill` and query are SETTLED, so that they may be
// read ahead of `wait_for_previous`.

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

// A token in memory, or the sums of a group; null for none. Of a tile of 16 rows, threads i and 16 + i have row i.
using Row = const char*;

__device__ Row of_tile(Row row, int i) {
  return reinterpret_cast<Row>(__shfl_sync(ALL, reinterpret_cast<unsigned long long>(row), i));
}

// Which of 16 rows number r of a thread is.
__device__ int column(int r) { return 2 * (threadIdx.x % 4) + r % 2 + r / 2 * 8; }

__device__ void load_values(Words (&value)[4][OF_VALUE], Row row) {
  const int g = threadIdx.x % 32 / 4;
  for (int r = 0; r < 4; r++) {
    const Row at = of_tile(row, column(r));
    for (int i = 0; i < OF_VALUE; i++) value[r][i] = at ? load_once(value_of<D>(at) + (g + 8 * i) * 16) : Words{};
  }
}

__device__ void load_keys(Words (&key)[2][OF_KEY], Row row) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int r = 0; r < 2; r++) {  // rows g and 8 + g
    const Row at = of_tile(row, g + 8 * r);
    for (int i = 0; i < OF_KEY; i++) key[r][i] = at ? load_once(at + (t + 4 * i) * 16) : Words{};
  }
}

// The query's operands of two products, 4 channels each. The other rows of the products are 0.
struct Operands { Words at[2]; };

// The products of head g with 16 keys, in fp16, or in bf16 with BRAIN. z[r][2] and z[r][3] are unused. `query(i)`: the
// operands for channels (t + 4 i) * 8 and the next 7. They are loaded each time: 8 registers, not D / 4.
template <bool BRAIN, class Query>
__device__ void products(float (&z)[2][4], Query query, const Words (&key)[2][OF_KEY]) {
  for (int r = 0; r < 2; r++)
    for (int c = 0; c < 4; c++) z[r][c] = 0;
  for (int i = 0; i < OF_KEY; i++) {
    const Operands x = query(i);
    for (int half = 0; half < 2; half++)
      for (int r = 0; r < 2; r++)
        multiply_add<BRAIN>(z[r], x.at[half].at, key[r][i].at[2 * half], key[r][i].at[2 * half + 1]);
  }
}

__device__ float capped(float logit, float softcap) {
  if (softcap > 0)  // tanh; rounded alike wherever it is inlined
    logit = __fsub_rn(softcap, __fdividef(2 * softcap, 1 + __expf(__fdividef(2 * logit, softcap))));
  return logit;
}

// The largest number of a query head over 16 rows.
__device__ float over_columns(const float (&x)[4]) {
  float peak = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1));
  return fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
}

// Attend to 16 tokens.
template <class Query>
__device__ void fold(State& s, Query query, Row row, float scale, float softcap) {
  Words key[2][OF_KEY], value[4][OF_VALUE];
  load_values(value, row);  // before the keys, for whose loads the products wait
  load_keys(key, row);
  float z[2][4], p[4];
  products<BF16>(z, query, key);
  for (int r = 0; r < 4; r++) p[r] = of_tile(row, column(r)) ? capped(z[r / 2][r % 2] * scale, softcap) : none();
  const float peak = fmaxf(over_columns(p), s.top);
  scale_by(s, share(s.top, peak));
  s.top = peak;
  for (int r = 0; r < 4; r++) s.total += p[r] = share(p[r], peak);
  add_values<BF16>(s, value, p);
}

// The tokens: those of the ring, and those of the chosen blocks.
struct Tokens {
  const char *near, *hot;
  const int *slots, *block_of, *fill;  // slots of the chosen blocks; the block in each slot; rows of a block that count
  Ring ring;
  int end, chosen;

  __device__ int near_tiles() const { return (ring.rows + TILE - 1) / TILE; }
  __device__ int tiles() const { return near_tiles() + (chosen + TILE - 1) / TILE; }

  // This thread's token of a tile.
  __device__ Row row(int tile) const {
    const int row = tile * TILE + threadIdx.x % TILE;
    if (tile < near_tiles()) return row < ring.rows && ring.position(row) < end ? row_at<D>(near, row) : nullptr;
    const int token = row - near_tiles() * TILE;
    const int slot = token < chosen ? slots[token / P] : -1;
    if (slot < 0 || FILLED && token % P >= fill[block_of[slot]]) return nullptr;
    return row_at<D>(hot, slot * P + token % P);
  }
};

// How many of `tiles`, dealt out to the programs of the cluster in turn, a program gets.
__device__ int dealt(int tiles, int rank) { return (tiles - rank + CLUSTER - 1) / CLUSTER; }

// A warp prefetches 16 rows into the L2, or only their VALUES.
template <bool VALUES = false> __device__ void ask_for(Row row) {
  if (row)
    for (int at = lane() / TILE * 128; at < row_bytes<D> / (1 + VALUES); at += 256)
      ask((VALUES ? value_of<D>(row) : row) + at);
}

#if GROUP
constexpr int BLOCKS = GROUP / P;  // blocks of a group
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
// Products are added up as integers, so that the order of the additions does not matter. These integers count steps of
// 1 / STEPS. GROUP products of up to MOST_PRODUCT do not overflow. A step for each token of a group adds less to the mean
// than the rounding of sums in fp16, if products are near 1 or larger.
constexpr float MOST_PRODUCT = 32767, STEPS = float(1 << 16) / GROUP;

// The product in steps of 1 / `of`. A product above MOST_PRODUCT, or NaN, makes the output NaN.
__device__ int steps(State& s, float product, float of) {
  if (!(fabsf(product) <= MOST_PRODUCT)) s.total = __int_as_float(0x7FC00000), product = 0;
  return __float2int_rn(product * of);
}

// 2^n; 0 if that is below the normal numbers.
__device__ float power(int n) { return n < -126 ? 0 : __int_as_float((n + 127) << 23); }

// 16 tokens, or 16 groups.
struct Tile {
  Row row;
  int group;  // of this thread's token, or group; -1 for none
};

// The groups of the rest. Exact tokens are in chosen blocks, or have positions from `begin` up to `end`: the latter are
// both in the ring and in the sums. Tiles of 16 groups go to the programs of the cluster in turn.
struct Rest {
  const char* sums;
  const int* fill;
  int groups, blocks, sink, begin, end;
  // In the shared memory of the program of a group: what remains of the group.
  int *product;  // [groups of the program, G], in steps: products of the query with the keys
  int *left;     // [groups of the program]: tokens

  __device__ int tiles() const { return ((end + GROUP - 1) / GROUP + TILE - 1) / TILE; }

  // The number of tokens in the sums of a group.
  __device__ int held(int g) const {
    if (g >= groups) return 0;
    if (!FILLED) return max(min((g + 1) * GROUP, end) - max(g * GROUP, sink), 0);
    int tokens = 0;
    for (int i = g * BLOCKS; i < min((g + 1) * BLOCKS, blocks); i++) tokens += __ldcg(fill + i);
    return tokens;
  }

  __device__ Tile tile(int tile) const {
    const int group = tile * TILE + threadIdx.x % TILE;
    return held(group) > 0 ? Tile{row_at<D>(sums, group), group} : Tile{nullptr, -1};
  }

  // A tile of tokens with their groups.
  __device__ Tile tile(const Tokens& tokens, int tile) const {
    const int row = tile * TILE + threadIdx.x % TILE;
    const Row token = tokens.row(tile);
    if (!token) return {nullptr, -1};
    if (tile < tokens.near_tiles()) {
      const int position = tokens.ring.position(row);
      return {token, position >= begin && position < end ? position / GROUP : -1};
    }
    const int n = row - tokens.near_tiles() * TILE, position = tokens.block_of[tokens.slots[n / P]] * P + n % P;
    return {token, FILLED || position >= sink && position < begin ? position / GROUP : -1};
  }

  // The program of a group, and the place of the group in its tables.
  __device__ static int program(int g) { return g / TILE % CLUSTER; }
  __device__ static int place(int g) { return g / TILE / CLUSTER * TILE + g % TILE; }

  // The logit of one of the remaining tokens of a group, to base 2; -inf if no token remains. Roundings are explicit, so
  // that the compiler does not fuse them differently where this function is inlined.
  __device__ static float logit(int product, int left, float softcap) {
    const float mean = __fdividef(__fmul_rn(product, 1 / STEPS), left);
    return left > 0 ? __fmul_rn(capped(mean, softcap), LOG2_E) : none();
  }
};

// The weight of a token with that logit, to base 2, times 2^-peak. It is rounded to the type of the query before it is
// multiplied by 2^-peak. So every warp rounds alike, and what exact tokens give back is what their group has added.
__device__ float weight(float logit, float peak) {
  const float below = floorf(logit);
  return logit == none() ? 0 : number<BF16>(halves<BF16>(exp2f(logit - below), 0)) * power(below - peak);
}

// The query in shared memory, in its type and in fp16, as the products take it.
struct Queries {
  Words at[2][G][D / 4 + 1];

  // Called by all threads; read after a barrier. `query`: that of head 0.
  __device__ void load(const unsigned short* query, int stride) {
    for (int i = threadIdx.x; i < G * D / 4; i += THREADS) {
      const int head = i / (D / 4), c = i % (D / 4);
      uint2 x = __ldcg(reinterpret_cast<const uint2*>(query + (long long)head * stride + c * 4));
      at[0][head][c] = {{x.x, 0, x.y, 0}};
      if (BF16)
        for (unsigned* two : {&x.x, &x.y}) *two = halves(number<true>(*two & 0xFFFF), number<true>(*two >> 16));
      at[1][head][c] = {{x.x, 0, x.y, 0}};
    }
  }

  // The products with 16 keys, in fp16 those with SUMS.
  template <bool SUMS> __device__ void multiply(float (&z)[2][4], const Words (&key)[2][OF_KEY]) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    products<BF16 && !SUMS>(z, [&](int i) -> Operands {
      const Words* const x = &at[SUMS][min(g, G - 1)][2 * (t + 4 * i)];
      return {{x[0], x[1]}};
    }, key);
  }
};

// Write the products with a tile of sums, and the tokens of its groups, into the tables.
__device__ void multiply_sums(State& s, const Rest& rest, const Queries& queries, int tile, float scale) {
  const int g = threadIdx.x % 32 / 4, base = tile / CLUSTER * TILE;
  const Tile x = rest.tile(tile);
  Words key[2][OF_KEY];
  float z[2][4];
  load_keys(key, x.row);
  ask_for<true>(x.row);
  queries.multiply<true>(z, key);
  for (int r = 0; r < 4; r++)
    if (g < G) rest.product[(base + column(r)) * G + g] = steps(s, z[r / 2][r % 2] * scale, STEPS * GROUP);
  if (lane() < TILE) rest.left[base + lane()] = x.group < 0 ? 0 : rest.held(x.group);
}

// Write the products with a tile of tokens into `kept`, and subtract them from the products of their groups.
__device__ void multiply_tokens(State& s, const Rest& rest, const Queries& queries, const Words (&key)[2][OF_KEY],
                                const Tile& tile, float* kept, float scale) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float z[2][4];
  queries.multiply<false>(z, key);
  for (int r = 0; r < 4; r++) {
    const int group = __shfl_sync(ALL, tile.group, column(r));
    const float x = z[r / 2][r % 2] * scale;
    if (g < G) kept[(r * G + g) * 4 + t] = x;
    if (g < G && group >= 0)
      add<CLUSTER>(Rest::program(group), rest.product + Rest::place(group) * G + g, steps(s, x, -STEPS));
  }
  if (lane() < TILE && tile.group >= 0) add<CLUSTER>(Rest::program(tile.group), rest.left + Rest::place(tile.group), -1);
}

// Raise s.top to the largest of these logits. s.top is to base 2 and an integer, so all weights are scaled exactly.
__device__ void raise(State& s, const float (&logit)[4]) {
  const float peak = fmaxf(ceilf(over_columns(logit)), s.top);
  if (__any_sync(ALL, peak > s.top)) scale_by(s, s.top == none() ? 0 : power(s.top - peak));
  s.top = peak;
}

// Attend to a tile of tokens. They give back their share of the groups.
__device__ void fold_tokens(State& s, const Rest& rest, const Words (&value)[4][OF_VALUE], const Tile& tile,
                            const float* kept, float softcap) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float p[4], mean[4], most[4], back[4];
  for (int r = 0; r < 4; r++) {
    const int group = __shfl_sync(ALL, tile.group, column(r));
    const bool live = of_tile(tile.row, column(r)) && g < G;
    p[r] = live ? capped(kept[(r * G + g) * 4 + t], softcap) * LOG2_E : none();
    mean[r] = none();
    if (live && group >= 0) {
      const int program = Rest::program(group), place = Rest::place(group);
      mean[r] = Rest::logit(read<CLUSTER>(program, rest.product + place * G + g), read<CLUSTER>(program, rest.left + place),
                            softcap);
    }
    most[r] = fmaxf(p[r], mean[r]);
  }
  raise(s, most);
  for (int r = 0; r < 4; r++) {
    s.total += p[r] = p[r] == none() ? 0 : exp2f(p[r] - s.top);
    back[r] = -weight(mean[r], s.top);
  }
  add_values<BF16>(s, value, p);
  if (__any_sync(ALL, tile.group >= 0)) add_values<BF16>(s, value, back);
}

// Attend to a tile of groups.
__device__ void fold_sums(State& s, const Rest& rest, const Words (&value)[4][OF_VALUE], int tile, float softcap) {
  const int g = threadIdx.x % 32 / 4, base = tile / CLUSTER * TILE;
  float p[4], left[4], most[4];
  for (int r = 0; r < 4; r++) {
    const int place = base + column(r);
    left[r] = g < G ? rest.left[place] : 0;
    p[r] = Rest::logit(g < G ? rest.product[place * G + g] : 0, left[r], softcap);
    most[r] = p[r] + __log2f(fmaxf(left[r], 1));
  }
  raise(s, most);
  for (int r = 0; r < 4; r++) {
    p[r] = weight(p[r], s.top);
    s.total += p[r] * left[r];
    p[r] *= GROUP;
  }
  add_values<false>(s, value, p);
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
  const int warp = threadIdx.x / 32;
  slots += (long long)bh * (chosen / P), block_of += (long long)bh * (hot_rows / P), fill += (long long)bh * blocks;
  ring = head_of<D>(ring, bh, ring_rows), hot = head_of<D>(hot, bh, hot_rows);
  q += (long long)b * q_b + (long long)h * G * q_h;  // of the first head
  found.bell.expect(NUMBERS);
  const int near = (rank + CLUSTER * warp) * TILE + lane() % TILE;
  ask_for(near < ring_rows ? row_at<D>(ring, near) : nullptr);
  State s = {none()};
#if GROUP
  if (!SETTLED) wait_for_previous();
  __shared__ Queries queries;
  const int own = (groups + TILE * CLUSTER - 1) / (TILE * CLUSTER) * TILE;  // groups of a program, at most
  int* const product = reinterpret_cast<int*>(parts);
  float* const kept = reinterpret_cast<float*>(product + own * (G + 1));
  const int all = groups * GROUP, end = FILLED ? all : min(__ldcg(ring_begin + b), all);
  const int begin = FILLED ? all : __ldcg(begins + bh / per);
  const Rest rest = {head_of<D>(sums, bh, groups), fill, groups, blocks, sink, begin, end, product, product + own * G};
  queries.load(q, q_h);
  __syncthreads();
  for (int tile = rank + CLUSTER * warp; tile < rest.tiles(); tile += CLUSTER * WARPS)
    multiply_sums(s, rest, queries, tile, scale);
  arrive();
  if (SETTLED) wait_for_previous();
  const Tokens tokens = {ring, hot, slots, block_of, fill, {ring_rows, sink, begins[bh / per]}, length[b], chosen};
  // The first tiles of a warp stay in registers.
  int tile = rank + CLUSTER * warp, group = tile;
  Words key[2][OF_KEY], value[4][OF_VALUE], mean[4][OF_VALUE];
  Tile first = tile < tokens.tiles() ? rest.tile(tokens, tile) : Tile{nullptr, -1};
  load_keys(key, first.row);
  load_values(value, first.row);
  load_values(mean, rest.tile(group).row);
  wait();  // until the products with sums are in all tables
  if (tile < tokens.tiles()) multiply_tokens(s, rest, queries, key, first, kept + warp * TILE * G, scale);
#pragma unroll 1
  for (int i = warp + WARPS; rank + CLUSTER * i < tokens.tiles(); i += WARPS) {
    const Tile x = rest.tile(tokens, rank + CLUSTER * i);
    load_keys(key, x.row);
    ask_for<true>(x.row);
    multiply_tokens(s, rest, queries, key, x, kept + i * TILE * G, scale);
  }
  arrive(), wait();  // until what remains is in all tables
#pragma unroll 1
  for (int i = warp; tile < tokens.tiles(); i += WARPS) {
    fold_tokens(s, rest, value, first, kept + i * TILE * G, softcap);
    if ((tile += CLUSTER * WARPS) >= tokens.tiles()) break;
    first = rest.tile(tokens, tile);
    load_values(value, first.row);
  }
#pragma unroll 1
  while (group < rest.tiles()) {
    fold_sums(s, rest, mean, group, softcap);
    if ((group += CLUSTER * WARPS) >= rest.tiles()) break;
    load_values(mean, rest.tile(group).row);
  }
  s.top *= LN_2;
  // Other programs may still read the tables; alone, a program writes its sums over them.
  float* const sent = CLUSTER == 1 ? parts : kept + dealt(tokens.tiles(), rank) * TILE * G;
#else
  arrive();
  wait_for_previous();
  const Tokens tokens = {ring, hot, slots, block_of, fill, {ring_rows, sink, begins[bh / per]}, length[b], chosen};
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto query = [&](int i) -> Operands {
    Words x = {};
    if (g < G) x = *reinterpret_cast<const Words*>(q + (long long)g * q_h + (t + 4 * i) * 8);
    return {{{{x.at[0], 0, x.at[1], 0}}, {{x.at[2], 0, x.at[3], 0}}}};
  };
  for (int tile = rank + CLUSTER * warp; tile < tokens.tiles(); tile += CLUSTER * WARPS) {
    const Row row = tokens.row(tile);
    if (__any_sync(ALL, row != nullptr)) fold(s, query, row, scale, softcap);
  }
  float* const sent = parts;
  wait();  // until all programs are ready to receive
#endif
  add_warps(found, rank, s, sent);
  add_programs(found, rank, sink_logits ? sink_logits + h * G : nullptr, out + (long long)bh * G * D, tokens.end < 0);
}
