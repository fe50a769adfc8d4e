// Which nodes of a level a query head expands, as ops/select/visit_nodes.py specifies it: a program for each query head,
// which makes the products of the others -inf (search.cuh says why not Triton).
//
// Set by the compilation: THREADS; NODES nodes that a thread looks at; G query heads of a kv head; MILLION, a share of 1.

#include "search.cuh"

static_assert(NODES <= 64, "a bit each");

// The sum over the threads of a program.
__device__ int total_of(int mine, Search& s) {
  mine = __reduce_add_sync(ALL, mine);
  if (lane() == 0) s.totals[0][warp()] = mine;
  __syncthreads();
  return __reduce_add_sync(ALL, lane() < WARPS ? s.totals[0][lane()] : 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) expand(
    const int* level, const int* node_count, float* visited, int nodes, int share, int least, int at) {
  __shared__ Search s;
  const long long row = blockIdx.x, bh = row / G;
  const Span span(nodes);
  level += bh * nodes, visited += row * nodes;
  prepare(s);
  chain();
  const int known = node_count[bh];
  unsigned long long there = 0;  // nodes of this level
  unsigned key[NODES];
  for (int i = 0; i < NODES; i++) {
    const int u = min(span.place(i), nodes - 1);  // both loads at once
    const int its = level[u];
    const float score = visited[u];
    const bool mine = span.place(i) < span.stop && u < known && its == at;
    there |= (unsigned long long)mine << i;
    key[i] = mine ? ordered(score) : 0;
  }
  const long long all = total_of(__popcll(there), s);
  const int room = max((int)((all * share + MILLION - 1) / MILLION), least);
  const Range range = range_of(key, room, lanes_of(room), s);
  const unsigned last = cut(key, span, nodes, range, 0, FEW, s.bins, s);
  for (int i = 0; i < NODES; i++)
    if (there >> i & 1 && key[i] < max(last, LEAST)) visited[span.place(i)] = none();
}
