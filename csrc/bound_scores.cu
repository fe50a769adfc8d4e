// Bounds of blocks, as ops/select/bound_scores.py specifies them, for digests in fp8 and queries of 16 bits.
//
// Why not Triton: the time depends only on loading every byte early and once. Here a warp takes 16 blocks at a time,
// and loads their digests straight into the registers that the tensor cores read. A product may take the channels in
// any order, so a thread loads 16 neighbouring channels, and the queries get the same layout. The kernel needs neither
// shared memory nor a barrier, and waits for memory alone.
//
// Compile-time constants: D channels (a multiple of 64); G query heads per kv head; BOX (a spread per channel in fp8,
// or one per block in fp32); BF16 (queries in bf16, or in fp16); WARPS per program; GROUP scores that share a peak;
// UNIT, with which numbers in digests are multiplied.

#include "common.cuh"
#include "tensor.cuh"

constexpr int TILE = 16;
static_assert(TILE == GROUP);
constexpr int CHUNKS = D / 64, KINDS = BOX ? 2 : 1, COLUMNS = (G + 7) / 8;
constexpr int LOADS = KINDS * CHUNKS, ROOM = 4;  // pairs of 16-byte loads in flight: more leave the next kernel no room
constexpr int AHEAD = LOADS > ROOM ? 1 : ROOM / LOADS > 4 ? 4 : ROOM / LOADS;  // tiles of a warp in flight
constexpr unsigned LARGEST = 0x5F00, UNBOUNDED = 0x7BFF;  // in fp16: 448, the largest e4m3; it counts as 65504

// A thread's part of 16 blocks: 16 of every 64 channels of blocks g and g + 8, where g = lane / 4.
struct Tile {
  Words digest[KINDS][CHUNKS][2];
  float radius[2];
};

struct Digests {
  const unsigned char *centre, *spread;  // row 0, at the first channel of this thread
  const float* radius;
  int last;  // the last row

  __device__ void load(int tile, Tile& x) const {
    for (int r = 0; r < 2; r++) {
      const long long row = min(tile * TILE + threadIdx.x % 32 / 4 + 8 * r, last);
      for (int c = 0; c < CHUNKS; c++) {
        x.digest[0][c][r] = load_once(centre + row * D + c * 64);
        if (BOX) x.digest[KINDS - 1][c][r] = load_once(spread + row * D + c * 64);
      }
      if (!BOX) x.radius[r] = radius[row];
    }
  }
};

struct Raw { uint4 part[COLUMNS][CHUNKS][2]; };

// Query head g = lane / 4 of every tile of 8 query heads, in the layout of the digests.
__device__ Raw load(const unsigned short* q, int q_h) {
  Raw x = {};
  for (int n = 0; n < COLUMNS; n++) {
    const int g = 8 * n + threadIdx.x % 32 / 4;
    for (int c = 0; c < CHUNKS && g < G; c++)
      for (int i = 0; i < 2; i++)
        x.part[n][c][i] = reinterpret_cast<const uint4*>(q + (long long)g * q_h + c * 64 + threadIdx.x % 4 * 16)[i];
  }
  return x;
}

struct Queries {
  unsigned half[COLUMNS][CHUNKS][8];
  float norm[COLUMNS][2], shift[COLUMNS][2];  // |q| and q.origin of the columns whose sums this thread has

  // origin: at the first channel of this thread.
  __device__ Queries(const Raw& raw, const float* origin) {
    for (int n = 0; n < COLUMNS; n++) {
      float squares = 0, away = 0;
      for (int c = 0; c < CHUNKS; c++)
        for (int i = 0; i < 8; i++) {
          const uint4 x = raw.part[n][c][i / 4];
          const unsigned word = i % 4 == 0 ? x.x : i % 4 == 1 ? x.y : i % 4 == 2 ? x.z : x.w;
          const float low = BF16 ? __uint_as_float(word << 16) : number((unsigned short)word);
          const float high = BF16 ? __uint_as_float(word & 0xFFFF0000) : number((unsigned short)(word >> 16));
          half[n][c][i] = BF16 ? halves(low, high) : word;
          squares += low * low + high * high;
          const float2 o = *reinterpret_cast<const float2*>(origin + c * 64 + 2 * i);
          away += low * o.x + high * o.y;
        }
      away += __shfl_xor_sync(ALL, away, 1);
      away += __shfl_xor_sync(ALL, away, 2);
      for (int j = 0; j < 2; j++) shift[n][j] = __shfl_sync(ALL, away, 4 * (2 * (threadIdx.x % 4) + j));
      if (!BOX) {
        squares += __shfl_xor_sync(ALL, squares, 1);
        squares += __shfl_xor_sync(ALL, squares, 2);
        for (int j = 0; j < 2; j++) norm[n][j] = sqrtf(__shfl_sync(ALL, squares, 4 * (2 * (threadIdx.x % 4) + j)));
      }
    }
  }
};

__device__ unsigned unbounded(unsigned x) {
  const unsigned at = __vcmpeq2(x, LARGEST * 0x10001);
  return x & ~at | UNBOUNDED * 0x10001 & at;
}

struct Sums {
  float part[2][COLUMNS][4] = {};  // neighbouring steps add to different parts, so they overlap

  // The products of one kind of digest. Widths (WIDTH) are multiplied with |q|. With LIMIT the largest widths count as
  // unbounded.
  template <bool WIDTH, bool LIMIT>
  __device__ void add(const Words (&digest)[CHUNKS][2], const Queries& q) {
    for (int c = 0; c < CHUNKS; c++)
      for (int w = 0; w < 4; w++) {
        const unsigned g = digest[c][0].at[w], g_8 = digest[c][1].at[w], sign = WIDTH ? 0x7FFF7FFF : 0xFFFFFFFF;
        unsigned a[4] = {halves_of<false>(g), halves_of<false>(g_8), halves_of<true>(g), halves_of<true>(g_8)};
        for (int i = 0; i < 4 && LIMIT; i++) a[i] = unbounded(a[i]);
        for (int n = 0; n < COLUMNS; n++)
          multiply_add(part[w % 2][n], a, q.half[n][c][2 * w] & sign, q.half[n][c][2 * w + 1] & sign);
      }
  }

  __device__ Sums(const Tile& x, const Queries& q) {
    add<false, false>(x.digest[0], q);
    if (BOX) {
      unsigned large = 0;  // the highest bit of each byte that is 448 or more
      for (int c = 0; c < CHUNKS; c++)
        for (int w = 0; w < 4; w++)
          for (int r = 0; r < 2; r++) large |= x.digest[KINDS - 1][c][r].at[w] + 0x02020202;
      if (__any_sync(ALL, large & 0x80808080))
        add<true, true>(x.digest[KINDS - 1], q);
      else
        add<true, false>(x.digest[KINDS - 1], q);
    }
    for (int n = 0; n < COLUMNS; n++)
      for (int i = 0; i < 4; i++)
        part[0][n][i] = q.shift[n][i % 2] + UNIT * (part[0][n][i] + part[1][n][i] +
                                                    (BOX ? 0 : x.radius[i / 2] * q.norm[n][i % 2]));
  }

  // The largest score of block g = lane / 4 of the tile; odd threads get the score of block g + 8.
  __device__ float best() const {
    const int t = threadIdx.x % 4;
    float most[2] = {none(), none()};
    for (int n = 0; n < COLUMNS; n++)
      for (int i = 0; i < 4; i++)
        if (8 * n + 2 * t + i % 2 < G) most[i / 2] = fmaxf(most[i / 2], part[0][n][i]);
    const float mine = t % 2 ? most[1] : most[0], other = t % 2 ? most[0] : most[1];
    const float both = fmaxf(mine, __shfl_xor_sync(ALL, other, 1));
    return fmaxf(both, __shfl_xor_sync(ALL, both, 2));
  }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 16 / WARPS) bounds(
    const unsigned short* q, const unsigned char* centre, const unsigned char* spread, const float* origin, float* out,
    float* peaks, const int* ring_begin, const int* pinned, int q_b, int q_h, int heads, int blocks, int first,
    int block_size) {
  const long long bh = blockIdx.x;
  const int b = blockIdx.x / heads, h = blockIdx.x % heads, warp = blockIdx.y * WARPS + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, place = lane / 4 + lane % 2 * 8;  // in a tile
  const int tiles = (blocks + TILE - 1) / TILE, step = gridDim.y * WARPS, begin = first / TILE, from = begin + warp;
  const float* radius = reinterpret_cast<const float*>(spread) + bh * blocks;
  centre += bh * blocks * D, spread += bh * blocks * D, out += bh * blocks + place, peaks += bh * tiles;
  const int end = min(__ldcg(ring_begin + b) / block_size, blocks);  // of the live blocks
  const int stop = (end + TILE - 1) / TILE;  // of the tiles
  wait_for_previous();
  const int stay = pinned ? first + pinned[bh] / block_size : 0;
  const Digests digests = {centre + lane % 4 * 16, spread + lane % 4 * 16, radius, blocks - 1};
  Tile ahead[AHEAD];
#pragma unroll
  for (int k = 0; k < AHEAD; k++)
    if (from + k * step < tiles) digests.load(from + k * step, ahead[k]);  // while `end` is being loaded
  const Raw raw = load(q + (long long)b * q_b + (long long)h * G * q_h, q_h);
  const Queries queries(raw, origin + bh * D + lane % 4 * 16);
  auto store = [&](int tile, float score) {
    if (lane % 4 < 2 && tile * TILE + place < blocks) out[tile * TILE] = score;
    for (int d = 1; d < 32; d *= d == 1 ? 4 : 2) score = fmaxf(score, __shfl_xor_sync(ALL, score, d));
    if (lane == 0) peaks[tile] = score;
  };
  for (int tile = warp; tile < tiles; tile += step)
    if (tile < begin || tile >= stop) store(tile, none());
  for (int at = from; at < stop; at += AHEAD * step)
#pragma unroll
    for (int k = 0; k < AHEAD; k++) {
      const int tile = at + k * step, row = tile * TILE + place, next = tile + AHEAD * step;
      if (tile >= stop) break;
      const Sums sums(ahead[k], queries);
      if (next < stop) digests.load(next, ahead[k]);
      const float best = sums.best();
      store(tile, row < first || row >= end ? none() : row < stay ? -none() : best);
    }
}
