// Lloyd-Max levels and packed codes, which rotation.py defines.

#if defined(NATIVE_LEVELS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_LEVELS_H
#undef NATIVE_LEVELS_H
#else
#define NATIVE_LEVELS_H
#endif

#include "native_packing.h"
#include "native_rotation.h"

namespace ISA {

// Positive levels of 1 bit, 2 bits, and so on.
static const double LLOYD_MAX_LEVELS[] = {0.7978846, 0.4527800, 1.5104176, 0.2450942, 0.7560053,
                                          1.3439093, 2.1519457, 0.1283950, 0.3880483, 0.6567591,
                                          0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896};

// Levels of sign-and-magnitude codes; of magnitudes alone if a table has no room for signs.
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

// Number of a bucket's thresholds that a magnitude exceeds, by bisection.
template <i64 BITS>
struct Thresholds {
  Table limits[BITS];  // thresholds of bit i, indexed by the bits above it

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

// reference.pack_codes of a bucket's rows; `code` returns their vectors.
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
    // The rest: the upper `shift` bits of each code, possibly none.
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) words[part] = codes[part] >> (i32)(BITS - shift);
  }
  if (shift) write();
}

template <i64 BITS>
struct NearestCoding {
  Levels<BITS> levels;

  INLINE NearestCoding() {}

  // Writes the codes of coordinates, and returns the sum of coordinates times levels.
  INLINE double encode(i64 rows, float unit, u32* words, const float* z) const {
    const Thresholds<BITS> thresholds(unit);
    TermSums products;
    pack_codes<BITS>(rows, words, [&](i64 row, i64 part) INLINE_LAMBDA {
      const Floats own = vector_at<Floats>(z + (row * PARTS + part) * VECTOR);
      const Ints code = thresholds.code_of(own);
      const Floats same_sign = Levels<BITS>::SIGNED ? own : (Floats)((Ints)own & (i32)ABS);
      products.add(row, part, same_sign * levels.table[code]);
      return code;
    });
    return products.take(rows);
  }
};

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

}  // namespace ISA

#endif
