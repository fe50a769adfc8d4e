// Score every page by the largest q.k of its tokens; ops/icecache/page_peaks.py is the specification. The kernel takes
// tokens in codes, pages of 4, 8 or 16 tokens, and up to 8 query heads of a kv head.
//
// Why not Triton: a query head sees tokens in few pages, and these pages lie side by side. A program that worked
// through a fixed part of the pages would often have many of them. Here the threads of a program first find the pages
// that may be seen, from the nodes in the span of each page. Then the warps share out these pages. Codes are unpacked
// in the registers that the tensor cores read. A page whose tokens are all nodes needs no codes, because the products
// with nodes are known.
//
// Compile-time constants: D channels (a multiple of 64), G query heads, P tokens of a page, BF16 queries, CHANNELS that
// share a scale, GROUP pages that share a peak, WARPS of a program, RESIDENT programs of a multiprocessor, MOST_GROUPS
// of a round of a program, and the spans of pages without a token (EMPTY_SPAN) or with nodes only (NODES_ONLY_SPAN).

#include "common.cuh"
#include "tensor.cuh"

constexpr int TILE = 16, HEADS = 8;  // tokens and query heads of a product
constexpr int PAGES = TILE / P, TILES = GROUP / PAGES;  // pages of a tile, tiles of a group
constexpr int LOOKERS = 2;  // threads that check a page
constexpr int LOOKS = (MOST_GROUPS * GROUP * LOOKERS + 32 * WARPS - 1) / (32 * WARPS);  // pages that a thread checks
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

// Shared memory of a program, for the groups of a round: the scores of their pages, and a list of tiles. Tiles that
// some query head may see are listed from the first place on, tiles with nodes only from the last place back.
extern __shared__ __align__(16) float pool[];
struct Pool {
  Query& query;
  int (&count)[2];  // length of each list
  int groups;

  __device__ float* scores(int head) const { return pool + head * groups * GROUP; }
  __device__ unsigned short& tile(bool nodes_only, int i) const {
    return reinterpret_cast<unsigned short*>(scores(G))[nodes_only ? groups * TILES - 1 - i : i];
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
  long long last;  // number of the last token

  __device__ Source(const Leaves& x, int min_nodes) : min_nodes(min_nodes) {
    const int g = lane() / 4, t = lane() % 4;
    products = x.products + (2 * t < G ? 2 * t : 0);
    codes = x.codes + g * (D / 2) + t * (D / 8);
    scales = reinterpret_cast<const Scales*>(x.scales) + g * 4 + t;
    node = x.node + g;
    last = x.rows - 1 - g;
    hold(products), hold(codes);
    __builtin_assume(__isGlobal(products) && __isGlobal(codes));  // `hold` hides this from the compiler
  }

  __device__ void load_threshold(const unsigned* from) {
    const Run<2> two = pair_at(from + (lane() % 4 * 2 < G ? lane() % 4 * 2 : 0));
    for (int c = 0; c < 2; c++) threshold[c] = __uint_as_float(two.at[c]);
  }

  // Token numbers beyond the last one are clamped; the scores of their pages are not used.
  __device__ long long token(long long first, int r) const {
    return P < TILE ? min(first + 8 * r, last) : first + 8 * r;
  }

  __device__ int2 nodes(long long first) const { return {node[token(first, 0)], node[token(first, 1)]}; }

  __device__ void load(Tile& x, long long first, int2 nodes) const {
    const int u[2] = {nodes.x, nodes.y};
    for (int r = 0; r < 2; r++) {
      const long long at = token(first, r);
      x.word[r] = ::load<2 * WORDS>(codes + at * (D / 2));
      x.scale[r] = scales[at * 4];
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
  for (int i = threadIdx.x; i < G * s.groups * GROUP; i += 32 * WARPS) s.scores(0)[i] = none();
  if (threadIdx.x < 2) s.count[threadIdx.x] = 0;
}

// The nodes in the span of a page. A thread checks every LOOKERS-th of them.
struct Between {
  unsigned at, last;
  __device__ explicit Between(unsigned span) : at((span & 0xFFFF) + lane() % LOOKERS), last(span >> 16) {}
  __device__ Run<G> load(const unsigned* products) const { return all_at(products + min(at, last) * G); }
  // Whether some query head expands one of the nodes that this thread checks. `each` are the products of the first of
  // these nodes. Nodes with a number below `min_nodes` are always expanded.
  __device__ bool seen(Run<G> each, const unsigned* products, const Run<G>& threshold, unsigned min_nodes) {
    bool found = at < min_nodes;
    for (; at <= last && !found; each = load(products)) {
      for (int h = 0; h < G; h++) found |= __uint_as_float(each.at[h]) >= __uint_as_float(threshold.at[h]);
      at += LOOKERS;
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

// From one bit for each thread of a warp, one bit for each tile, at the first thread of the tile: set if a thread of
// the tile has its bit set.
__device__ unsigned tiles_of(unsigned threads) {
  for (int d = 1; d < LOOKERS * PAGES; d *= 2) threads |= threads >> d;
  return threads & ALL / ((1u << LOOKERS * PAGES) - 1);
}

// Add to a list the tiles of the threads whose bit is set in `found`.
__device__ void list(const Pool& s, bool nodes_only, unsigned found, int tile) {
  int place = 0;
  if (lane() == 0 && found) place = atomicAdd(&s.count[nodes_only], __popc(found));
  place = __shfl_sync(ALL, place, 0) + __popc(found & (1u << lane()) - 1);
  if (found >> lane() & 1) s.tile(nodes_only, place) = tile;
}

// The spans of the pages that a thread checks in a round.
struct Spans {
  unsigned at[LOOKS];
  __device__ Spans(const Leaves& from, const Groups& groups) {
    for (int i = 0; i < LOOKS; i++) {
      const int place = (i * 32 * WARPS + threadIdx.x) / LOOKERS, page = groups.page(place);
      at[i] = place < groups.count * GROUP && page < from.pages ? from.span[page] : EMPTY_SPAN;
    }
  }
};

// List the tiles. `next` are the products of the first node that a thread checks.
__device__ void look(
    const Pool& s, const Spans& spans, Run<G> next, const unsigned* products, const Run<G>& threshold,
    int min_nodes, int pages) {
  for (int i = 0; i < LOOKS; i++) {
    const int first = 32 * (i * WARPS + warp()), tile = (first + lane()) / (LOOKERS * PAGES);
    if (first >= LOOKERS * pages) return;
    const Run<G> own = next;
    if (i + 1 < LOOKS) next = Between(spans.at[i + 1]).load(products);
    const unsigned found = tiles_of(__ballot_sync(ALL, Between(spans.at[i]).seen(own, products, threshold, min_nodes)));
    list(s, false, found, tile);
    list(s, true, tiles_of(__ballot_sync(ALL, spans.at[i] == NODES_ONLY_SPAN)) & ~found, tile);
  }
}

// Store the scores of a tile's pages.
__device__ void write(const Pool& s, int tile, const float (&best)[2][2]) {
  const int g = lane() / 4, t = lane() % 4;
  for (int c = 0; c < 2; c++) {
    if (g % SPAN || 2 * t + c >= G) continue;
    float* page = s.scores(2 * t + c) + tile * PAGES + g / SPAN;
    page[0] = best[0][c];
    if (P < TILE) page[8 / SPAN] = best[1][c];
  }
}

// Score the listed tiles that need their codes.
__device__ void multiply_all(const Pool& s, const Source& from, const Groups& groups) {
  const auto first = [&](int i) { return groups.page(s.tile(false, i) * PAGES) * (long long)P; };
  int2 nodes = {};  // of a tile; loaded while the tile before it is multiplied
  if (warp() < s.count[0]) nodes = from.nodes(first(warp()));
  for (int i = warp(); i < s.count[0]; i += WARPS) {
    Tile tile;
    float best[2][2];
    from.load(tile, first(i), nodes);
    if (i + WARPS < s.count[0]) nodes = from.nodes(first(i + WARPS));
    best_of(best, tile, s.query);
    write(s, s.tile(false, i), best);
  }
}

// Score the tiles with nodes only. Half a warp takes two tiles, and a thread takes one node of each, with all query
// heads. The last warps begin, because they multiply the fewest tiles.
__device__ void look_up_all(const Pool& s, const Leaves& from, const Groups& groups) {
  for (int begin = 4 * (WARPS - 1 - warp()); begin < s.count[1]; begin += 4 * WARPS) {
    int tile[2], u[2];
    Run<G> product[2];
    for (int r = 0; r < 2; r++) {
      tile[r] = s.tile(true, min(begin + 2 * r + lane() / TILE, s.count[1] - 1));  // the last tile may repeat
      u[r] = from.node[min(groups.page(tile[r] * PAGES) * P + lane() % TILE, from.rows - 1)];
    }
    for (int r = 0; r < 2; r++) product[r] = all_at(from.products + (-2 - min(u[r], -2)) * G);
    for (int r = 0; r < 2; r++)
      for (int h = 0; h < G; h++) {
        float best = u[r] < -1 ? __uint_as_float(product[r].at[h]) : none();
        for (int d = 1; d < P; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, d));
        if (lane() % P == 0) s.scores(h)[tile[r] * PAGES + lane() % TILE / P] = best;
      }
  }
}

// Write the scores of all pages of a round, four pages for each thread, and the peaks of the groups.
__device__ void write_all(const Pool& s, const Groups& groups, float* out, float* peaks, int pages) {
  const int all = (pages + GROUP - 1) / GROUP, runs = (groups.count * GROUP / 4 + 31) / 32;
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
    const Spans spans(leaves, groups);
    // Before `wait_for_previous` only queries and spans are read, which are older than the products.
    if (first == blockIdx.y) {
      wait_for_previous();
      source.load_threshold(threshold + bh * G);
    }
    const Run<G> next = Between(spans.at[0]).load(leaves.products), all_thresholds = all_at(threshold + bh * G);
    __syncthreads();
    look(s, spans, next, leaves.products, all_thresholds, min_nodes, groups.count * GROUP);
    __syncthreads();
    multiply_all(s, source, groups);
    look_up_all(s, leaves, groups);
    __syncthreads();
    write_all(s, groups, out + bh * G * pages, peaks + bh * G * all, pages);
    __syncthreads();
    if (first + most_groups * step < all) clear(s);
  }
}
