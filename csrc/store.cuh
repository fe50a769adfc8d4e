#pragma once

// The layout of a token in memory, as ops/store/rows.py specifies it. A row is a key and a value side by side, here in
// fp16 or bf16; the rows of a head follow one another. The ring holds the sinks in its first rows and uses the others
// round-robin.

namespace counter {  // the columns of the counters of a (row, kv head)
enum { STEPS, CONTEXT, IN_RING, SELECTED, MISSED, ALL_OF_THEM };
}

__device__ inline unsigned long long* counters_of(unsigned long long* counts, long long head) {
  return counts + head * counter::ALL_OF_THEM;
}

// Pointers into a store with `rows` rows per head, of CHANNELS numbers of 2 bytes.
template <int CHANNELS> __device__ inline const char* head_of(const char* store, long long head, int rows) {
  return store + head * (4ll * CHANNELS) * rows;
}
template <int CHANNELS> __device__ inline const char* row_at(const char* rows, int row) {
  return rows + row * (4ll * CHANNELS);
}
template <int CHANNELS> constexpr int row_bytes = 4 * CHANNELS;
template <int CHANNELS> __device__ inline const char* value_of(const char* row) { return row + 2 * CHANNELS; }

// A packed row of a pool, in words of 16 bytes: the 8-bit numbers of the key (CHANNELS), those of the value, and the
// fp32 scales of their groups of 64 channels.
template <int CHANNELS> struct Packed {
  static constexpr int NUMBERS = CHANNELS / 8, GROUPS = (CHANNELS + 63) / 64, WORDS = NUMBERS + (GROUPS + 1) / 2;

  // Row n of a head in a store with `rows` rows per head.
  __device__ static const char* row_at(const char* store, long long head, int rows, int n) {
    return store + (head * rows + n) * (16ll * WORDS);
  }
  __device__ static const char* value_of(const char* row) { return row + CHANNELS; }
  // The scales of the groups of the key, then those of the value.
  __device__ static const char* scales_of(const char* row) { return row + 16 * NUMBERS; }

  // The scale of the 16 numbers in word `at` of a row; `scales` points to the word after its numbers.
  __device__ static float scale(const uint4* scales, int at) {
    const int half = at / (NUMBERS / 2), group = at % (NUMBERS / 2) / 4;
    return reinterpret_cast<const float*>(scales)[half * GROUPS + group];
  }

  // Number i of the four in 32 bits of such a word, without its scale.
  __device__ static float number(unsigned four, int i) { return (signed char)(four >> 8 * i); }
};

struct Ring {
  int rows, sink, begin;  // begin: the position of the oldest token after the sinks

  // The position of the token in a ring row. The caller compares the position with the length of the sequence.
  __device__ int position(int row) const {
    const int span = rows - sink, oldest = sink + (begin - sink) % span;
    return row < sink ? row : begin + row - oldest + (row < oldest ? span : 0);
  }

  // The ring row of a position.
  __device__ int row(int position) const { return position < sink ? position : sink + (position - sink) % (rows - sink); }
};
