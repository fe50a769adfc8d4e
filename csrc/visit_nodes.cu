// Which nodes of a level a query head expands, as ops/select/visit_nodes.py specifies it: a program for each query head,
// which marks them by a bit each (search.cuh says why not Triton).
//
// Set by the compilation: THREADS; NODES nodes that a thread looks at, or, of a tree of two levels that has many, PEAKS that
// it looks at before and SCORES of the groups that have these (PEAKS 0: all nodes are looked at); GROUP scores that share a
// peak; WORDS of marks; G query heads of a kv head; MILLION, a share of 1; FLAT for trees of two levels, whose nodes all
// are of one.

#include "search.cuh"

static_assert(NODES <= 64, "a bit each");
constexpr int MOST = PEAKS ? THREADS * SCORES / GROUP : 1;

struct Shared : Grouped<MOST> {
  unsigned taken[PEAKS ? WORDS : 1];
};

// How many of so many nodes are expanded.
struct View {
  int share, least, most;
  __device__ int room(int all) const {
    return min(max((int)(((long long)all * share + MILLION - 1) / MILLION), least), most);
  }
};

// The nodes of a query head, whose products and marks are beside those of the others of its kv head.
struct Row {
  const float* products;
  unsigned* marks;
  int nodes;
};

// The sum over the threads of a program.
__device__ int total_of(int mine, Search& s) {
  mine = __reduce_add_sync(ALL, mine);
  if (lane() == 0) s.totals[0][warp()] = mine;
  __syncthreads();
  return __reduce_add_sync(ALL, lane() < WARPS ? s.totals[0][lane()] : 0);
}

// Of level `at`, all of them looked at; the marks of higher levels are kept.
__device__ void expand_level(const Row& row, const int* level, int known, const View& view, int at, bool top, Search& s) {
  const Span span(row.nodes, 32);  // a warp has whole words of marks
  const int first = span.place(0), rest = span.stop - first;
  const float* product = row.products + (long long)first * G;
  unsigned key[NODES];
  int there = 0;  // nodes of this level
  for (int i = 0; i < NODES; i++) {
    const int its = FLAT ? at : 32 * i < rest ? level[first + 32 * i] : 0;  // both loads at once
    const float score = 32 * i < rest ? product[32 * i * G] : none();  // of unknown nodes it is -inf anyway
    const bool mine = FLAT || its == at && 32 * i < known - first;
    there += mine;
    key[i] = mine ? ordered(score) : 0;
  }
  if (first == 0) key[0] = 0;  // the root
  const int room = view.room(FLAT ? known - 1 : total_of(there, s));
  // Where every thread has nodes as many groups as wanted will do, and leave a narrower range than twice as many.
  const Range range = range_of(key, room, lanes_of(FLAT ? (room + 1) / 2 : room), s);
  const unsigned last = max(cut(key, span, row.nodes, range, 0, FEW, s.bins, s), LEAST);
  unsigned word[(NODES + 31) / 32] = {};  // lane i has that of step i
  for (int i = 0; i < NODES; i++) {
    const unsigned bits = __ballot_sync(ALL, key[i] >= last);
    if (lane() == i % 32) word[i / 32] = bits;
  }
  for (int i = 0; i < (NODES + 31) / 32; i++) {
    const int step = 32 * i + lane(), u = span.first + 32 * step;
    unsigned* marks = row.marks + u / 32 * G;
    if (step < NODES && u < span.stop) *marks = word[i] | (top ? u == 0 : *marks);
  }
}

// Of the one level of a tree of two, by its peaks. The root has no part in these, nor is it looked at.
__device__ void expand_few(const Row& row, const float* peaks, int room, Shared& s) {
  const int groups = (row.nodes + GROUP - 1) / GROUP;
  const Span of_peaks(groups);
  float peak[PEAKS ? PEAKS : 1];
  for (int i = 0; i < PEAKS; i++) peak[i] = of_peaks.place(i) < of_peaks.stop ? peaks[of_peaks.place(i)] : none();
  Range range;
  const int count = GROUP * choose(peak, of_peaks, groups, room, lanes_of(room), range, s);
  __syncthreads();
  const Span span(count, 32);
  int node[PEAKS ? SCORES : 1];
  unsigned key[PEAKS ? SCORES : 1];
  look_at(key, node, row.products, row.nodes, G, span, true, s);
  for (int i = 0; i < SCORES; i++)
    if (node[i] == 0) key[i] = 0;
  const unsigned last = cut(key, span, count, range, 0, FEW, s.bins + ROUNDS / 2, s);
  for (int i = 0; i < SCORES; i++)
    if (key[i] >= max(last, LEAST)) atomicOr(&s.taken[node[i] / 32], 1u << node[i] % 32);
  __syncthreads();
  for (int w = threadIdx.x; w < (row.nodes + 31) / 32; w += THREADS) row.marks[w * G] = s.taken[w] | (w == 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) expand(
    const int* level, const int* node_count, const float* products, const float* peaks, unsigned* marks, int nodes,
    int share, int least, int most, int at, int top) {
  __shared__ Shared s;
  const long long head = blockIdx.x, bh = head / G;
  const Row row = {products + bh * nodes * G + head % G, marks + bh * ((nodes + 31) / 32) * G + head % G, nodes};
  const View view = {share, least, most};
  prepare(s);
  for (int i = threadIdx.x; PEAKS > 0 && i < WORDS; i += THREADS) s.taken[i] = 0;
  chain();
  const int known = node_count[bh];
  if constexpr (PEAKS > 0)
    expand_few(row, peaks + head * ((nodes + GROUP - 1) / GROUP), view.room(known - 1), s);
  else
    expand_level(row, level + bh * nodes, known, view, at, top, s);
}
