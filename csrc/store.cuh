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
template <int CHANNELS> constexpr int row_bytes = 4 * CHANNELS;
template <int CHANNELS> __device__ inline const char* value_of(const char* row) { return row + 2 * CHANNELS; }

// Packed rows of a pool, of so many CHANNELS, in words of 16 bytes: the 8-bit numbers of the key, those of the value, and
// the scales of their groups of 64 channels.
template <int CHANNELS> struct Packed {
  static constexpr int NUMBERS = CHANNELS / 8, GROUPS = (CHANNELS + 63) / 64, WORDS = NUMBERS + (GROUPS + 1) / 2;

  // Of the 16 numbers in word `at` of a row, from the scales behind its numbers.
  __device__ static float scale(const uint4* scales, int at) {
    const int half = at / (NUMBERS / 2), group = at % (NUMBERS / 2) / 4;
    return reinterpret_cast<const float*>(scales)[half * GROUPS + group];
  }

  // Of the four numbers in 32 bits of such a word, one, without its scale.
  __device__ static float number(unsigned four, int i) { return (signed char)(four >> 8 * i); }
};

struct Ring {
  int rows, sink, begin;  // the token at `begin` is the oldest of those behind the sinks

  // The position of the token in a row, if it holds one.
  __device__ int position(int row) const {
    const int span = rows - sink, oldest = sink + (begin - sink) % span;
    return row < sink ? row : begin + row - oldest + (row < oldest ? span : 0);
  }
};
