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

// The nodes of a query head.
struct Row {
  const float* scores;
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
  unsigned long long there = 0;  // nodes of this level
  unsigned key[NODES];
  for (int i = 0; i < NODES; i++) {
    const int u = min(span.place(i), row.nodes - 1);  // both loads at once
    const int its = FLAT ? at : level[u];
    const float score = row.scores[u];
    const bool mine = span.place(i) < span.stop && 0 < u && u < known && its == at;
    there |= (unsigned long long)mine << i;
    key[i] = mine ? ordered(score) : 0;
  }
  const int room = view.room(FLAT ? known - 1 : total_of(__popcll(there), s));
  const Range range = range_of(key, room, lanes_of(room), s);
  const unsigned last = cut(key, span, row.nodes, range, 0, FEW, s.bins, s);
  for (int i = 0; i < NODES; i++) {
    const int u = span.place(i);
    const bool taken = there >> i & 1 && key[i] >= max(last, LEAST);
    const unsigned bits = __ballot_sync(ALL, taken || top && u == 0);  // the root too
    if (lane() == 0 && u < span.stop) row.marks[u / 32] = top ? bits : row.marks[u / 32] | bits;
  }
}

// Of the one level of a tree of two, by its peaks. The root has no part in these, nor is it looked at.
__device__ void expand_few(const Row& row, const float* peaks, int room, Shared& s) {
  const int groups = (row.nodes + GROUP - 1) / GROUP;
  const Span of_peaks(groups);
  float peak[PEAKS ? PEAKS : 1], score[PEAKS ? SCORES : 1];
  for (int i = 0; i < PEAKS; i++) peak[i] = of_peaks.place(i) < of_peaks.stop ? peaks[of_peaks.place(i)] : none();
  Range range;
  const int count = GROUP * choose(peak, of_peaks, groups, room, lanes_of(room), range, s);
  __syncthreads();
  const Span span(count);
  int node[PEAKS ? SCORES : 1];
  for (int i = 0; i < SCORES; i++) {
    node[i] = s.number(span.place(i));
    const bool live = span.place(i) < span.stop && node[i] > 0 && node[i] < row.nodes;
    score[i] = live ? row.scores[node[i]] : none();
  }
  unsigned key[PEAKS ? SCORES : 1];
  keys_of(key, score);
  const unsigned last = cut(key, span, count, range, 0, FEW, s.bins + ROUNDS / 2, s);
  for (int i = 0; i < SCORES; i++)
    if (key[i] >= max(last, LEAST)) atomicOr(&s.taken[node[i] / 32], 1u << node[i] % 32);
  __syncthreads();
  for (int w = threadIdx.x; w < (row.nodes + 31) / 32; w += THREADS) row.marks[w] = s.taken[w] | (w == 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) expand(
    const int* level, const int* node_count, const float* scores, const float* peaks, unsigned* marks, int nodes, int share,
    int least, int most, int at, int top) {
  __shared__ Shared s;
  const long long head = blockIdx.x, bh = head / G;
  const Row row = {scores + head * nodes, marks + head * ((nodes + 31) / 32), nodes};
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
