#pragma once

// Where the tokens of a row of the batch lie. TOKENS 0: the row has a pool of its own. Else all rows share one pool of
// blocks of TOKENS tokens, and blocks[p / TOKENS] is the block of position p (ops/store/tables.py).
template <int TOKENS> struct Table {
  const int* blocks;  // of this row
  long long first;  // the first pool row of this head

  __device__ Table(const int* table, int places, int row_and_head, int heads, int pool_rows)
      : blocks(TOKENS ? table + (long long)(row_and_head / heads) * places : nullptr),
        first((long long)(TOKENS ? row_and_head % heads : row_and_head) * pool_rows) {}

  // The block of a position; 0 from `end` on. Apart from `row`, so that a kernel can issue this load early.
  __device__ int block(int position, int end) const {
    if constexpr (TOKENS > 0) return position < end ? blocks[position / TOKENS] : 0;
    return 0;
  }

  // The pool row of a position, counted from `first`.
  __device__ long long row(int block, int position) const {
    if constexpr (TOKENS > 0) return (long long)block * TOKENS + position % TOKENS;
    return position;
  }
};
