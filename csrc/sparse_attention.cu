// Attention of one query token over the ring and the chosen blocks, as ops/attend/sparse_attention.py specifies it, for
// up to 8 query heads of a kv head, in fp16 and bf16.
//
// With LISTED it is attention over the blocks that are listed for each request of an engine, as
// ops/engine/listed_attention.py specifies it. All requests share the heads of `hot`, the ring has no rows, and `fill` has
// a number for each place of a list. The last places of a list have the blocks that a method selected, and `ids` has the
// numbers of these blocks in the text. A group of the rest is a block of the engine, which `table` names.
//
// Why not Triton: there attention takes two launches, and the results of the programs of a head go through memory. Here
// the programs of a head are a cluster. Each program adds up a slice of the output, and the others send their parts of it.
// A product may take the channels in any order, so a row goes straight into the registers that the tensor cores read. A
// warp has loads of 16 tokens in flight, 8 KiB at head_dim 128.
//
// With the estimate of the rest (ops/rest/__init__.py) the sums of groups are further rows, in fp16. Exact tokens are
// those that the step attends to exactly. A group g with exact tokens i and m remaining tokens is computed without a
// subtraction from its row:
//
//   logit of g = (q.sum of keys - sum of q.k_i) / m + log m, and w = exp(logit) / m
//   out += w (sum of values) - sum of w v_i
//
// A program of the cluster attends to every CLUSTER-th group, and to all exact tokens of these groups. In its shared memory
// it keeps the products of the query with the sums of its groups, and subtracts the products with the exact tokens from
// them. Then a warp attends to its tiles of tokens and of groups, and looks up the w of the group of each exact token.
//
// Compile-time constants: D channels (a multiple of 64); G query heads; P rows of a block; FILLED, whether blocks may
// be partly empty; LISTED; BF16; WARPS of a program; programs RESIDENT on a multiprocessor; programs of a CLUSTER; pool
// rows of a GROUP of the rest (0: no rest); whether sums, lengths, frontier, `fill` and query are SETTLED, so that they may be
// read ahead of `wait_for_previous`; whether the blocks are NAMED: `ids` has the numbers of the blocks in `slots`, and may
// be read ahead too.

#include "attend.cuh"
#include "cluster.cuh"
#include "common.cuh"
#include "store.cuh"
#include "tensor.cuh"

constexpr int OF_KEY = D / 32, OF_VALUE = D / 64;  // 8-channel loads of a thread for one token
constexpr int SLICE = G * D / CLUSTER;  // numbers of the output for each program of the cluster
static_assert(D % 64 == 0 && G <= HEADS && 32 % CLUSTER == 0 && CLUSTER <= WARPS && GROUP % P == 0);
static_assert(!LISTED || FILLED && !NAMED);

struct End { float top, total; };

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

// The tokens: those of the ring, and those of the chosen blocks. The first tokens, a whole number of tiles, are the rows
// of the ring. Then come the tokens of the blocks.
struct Tokens {
  const char *near, *hot;
  const int *slots, *block_of;  // slots of the chosen blocks; the block in each slot
  const int* ids;               // with NAMED the chosen blocks, with LISTED those that a method selected
  const int* fill;              // rows that count: of each block, or with LISTED of each place of `slots`
  Ring ring;
  int end, chosen, selected;

  __device__ int first() const { return (ring.rows + TILE - 1) / TILE * TILE; }  // token of a block
  __device__ int tiles() const { return first() / TILE + (chosen + TILE - 1) / TILE; }

  __device__ bool in_ring(int n) const { return n < ring.rows && ring.position(n) < end; }

  // The row of a token that is there.
  __device__ Row row(int n) const {
    if (n < first()) return row_at<D>(near, n);
    n -= first();
    return row_at<D>(hot, slots[n / P] * P + n % P);
  }

  // The row of token n; null if there is none.
  __device__ Row find(int n) const {
    if (n < first()) return in_ring(n) ? row(n) : nullptr;
    const int place = (n - first()) / P, slot = n - first() < chosen ? slots[place] : -1;
    if (slot < 0 || FILLED && (n - first()) % P >= fill[LISTED ? place : block_of[slot]]) return nullptr;
    return row(n);
  }
};

// A warp prefetches 16 rows into the L2, or only their VALUES.
template <bool VALUES = false> __device__ void ask_for(Row row) {
  if (row)
    for (int at = lane() / TILE * 128; at < row_bytes<D> / (1 + VALUES); at += 256)
      ask((VALUES ? value_of<D>(row) : row) + at);
}

#if GROUP
constexpr int BLOCKS = GROUP / P;            // blocks of a group
constexpr bool BY_FILL = FILLED && !LISTED;  // `fill` says which rows of the pool hold tokens
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;
// Products are added up as integers, so that the order of the additions does not matter. These integers count steps of
// 1 / STEPS. GROUP products of up to MOST_PRODUCT do not overflow. Rounding products to steps changes the mean less
// than the rounding of sums in fp16, if products are near 1 or larger.
constexpr float MOST_PRODUCT = 32767, STEPS = float(1 << 16) / GROUP;

// The product in steps of 1 / `of`. A product above MOST_PRODUCT, or NaN, makes the output NaN.
__device__ int steps(State& s, float product, float of) {
  if (!(fabsf(product) <= MOST_PRODUCT)) s.total = __int_as_float(0x7FC00000), product = 0;
  return __float2int_rn(product * of);
}

// 2^n; 0 if that is below the normal numbers.
__device__ float power(int n) { return n < -126 ? 0 : __int_as_float((n + 127) << 23); }

// Groups go to the programs of the cluster in turn. A program has its groups at these places of its tables.
__device__ int program_of(int group) { return group % CLUSTER; }
__device__ int place_of(int group) { return group / CLUSTER; }

// The sums of a group, and the number of tokens in them; null without a token.
struct Group { Row row; int tokens; };

// The groups of the rest. Their exact tokens are in chosen blocks, or at positions from `begin` up to `end`, which are both in
// the ring and in the sums.
struct Rest {
  const char* sums;
  const int *fill, *table;
  int groups, blocks, sink, begin, end, rank;
  // In shared memory: what remains of the groups of this program.
  int *product;  // [groups, G], in steps: products of the query with the keys
  int *left;     // [groups]: tokens

  // Of the groups of this program.
  __device__ int tiles() const {
    const int groups = (end + GROUP - 1) / GROUP;
    return ((groups - rank + CLUSTER - 1) / CLUSTER + TILE - 1) / TILE;
  }

  // The number of tokens in the sums of a group.
  __device__ int held(int g) const {
    if (g >= groups) return 0;
    if (!BY_FILL) return max(min((g + 1) * GROUP, end) - max(g * GROUP, sink), 0);
    int tokens = 0;
    for (int i = 0; i < BLOCKS; i++)  // a constant number, so that the loads are in flight together
      if (g * BLOCKS + i < blocks) tokens += __ldcg(fill + g * BLOCKS + i);
    return tokens;
  }

  // This thread's group of a tile.
  __device__ int group(int tile) const { return (tile * TILE + threadIdx.x % TILE) * CLUSTER + rank; }

  __device__ Row row(int g) const { return row_at<D>(sums, LISTED ? __ldcg(table + g) : g); }

  __device__ Group find(int tile) const {
    const int g = group(tile), tokens = held(g);
    return {tokens > 0 ? row(g) : nullptr, tokens};
  }

  // The sums of this thread's group of a tile; null if no token remains.
  __device__ Row remaining(int tile) const {
    return left[tile * TILE + threadIdx.x % TILE] > 0 ? row(group(tile)) : nullptr;
  }

  // The logit of one of the remaining tokens of a group, to base 2; -inf if no token remains. Roundings are explicit, so
  // that the compiler does not fuse them differently where this function is inlined.
  __device__ static float logit(int product, int left, float softcap) {
    const float mean = __fdividef(__fmul_rn(product, 1 / STEPS), left);
    return left > 0 ? __fmul_rn(capped(mean, softcap), LOG2_E) : none();
  }
};

constexpr int ALONE = -1, ABSENT = -2;  // instead of a group: the token is in no sum; there is no token

// The group of token n, which is in this block if it is not in the ring. With LISTED `block` is its place in the pool.
__device__ int group_of(const Tokens& tokens, const Rest& rest, int n, int block) {
  if (n < tokens.first()) {
    if (!tokens.in_ring(n)) return ABSENT;
    const int position = tokens.ring.position(n);
    return position >= rest.begin && position < rest.end ? position / GROUP : ALONE;
  }
  n -= tokens.first();
  if (block < 0 || FILLED && n % P >= __ldcg(tokens.fill + (LISTED ? n / P : block))) return ABSENT;
  if (LISTED) {
    const int nth = n / P - (tokens.chosen / P - tokens.selected);
    return nth < 0 ? ALONE : (__ldcg(tokens.ids + nth) * P + n % P) / GROUP;
  }
  const int position = block * P + n % P;
  return FILLED || position >= rest.sink && position < rest.begin ? position / GROUP : ALONE;
}

// The exact tokens of a program, in shared memory: the tokens of its groups, and those without a group in every CLUSTER-th
// tile.
struct List {
  static constexpr int EACH = 4;  // tokens that a thread looks at together
  int *token, *place;             // the tokens; the places of their groups in the tables, or ALONE
  int size;

  __device__ int tiles() const { return (size + TILE - 1) / TILE; }

  // Fill the list in the order of the tokens, and count them off their groups (Rest::left). All threads call it.
  __device__ void fill(const Tokens& tokens, const Rest& rest, int (&counts)[2][WARPS]) {
    const int warp = threadIdx.x / 32;
    for (int first = 0, parity = 0; first < tokens.tiles() * TILE; first += EACH * THREADS, parity ^= 1) {
      int block[EACH], group[EACH], own = 0;
      unsigned mine[EACH];
      const auto token_of = [&](int e) { return first + (warp * EACH + e) * 32 + lane(); };
      for (int e = 0; e < EACH; e++) {
        const int i = token_of(e) - tokens.first();
        block[e] = i < 0 || i >= tokens.chosen ? -1 : NAMED ? __ldcg(tokens.ids + i / P) : tokens.slots[i / P];
      }
      if (!NAMED && !LISTED)
        for (int e = 0; e < EACH; e++) block[e] = block[e] < 0 ? -1 : tokens.block_of[block[e]];
      for (int e = 0; e < EACH; e++) {
        const int n = token_of(e);
        group[e] = group_of(tokens, rest, n, block[e]);
        const int program = group[e] < 0 ? n / TILE % CLUSTER : program_of(group[e]);
        mine[e] = __ballot_sync(ALL, group[e] != ABSENT && program == rest.rank);
        own += __popc(mine[e]);
      }
      if (lane() == 0) counts[parity][warp] = own;
      __syncthreads();
      const int count = lane() < WARPS ? counts[parity][lane()] : 0;
      int at = size + __reduce_add_sync(ALL, lane() < warp ? count : 0);
      size += __reduce_add_sync(ALL, count);
      for (int e = 0; e < EACH; e++) {
        if (mine[e] >> lane() & 1) {
          const int to = at + __popc(mine[e] & (1u << lane()) - 1);
          token[to] = token_of(e), place[to] = group[e] < 0 ? ALONE : place_of(group[e]);
          if (group[e] >= 0) atomicAdd(rest.left + place_of(group[e]), -1);
        }
        at += __popc(mine[e]);
      }
    }
    __syncthreads();
  }
};

// 16 tokens of a list.
struct Tile {
  Row row;
  int place;  // of the group of this thread's token; ALONE for none, ABSENT without a token
};

__device__ Tile tile_of(const List& list, const Tokens& tokens, int tile) {
  const int i = tile * TILE + threadIdx.x % TILE;
  return i < list.size ? Tile{tokens.row(list.token[i]), list.place[i]} : Tile{nullptr, ABSENT};
}

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

  // The products with 16 keys; with SUMS in fp16.
  template <bool SUMS> __device__ void multiply(float (&z)[2][4], const Words (&key)[2][OF_KEY]) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    products<BF16 && !SUMS>(z, [&](int i) -> Operands {
      const Words* const x = &at[SUMS][min(g, G - 1)][2 * (t + 4 * i)];
      return {{x[0], x[1]}};
    }, key);
  }
};

// Write the products with a tile of sums, and the tokens of its groups, into the tables. `tokens`: of this thread's group.
__device__ void multiply_sums(State& s, const Rest& rest, const Queries& queries, const Words (&key)[2][OF_KEY],
                              int tile, int tokens, float scale) {
  const int g = threadIdx.x % 32 / 4;
  float z[2][4];
  queries.multiply<true>(z, key);
  for (int r = 0; r < 4; r++)
    if (g < G) rest.product[(tile * TILE + column(r)) * G + g] = steps(s, z[r / 2][r % 2] * scale, STEPS * GROUP);
  if (lane() < TILE) rest.left[tile * TILE + lane()] = tokens;
}

// Write the products with a tile of tokens into `kept`, and subtract them from the products of their groups.
__device__ void multiply_tokens(State& s, const Rest& rest, const Queries& queries, const Words (&key)[2][OF_KEY],
                                const Tile& tile, float* kept, float scale) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float z[2][4];
  queries.multiply<false>(z, key);
  for (int r = 0; r < 4; r++) {
    const int place = __shfl_sync(ALL, tile.place, column(r));
    const float x = z[r / 2][r % 2] * scale;
    if (g < G) kept[(r * G + g) * 4 + t] = x;
    if (g < G && place >= 0) atomicAdd(rest.product + place * G + g, steps(s, x, -STEPS));
  }
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
    const int place = __shfl_sync(ALL, tile.place, column(r));
    const bool live = place != ABSENT && g < G;
    p[r] = live ? capped(kept[(r * G + g) * 4 + t], softcap) * LOG2_E : none();
    mean[r] = live && place >= 0 ? Rest::logit(rest.product[place * G + g], rest.left[place], softcap) : none();
    most[r] = fmaxf(p[r], mean[r]);
  }
  raise(s, most);
  for (int r = 0; r < 4; r++) {
    s.total += p[r] = p[r] == none() ? 0 : exp2f(p[r] - s.top);
    back[r] = -weight(mean[r], s.top);
  }
  add_values<BF16>(s, value, p);
  if (__any_sync(ALL, tile.place >= 0)) add_values<BF16>(s, value, back);
}

// Attend to a tile of groups.
__device__ void fold_sums(State& s, const Rest& rest, const Words (&value)[4][OF_VALUE], int tile, float softcap) {
  const int g = threadIdx.x % 32 / 4;
  float p[4], left[4], most[4];
  for (int r = 0; r < 4; r++) {
    const int place = tile * TILE + column(r);
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
__device__ void send_warps(Found& found, int rank, State& s, float* parts) {
  join_warps(
      s, parts, [&](int i, float sum) { found.bell.send(i / SLICE, &found.sum[rank][i % SLICE], __float_as_uint(sum)); },
      [&](int head, float top, float total) {
        if (warp() >= CLUSTER) return;
        found.bell.send(warp(), &found.end[rank][head].top, __float_as_uint(top));
        found.bell.send(warp(), &found.end[rank][head].total, __float_as_uint(total));
      });
}

// Add up a program's slice over the programs that sent it, with one thread for each sender of a number.
__device__ void add_programs(
    Found& found, int rank, const unsigned short* sink_logits, unsigned short* out, bool broken) {
  const int from = threadIdx.x % CLUSTER;
  found.bell.receive();
  for (int i = threadIdx.x / CLUSTER; i < SLICE; i += THREADS / CLUSTER) {
    const int head = (rank * SLICE + i) / D, c = (rank * SLICE + i) % D;
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
    if (from == 0) out[head * D + channel_of(c)] = halves<BF16>(answer, 0);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, RESIDENT) attend(
    const unsigned short* q, const char* ring, const char* hot, const int* slots, const int* block_of, const int* ids,
    const int* fill, const int* length, const int* begins, const unsigned short* sink_logits, const char* sums,
    const int* table, const int* ring_begin, unsigned short* out, int q_b, int q_h, int heads, int per, int ring_rows,
    int hot_rows, int blocks, int chosen, int selected, int groups, int sink, float scale, float softcap) {
  extern __shared__ __align__(16) float parts[];  // [WARPS, G, STRIDE]; earlier, the tables of the rest
  __shared__ Found found;
  const int rank = blockIdx.x % CLUSTER, bh = blockIdx.x / CLUSTER, b = bh / heads, h = bh % heads;
  const int warp = threadIdx.x / 32;
  slots += (long long)bh * (chosen / P), block_of += (long long)bh * (hot_rows / P);
  fill += (long long)bh * (LISTED ? chosen / P : blocks);
  ring = head_of<D>(ring, bh, ring_rows), hot = head_of<D>(hot, LISTED ? h : bh, hot_rows);
  q += (long long)b * q_b + (long long)h * G * q_h;  // of the first head
  found.bell.expect(NUMBERS);
  const int near = (rank + CLUSTER * warp) * TILE + lane() % TILE;
  ask_for(near < ring_rows ? row_at<D>(ring, near) : nullptr);
  announce();
  State s = {none()};
#if GROUP
  if (!SETTLED) wait_for_previous();
  __shared__ Queries queries;
  __shared__ int counts[2][WARPS];
  const Ring positions = {ring_rows, sink, __ldcg(begins + bh / per)};
  const Tokens tokens = {ring, hot, slots, block_of, ids + (long long)bh * selected, fill, positions,
                         __ldcg(length + b), chosen, selected};
  const int own = (groups + TILE * CLUSTER - 1) / (TILE * CLUSTER) * TILE;  // groups of a program, at most
  const int most = tokens.tiles() * TILE;                                   // tokens of a program, at most
  int* const product = reinterpret_cast<int*>(parts);
  float* const kept = reinterpret_cast<float*>(product + own * (G + 1));
  int* const token = reinterpret_cast<int*>(kept + most * G);
  const int all = groups * GROUP, end = BY_FILL ? all : min(__ldcg(ring_begin + b), all);
  const int begin = BY_FILL ? all : positions.begin;
  const char* const own_sums = LISTED ? head_of<D>(sums, h, blocks) : head_of<D>(sums, bh, groups);
  const Rest rest = {own_sums, fill, table + (long long)b * groups, groups, blocks, sink, begin, end, rank, product,
                     product + own * G};
  // The first tiles of a warp stay in registers.
  int tile = warp, group = warp;
  Words key[2][OF_KEY], value[4][OF_VALUE], mean[4][OF_VALUE];
  Group found_sums = rest.find(group);
  load_keys(key, found_sums.row);
  load_values(mean, found_sums.row);
  if (group + WARPS < rest.tiles()) ask_for(rest.find(group + WARPS).row);
  queries.load(q, q_h);
  __syncthreads();
#pragma unroll 1
  for (int i = group; i < rest.tiles();) {
    multiply_sums(s, rest, queries, key, i, found_sums.tokens, scale);
    if ((i += WARPS) >= rest.tiles()) break;
    found_sums = rest.find(i);
    load_keys(key, found_sums.row);
    ask_for<true>(found_sums.row);
  }
  if (SETTLED && !NAMED) wait_for_previous();
  List list = {token, token + most};
  list.fill(tokens, rest, counts);
  if (SETTLED && NAMED) wait_for_previous();
  Tile first = tile_of(list, tokens, tile);
  load_keys(key, first.row);
  load_values(value, first.row);
  if (tile < list.tiles()) multiply_tokens(s, rest, queries, key, first, kept + tile * TILE * G, scale);
#pragma unroll 1
  for (int i = tile + WARPS; i < list.tiles(); i += WARPS) {
    const Tile x = tile_of(list, tokens, i);
    load_keys(key, x.row);
    ask_for<true>(x.row);
    multiply_tokens(s, rest, queries, key, x, kept + i * TILE * G, scale);
  }
  __syncthreads();  // until what remains is in the tables
#pragma unroll 1
  while (tile < list.tiles()) {
    fold_tokens(s, rest, value, first, kept + tile * TILE * G, softcap);
    if ((tile += WARPS) >= list.tiles()) break;
    first = tile_of(list, tokens, tile);
    load_values(value, first.row);
  }
#pragma unroll 1
  while (group < rest.tiles()) {
    fold_sums(s, rest, mean, group, softcap);
    if ((group += WARPS) >= rest.tiles()) break;
    load_values(mean, rest.remaining(group));
  }
  s.top *= LN_2;
#else
  const Ring positions = {ring_rows, sink, __ldcg(begins + bh / per)};
  const Tokens tokens = {ring, hot, slots, block_of, ids, fill, positions, __ldcg(length + b), chosen, selected};
  wait_for_previous();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto query = [&](int i) -> Operands {
    Words x = {};
    if (g < G) x = *reinterpret_cast<const Words*>(q + (long long)g * q_h + (t + 4 * i) * 8);
    return {{{{x.at[0], 0, x.at[1], 0}}, {{x.at[2], 0, x.at[3], 0}}}};
  };
  for (int tile = rank + CLUSTER * warp; tile < tokens.tiles(); tile += CLUSTER * WARPS) {
    const Row row = tokens.find(tile * TILE + threadIdx.x % TILE);
    if (__any_sync(ALL, row != nullptr)) fold(s, query, row, scale, softcap);
  }
#endif
  wait();  // until all programs are ready to receive
  send_warps(found, rank, s, parts);
  add_programs(found, rank, sink_logits ? sink_logits + h * G : nullptr, out + (long long)bh * G * D, tokens.end < 0);
}
