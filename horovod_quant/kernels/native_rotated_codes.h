// EDEN's kernels, which rotation.py defines.

#if defined(NATIVE_ROTATED_CODES_H) == defined(NATIVE_PASS)
#ifdef NATIVE_ROTATED_CODES_H
#undef NATIVE_ROTATED_CODES_H
#else
#define NATIVE_ROTATED_CODES_H
#endif

#include "native_levels.h"
#include "native_trellis.h"

namespace ISA {

// Smallest nonzero magnitude, see Maximum.
struct Minimum {
  Words lanes[PARTS];  // less 1

  INLINE Minimum() {
    for (Words& own : lanes) own = Words{} - 1u;
  }
  INLINE void add(i64 part, Floats x) {
    lanes[part] = smaller_of(lanes[part], (Words)((Ints)x & (i32)ABS) - 1u);
  }
  INLINE float take() const {
    Words all = lanes[0];
    for (Words own : lanes) all = smaller_of(all, own);
    u32 found = ~0u;
    for (i64 lane = 0; lane < VECTOR; lane++) found = all[lane] < found ? all[lane] : found;
    return float_of(found + 1);
  }
};

constexpr float TINY = 0x1p-60f;  // if the largest is 1 to 4: rotation.SMALLEST

// Writes elements times a power of two, tiny ones as 0, and returns their sum of squares.
static __attribute__((noinline)) double bring_into_range(const float* source, i64 size, float power, Bucket& target) {
  TermSums squares;
  for (i64 i = 0; i < size / VECTOR; i++) {
    const Floats value = vector_at<Floats>(source + i * VECTOR) * power;
    const Ints is_large = (Floats)((Ints)value & (i32)ABS) >= Floats{} + TINY;
    const Floats kept = (Floats)((Ints)value & is_large);
    target.at(i) = kept;
    squares.add(i / PARTS, i % PARTS, kept * kept);
  }
  return squares.take(size / ROW);
}

// Not inlined, because it is the same for all widths.
static __attribute__((noinline)) void rotate_once(Bucket& bucket, const Signs& signs, const Reader& in, i64 tile,
                                                  const float* source, i64 size) {
  bucket.rotate(signs, size, [&](i64 i) INLINE_LAMBDA {
    if (i % PARTS == 0) in.prefetch_next(tile, i / PARTS);
    return vector_at<Floats>(source + i * VECTOR);
  });
}

// 2 to the power of a normal number's exponent.
INLINE double power_of_two(i64 exponent) {
  const u64 bits = (u64)(1023 + exponent) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

template <i64 BITS, bool TRELLIS>
INLINE void encode_rotated(const void* x, i64 type, i64 count, Signs& signs, u32* out, float* scales) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  const std::conditional_t<TRELLIS, TrellisCoding<BITS>, NearestCoding<BITS>> coding;
  for (i64 tile = 0; tile < in.tiles(); tile++) {
    const float* source = in.tile(tile);
    const i64 size = rotated_elements(in.elements(tile));
    u32* words = out + tile * BITS * ROW;
    Maximum largest;
    Minimum smallest;
    TermSums squares;  // unscaled, valid if the elements are in range
    for (i64 row = 0; row < size / ROW; row++)
#pragma GCC unroll 8
      for (i64 part = 0; part < PARTS; part++) {
        const Floats own = vector_at<Floats>(source + row * ROW + part * VECTOR);
        largest.add(part, own);
        smallest.add(part, own);
        squares.add(row, part, own * own);
      }
    const float maximum = largest.take(), minimum = smallest.take();
    if (!(maximum >= 0x1p-96f && maximum < float_of(INFINITE))) {
      scales[tile] = maximum < float_of(INFINITE) ? 0.0f : float_of(0x7FC00000);
      memset(words, 0, sizeof(u32) * ROW * ceil_div(size / ROW * BITS, 32));
      continue;
    }
    Bucket bucket, in_range;
    i64 shift = 0;
    double square_sum;
    // A power of two changes no digit of the results if nothing overflows or is tiny. A trellis compares with numbers
    // that do not depend on the range.
    if (!TRELLIS && maximum < 0x1p60f && minimum >= 0x1p-63f && minimum >= maximum * TINY) {
      square_sum = squares.take(size / ROW);
    } else {
      shift = smaller((i64)(bits_of(maximum) >> 23) - 127, 126);
      square_sum = bring_into_range(source, size, float_of((u32)(127 - shift) << 23), in_range);
      source = in_range.values;
    }
    signs.take(tile * ROW);
    rotate_once(bucket, signs, in, tile, source, size);
    const float unit = (float)__builtin_sqrt(square_sum * (double)size);
    const double product_sum = coding.encode(size / ROW, unit, words, bucket.values);
    scales[tile] = (float)(square_sum / product_sum * power_of_two(shift));
  }
}

#define BY_WIDTH(FUNCTION, ...)                                       \
  switch (2 * bits + trellis) {                                       \
    case 2: return FUNCTION<1, false>(__VA_ARGS__);                   \
    case 3: return FUNCTION<1, true>(__VA_ARGS__);                    \
    case 4: return FUNCTION<2, false>(__VA_ARGS__);                   \
    case 5: return FUNCTION<2, true>(__VA_ARGS__);                    \
    case 6: return FUNCTION<3, false>(__VA_ARGS__);                   \
    case 7: return FUNCTION<3, true>(__VA_ARGS__);                    \
    case 8: return FUNCTION<4, false>(__VA_ARGS__);                   \
    case 9: return FUNCTION<4, true>(__VA_ARGS__);                    \
  }

KERNEL(void, encode_rotated)(const void* x, i64 type, i64 count, i64 bits, i64 trellis, const Key* key, i64 start,
                             u32* out, float* scales) {
  Signs signs(key, start);
  BY_WIDTH(encode_rotated, x, type, count, signs, out, scales)
}

template <i64 BITS, bool TRELLIS>
INLINE void add_rotated(const u32* const* words, const float* const* scales, i64 workers, i64 count, float factor,
                        const Key* keys, i64 start, void* data, i64 type) {
  DefaultArithmetic scope;
  Writer out(data, type, count);
  const std::conditional_t<TRELLIS, TrellisLevels<BITS>, Levels<BITS>> levels;
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    const i64 size = rotated_elements(out.elements(tile));
    float* values = out.tile(tile);
    for (i64 worker = 0; worker < workers; worker++) {
      Signs signs(keys + worker, start);
      signs.take(tile * ROW);
      Bucket bucket;
      const u32* own = words[worker] + tile * BITS * ROW;
      std::conditional_t<TRELLIS, TrellisReader<BITS>, NearestReader<BITS>> reader{levels};
      const auto load = [&](i64 i) INLINE_LAMBDA {
        if (worker == 0 && i % PARTS == 0) out.prefetch_next(tile, i / PARTS);
        return reader.level(i, (Ints)code_at<BITS>(own, i));
      };
      const float unit = scales[worker][tile] * factor;
      bucket.turn_back(signs, size, unit, load, [&](i64 i, Floats value) INLINE_LAMBDA {
        if (worker) value = vector_at<Floats>(values + i * VECTOR) + value;
        memcpy(values + i * VECTOR, &value, sizeof value);
      });
    }
    out.store(tile);
  }
}

// The sum over the workers, in rank order.
KERNEL(void, add_rotated)(const u32* const* words, const float* const* scales, i64 workers, i64 count, i64 bits,
                          i64 trellis, float factor, const Key* keys, i64 start, void* out, i64 type) {
  BY_WIDTH(add_rotated, words, scales, workers, count, factor, keys, start, out, type)
}

#undef BY_WIDTH

}  // namespace ISA

#endif
