// Score every page by the largest q.k of its tokens; ops/icecache/page_peaks.py is the specification. The kernel takes
// tokens in codes, pages of 4, 8 or 16 tokens, and up to 8 query heads of a kv head.
//
// Why not Triton: a query head sees tokens in few pages, and these pages lie side by side. A program that worked
// through a fixed part of the pages would often have many of them. Here the threads of a program first find the pages
// that may be seen, from the nodes in the span of each page; a page with a WIDE span is listed without a check. Then the
// warps share out these pages, TILE tokens at a time. Codes are unpacked in the registers that the tensor cores read. A page
// whose tokens are all nodes needs no codes, because the products with nodes are known.
//
// Compile-time constants: D channels (a multiple of 64), G query heads, P tokens of a page, BF16 queries, CHANNELS that
// share a scale, GROUP pages that share a peak, WARPS of a program, RESIDENT programs of a multiprocessor, and the spans of
// pages without a token (EMPTY_SPAN) or with nodes only (NODES_ONLY_SPAN).

#include "common.cuh"
#include "tensor.cuh"

constexpr int TILE = 16, HEADS = 8;  // tokens and query heads of a product
constexpr int PAGES = TILE / P;  // of a tile: any pages of the list, side by side in it
constexpr int LOOKERS = 2;  // threads that check a page
constexpr int LOOKED = 32 * WARPS / LOOKERS;  // pages that a program checks at a time
constexpr int WIDE = 16;  // a page whose span is wider is taken to be seen: checking it takes longer than multiplying it
constexpr int WORDS = D / 32, SCALES = D / 64;  // of a token's code that a thread has; two words share a scale
struct __align__(2 * SCALES) Scales { unsigned short at[SCALES]; };
__device__ unsigned twice(const Scales& x, int i) { return __byte_perm(x.at[i], 0, 0x1010); }
constexpr int SPAN = P < 8 ? P : 8;  // tokens of a page among 8 consecutive tokens
static_assert(CHANNELS == 16 && GROUP == 16 && P % 4 == 0 && P <= TILE && G <= HEADS);

// The products of a node with a thread's two query heads; the same product twice if there is no second head.
__device__ Run<2> pair_at(const unsigned* x) {
  if (G % 2) return {x[0], x[G > 1 && lane() % 4 < G / 2]};
  return load<4>(x);
}

// The products of two nodes.
struct Two { Run<G> first, second; };

// The products of a node with all query heads.
__device__ Run<G> all_at(const unsigned* x) {
  if constexpr (G == 2 || G == 4 || G == 8) {
    return load<2 * G>(x);
  } else {
    Run<G> all;
    for (int h = 0; h < G; h++) all.at[h] = x[h];
    return all;
  }
}

// Bits 4 to 7 of each 16-bit half are a number x; returns x - 7.5 in fp16. 64 + x and its difference to 71.5 are exact
// in fp16. `mask` selects the bits. It is held in a register, because an instruction takes only one constant.
__device__ unsigned levels(unsigned bits, unsigned mask) {
  unsigned x;
  asm("lop3.b32 %0, %1, %2, 0x54005400, 0xEA;" : "=r"(x) : "r"(bits), "r"(mask));  // bits & mask | 64
  asm("sub.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0x54785478));
  return x;
}

// The residuals of a word of codes: of channels 0 and 2, 8 and 10, 1 and 3, 9 and 11, counted from the channel of the
// lowest bits.
__device__ void unpack(unsigned (&pairs)[4], unsigned word, unsigned scale, unsigned mask) {
  const unsigned bits[4] = {word << 4, word, word >> 4, word >> 8};
  for (int i = 0; i < 4; i++) pairs[i] = times(levels(bits[i], mask), scale);
}

using Query = uint4[WORDS][32];  // the second factor of the tensor cores: for each thread the pairs of its words

// Load query head lane / 4. The warps of a program share the work.
__device__ void load_query(Query& query, const unsigned short* q, int q_h) {
  const int g = lane() / 4, t = lane() % 4;
  for (int w = warp(); w < WORDS; w += WARPS) {
    unsigned pair[4] = {};
    for (int upper = 0; upper < 2 && g < G; upper++) {
      const int channel = t * (D / 4) + w / 2 * 16 + w % 2 * 4 + 8 * upper;
      const uint2 x = *reinterpret_cast<const uint2*>(q + (long long)g * q_h + channel);
      for (int odd = 0; odd < 2; odd++) pair[2 * odd + upper] = every_other<BF16>(x, odd);
    }
    query[w][lane()] = {pair[0], pair[1], pair[2], pair[3]};
  }
}

// A thread's part of a tile: the codes of tokens lane / 4 and lane / 4 + 8, and the products of query heads 2 t and
// 2 t + 1 with the base nodes of these tokens (t = lane % 4).
struct Tile {
  Run<WORDS> word[2];
  Scales scale[2];
  float node[2][2];
};

// The leaves and products of a kv head. Products are float bits; those of the query heads lie side by side.
struct Leaves {
  const unsigned char* codes;
  const unsigned short* scales;
  const int* node;
  const unsigned *span, *products;
  int rows, pages;
};

// Shared memory of a program, for the groups of a round: the scores of their pages, and a list of pages. Pages that
// some query head may see are listed from the first place on, pages with nodes only from the last place back.
extern __shared__ __align__(16) float pool[];
struct Pool {
  Query& query;
  int (&count)[2];  // length of each list
  int groups;

  __device__ float* scores(int head) const { return pool + head * groups * GROUP; }
  __device__ unsigned short& page(bool nodes_only, int i) const {
    return reinterpret_cast<unsigned short*>(scores(G))[nodes_only ? groups * GROUP - 1 - i : i];
  }
  __device__ int tiles(bool nodes_only) const { return (count[nodes_only] + PAGES - 1) / PAGES; }
};

// The page with token `i` of a tile. For tokens beyond the last listed page `there` is false, and the page is the last one.
struct Place {
  int page;
  bool there;
  __device__ Place(const Pool& s, bool nodes_only, int tile, int i) {
    const int at = tile * PAGES + i / P, last = s.count[nodes_only] - 1;
    page = s.page(nodes_only, min(at, last)), there = at <= last;
  }
};

// What a thread reads of the leaves.
struct Source {
  const unsigned* products;  // of a thread's two query heads
  float threshold[2];  // of these query heads
  int min_nodes;  // nodes below this number are always expanded
  const unsigned char* codes;
  const Scales* scales;
  const int* node;

  __device__ Source(const Leaves& x, int min_nodes) : min_nodes(min_nodes) {
    const int t = lane() % 4;
    products = x.products + (2 * t < G ? 2 * t : 0);
    codes = x.codes + t * (D / 8);
    scales = reinterpret_cast<const Scales*>(x.scales) + t;
    node = x.node;
    hold(products), hold(codes);
    __builtin_assume(__isGlobal(products) && __isGlobal(codes));  // `hold` hides this from the compiler
  }

  __device__ void load_threshold(const unsigned* from) {
    const Run<2> two = pair_at(from + (lane() % 4 * 2 < G ? lane() % 4 * 2 : 0));
    for (int c = 0; c < 2; c++) threshold[c] = __uint_as_float(two.at[c]);
  }

  __device__ void load(Tile& x, const long long (&token)[2], const int (&u)[2]) const {
    for (int r = 0; r < 2; r++) {
      x.word[r] = ::load<2 * WORDS>(codes + token[r] * (D / 2));
      x.scale[r] = scales[token[r] * 4];
    }
    for (int r = 0; r < 2; r++) {
      const unsigned of = max(u[r] < -1 ? -2 - u[r] : u[r], 0);
      const Run<2> product = pair_at(products + of * G);
      for (int c = 0; c < 2; c++) {  // without a branch: there is nothing to skip
        const float value = __uint_as_float(product.at[c]), bound = u[r] >= min_nodes ? threshold[c] : none();
        x.node[r][c] = value >= bound & u[r] != -1 ? value : none();
      }
    }
  }
};

__device__ void multiply(float (&sum)[4], const Tile& x, const Query& query) {
  unsigned mask = 0x00F000F0;
  hold(mask);
  for (int w = 0; w < WORDS; w++) {
    unsigned upper[4], lower[4];
    const uint4 own = query[w][lane()];
    unpack(upper, x.word[0].at[w], twice(x.scale[0], w / 2), mask);
    unpack(lower, x.word[1].at[w], twice(x.scale[1], w / 2), mask);
    multiply_add(sum, {upper[0], lower[0], upper[1], lower[1]}, own.x, own.y);
    multiply_add(sum, {upper[2], lower[2], upper[3], lower[3]}, own.z, own.w);
  }
}

// The largest score of each page of a tile, for query heads 2 t and 2 t + 1: best[0] for pages in the first 8 tokens,
// best[1] for pages in the other 8 tokens; with pages of 16 tokens best[0] alone.
__device__ void best_of(float (&best)[2][2], const Tile& x, const Query& query) {
  float sum[4] = {};
  multiply(sum, x, query);
  for (int c = 0; c < 2; c++) {
    for (int r = 0; r < 2; r++) best[r][c] = fmaxf(x.node[r][c] + sum[2 * r + c], none());
    if (P == TILE) best[0][c] = fmaxf(best[0][c], best[1][c]);
    for (int d = 4; d < 4 * SPAN; d *= 2)
      for (int r = 0; r < (P == TILE ? 1 : 2); r++) best[r][c] = fmaxf(best[r][c], __shfl_xor_sync(ALL, best[r][c], d));
  }
}

// Clear the scores and the lists for a round.
__device__ void clear(const Pool& s) {
#pragma unroll 1
  for (int i = threadIdx.x; i < G * s.groups * GROUP; i += 32 * WARPS) s.scores(0)[i] = none();
  if (threadIdx.x < 2) s.count[threadIdx.x] = 0;
}

// The nodes in the span of a page. A thread checks every LOOKERS-th of them, two at a time.
struct Between {
  unsigned at, last;
  bool wide;
  __device__ explicit Between(unsigned span)
      : at((span & 0xFFFF) + lane() % LOOKERS), last(span >> 16), wide((span & 0xFFFF) + WIDE <= last) {}
  __device__ Two load(const unsigned* products) const {
    return {all_at(products + min(at, last) * G), all_at(products + min(at + LOOKERS, last) * G)};
  }
  // Whether the page is wide, or some query head expands one of the nodes that this thread checks. `each` are the
  // products of the first two of these nodes, or of the last node of the span. Nodes with a number below `min_nodes`
  // are always expanded.
  __device__ bool seen(Two each, const unsigned* products, const Run<G>& threshold, unsigned min_nodes) {
    bool found = wide | at < min_nodes;
#pragma unroll 1
    for (; at <= last && !found; each = load(products)) {
      for (int h = 0; h < G; h++) {
        const float bound = __uint_as_float(threshold.at[h]);
        found |= __uint_as_float(each.first.at[h]) >= bound | __uint_as_float(each.second.at[h]) >= bound;
      }
      at += 2 * LOOKERS;
    }
    return found;
  }
};

// The groups of a round: the first group, the distance to the next, and the number of groups.
struct Groups {
  int first, step, count;
  __device__ int at(int i) const { return first + i * step; }
  __device__ int page(int i) const { return at(i / GROUP) * GROUP + i % GROUP; }
};

// From one bit for each thread of a warp, one bit for each page, at the first thread of the page: set if a thread of
// the page has its bit set.
__device__ unsigned pages_of(unsigned threads) {
  for (int d = 1; d < LOOKERS; d *= 2) threads |= threads >> d;
  return threads & ALL / ((1u << LOOKERS) - 1);
}

// Add to a list the pages of the threads whose bit is set in `found`.
__device__ void list(const Pool& s, bool nodes_only, unsigned found, int page) {
  int place = 0;
  if (lane() == 0 && found) place = atomicAdd(&s.count[nodes_only], __popc(found));
  place = __shfl_sync(ALL, place, 0) + __popc(found & (1u << lane()) - 1);
  if (found >> lane() & 1) s.page(nodes_only, place) = page;
}

// The span of the i-th page that a thread checks in a round.
__device__ unsigned span_of(const Leaves& from, const Groups& groups, int i) {
  const int place = i * LOOKED + threadIdx.x / LOOKERS, page = groups.page(place);
  return place < groups.count * GROUP && page < from.pages ? from.span[page] : EMPTY_SPAN;
}

// List the pages of a round. `span` and `next` are the spans of the first two pages that a thread checks, and `each` are
// the products of the first nodes that it checks of the first one.
__device__ void look(
    const Pool& s, const Leaves& from, const Groups& groups, unsigned span, unsigned next, Two each,
    const Run<G>& threshold, int min_nodes) {
#pragma unroll 1
  for (int i = 0; i * LOOKED < groups.count * GROUP; i++) {
    const Two own = each;
    each = Between(next).load(from.products);
    const unsigned later = span_of(from, groups, i + 2);
    const unsigned found = pages_of(__ballot_sync(ALL, Between(span).seen(own, from.products, threshold, min_nodes)));
    const int page = i * LOOKED + threadIdx.x / LOOKERS;
    list(s, false, found, page);
    list(s, true, pages_of(__ballot_sync(ALL, span == NODES_ONLY_SPAN)) & ~found, page);
    span = next, next = later;
  }
}

// Store the scores of the pages of a thread's tokens.
__device__ void write(const Pool& s, const Place (&place)[2], const float (&best)[2][2]) {
  const int g = lane() / 4, t = lane() % 4;
  for (int c = 0; c < 2; c++) {
    if (g % SPAN || 2 * t + c >= G) continue;
    for (int r = 0; r < (P == TILE ? 1 : 2); r++)
      if (place[r].there) s.scores(2 * t + c)[place[r].page] = best[r][c];
  }
}

// Score the listed pages that need their codes. A thread has two tokens of a tile.
__device__ void multiply_all(const Pool& s, const Source& from, const Groups& groups) {
  const int g = lane() / 4, tiles = s.tiles(false);
  const auto find = [&](int tile, long long (&token)[2], int (&node)[2]) {
    for (int r = 0; r < 2; r++) {
      token[r] = groups.page(Place(s, false, tile, g + 8 * r).page) * (long long)P + (g + 8 * r) % P;
      node[r] = from.node[token[r]];
    }
  };
  long long token[2];
  int node[2];  // of a tile; loaded while the tile before it is multiplied
  if (warp() < tiles) find(warp(), token, node);
#pragma unroll 1
  for (int i = warp(); i < tiles; i += WARPS) {
    Tile tile;
    float best[2][2];
    from.load(tile, token, node);
    if (i + WARPS < tiles) find(i + WARPS, token, node);
    best_of(best, tile, s.query);
    write(s, {Place(s, false, i, g), Place(s, false, i, g + 8)}, best);
  }
}

// Score the pages with nodes only. Half a warp takes two tiles, and a thread takes one node of each, with all query
// heads. The last warps begin, because they multiply the fewest tiles.
__device__ void look_up_all(const Pool& s, const Leaves& from, const Groups& groups) {
  const int own = lane() % TILE;
#pragma unroll 1
  for (int begin = 4 * (WARPS - 1 - warp()); begin < s.tiles(true); begin += 4 * WARPS) {
    const Place place[2] = {{s, true, begin + lane() / TILE, own}, {s, true, begin + 2 + lane() / TILE, own}};
    int u[2];
    Run<G> product[2];
    for (int r = 0; r < 2; r++) u[r] = from.node[groups.page(place[r].page) * P + own % P];
    for (int r = 0; r < 2; r++) product[r] = all_at(from.products + (-2 - min(u[r], -2)) * G);
    for (int r = 0; r < 2; r++)
      for (int h = 0; h < G; h++) {
        float best = u[r] < -1 ? __uint_as_float(product[r].at[h]) : none();
        for (int d = 1; d < P; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, d));
        if (own % P == 0 && place[r].there) s.scores(h)[place[r].page] = best;
      }
  }
}

// Write the scores of all pages of a round, four pages for each thread, and the peaks of the groups.
__device__ void write_all(const Pool& s, const Groups& groups, float* out, float* peaks, int pages) {
  const int all = (pages + GROUP - 1) / GROUP, runs = (groups.count * GROUP / 4 + 31) / 32;
#pragma unroll 1
  for (int i = warp(); i < G * runs; i += WARPS) {
    const int head = i % G, at = 4 * (i / G * 32 + lane()), group = groups.at(at / GROUP);
    const int page = group * GROUP + at % GROUP, count = at / GROUP < groups.count ? min(4, pages - page) : 0;
    float* to = out + (long long)head * pages + page;
    const float4 x = *reinterpret_cast<const float4*>(s.scores(head) + (count > 0 ? at : 0));
    const float peak[4] = {x.x, x.y, x.z, x.w};
    float best = none();
    for (int j = 0; j < 4; j++) best = j < count ? fmaxf(best, peak[j]) : best;
    if (count == 4 && pages % 4 == 0) {
      *reinterpret_cast<float4*>(to) = x;
    } else {
      for (int j = 0; j < 4; j++)
        if (j < count) to[j] = peak[j];
    }
    for (int d = 1; d < GROUP / 4; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, d));
    if (at % GROUP == 0 && at / GROUP < groups.count) peaks[(long long)head * all + group] = best;
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT) page_peaks(
    const unsigned short* q, const unsigned* products, const unsigned* threshold, const unsigned char* codes,
    const unsigned short* scales, const int* node, const unsigned* span, float* out, float* peaks, int q_b, int q_h,
    int heads, int nodes, int rows, int pages, int most_groups, int min_nodes) {
  __shared__ Query query;
  __shared__ int count[2];
  const int all = (pages + GROUP - 1) / GROUP, step = gridDim.y;
  const long long bh = blockIdx.x;
  const Pool s = {query, count, most_groups};
  const Leaves leaves = {codes + bh * rows * (D / 2), scales + bh * rows * (D / CHANNELS), node + bh * rows,
                         span + bh * pages, products + bh * nodes * G, rows, pages};
  Source source(leaves, min_nodes);
  load_query(query, q + bh / heads * q_b + bh % heads * G * q_h, q_h);
  clear(s);
  for (int first = blockIdx.y; first < all; first += most_groups * step) {
    const Groups groups = {first, step, min(most_groups, (all - first + step - 1) / step)};
    const unsigned span = span_of(leaves, groups, 0), later = span_of(leaves, groups, 1);
    // Before `wait_for_previous` only queries and spans are read, which are older than the products.
    if (first == blockIdx.y) {
      wait_for_previous();
      source.load_threshold(threshold + bh * G);
    }
    const Two each = Between(span).load(leaves.products);
    const Run<G> all_thresholds = all_at(threshold + bh * G);
    __syncthreads();
    look(s, leaves, groups, span, later, each, all_thresholds, min_nodes);
    __syncthreads();
    multiply_all(s, source, groups);
    look_up_all(s, leaves, groups);
    __syncthreads();
    write_all(s, groups, out + bh * G * pages, peaks + bh * G * all, pages);
    __syncthreads();
    if (first + most_groups * step < all) clear(s);
  }
}
