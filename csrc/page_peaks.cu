// The largest q.k of every page's tokens, as ops/select/page_peaks.py specifies it, for tokens in codes, pages of 4, 8 or
// 16 of them, and up to 8 query heads of a kv head.
//
// Why not Triton: few pages are seen, and which ones is known token by token. Here the warps of a program find out first of
// which 16 tokens one is seen, and then share out these among themselves: the pages of a query lie side by side, and a
// program that went through its own one after the other would often have many of them. Codes are unpacked in the
// registers that the tensor cores read.
//
// Set by the compilation: D channels (a multiple of 64), G query heads, P tokens of a page, BF16 queries, CHANNELS that
// share a scale, GROUP pages that share a peak, WARPS of a program, programs RESIDENT on a multiprocessor and
// WORDS_OF_MARKS for all nodes.

#include "common.cuh"
#include "tensor.cuh"

constexpr int TILE = 16, HEADS = 8;  // tokens and query heads of a product
constexpr int TURN = 32;  // groups of pages that a program has at a time
constexpr int TILES = GROUP * P / TILE, LOOKS = GROUP * P / 64;  // of a group: tiles, and looks of a warp
constexpr int TOGETHER = 2, LOOKS_TOGETHER = 4;  // that a warp has on their way at a time
constexpr int WORDS = D / 32, SCALES = D / 64;  // of a token's code that a thread has; a scale is of two words
constexpr int SPAN = P < 8 ? P : 8;  // tokens of a page among 8 that follow one another
static_assert(CHANNELS == 16 && GROUP == 16 && P % 4 == 0 && P <= TILE && G <= HEADS);

// Four bits, from the second one on of each half, as halves: 512 + x is exact, and so is what it is less than 7.5 above.
__device__ unsigned levels(unsigned bits) {
  unsigned x = bits & 0x001E001E | 0x60006000;
  asm("sub.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0x600F600F));
  return x;
}

// What is behind a word of codes: of channels 0 and 2, 8 and 10, 1 and 3, 9 and 11, counted from that of its lowest bits.
__device__ void unpack(unsigned (&pairs)[4], unsigned word, unsigned scale) {
  const unsigned bits[4] = {word << 1, word >> 3, word >> 7, word >> 11};
  for (int i = 0; i < 4; i++) pairs[i] = times(levels(bits[i]), scale);
}

using Query = uint4[WORDS][32];  // as the second factor wants it: of each thread the pairs of its words in turn

// Of query head number `lane / 4`, by the first warp of a program for all.
__device__ void load_query(Query& query, const unsigned short* q, int q_h) {
  const int g = lane() / 4, t = lane() % 4;
  for (int w = 0; w < WORDS; w++) {
    unsigned pair[4] = {};
    for (int upper = 0; upper < 2 && g < G; upper++) {
      const int channel = t * (D / 4) + w / 2 * 16 + w % 2 * 4 + 8 * upper;
      const uint2 x = *reinterpret_cast<const uint2*>(q + (long long)g * q_h + channel);
      for (int odd = 0; odd < 2; odd++) {
        const unsigned two = __byte_perm(x.x, x.y, odd ? 0x7632 : 0x5410);
        pair[2 * odd + upper] = BF16 ? halves(number<true>(two & 0xFFFF), number<true>(two >> 16)) : two;
      }
    }
    query[w][lane()] = {pair[0], pair[1], pair[2], pair[3]};
  }
}

// What a thread has of a tile: the codes of tokens lane / 4 and 8 behind it, and for query heads 2 t and 2 t + 1 the
// products with their nodes.
struct Tile {
  Run<WORDS> word[2];
  unsigned short scale[2][SCALES];
  float node[2][2];
};

// What a kv head has.
struct Source {
  const float* visited;
  const unsigned char* codes;
  const unsigned short* scales;
  const int* node;
  int nodes, rows;

  // Behind the last token it comes again: nobody looks at the pages there.
  __device__ void load(Tile& x, int first) const {
    const int g = lane() / 4, t = lane() % 4, last = rows - 1;
    const float* own = visited + (long long)(2 * t < G ? 2 * t : 0) * nodes;
    const float* next = 2 * t + 1 < G ? own + nodes : own;
    int u[2];
    for (int r = 0; r < 2; r++) {
      const long long at = min(first + g + 8 * r, last);
      u[r] = node[at];
      x.word[r] = ::load<2 * WORDS>(codes + at * (D / 2) + t * (D / 8));
      for (int i = 0; i < SCALES; i++) x.scale[r][i] = scales[at * (D / CHANNELS) + t * SCALES + i];
    }
    for (int r = 0; r < 2; r++) {
      const unsigned at = max(u[r], 0);
      const float a = own[at], b = next[at];
      x.node[r][0] = u[r] >= 0 ? a : none(), x.node[r][1] = u[r] >= 0 ? b : none();
    }
  }
};

__device__ void multiply(float (&sum)[4], const Tile& x, const Query& query) {
  for (int w = 0; w < WORDS; w++) {
    unsigned upper[4], lower[4];
    const uint4 own = query[w][lane()];
    unpack(upper, x.word[0].at[w], x.scale[0][w / 2] * 0x10001u);
    unpack(lower, x.word[1].at[w], x.scale[1][w / 2] * 0x10001u);
    multiply_add(sum, {upper[0], lower[0], upper[1], lower[1]}, own.x, own.y);
    multiply_add(sum, {upper[2], lower[2], upper[3], lower[3]}, own.z, own.w);
  }
}

// The best tokens of a tile's pages for query heads 2 t and 2 t + 1: of those of the first 8 tokens and of the others,
// or of all 16.
__device__ void best_of(float (&best)[2][2], const Tile& x, const Query& query) {
  float sum[4] = {};
  multiply(sum, x, query);
  for (int c = 0; c < 2; c++) {
    for (int r = 0; r < 2; r++) best[r][c] = x.node[r][c] > none() ? x.node[r][c] + sum[2 * r + c] : none();
    if (P == TILE) best[0][c] = fmaxf(best[0][c], best[1][c]);
    for (int d = 4; d < 4 * SPAN; d *= 2)
      for (int r = 0; r < (P == TILE ? 1 : 2); r++) best[r][c] = fmaxf(best[r][c], __shfl_xor_sync(ALL, best[r][c], d));
  }
}

// What the warps of a program share: of the groups of a turn the peaks, and the tiles that some query head sees.
struct Shared {
  Query query;
  unsigned marks[WORDS_OF_MARKS];  // of what some query head sees
  float peaks[G][TURN * GROUP];
  unsigned short tiles[TURN * TILES];
  int count;
};

// Of all query heads.
__device__ void load_marks(Shared& s, const unsigned* marks, int words) {
  for (int i = threadIdx.x; i < words; i += 32 * WARPS) {
    unsigned any = 0;
    for (int h = 0; h < G; h++) any |= marks[h * words + i];
    s.marks[i] = any;
  }
}

// Whether some query head sees a token of this node.
__device__ bool seen(const Shared& s, int u) { return u >= 0 && s.marks[u >> 5] >> (u & 31) & 1; }

// The groups of a turn: the first, how far they are apart, and how many.
struct Groups {
  int first, step, count;
  __device__ int at(int i) const { return first + i * step; }
};

// Find the tiles; a thread looks at two tokens of every 64.
__device__ void look(Shared& s, const Source& from, const Groups& groups) {
  const int count = groups.count * LOOKS;
  for (int begin = warp(); begin < count; begin += WARPS * LOOKS_TOGETHER) {
    int2 node[LOOKS_TOGETHER];
    bool sees[LOOKS_TOGETHER];
    for (int i = 0; i < LOOKS_TOGETHER; i++) {
      const int at = begin + i * WARPS, row = groups.at(at / LOOKS) * (GROUP * P) + at % LOOKS * 64 + 2 * lane();
      node[i] = at < count && row < from.rows ? *reinterpret_cast<const int2*>(from.node + row) : int2{-1, -1};
    }
    for (int i = 0; i < LOOKS_TOGETHER; i++) sees[i] = seen(s, node[i].x) | seen(s, node[i].y);
    for (int i = 0; i < LOOKS_TOGETHER; i++) {
      const unsigned tokens = __ballot_sync(ALL, sees[i]);
      const int tile = 4 * (begin + i * WARPS) + lane();
      if (lane() < 4 && tokens >> 8 * lane() & 0xFF) s.tiles[atomicAdd(&s.count, 1)] = tile;
    }
  }
}

// The peaks of a tile's pages.
__device__ void write(Shared& s, int tile, const float (&best)[2][2]) {
  const int g = lane() / 4, t = lane() % 4;
  for (int c = 0; c < 2; c++) {
    if (g % SPAN || 2 * t + c >= G) continue;
    float* page = s.peaks[2 * t + c] + tile * (TILE / P) + g / SPAN;
    page[0] = best[0][c];
    if (P < TILE) page[8 / SPAN] = best[1][c];
  }
}

// All tiles that were found.
__device__ void multiply_all(Shared& s, const Source& from, const Groups& groups) {
  for (int begin = warp(); begin < s.count; begin += WARPS * TOGETHER) {
    Tile tile[TOGETHER];
    int name[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      name[i] = begin + i * WARPS < s.count ? s.tiles[begin + i * WARPS] : -1;
      if (name[i] >= 0) from.load(tile[i], groups.at(name[i] / TILES) * (GROUP * P) + name[i] % TILES * TILE);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      if (name[i] < 0) continue;
      float best[2][2];
      best_of(best, tile[i], s.query);
      write(s, name[i], best);
    }
  }
}

// Of all pages, and of all groups.
__device__ void write_all(const Shared& s, const Groups& groups, float* out, float* peaks, int pages) {
  const int all = (pages + GROUP - 1) / GROUP, runs = (groups.count * GROUP + 31) / 32;  // a lane a page
  for (int i = warp(); i < G * runs; i += WARPS) {
    const int head = i % G, at = i / G * 32 + lane(), group = groups.at(at / GROUP), page = group * GROUP + at % GROUP;
    const bool mine = at / GROUP < groups.count, live = mine & page < pages;
    float best = live ? s.peaks[head][at] : none();
    if (live) out[(long long)head * pages + page] = best;
    for (int d = 1; d < GROUP; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, d));
    if (mine & lane() % GROUP == 0) peaks[(long long)head * all + group] = best;
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) page_peaks(
    const unsigned short* q, const float* visited, const unsigned* marks, const unsigned char* codes,
    const unsigned short* scales, const int* node, float* out, float* peaks, int q_b, int q_h, int heads, int nodes,
    int rows, int pages) {
  __shared__ Shared s;
  const int all = (pages + GROUP - 1) / GROUP, step = gridDim.y, words = (nodes + 31) / 32;
  const long long bh = blockIdx.x;
  const Source from = {visited + bh * G * nodes, codes + bh * rows * (D / 2), scales + bh * rows * (D / CHANNELS),
                       node + bh * rows, nodes, rows};
  chain();
  load_marks(s, marks + bh * G * words, words);
  if (warp() == 0) load_query(s.query, q + bh / heads * q_b + bh % heads * G * q_h, q_h);
  for (int first = blockIdx.y; first < all; first += TURN * step) {
    const Groups groups = {first, step, min(TURN, (all - first + step - 1) / step)};
    for (int i = threadIdx.x; i < G * TURN * GROUP; i += 32 * WARPS) s.peaks[0][i] = none();
    if (threadIdx.x == 0) s.count = 0;
    __syncthreads();
    look(s, from, groups);
    __syncthreads();
    multiply_all(s, from, groups);
    __syncthreads();
    write_all(s, groups, out + bh * G * pages, peaks + bh * G * all, pages);
    __syncthreads();
  }
}
