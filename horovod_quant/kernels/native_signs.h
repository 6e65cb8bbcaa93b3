// One bit per element: momenta, votes and signs.

#if defined(NATIVE_SIGNS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_SIGNS_H
#undef NATIVE_SIGNS_H
#else
#define NATIVE_SIGNS_H
#endif

#include "native_norms.h"
#include "native_random.h"

namespace ISA {

template <class Random>
struct Binarizer {  // reference.binarize
  float keep, take;
  Random random;

  // Sets `bit` of the words whose elements draw a 1.
  template <bool UPDATE>
  INLINE void row(const float* RESTRICT x, i64 row, float* RESTRICT momentum, float* RESTRICT scale, u32 bit,
                  u32* RESTRICT words) const {
    const u32 counter = random.counter(row);
    for (u32 lane = 0; lane < ROW; lane++) {
      float m = momentum[lane], b = scale[lane];
      if (UPDATE) {
        momentum[lane] = m = keep * m + take * x[lane];
        scale[lane] = b = keep * b + take * float_of(bits_of(x[lane]) & ABS);
      }
      const float width = b >= 0x1p-126f ? b : 1.0f;
      const float uniform = (float)((i32)random.hash(counter, lane) >> 8) * 0x1p-23f;
      words[lane] |= bit & -(u32)(uniform * width < m);
    }
  }

  // The last row of a gradient whose length is no multiple of 32.
  template <bool UPDATE>
  void part_row(const float* x, i64 row, i64 count, float* momentum, float* scale, u32 bit, u32* words) const {
    float m[ROW] = {}, b[ROW] = {};
    memcpy(m, momentum, sizeof(float) * count);
    memcpy(b, scale, sizeof(float) * count);
    this->row<UPDATE>(x, row, m, b, bit, words);
    memcpy(momentum, m, sizeof(float) * count);
    memcpy(scale, b, sizeof(float) * count);
    for (i64 lane = count; lane < ROW; lane++) words[lane] &= ~bit;
  }

  template <bool UPDATE>
  INLINE void tile(const float* x, i64 first_row, i64 count, float* momentum, float* scale, u32* out) const {
    alignas(64) u32 words[ROW] = {};
    u32 bit = 1;
    i64 i = 0, row = first_row;
    for (; i + ROW <= count; i += ROW, row++, bit <<= 1) {
      for (i64 lane = 0; lane < ROW; lane += 16) {
        __builtin_prefetch(momentum + i + TILE + lane);
        __builtin_prefetch(scale + i + TILE + lane);
      }
      this->row<UPDATE>(x + i, row, momentum + i, scale + i, bit, words);
    }
    if (i < count) part_row<UPDATE>(x + i, row, count - i, momentum + i, scale + i, bit, words);
    memcpy(out, words, sizeof words);
  }
};

template <class Random>
INLINE void binarize(const void* x, i64 type, i64 count, float* momentum, float* scale,
                     const Binarizer<Random>& binarizer, u32* out, u8* broken) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  for (i64 tile = 0; tile < in.tiles(); tile++, momentum += TILE, scale += TILE, out += ROW) {
    const float* values = in.tile(tile);
    Maximum largest;
    for (i64 row = 0; row < 32; row++) {
      in.prefetch_next(tile, row);
      largest.add(values + row * ROW);
    }
    broken[tile] = largest.take() == float_of(INFINITE);
    if (broken[tile])
      binarizer.template tile<false>(values, tile * ROW, in.elements(tile), momentum, scale, out);
    else
      binarizer.template tile<true>(values, tile * ROW, in.elements(tile), momentum, scale, out);
  }
}

KERNEL(void, binarize)(const void* x, i64 type, i64 count, float* momentum, float* scale, float keep, float take,
                       const Key* key, i64 start, u32* out, u8* broken) {
  with_any_random(key, start, [&](auto random) INLINE_LAMBDA {
    binarize(x, type, count, momentum, scale, Binarizer<decltype(random)>{keep, take, random}, out, broken);
  });
}

// Number of ones among the workers' bits of a part of a tile's words, a binary digit per plane.
template <i64 PLANES>
INLINE void count_ones(const u32* const* words, i64 workers, i64 at, Words* planes) {
  for (i64 plane = 0; plane < PLANES; plane++) planes[plane] = Words{};
  for (i64 worker = 0; worker < workers; worker++) {
    Words carry = vector_at<Words>(words[worker] + at);
#pragma GCC unroll 8
    for (i64 plane = 0; plane < PLANES; plane++) {
      const Words both = planes[plane] & carry;
      planes[plane] ^= carry;
      carry = both;
    }
  }
}

// Vote of 2^LOG workers: the upper bits of the hash are less than the count. Planes compare 32 rows at once.
template <i64 LOG, class Random>
INLINE void vote_of_a_power(const u32* const* words, i64 tiles, const Random& random, u32* out) {
  for (i64 tile = 0; tile < tiles; tile++, out += ROW) {
    Words uniform[LOG][PARTS] = {};
    for (i64 row = 0; row < 32; row++) {
      alignas(64) u32 hashes[ROW];
      const u32 counter = random.counter(tile * ROW + row);
      for (u32 lane = 0; lane < ROW; lane++) hashes[lane] = random.hash(counter, lane);
#pragma GCC unroll 8
      for (i64 part = 0; part < PARTS; part++) {
        const Words own = vector_at<Words>(hashes + part * VECTOR);
#pragma GCC unroll 8
        for (i64 bit = 0; bit < LOG; bit++)  // the rows before move down
          uniform[bit][part] = uniform[bit][part] >> 1 | ((own << (u32)(LOG - 1 - bit)) & 0x80000000u);
      }
    }
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) {
      Words ones[LOG + 1], less{};
      count_ones<LOG + 1>(words, 1 << LOG, tile * ROW + part * VECTOR, ones);
#pragma GCC unroll 8
      for (i64 bit = 0; bit < LOG; bit++) {
        const Words own = uniform[bit][part];
        less = (~own & ones[bit]) | (~(own ^ ones[bit]) & less);
      }
      less |= ones[LOG];
      memcpy(out + part * VECTOR, &less, sizeof less);
    }
  }
}

template <class Random>
INLINE void vote(const u32* const* words, i64 workers, i64 tiles, const Random& random, u32* out) {
  const i64 random_bits = smaller(24, __builtin_clz((u32)workers));
  for (i64 tile = 0; tile < tiles; tile++, out += ROW) {
    alignas(64) u32 result[ROW] = {};
    for (i64 row = 0; row < 32; row++) {
      const u32 counter = random.counter(tile * ROW + row), bit = 1u << row;
      alignas(64) u32 ones[ROW] = {};
      for (i64 worker = 0; worker < workers; worker++) {
        asm volatile("");  // otherwise GCC interleaves two workers and does not vectorize
        const u32* word = words[worker] + tile * ROW;
        for (i64 lane = 0; lane < ROW; lane++) ones[lane] += word[lane] >> row & 1;
      }
      for (u32 lane = 0; lane < ROW; lane++) {
        const u32 uniform = random.hash(counter, lane) >> (32 - random_bits);
        result[lane] |= bit & -(u32)(uniform * (u32)workers < ones[lane] << random_bits);
      }
    }
    memcpy(out, result, sizeof result);
  }
}

KERNEL(void, vote)(const u32* const* words, i64 workers, i64 tiles, const Key* key, i64 start, u32* out) {
  with_any_random(key, start, [&](auto random) INLINE_LAMBDA {
    switch (workers) {
      case 2: return vote_of_a_power<1>(words, tiles, random, out);
      case 4: return vote_of_a_power<2>(words, tiles, random, out);
      case 8: return vote_of_a_power<3>(words, tiles, random, out);
      case 16: return vote_of_a_power<4>(words, tiles, random, out);
      case 32: return vote_of_a_power<5>(words, tiles, random, out);
      default: return vote(words, workers, tiles, random, out);
    }
  });
}

KERNEL(void, decode_signs)(const u32* words, i64 count, float magnitude, void* data, i64 type) {
  Writer out(data, type, count);
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    float* RESTRICT values = out.tile(tile);
    const u32* RESTRICT word = words + tile * ROW;
    const i64 rows = out.rows(tile);
    for (i64 row = 0; row < rows; row++) {
      out.prefetch_next(tile, row);
      for (i64 lane = 0; lane < ROW; lane++)
        values[row * ROW + lane] = word[lane] & 1u << row ? magnitude : -magnitude;
    }
    out.store(tile);
  }
}

}  // namespace ISA

#endif
