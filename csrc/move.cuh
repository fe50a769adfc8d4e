#pragma once

// Rows on their way from the pool into the hot buffer, 16 bytes of the pool at a time: `load` asks for them, and `store`
// may come much later.

#include "store.cuh"
#include "tensor.cuh"

// Of COUNT words of 16 bytes, as they are.
template <int COUNT> struct Plain {
  static constexpr int PARTS = COUNT, WORDS = COUNT;  // what is moved at a time; words of 16 bytes in the pool
  uint4 quad;

  __device__ void load(const uint4* from, int part) { quad = from[part]; }
  __device__ void store(uint4* to, int part) const { to[part] = quad; }
};

// Of packed rows of so many CHANNELS, which become COUNT words of halves: 16 numbers at a time.
template <int COUNT, int CHANNELS, bool BRAIN> struct Unpacked {
  using Row = Packed<CHANNELS>;
  static constexpr int PARTS = COUNT / 2, WORDS = PARTS / Row::NUMBERS * Row::WORDS;
  uint4 quad;
  float scale;

  __device__ void load(const uint4* from, int part) {
    const uint4* row = from + part / Row::NUMBERS * Row::WORDS;
    quad = row[part % Row::NUMBERS], scale = Row::scale(row, part % Row::NUMBERS);
  }

  __device__ unsigned two(unsigned four, int i) const {
    return halves<BRAIN>(Row::number(four, i) * scale, Row::number(four, i + 1) * scale);
  }

  __device__ void store(uint4* to, int part) const {
    to[2 * part] = {two(quad.x, 0), two(quad.x, 2), two(quad.y, 0), two(quad.y, 2)};
    to[2 * part + 1] = {two(quad.z, 0), two(quad.z, 2), two(quad.w, 0), two(quad.w, 2)};
  }
};

// What becomes COUNT words of the hot buffer: packed rows of so many CHANNELS, or where these are 0, words as they are.
template <int COUNT, int CHANNELS, bool BRAIN> struct Moved { using Part = Unpacked<COUNT, CHANNELS, BRAIN>; };
template <int COUNT, bool BRAIN> struct Moved<COUNT, 0, BRAIN> { using Part = Plain<COUNT>; };
