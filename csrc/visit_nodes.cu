// Multiply queries with the nodes of a tree of two levels, and find the threshold of expanded nodes in a sample;
// ops/icecache/visit_nodes.py is the specification. A warp multiplies tiles of 16 nodes with all query heads of a kv
// head. The first programs of a kv head, one for each query head, form a cluster that writes no products. While the
// other programs multiply, each program of the cluster computes a share of the sample. Then it searches the whole
// sample for the threshold of its query head.
//
// Why not Triton: it moves codes through shared memory into the layout of the tensor cores. A product does not depend
// on the order of channels, as long as queries and keys have the same order. So here a thread multiplies the 16 bytes
// that it loads itself. search.cuh says why the search is not in Triton.
//
// Compile-time constants: D channels (a multiple of 64), G query heads of a kv head (up to 8), BF16 queries, THREADS of
// a program, TILES of a warp, SAMPLE nodes of a sample, and MILLION, which is a share of 1.

#include "cluster.cuh"
#include "search.cuh"
#include "tensor.cuh"

constexpr int TILE = 16, HEADS = 8;  // nodes and query heads of a product
constexpr int RUNS = D / 64;  // runs of 16 channels of a code that a thread loads
constexpr int SHARE = (SAMPLE + TILE * WARPS * G - 1) / (TILE * WARPS * G);  // tiles of the sample for a warp
constexpr int KEYS = (SAMPLE + THREADS - 1) / THREADS;  // nodes of the sample that a thread searches
static_assert(D % 64 == 0 && G <= HEADS && SAMPLE % TILE == 0);

// The nodes of a kv head.
struct Head {
  const unsigned char* code;
  const float* scale;
  float* products;
  int nodes;
};

// Evenly spaced nodes.
struct Nodes {
  int first, apart;
  __device__ int at(int i) const { return first + i * apart; }
};

struct Shared : Search {
  unsigned key[SAMPLE];  // of the program's query head
  Bell<G> bell;
};

// Bytes 0 and 2, or 1 and 3 (odd), in fp16. A byte is a signed number x, and 1024 + 128 + x is exact in fp16.
__device__ unsigned pair_of(unsigned bytes, bool odd) {
  unsigned x = __byte_perm(bytes ^ 0x80808080, 0x64646464, odd ? 0x4341 : 0x4240);
  asm("sub.f16x2 %0, %0, %1;" : "+r"(x) : "r"(0x64806480));
  return x;
}

// A query head as the second factor of the tensor cores, in the order of `pair_of`.
struct Query {
  unsigned at[RUNS][4][2];

  __device__ Query(const unsigned short* q, int q_h) {
    q += min(lane() / 4, G - 1) * (long long)q_h + lane() % 4 * 16;
    for (int r = 0; r < RUNS; r++)
      for (int w = 0; w < 4; w++) {
        const uint2 x = *reinterpret_cast<const uint2*>(q + 64 * r + 4 * w);
        for (int odd = 0; odd < 2; odd++) at[r][w][odd] = every_other<BF16>(x, odd);
      }
  }
};

// A thread's part of a tile: nodes lane / 4 and lane / 4 + 8.
struct Tile {
  Words run[2][RUNS];
  float scale[2];

  __device__ void load(const Head& x, const Nodes& nodes) {
    for (int r = 0; r < 2; r++) {
      const int u = min(nodes.at(lane() / 4 + 8 * r), x.nodes - 1);
      for (int i = 0; i < RUNS; i++) run[r][i] = load_once(x.code + (long long)u * D + lane() % 4 * 16 + 64 * i);
      scale[r] = x.scale[u];
    }
  }

  // The products with query heads 2 t and 2 t + 1, where t = lane % 4; -inf for NaN and from node `known` on.
  __device__ void multiply(float (&product)[2][2], const Query& query, const Nodes& nodes, int known) const {
    float sum[4] = {};
    for (int i = 0; i < RUNS; i++)
      for (int w = 0; w < 4; w++) {
        const unsigned upper = run[0][i].at[w], lower = run[1][i].at[w];
        multiply_add(sum, {pair_of(upper, false), pair_of(lower, false), pair_of(upper, true), pair_of(lower, true)},
                     query.at[i][w][0], query.at[i][w][1]);
      }
    for (int r = 0; r < 2; r++) {
      const int u = nodes.at(lane() / 4 + 8 * r);
      for (int c = 0; c < 2; c++) product[r][c] = u < known ? fmaxf(sum[2 * r + c] * scale[r], none()) : none();
    }
  }
};

// Store the products of a node with two query heads, or with the first only.
__device__ void put(float* to, float first, float second, bool both) {
  if (G % 2 == 0) {
    *reinterpret_cast<float2*>(to) = {first, second};
  } else {
    to[0] = first;
    if (both) to[1] = second;
  }
}

// Store the products of a tile.
__device__ void write(const Head& x, const Nodes& nodes, const float (&product)[2][2]) {
  const int head = lane() % 4 * 2;
  for (int r = 0; r < 2; r++) {
    const int u = nodes.at(lane() / 4 + 8 * r);
    if (u >= x.nodes || head >= G) continue;
    const bool root = u == 0;
    put(x.products + (long long)u * G + head, root ? 0 : product[r][0], root ? 0 : product[r][1], head + 1 < G);
  }
}

// Multiply and store the tiles of a warp, from this tile on, `step` tiles apart. The first tiles are loaded before the
// number of nodes is known, because their addresses do not depend on it.
__device__ void write_all(const Head& x, const unsigned short* q, int q_h, const int* node_count, int tile, int step) {
  const auto nodes = [&](int i) { return Nodes{(tile + i) * TILE, 1}; };
  Tile tiles[TILES];
  for (int i = 0; i < TILES; i++) tiles[i].load(x, nodes(i));
  __syncwarp();
  const int known = *node_count;
  const Query query(q, q_h);
  while (true) {
    for (int i = 0; i < TILES; i++) {
      float product[2][2];
      tiles[i].multiply(product, query, nodes(i), known);
      write(x, nodes(i), product);
    }
    tile += step;
    if (tile * TILE >= x.nodes) return;
    for (int i = 0; i < TILES; i++) tiles[i].load(x, nodes(i));
  }
}

// The distance between two nodes of the sample.
__device__ int apart_of(int known) { return max(1, (known - 1 + SAMPLE - 1) / SAMPLE); }

// Prefetch the nodes of a program's share of the sample into the L2.
__device__ void ask_sample(const Head& x, int apart) {
  for (int i = blockIdx.y * THREADS + threadIdx.x; i < SAMPLE; i += G * THREADS) {
    const long long u = min(1 + i * apart, x.nodes - 1);
    for (int c = 0; c < D; c += 128) ask(x.code + u * D + c);
    ask(x.scale + u);
  }
}

// Multiply the program's share of the sample, and send the products as keys to the programs of their query heads.
// Returns the number of nodes. `guess` is an earlier reading of that number, by which the first tiles are loaded. If
// the distance between nodes has changed since, the tiles are loaded again.
__device__ int sample(const Head& x, const unsigned short* q, int q_h, const int* node_count, int guess, Shared& s) {
  const int head = lane() % 4 * 2;
  const auto first = [&](int tile) { return (int)((tile * G + blockIdx.y) * WARPS + warp()) * TILE; };
  const auto nodes = [&](int tile, int apart) { return Nodes{1 + first(tile) * apart, apart}; };
  Tile tiles[TILES];
  int apart = apart_of(guess);
  for (int i = 0; i < TILES; i++) tiles[i].load(x, nodes(i, apart));
  __syncwarp();
  const int known = *node_count;
  const Query query(q, q_h);
  for (int tile = 0; tile < SHARE; tile += TILES) {
    if (tile > 0 || apart != apart_of(known)) {
      apart = apart_of(known);
      for (int i = 0; i < TILES; i++) tiles[i].load(x, nodes(tile + i, apart));
    }
    for (int i = 0; i < TILES; i++) {
      float product[2][2];
      tiles[i].multiply(product, query, nodes(tile + i, apart), known);
      for (int r = 0; r < 2; r++)
        for (int c = 0; c < 2; c++)
          if (head + c < G && first(tile + i) < SAMPLE)
            s.bell.send(head + c, &s.key[first(tile + i) + lane() / 4 + 8 * r], ordered(product[r][c]));
    }
  }
  return known;
}

// The key of this rank in the sample of the program's query head. Valid in the first thread.
__device__ unsigned key_of_rank(int rank, Shared& s) {
  unsigned key[KEYS];
  for (int i = 0; i < KEYS; i++) key[i] = i * THREADS + threadIdx.x < SAMPLE ? s.key[i * THREADS + threadIdx.x] : 0;
  return key_at(key, rank, s);
}

extern "C" __global__ void __cluster_dims__(1, G) __launch_bounds__(THREADS) score(
    const unsigned short* q, const unsigned char* code, const float* scale, const int* node_count, float* products,
    float* threshold, int q_b, int q_h, int heads, int nodes, int share, int min_nodes, int max_nodes) {
  __shared__ Shared s;
  const long long bh = blockIdx.x;
  const Head head = {code + bh * nodes * D, scale + bh * nodes, products + bh * nodes * G, nodes};
  q += bh / heads * q_b + bh % heads * G * q_h, node_count += bh;
  if (threadIdx.x < G) ask(q + threadIdx.x * (long long)q_h);
  int guess = 0;
  if (blockIdx.y < G) {
    s.bell.expect(SAMPLE);
    arrive();
    guess = min(__ldcg(node_count), nodes);
    ask_sample(head, apart_of(guess));
    prepare(s);
    wait();
  }
  wait_for_previous();
  if (blockIdx.y >= G) {
    const int step = WARPS * TILES;
    write_all(head, q, q_h, node_count, (blockIdx.y - G) * step + warp() * TILES, (gridDim.y - G) * step);
    return;
  }
  const int known = sample(head, q, q_h, node_count, guess, s), count = known - 1, apart = apart_of(known);
  const int room = min(max((int)((count * (long long)share + MILLION - 1) / MILLION), min_nodes), max_nodes);
  const int rank = (room + apart - 1) / apart;
  now(rank);
  s.bell.receive();
  const unsigned key = room < count ? key_of_rank(rank, s) : LEAST;
  if (threadIdx.x == 0) threshold[bh * G + blockIdx.y] = number_of(key);
}
