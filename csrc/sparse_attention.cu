// Attention of one query token over the ring and the chosen blocks, as ops/attend/sparse_attention.py specifies it, for
// up to 8 query heads of a kv head, in fp16 and bf16.
//
// Why not Triton: there it is two launches, and in between what the programs of a head found goes through memory. Here
// they are a cluster: each adds up a slice of the output, of which the others send it what they have. A product does not
// care in which order it takes the channels, so a row goes straight into the registers that the tensor cores read: a warp
// has 16 tokens, 8 KiB at head_dim 128, on their way at a time.
//
// Set by the compilation: D channels (a multiple of 64), G query heads, P rows of a block, whether blocks may be partly
// FILLED, BF16, WARPS of a program, programs RESIDENT on a multiprocessor, and programs of a CLUSTER.

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
static_assert(D % 64 == 0 && G <= HEADS && 32 % CLUSTER == 0 && CLUSTER <= WARPS);

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
__device__ void add_values(State& s, const Words (&value)[4][OF_VALUE], const float (&p)[4]) {
  const unsigned early = halves<BF16>(p[0], p[1]), late = halves<BF16>(p[2], p[3]);
  for (int i = 0; i < OF_VALUE; i++)
    for (int j = 0; j < 4; j++) {  // a pair of channels: the lower ones of the tokens together, then the upper ones
      const unsigned a = value[0][i].at[j], b = value[1][i].at[j], c = value[2][i].at[j], d = value[3][i].at[j];
      multiply_add<BF16>(s.sum[4 * i + j],
                         {__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
                          __byte_perm(c, d, 0x7632)}, early, late);
    }
}

// Take in 16 tokens: `row` of thread i or 16 + i is that of token i behind `rows`, or below 0 where there is none.
__device__ void fold(
    State& s, const unsigned short* query, const char* rows, int row, float scale, float softcap) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Words key[2][OF_KEY] = {}, value[4][OF_VALUE] = {};
  bool live[4];
  for (int r = 0; r < 4; r++) {  // of tokens 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t; before the keys, which are waited for
    const int at = __shfl_sync(ALL, row, 2 * t + r % 2 + r / 2 * 8);
    live[r] = at >= 0;
    for (int i = 0; i < OF_VALUE; i++)
      if (live[r]) value[r][i] = load_once(value_of<D>(row_at<D>(rows, at)) + (g + 8 * i) * 16);
  }
  for (int r = 0; r < 2; r++) {  // of tokens g and 8 + g
    const int at = __shfl_sync(ALL, row, g + 8 * r);
    for (int i = 0; i < OF_KEY; i++)
      if (at >= 0) key[r][i] = load_once(row_at<D>(rows, at) + (t + 4 * i) * 16);
  }
  float z[2][4] = {};  // of head g and the same tokens as the values; the upper two are of heads that there are not
  for (int i = 0; i < OF_KEY; i++) {  // of the query from the caches each time: 4 registers, not D / 8
    Words x = {};
    if (g < G) x = *reinterpret_cast<const Words*>(query + (t + 4 * i) * 8);
    for (int half = 0; half < 4; half += 2)
      for (int r = 0; r < 2; r++)
        multiply_add<BF16>(z[r], {x.at[half], 0, x.at[half + 1], 0}, key[r][i].at[half], key[r][i].at[half + 1]);
  }
  float p[4], peak = s.top;
  for (int r = 0; r < 4; r++) {
    p[r] = z[r / 2][r % 2] * scale;
    if (softcap > 0) p[r] = softcap - __fdividef(2 * softcap, 1 + __expf(__fdividef(2 * p[r], softcap)));  // tanh
    if (!live[r]) p[r] = none();
    peak = fmaxf(peak, p[r]);
  }
  peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 1)), peak = fmaxf(peak, __shfl_xor_sync(ALL, peak, 2));
  scale_by(s, share(s.top, peak));
  s.top = peak;
  for (int r = 0; r < 4; r++) p[r] = share(p[r], peak), s.total += p[r];
  add_values(s, value, p);
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

// A warp asks for a tile of the ring.
__device__ void ask_for(const char* ring, int tile, int ring_rows) {
  const int row = tile * TILE + lane() % TILE;
  if (row < ring_rows)
    for (int at = lane() / TILE * 128; at < row_bytes<D>; at += 256) ask(row_at<D>(ring, row) + at);
}

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
    const int* length, const int* begins, const unsigned short* sink_logits, unsigned short* out, int q_b, int q_h, int heads, int per,
    int ring_rows, int hot_rows, int blocks, int chosen, int sink, float scale, float softcap) {
  extern __shared__ float parts[];  // [WARPS, G, STRIDE]
  __shared__ Found found;
  const int rank = blockIdx.x % CLUSTER, bh = blockIdx.x / CLUSTER, b = bh / heads, h = bh % heads;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  slots += (long long)bh * (chosen / P), block_of += (long long)bh * (hot_rows / P), fill += (long long)bh * blocks;
  ring = head_of<D>(ring, bh, ring_rows), hot = head_of<D>(hot, bh, hot_rows);
  found.bell.expect(NUMBERS);
  arrive();
  ask_for(ring, rank + CLUSTER * warp, ring_rows);
  wait_for_previous();
  const Tokens tokens = {slots, block_of, fill, {ring_rows, sink, begins[bh / per]}, length[b], chosen};
  q += (long long)b * q_b + (long long)(h * G + g) * q_h;  // of head g
  State s = {none()};
  for (int tile = rank + CLUSTER * warp; tile < tokens.tiles(); tile += CLUSTER * WARPS) {
    const int row = tokens.row(tile);
    if (__any_sync(ALL, row >= 0)) fold(s, q, tile < tokens.near_tiles() ? ring : hot, row, scale, softcap);
  }
  add_warps(found, rank, s, parts);
  add_programs(found, rank, sink_logits ? sink_logits + h * G : nullptr, out + (long long)bh * G * D, tokens.end < 0);
}
