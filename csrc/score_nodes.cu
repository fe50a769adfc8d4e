// The products of queries with the nodes of a tree of two levels, and their peaks, as ops/select/visit_nodes.py specifies
// them: a warp has tiles of 16 nodes, each for all query heads of a kv head.
//
// Why not Triton: it takes codes through shared memory to where the tensor cores want them. Which channels are next to
// one another does not matter as long as queries and keys agree, so here a thread multiplies the very 16 bytes that it
// loads.
//
// Set by the compilation: D channels (a multiple of 64), G query heads of a kv head (up to 8), BF16 queries, WARPS of a
// program, TILES of a warp, and GROUP nodes that share a peak (16).

#include "common.cuh"
#include "tensor.cuh"

constexpr int TILE = 16, HEADS = 8;  // nodes and query heads of a product
constexpr int RUNS = D / 64;  // of a code that a thread loads: 16 channels each
static_assert(D % 64 == 0 && G <= HEADS && GROUP == TILE);

// What a kv head has, and what it is told: peaks query head by query head, if any are wanted.
struct Head {
  const unsigned char* code;
  const float* scale;
  float *products, *peaks;
  int nodes, known;
};

// Bytes 0 and 2, or 1 and 3, as halves; they are signed, and 1024 + 128 + x is exact.
__device__ unsigned pair_of(unsigned bytes, bool odd) {
  unsigned x = __byte_perm(bytes ^ 0x80808080, 0x64646464, odd ? 0x4341 : 0x4240);
  asm("sub.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0x64806480));
  return x;
}

// A query head as the second factor wants it, in the order of those bytes.
struct Query {
  unsigned at[RUNS][4][2];

  __device__ explicit Query(const unsigned short* q) {
    for (int r = 0; r < RUNS; r++)
      for (int w = 0; w < 4; w++) {
        const uint2 x = *reinterpret_cast<const uint2*>(q + 64 * r + 4 * w);
        for (int odd = 0; odd < 2; odd++) at[r][w][odd] = every_other<BF16>(x, odd);
      }
  }
};

// What a thread has of a tile: nodes lane / 4, and 8 behind it.
struct Tile {
  Words run[2][RUNS];
  float scale[2];

  __device__ void load(const Head& x, int first) {
    for (int r = 0; r < 2; r++) {
      const int u = max(0, min(first + lane() / 4 + 8 * r, x.known - 1));
      for (int i = 0; i < RUNS; i++) run[r][i] = load_once(x.code + (long long)u * D + lane() % 4 * 16 + 64 * i);
      scale[r] = x.scale[u];
    }
  }

  // With query heads 2 t and 2 t + 1; -inf where nobody is, at the root, and for NaN.
  __device__ void multiply(float (&product)[2][2], const Query& query, int first, int known) const {
    float sum[4] = {};
    for (int i = 0; i < RUNS; i++)
      for (int w = 0; w < 4; w++) {
        const unsigned upper = run[0][i].at[w], lower = run[1][i].at[w];
        multiply_add(sum, {pair_of(upper, false), pair_of(lower, false), pair_of(upper, true), pair_of(lower, true)},
                     query.at[i][w][0], query.at[i][w][1]);
      }
    for (int r = 0; r < 2; r++) {
      const int u = first + lane() / 4 + 8 * r;
      for (int c = 0; c < 2; c++) product[r][c] = 0 < u & u < known ? fmaxf(sum[2 * r + c] * scale[r], none()) : none();
    }
  }
};

// A node's products with two query heads, or with the one that there is.
__device__ void put(float* to, float first, float second, bool both) {
  if (G % 2 == 0) {
    *reinterpret_cast<float2*>(to) = {first, second};
  } else {
    to[0] = first;
    if (both) to[1] = second;
  }
}

__device__ void write(const Head& x, int first, const float (&product)[2][2]) {
  const int g = lane() / 4, head = lane() % 4 * 2, groups = (x.nodes + TILE - 1) / TILE;
  for (int r = 0; r < 2; r++) {
    const int u = first + g + 8 * r;
    if (u >= x.nodes || head >= G) continue;
    const bool root = u == 0;
    put(x.products + (long long)u * G + head, root ? 0 : product[r][0], root ? 0 : product[r][1], head + 1 < G);
  }
  for (int c = 0; c < 2 && x.peaks; c++) {
    float best = fmaxf(product[0][c], product[1][c]);
    for (int d = 4; d < 32; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL, best, d));
    if (g == 0 && head + c < G && first < x.nodes) x.peaks[(head + c) * groups + first / TILE] = best;
  }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) score(
    const unsigned short* q, const unsigned char* code, const float* scale, const int* node_count, float* products,
    float* peaks, int q_b, int q_h, int heads, int nodes) {
  const int g = lane() / 4, t = lane() % 4, groups = (nodes + TILE - 1) / TILE;
  const int first = (blockIdx.y * WARPS + warp()) * TILES * TILE;
  const long long bh = blockIdx.x;
  chain();
  const Head head = {code + bh * nodes * D, scale + bh * nodes, products + bh * nodes * G,
                     peaks ? peaks + bh * G * groups : nullptr, nodes, node_count[bh]};
  const Query query(q + bh / heads * q_b + (bh % heads * G + min(g, G - 1)) * (long long)q_h + 16 * t);
  Tile tile[TILES];
  for (int i = 0; i < TILES; i++) tile[i].load(head, first + i * TILE);
  for (int i = 0; i < TILES; i++) {
    float product[2][2];
    tile[i].multiply(product, query, first + i * TILE, head.known);
    write(head, first + i * TILE, product);
  }
}
