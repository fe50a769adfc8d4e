#pragma once

// How a token lies in memory, as ops/store/rows.py says it: a row is a key and a value side by side, of halves here;
// the rows of a head follow one another; the ring has the sinks in front and uses the rows behind them in turn.

namespace counter {  // of a (row, kv head)
enum { STEPS, CONTEXT, NEAR, SELECTED, MISSED, ALL_OF_THEM };
}

__device__ inline unsigned long long* counters_of(unsigned long long* counts, long long head) {
  return counts + head * counter::ALL_OF_THEM;
}

// Of stores of halves with `rows` rows a head and so many CHANNELS.
template <int CHANNELS> __device__ inline const char* head_of(const char* store, long long head, int rows) {
  return store + head * (4ll * CHANNELS) * rows;
}
template <int CHANNELS> __device__ inline const char* row_at(const char* rows, int row) {
  return rows + row * (4ll * CHANNELS);
}
template <int CHANNELS> __device__ inline const char* value_of(const char* row) { return row + 2 * CHANNELS; }

struct Ring {
  int rows, sink, begin;  // the token at `begin` is the oldest of those behind the sinks

  // The position of the token in a row, if it holds one.
  __device__ int position(int row) const {
    const int span = rows - sink, oldest = sink + (begin - sink) % span;
    return row < sink ? row : begin + row - oldest + (row < oldest ? span : 0);
  }
};
