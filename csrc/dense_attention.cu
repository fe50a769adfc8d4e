// Attention of one query token over every token of a packed pool, as ops/attend/dense_attention.py specifies it, for up to
// 8 query heads of a kv head, in fp16 and bf16. A program takes a part of the tokens of a head. Its running softmax goes to
// memory, where a second launch combines the parts.
//
// Why not Triton: tensor cores read pairs of tokens of a channel. Of 8-bit values Triton loads such pairs byte by byte: 51
// sequences of 32K take 3.25 ms a layer in 8 bits, and 1.85 ms in 16 bits. Here a thread loads whole words, and puts the
// bytes of two tokens side by side: 0.93 ms.
//
// Products are of the int8 numbers, which the tensor cores take as fp16 or bf16 without rounding. The scale of a group of 64
// channels of a key multiplies its products; that of a value multiplies the weight of the token.
//
// Each warp has a queue of STAGES tiles of tokens in shared memory. While it multiplies one tile, the next ones arrive.
//
// Compile-time constants: D channels (64, 128 or 256); G query heads; BF16; WARPS of a program; programs RESIDENT on a
// multiprocessor; STAGES.

#include "attend.cuh"
#include "copies.cuh"
#include "store.cuh"
#include "tensor.cuh"

using Pool = Packed<D>;
constexpr int GROUPS = Pool::GROUPS;          // of channels with one scale
constexpr int BYTES = TILE * 16 * Pool::WORDS;  // of a tile of tokens
// A weight times a scale of values, times LIFT, must fit fp16: scales are up to 65504 / 127. Products below about 1e-9 are
// lost.
constexpr float LIFT = BF16 ? 1 : 64;
static_assert((D == 64 || D == 128 || D == 256) && G <= HEADS);

// The query heads of a kv head, as the products take them: channels 64 i + 16 t up to + 15 of head g.
struct Queries {
  unsigned at[GROUPS][4][2];

  __device__ void load(const unsigned short* q, int stride) {
    const int g = lane() / 4, t = lane() % 4;
    for (int i = 0; i < GROUPS; i++)
      for (int j = 0; j < 4; j++) {
        uint2 x = {};
        if (g < G) x = *reinterpret_cast<const uint2*>(q + (long long)g * stride + 64 * i + 16 * t + 4 * j);
        at[i][j][0] = __byte_perm(x.x, x.y, 0x5410), at[i][j][1] = __byte_perm(x.x, x.y, 0x7632);
      }
  }
};

// 16 tokens in shared memory. A thread reads keys of tokens g and 8 + g, values and scales of those at `column`.
struct Tokens {
  const char* tile;

  __device__ const char* row(int n) const { return Pool::row_at(tile, 0, 0, n); }
  __device__ Words key(int r, int i) const {
    return *reinterpret_cast<const Words*>(row(lane() / 4 + 8 * r) + 64 * i + 16 * (lane() % 4));
  }
  __device__ uint2 value(int r, int i) const {
    return *reinterpret_cast<const uint2*>(Pool::value_of(row(column(r))) + 64 * i + 8 * (lane() / 4));
  }
  __device__ Run<GROUPS> key_scales(int r) const { return load<2 * GROUPS>(Pool::scales_of(row(column(r)))); }
  __device__ Run<GROUPS> value_scales(int r) const {
    return load<2 * GROUPS>(Pool::scales_of(row(column(r))) + 4 * GROUPS);
  }
};

// The products of head g with the tokens at `column`.
__device__ void products(float (&p)[4], const Queries& q, const Tokens& tokens) {
  for (int r = 0; r < 2; r++) {
    const Run<GROUPS> scales[2] = {tokens.key_scales(2 * r), tokens.key_scales(2 * r + 1)};
    p[2 * r] = p[2 * r + 1] = 0;
    for (int i = 0; i < GROUPS; i++) {
      const Words key = tokens.key(r, i);
      float z[4] = {};
      for (int j = 0; j < 4; j++) {
        const unsigned query[4] = {q.at[i][j][0], 0, q.at[i][j][1], 0};
        multiply_add<BF16>(z, query, numbers_0_2<BF16>(key.at[j]), numbers_0_2<BF16>(key.at[j] >> 8));
      }
      for (int c = 0; c < 2; c++) p[2 * r + c] += z[c] * __uint_as_float(scales[c].at[i]);
    }
  }
}

// A byte of each of two tokens as a pair of numbers.
__device__ unsigned side_by_side(unsigned a, unsigned b, unsigned bytes) {
  return numbers_0_2<BF16>(__byte_perm(a, b, bytes));
}

// Add the values of the tokens, weighted by `p`.
__device__ void add_values(State& s, const Tokens& tokens, const float (&p)[4]) {
  Run<GROUPS> scales[4];
  for (int r = 0; r < 4; r++) scales[r] = tokens.value_scales(r);
  for (int i = 0; i < GROUPS; i++) {
    float w[4];
    uint2 value[4];
    for (int r = 0; r < 4; r++) value[r] = tokens.value(r, i), w[r] = p[r] * (LIFT * __uint_as_float(scales[r].at[i]));
    const unsigned early = halves<BF16>(w[0], w[1]), late = halves<BF16>(w[2], w[3]);
    const auto word = [&](int r, int j) { return j ? value[r].y : value[r].x; };
    for (int j = 0; j < 4; j++) {  // a pair of channels: the lower channel of all tokens, then the upper
      const unsigned low = j % 2 ? 0x0602 : 0x0400, high = low + 0x0101;
      const unsigned a = word(0, j / 2), b = word(1, j / 2), c = word(2, j / 2), d = word(3, j / 2);
      multiply_add<BF16>(s.sum[4 * i + j],
                         {side_by_side(a, b, low), side_by_side(a, b, high), side_by_side(c, d, low),
                          side_by_side(c, d, high)}, early, late);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) attend(
    const unsigned short* q, const char* pool, const int* length, float* parts, float* tops, float* totals, int q_b,
    int q_h, int heads, int rows, int padded_heads, float scale, float softcap) {
  extern __shared__ __align__(16) char shared[];  // the queues [WARPS, STAGES, BYTES]; in their place, at the end, the sums
  __shared__ Copies<STAGES> copies_of[WARPS];
  const int bh = blockIdx.x, b = bh / heads, h = bh % heads;
  const long long part = ((long long)bh * gridDim.y + blockIdx.y) * padded_heads;
  char* const queue = shared + warp() * (STAGES * BYTES);
  Copies<STAGES>& copies = copies_of[warp()];
  // The last tile may have fewer than 16 tokens. The others get weight 0, so their scales must be finite.
  for (int i = lane(); i < STAGES * BYTES / 16; i += 32) reinterpret_cast<uint4*>(queue)[i] = {};
  copies.prepare();
  wait_for_previous();
  const int tiles = (max(length[b], 0) + TILE - 1) / TILE, own = (tiles + gridDim.y - 1) / gridDim.y * TILE;
  const int begin = blockIdx.y * own, stop = min(begin + own, max(length[b], 0));
  // Start to copy tokens `first` up to `stop`, at most 16, to a place of the queue.
  const auto start_copy = [&](int place, int first) {
    const int tokens = min(max(stop - first, 0), TILE);
    copies.start(place, queue + place * BYTES, Pool::row_at(pool, bh, rows, first), tokens * 16 * Pool::WORDS);
  };
  int next = begin + warp() * TILE;
  for (int i = 0; i < STAGES; i++, next += WARPS * TILE) start_copy(i, next);
  Queries queries;
  queries.load(q + (long long)b * q_b + (long long)h * G * q_h, q_h);
  State s = {none()};
  int place = 0, round = 0;
#pragma unroll 1
  for (int first = begin + warp() * TILE; first < stop; first += WARPS * TILE, next += WARPS * TILE) {
    copies.wait(place, round);
    const Tokens tokens = {queue + place * BYTES};
    float p[4];
    products(p, queries, tokens);
    for (int r = 0; r < 4; r++) p[r] = first + column(r) < stop ? capped(p[r] * scale, softcap) : none();
    const float peak = fmaxf(over_columns(p), s.top);
    if (__any_sync(ALL, peak > s.top)) scale_by(s, share(s.top, peak));
    s.top = peak;
    for (int r = 0; r < 4; r++) s.total += p[r] = share(p[r], peak);
    add_values(s, tokens, p);
    __syncwarp();
    start_copy(place, next);
    if (++place == STAGES) place = 0, round++;
  }
  join_warps(
      s, reinterpret_cast<float*>(shared),
      [&](int i, float sum) { parts[(part + i / D) * D + channel_of(i % D)] = sum / LIFT; },
      [&](int head, float top, float total) {
        if (warp() == 0) tops[part + head] = top, totals[part + head] = total;
      });
}
