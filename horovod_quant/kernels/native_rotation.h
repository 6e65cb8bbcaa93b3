// EDEN's kernels: rotation.py says what they mean. Included once for each instruction set, after native_kernels.h.
//
// A bucket is a tile, which stays in the first-level cache. Transforms take the stages in the order of rotation.py: those
// within a vector of the instruction set by shuffles, the others between vectors, eight of which stay in registers for
// three stages.

namespace ISA {

constexpr i64 VECTORS = TILE / VECTOR;

// 1 where a lane is the first of its pair at a distance of h, -1 where it is the second.
template <i64 H>
INLINE Floats places_in_pairs() {
  Floats places;
  for (i64 lane = 0; lane < VECTOR; lane++) places[lane] = lane & H ? -1.0f : 1.0f;
  return places;
}

// (a + b, a - b) of lanes at a distance of h.
template <i64 H>
INLINE Floats stage_within(Floats own) {
#if defined(__clang__)
  Floats other;
  for (i64 lane = 0; lane < VECTOR; lane++) other[lane] = own[lane ^ H];
#else
  Ints swapped;
  for (i64 lane = 0; lane < VECTOR; lane++) swapped[lane] = lane ^ H;
  const Floats other = __builtin_shuffle(own, swapped);
#endif
  return multiply_add(own, places_in_pairs<H>(), other);
}

INLINE Floats stages_within(Floats values) {
  values = stage_within<1>(values);
  values = stage_within<2>(values);
  if (VECTOR > 4) values = stage_within<4 % VECTOR>(values);
  if (VECTOR > 8) values = stage_within<8 % VECTOR>(values);
  return values;
}

INLINE void butterfly(Floats& a, Floats& b) {
  const Floats sum = a + b;
  b = multiply_add(b, Floats{} - 1.0f, a);
  a = sum;
}

// All stages between N vectors.
template <i64 N>
INLINE void stages_between(Floats* own) {
  if constexpr (N > 1) {
    stages_between<N / 2>(own);
    stages_between<N / 2>(own + N / 2);
#pragma GCC unroll 16
    for (i64 i = 0; i < N / 2; i++) butterfly(own[i], own[i + N / 2]);
  }
}

// Which elements of a bucket are negated by the two diagonals of signs: hashes 2 r and 2 r + 1 of a row.
struct Signs {
  Random<GENERAL> random;
  i64 first_row;
  alignas(64) u32 hashes[2 * TILE / ROW];

  INLINE Signs(const Key* key, i64 start) : random(*key, 0), first_row(start / ROW) {}

  // Takes those of the bucket whose first row in the array is `row`.
  INLINE void take(i64 row) {
    const u32 counter = (u32)(2 * (first_row + row)) * WEYL + random.k0;
    for (u32 i = 0; i < 2 * TILE / ROW; i++) hashes[i] = random.hash(counter, i);
  }

  // A vector of the bucket with the signs of that diagonal.
  INLINE Floats applied(Floats own, i64 vector, i64 number) const {
    const u32 hash = hashes[2 * (vector / PARTS) + number] >> vector % PARTS * VECTOR;
#if VECTOR_BYTES == 64
    const __m512i bits = (__m512i)own;
    return (Floats)_mm512_mask_xor_epi32(bits, (__mmask16)hash, bits, _mm512_set1_epi32((i32)0x80000000));
#else
    Ints places;
    for (i64 lane = 0; lane < VECTOR; lane++) places[lane] = 31 - lane;
    return (Floats)((Ints)own ^ (((Ints{} + (i32)hash) << places) & (i32)0x80000000));
#endif
  }
};

struct Bucket {
  alignas(64) float values[TILE];

  INLINE Floats& at(i64 vector) { return ((Floats*)values)[vector]; }

  // The transform of `size` elements. `load` gives vectors, which it is asked for in their order, once each; `store` takes
  // the results.
  template <class Load, class Store>
  INLINE void transform(i64 size, Load load, Store store) {
    const auto keep = [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = own; };
    if (size == TILE) {
      first_stages<8>(VECTORS, load, keep);
      constexpr i64 LAST = VECTOR == 16 ? 8 : 4;
      if (VECTORS > 8 * LAST) stages_at<VECTORS / (8 * LAST)>(VECTORS, 8, keep);
      stages_at<LAST>(VECTORS, VECTORS / LAST, store);
      return;
    }
    const i64 vectors = size / VECTOR;
    for (i64 i = 0; i < vectors; i++) at(i) = load(i);
    transform_short(vectors);
    for (i64 i = 0; i < vectors; i++) store(i, at(i));
  }

  // The rotation of the elements that `load` gives, with signs that it has applied.
  template <class Load>
  INLINE void rotate(const Signs& signs, i64 size, Load load) {
    const auto keep = [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = own; };
    transform(size, [&](i64 i) INLINE_LAMBDA { return signs.applied(load(i), i, 0); }, keep);
    transform(size, [&](i64 i) INLINE_LAMBDA { return signs.applied(at(i), i, 1); }, keep);
  }

  // The inverse rotation of what `load` gives, times a unit.
  template <class Load, class Store>
  INLINE void turn_back(const Signs& signs, i64 size, float unit, Load load, Store store) {
    transform(size, load, [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = signs.applied(own, i, 1); });
    transform(size, [&](i64 i) INLINE_LAMBDA { return at(i); },
              [&](i64 i, Floats own) INLINE_LAMBDA { store(i, signs.applied(own, i, 0) * unit); });
  }

 private:
  __attribute__((noinline)) void transform_short(i64 vectors) {
    const auto keep = [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = own; };
    first_stages<PARTS>(vectors, [&](i64 i) INLINE_LAMBDA { return at(i); }, keep);
    for (i64 h = PARTS; h < vectors; h *= 2) stages_at<2>(vectors, h, keep);
  }

  template <i64 N, class Load, class Store>
  INLINE void first_stages(i64 vectors, Load load, Store store) {
    for (i64 block = 0; block < vectors; block += N) {
      Floats own[N];
#pragma GCC unroll 16
      for (i64 i = 0; i < N; i++) own[i] = stages_within(load(block + i));
      stages_between<N>(own);
#pragma GCC unroll 16
      for (i64 i = 0; i < N; i++) store(block + i, own[i]);
    }
  }

  template <i64 N, class Store>
  INLINE void stages_at(i64 vectors, i64 h, Store store) {
    for (i64 block = 0; block < vectors; block += N * h)
      for (i64 first = block; first < block + h; first++) {
        Floats own[N];
#pragma GCC unroll 16
        for (i64 i = 0; i < N; i++) own[i] = at(first + i * h);
        stages_between<N>(own);
#pragma GCC unroll 16
        for (i64 i = 0; i < N; i++) store(first + i * h, own[i]);
      }
  }
};

INLINE i64 rotated_elements(i64 count) {  // of a bucket
  i64 size = ROW;
  while (size < count) size *= 2;
  return size;
}

// The positive levels of 1 bit, of 2, and so on.
static const double LLOYD_MAX_LEVELS[] = {0.7978846, 0.4527800, 1.5104176, 0.2450942, 0.7560053,
                                          1.3439093, 2.1519457, 0.1283950, 0.3880483, 0.6567591,
                                          0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896};

// The levels of sign-and-magnitude codes; those of magnitudes alone where a table has no place for the signs.
template <i64 BITS>
struct Levels {
  static constexpr bool SIGNED = 1 << BITS <= Table::SIZE;
  Table table;

  INLINE Levels() {
    constexpr i64 COUNT = 1 << (BITS - 1);
    for (i64 i = 0; i < Table::SIZE; i++) {
      const float level = (float)LLOYD_MAX_LEVELS[COUNT - 1 + (i & (COUNT - 1))];
      table.of[i] = SIGNED && i & COUNT ? -level : level;
    }
  }
};

// How many of a bucket's thresholds a magnitude exceeds, by bisection.
template <i64 BITS>
struct Thresholds {
  Table limits[BITS];  // of the bit of that number, by the bits above it

  INLINE explicit Thresholds(float unit) {
    static const float THRESHOLDS[] = {0.9815988f, 0.5005497f, 1.0499573f, 1.7479275f, 0.2582217f, 0.5224037f,
                                       0.7995498f, 1.0992858f, 1.4371388f, 1.8435318f, 2.4008034f};
    constexpr i64 COUNT = 1 << (BITS - 1);
    for (i64 bit = 0; bit < BITS - 1; bit++)
      for (i64 i = 0; i < Table::SIZE; i++) {
        const i64 below = (i & (COUNT - 1)) >> (bit + 1) << (bit + 1);
        limits[bit].of[i] = THRESHOLDS[COUNT - BITS + below + (1 << bit) - 1] * unit;
      }
  }

  INLINE Ints code_of(Floats z) const {
    const Floats magnitude = (Floats)((Ints)z & (i32)ABS);
    Ints code{};
    if (BITS > 1) code = marked(code, magnitude, Floats{} + limits[BITS - 2].of[0], 1 << (BITS - 2));
#pragma GCC unroll 4
    for (i64 bit = BITS - 3; bit >= 0; bit--) code = marked(code, magnitude, limits[bit][code], 1 << bit);
    return marked(code, Floats{}, z, 1 << (BITS - 1));
  }
};

// reference.pack_codes of a bucket's rows, whose vectors `code` gives.
template <i64 BITS, class Code>
INLINE void pack_codes(i64 rows, u32* out, Code code) {
  Ints words[PARTS] = {};
  i64 shift = 0;
  const auto write = [&]() INLINE_LAMBDA {
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) memcpy(out + part * VECTOR, words + part, sizeof(Ints));
    out += ROW;
  };
  for (i64 row = 0; row < rows; row++) {
    Ints codes[PARTS];
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) words[part] |= (codes[part] = code(row, part)) << (i32)shift;
    shift += BITS;
    if (shift < 32) continue;
    write();
    shift -= 32;
    // What did not fit: the upper `shift` bits of each code, which may be none.
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) words[part] = codes[part] >> (i32)(BITS - shift);
  }
  if (shift) write();
}

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

}  // namespace ISA

#include "native_trellis.h"

namespace ISA {

template <i64 BITS>
struct NearestCoding {
  Levels<BITS> levels;

  INLINE NearestCoding() {}

  // Codes of a bucket's coordinates; the sum of the products of coordinates and their levels.
  INLINE double encode(i64 rows, float unit, u32* words, const float* z) const {
    const Thresholds<BITS> thresholds(unit);
    ProductSums products;
    pack_codes<BITS>(rows, words, [&](i64 row, i64 part) INLINE_LAMBDA {
      const float* place = z + (row * PARTS + part) * VECTOR;
      const Floats own = vector_at<Floats>(place);
      const Ints code = thresholds.code_of(own);
      const Floats level = levels.table[code];
      if (Levels<BITS>::SIGNED) products.add(part, place, level);
      else products.add(part, (Floats)((Ints)own & (i32)ABS), level);
      return code;
    });
    return products.take();
  }
};

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

// A vector of a bucket's packed codes, with other bits above them.
template <i64 BITS>
INLINE Words code_at(const u32* words, i64 vector) {
  const i64 row = vector / PARTS, place = row * BITS, shift = place % 32;
  const u32* word = words + place / 32 * ROW + vector % PARTS * VECTOR;
  Words code = vector_at<Words>(word) >> (u32)shift;
  if (32 % BITS && shift + BITS > 32) code |= vector_at<Words>(word + ROW) << (u32)(32 - shift);
  return code;
}

template <i64 BITS>
struct NearestReader {
  const Levels<BITS>& levels;

  INLINE Floats level(i64, Ints code) const {
    const Floats found = levels.table[code];
    if (Levels<BITS>::SIGNED) return found;
    return (Floats)((Ints)found ^ (Ints)(((Words)code << (32 - BITS)) & 0x80000000u));
  }
};

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
