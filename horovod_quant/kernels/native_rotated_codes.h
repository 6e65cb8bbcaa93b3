// EDEN's kernels: rotation.py says what they mean. Included once for each instruction set, after native_levels.h and
// native_trellis.h.

namespace ISA {

// The coordinates of a bucket's elements times a power of two, less what is tiny then.
static __attribute__((noinline)) void rotate_scaled(Bucket& bucket, const Signs& signs, const Reader& in, i64 tile,
                                                    const float* source, i64 size, float power) {
  bucket.rotate(signs, size, [&](i64 i) INLINE_LAMBDA {
    if (i % PARTS == 0) in.prefetch_next(tile, i / PARTS);
    const Floats value = vector_at<Floats>(source + i * VECTOR) * power;
    const Ints is_large = (Floats)((Ints)value & (i32)ABS) >= Floats{} + 0x1p-100f;
    return (Floats)((Ints)value & is_large);
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
    // Squares too, while the elements come from memory: what is tiny beside the largest does not change their sum.
    ProductSums squares;
    for (i64 i = 0; i < size; i += ROW) {
      largest.add(source + i);
#pragma GCC unroll 8
      for (i64 part = 0; part < PARTS; part++) squares.add_square(part, source + i + part * VECTOR);
    }
    const float maximum = largest.take();
    if (!(maximum >= 0x1p-96f && maximum < float_of(INFINITE))) {
      scales[tile] = maximum < float_of(INFINITE) ? 0.0f : float_of(0x7FC00000);
      memset(words, 0, sizeof(u32) * ROW * ceil_div(size / ROW * BITS, 32));
      continue;
    }
    const i64 exponent = (i64)(bits_of(maximum) >> 23) - 127, shift = smaller(exponent, 126);
    Bucket bucket;
    signs.take(tile * ROW);
    rotate_scaled(bucket, signs, in, tile, source, size, float_of((u32)(127 - shift) << 23));
    const double square_sum = squares.take() * power_of_two(-2 * shift);
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
