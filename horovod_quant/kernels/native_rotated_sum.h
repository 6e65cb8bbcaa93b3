// Kernels of rotated sums, which rotated_sums.py defines.

#if defined(NATIVE_ROTATED_SUM_H) == defined(NATIVE_PASS)
#ifdef NATIVE_ROTATED_SUM_H
#undef NATIVE_ROTATED_SUM_H
#else
#define NATIVE_ROTATED_SUM_H
#endif

#include "native_packing.h"
#include "native_rotation.h"

namespace ISA {

// rotated_sums.WEIGHTS
struct Weights {
  alignas(64) u32 of[TILE];

  Weights() {
    const Key key{};
    const Random<PLAIN> random(key, 0);
    for (u32 i = 0; i < TILE; i++) of[i] = random.hash(random.counter(0), i) | 1;
  }
};

inline const u32* weights() {
  static const Weights table;
  return table.of;
}

// The coordinates of a bucket by its size.
INLINE void rotate(Bucket& bucket, const Signs& signs, const Reader& in, i64 tile, const float* source, i64 size) {
  const float share = 1.0f / (float)size;
  bucket.rotate(signs, size, [&](i64 i) INLINE_LAMBDA {
    if (i % PARTS == 0) in.prefetch_next(tile, i / PARTS);
    return vector_at<Floats>(source + i * VECTOR) * share;
  });
}

INLINE bool is_usable(float step) { return step > 0 && step < float_of(INFINITE); }

KERNEL(void, rotated_samples)(const void* x, i64 type, i64 count, i64 samples, const Key* key, i64 start, float* out) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  Signs signs(key, start);
  Bucket bucket;
  for (i64 tile = 0; tile < in.tiles(); tile++, out += samples) {
    const i64 size = rotated_elements(in.elements(tile)), taken = smaller(samples, size);
    const float* source = in.tile(tile);
    signs.take(tile * ROW);
    rotate(bucket, signs, in, tile, source, size);
    memcpy(out, bucket.values, sizeof(float) * taken);
    for (i64 i = taken; i < samples; i++) out[i] = 0;
  }
}

// floor(z / step + u) of a row, and its part of the bucket's check.
template <class Random>
INLINE void round_row(const float* RESTRICT z, float inverse, const Random& random, u32 counter,
                      const u32* RESTRICT weight, i32* RESTRICT digits, u32* RESTRICT lanes) {
  constexpr float LARGEST = 0x1p22f, SHIFT = 0x1.8p23f;  // a float of SHIFT's size has a last bit of 1
  for (u32 lane = 0; lane < ROW; lane++) {
    float y = z[lane] * inverse;
    y = y < LARGEST ? y : LARGEST;  // in this form for NaN
    y = y > -LARGEST ? y : -LARGEST;
    const float shifted = y + SHIFT;
    const i32 whole = bits_of(shifted) - bits_of(SHIFT), fraction = (i32)((y - (shifted - SHIFT)) * 0x1p24f);
    digits[lane] = whole + ((fraction + (i32)(random.hash(counter, lane) >> 8)) >> 24);
    lanes[lane] += (u32)digits[lane] * weight[lane];
  }
}

INLINE u32 sum_of(const u32* lanes) {
  u32 total = 0;
  for (i64 lane = 0; lane < ROW; lane++) total += lanes[lane];
  return total;
}

KERNEL(void, encode_rotated_sum)(const void* x, i64 type, i64 count, const float* steps, i64 width,
                                 const Key* sign_key, const Key* key, i64 start, u32* out, u32* checks) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  Signs signs(sign_key, start);
  const u32* weight = weights();
  SumPacker packer(out, width);
  Bucket bucket;
  with_random(key, start, [&](auto random) INLINE_LAMBDA {
    for (i64 tile = 0; tile < in.tiles(); tile++) {
      const i64 size = rotated_elements(in.elements(tile));
      const float* source = in.tile(tile);
      alignas(64) u32 lanes[ROW] = {};
      alignas(64) i32 digits[ROW] = {};
      if (is_usable(steps[tile])) {
        const float inverse = 1.0f / steps[tile];
        signs.take(tile * ROW);
        rotate(bucket, signs, in, tile, source, size);
        for (i64 i = 0; i < size; i += ROW) {
          const u32 counter = random.counter(tile * ROW + i / ROW);
          round_row(bucket.values + i, inverse, random, counter, weight + i, digits, lanes);
          packer.put(digits);
        }
      } else {
        for (i64 i = 0; i < size; i += ROW) packer.put(digits);
      }
      checks[tile] = sum_of(lanes);
    }
  });
  packer.finish();
}

// `count` is the number of coordinates.
KERNEL(void, rotated_sum_checks)(const u32* words, i64 width, i64 count, u32* checks) {
  const u32* weight = weights();
  SumFields fields(width);
  for (i64 first = 0; first < count; first += TILE) {
    Words lanes[PARTS] = {};
    for (i64 i = 0; i < smaller(TILE, count - first); i += ROW, fields.advance())
#pragma GCC unroll 8
      for (i64 part = 0; part < PARTS; part++)
        lanes[part] += (Words)fields.digits(words, part, false) * vector_at<Words>(weight + i + part * VECTOR);
    u32 all[ROW];
    memcpy(all, lanes, sizeof all);
    *checks++ = sum_of(all);
  }
}

KERNEL(void, decode_rotated_sum)(const u32* words, const float* steps, i64 count, i64 width, float factor,
                                 const Key* sign_key, i64 start, void* data, i64 type) {
  DefaultArithmetic scope;
  Writer out(data, type, count);
  Signs signs(sign_key, start);
  SumFields fields(width);
  Bucket bucket;
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    const i64 size = rotated_elements(out.elements(tile));
    float* values = out.tile(tile);
    signs.take(tile * ROW);
    bucket.turn_back(
        signs, size, steps[tile] * factor * (1.0f / (float)size),
        [&](i64 i) INLINE_LAMBDA {
          const i64 part = i % PARTS;
          if (part == 0) out.prefetch_next(tile, i / PARTS);
          const Ints digits = fields.digits(words, part, false);
          if (part == PARTS - 1) fields.advance();
          return __builtin_convertvector(digits, Floats);
        },
        [&](i64 i, Floats value) INLINE_LAMBDA { memcpy(values + i * VECTOR, &value, sizeof value); });
    out.store(tile);
  }
}

}  // namespace ISA

#endif
