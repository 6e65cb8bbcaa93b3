// Trellis-coded quantization, which trellis.py defines.

#if defined(NATIVE_TRELLIS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_TRELLIS_H
#undef NATIVE_TRELLIS_H
#else
#define NATIVE_TRELLIS_H
#endif

#include "native_levels.h"

namespace ISA {

// Numbers by the lower bits of an index; their count is a power of two.
template <i64 COUNT>
struct Numbers {
  static constexpr i64 TABLES = COUNT > Table::SIZE ? COUNT / Table::SIZE : 1;
  Table tables[TABLES];

  // Number i is `number(i)`.
  template <class Number>
  INLINE explicit Numbers(Number number) {
    for (i64 t = 0; t < TABLES; t++)
      for (i64 i = 0; i < Table::SIZE; i++) tables[t].of[i] = number((t * Table::SIZE + i) % COUNT);
  }

  INLINE Floats operator[](Ints indices) const {
    Floats found = tables[0][indices];
#pragma GCC unroll 8
    for (i64 t = 1; t < TABLES; t++) {
      const Ints is_there = (indices & (i32)(COUNT - 1)) >= (i32)(t * Table::SIZE);
      found = (Floats)(((Ints)tables[t][indices] & is_there) | ((Ints)found & ~is_there));
    }
    return found;
  }
};

// Levels in ascending order, which belong to the SUBSETS subsets in turn, and the middles in subsets.
template <i64 BITS, i64 SUBSETS>
struct Subsets {
  static constexpr i64 POINTS = 1 << (BITS - 1), LEVELS = SUBSETS * POINTS;
  float levels[LEVELS], middles[LEVELS] = {};

  INLINE explicit Subsets(const double* positive) {
    for (i64 i = 0; i < LEVELS; i++) {
      levels[i] = (float)ascending(positive, i);
      if (i + SUBSETS < LEVELS) middles[i] = middle(positive, i);
    }
  }

  static INLINE double ascending(const double* positive, i64 i) {
    return i < LEVELS / 2 ? -positive[LEVELS / 2 - 1 - i] : positive[i - LEVELS / 2];
  }

  static INLINE float middle(const double* positive, i64 i) {
    return (float)((ascending(positive, i) + ascending(positive, i + SUBSETS)) / 2);
  }

  // Distance of the subset's nearest level.
  INLINE Floats distance(Floats z, i64 subset) const {
    Floats nearest = Floats{} + levels[subset];
#pragma GCC unroll 8
    for (i64 i = subset; i + SUBSETS < LEVELS; i += SUBSETS)
      nearest = chosen(z, Floats{} + middles[i], Floats{} + levels[i + SUBSETS], nearest);
    const Floats difference = z - nearest;
    return difference * difference;
  }
};

// Indices of the nearest levels, by bisection, in a subset per lane.
template <i64 BITS, i64 SUBSETS>
struct Places {
  Numbers<SUBSETS << (BITS - 1)> middles;  // one by a subset, two more by its half, and so on

  INLINE explicit Places(const double* positive) : middles([&](i64 i) { return middle_at(positive, i); }) {}

  // Index ``SUBSETS (2^s + h) + subset`` is the middle of the part h of 2^s of the subset.
  static float middle_at(const double* positive, i64 i) {
    const i64 part = i / SUBSETS;
    if (!part) return 0;
    i64 parts = part;
    while (parts & (parts - 1)) parts &= parts - 1;
    const i64 width = Subsets<BITS, SUBSETS>::POINTS / parts;
    return Subsets<BITS, SUBSETS>::middle(positive, i % SUBSETS + SUBSETS * ((part - parts) * width + width / 2 - 1));
  }

  INLINE Ints of(Floats z, Ints subset) const {
    Ints place{};
#pragma GCC unroll 4
    for (i64 bit = BITS - 2; bit >= 0; bit--) {
      const Ints part = place + (1 << (BITS - 2 - bit));
      place = marked(place * 2, z, middles[part * (i32)SUBSETS + subset], 1);
    }
    return place;
  }
};

static const double TRELLIS_LEVELS[] = {
    0.3965216, 1.1846127,
    0.1745822, 0.6357927, 1.0658745, 1.8668883,
    0.0934709, 0.3200105, 0.5210609, 0.7691846, 1.0189391, 1.3346746, 1.7585782, 2.4517541,
    0.0402142, 0.1579808, 0.2418479, 0.3609421, 0.4527030, 0.5760727, 0.6802912, 0.8124041,
    0.9361862, 1.0869171, 1.2436125, 1.4360499, 1.6670287, 1.9652344, 2.3640281, 2.9742886};

template <i64 BITS>
INLINE const double* trellis_levels() { return TRELLIS_LEVELS + (1 << BITS) - 2; }
template <i64 BITS>
INLINE const double* first_levels() { return LLOYD_MAX_LEVELS + (1 << (BITS - 1)) - 1; }

// Numbers that encoding compares with coordinates.
template <i64 BITS>
struct alignas(64) TrellisTables {
  Subsets<BITS, 4> others{trellis_levels<BITS>()};
  Subsets<BITS, 2> first{first_levels<BITS>()};
  Places<BITS, 4> places{trellis_levels<BITS>()};
  Places<BITS, 2> first_places{first_levels<BITS>()};

  INLINE TrellisTables() {}

  // All numbers times a bucket's unit.
  INLINE TrellisTables times(float unit) const {
    TrellisTables scaled = *this;
    float* numbers = (float*)&scaled;
    for (u64 i = 0; i < sizeof scaled / sizeof unit; i++) numbers[i] *= unit;
    return scaled;
  }
};

// The branches of a bucket's coordinates: bit r of a lane is that of row r.
template <i64 BITS>
struct Path {
  Ints branches[PARTS];

  INLINE Path(i64 rows, const TrellisTables<BITS>& tables, const float* z) {
    for (i64 part = 0; part < PARTS; part++) {
      const Floats first = vector_at<Floats>(z + part * VECTOR), far = Floats{} + 0x1p120f;
      Floats sums[4] = {tables.first.distance(first, 0), tables.first.distance(first, 1), far, far};
      Ints decisions[4] = {};
      for (i64 row = 1; row < rows; row++) {
        const Floats own = vector_at<Floats>(z + (row * PARTS + part) * VECTOR);
        const i32 bit = (i32)(1u << row);
        Floats distances[4], next[4];
#pragma GCC unroll 4
        for (i64 subset = 0; subset < 4; subset++) distances[subset] = tables.others.distance(own, subset);
#pragma GCC unroll 4
        for (i64 state = 0; state < 4; state++) {
          const i64 before = state / 2, subset = before + (state % 2) * 2;
          const Floats low = sums[before] + distances[subset], high = sums[before + 2] + distances[subset ^ 2];
          decisions[state] = marked(decisions[state], low, high, bit);
          next[state] = chosen(low, high, high, low);
        }
        memcpy(sums, next, sizeof sums);
      }
      branches[part] = traced(rows, sums, decisions);
    }
  }

  INLINE Ints branch(i64 row, i64 part) const { return branches[part] >> (i32)row & 1; }

  // Subset of the codes of a row after the first.
  INLINE Ints subset(i64 row, i64 part) const {
    const Ints own = branches[part];
    return ((own << 1) >> (i32)row & 1) | ((own ^ (own << 2)) >> (i32)row & 1) << 1;
  }

 private:
  static INLINE Ints traced(i64 rows, const Floats* sums, const Ints* decisions) {
    // The branches of the current row and of the one before have all bits of a lane set, or none.
    const Ints low = sums[0] > sums[1], high = sums[2] > sums[3];
    const Ints upper = chosen(sums[0], sums[1], sums[1], sums[0]) > chosen(sums[2], sums[3], sums[3], sums[2]);
    Ints own = (low & ~upper) | (high & upper), before = upper, path{};
    for (i64 row = rows - 1; row > 0; row--) {
      path |= own & (i32)(1u << row);
      const Ints if_zero = (decisions[0] & ~own) | (decisions[1] & own);
      const Ints if_one = (decisions[2] & ~own) | (decisions[3] & own);
      const Ints earlier = (((if_zero & ~before) | (if_one & before)) << (i32)(31 - row)) >> 31;
      own = before;
      before = earlier;
    }
    return path | (own & 1);
  }
};

// Levels of a bucket's codes, by the codes before them.
template <i64 BITS>
struct TrellisLevels {
  Numbers<1 << BITS> first;
  Numbers<2 << BITS> others;

  INLINE TrellisLevels()
      : first([](i64 i) { return (float)Subsets<BITS, 2>::ascending(first_levels<BITS>(), i); }),
        others([](i64 i) { return (float)Subsets<BITS, 4>::ascending(trellis_levels<BITS>(), i); }) {}
};

// Computes levels of codes, which must be requested in order.
template <i64 BITS>
struct TrellisReader {
  const TrellisLevels<BITS>& levels;
  Ints before[PARTS], earlier[PARTS];  // the codes, of which the lowest bit matters

  INLINE Floats level(i64 vector, Ints code) {
    const i64 part = vector % PARTS;
    const bool is_first = vector < PARTS;
    const Ints subset = is_first ? Ints{} : (before[part] & 1) | ((code ^ earlier[part]) & 1) << 1;
    earlier[part] = is_first ? Ints{} : before[part];
    before[part] = code;
    return is_first ? levels.first[code] : levels.others[(code >> 1 << 2) | subset];
  }
};

template <i64 BITS>
struct TrellisCoding {
  TrellisTables<BITS> tables;
  TrellisLevels<BITS> levels;

  INLINE TrellisCoding() {}

  // See `NearestCoding::encode`.
  INLINE double encode(i64 rows, float unit, u32* words, const float* z) const {
    const TrellisTables<BITS> scaled = tables.times(unit);
    const Path<BITS> path(rows, scaled, z);
    TermSums products;
    pack_codes<BITS>(rows, words, [&](i64 row, i64 part) INLINE_LAMBDA {
      const Floats own = vector_at<Floats>(z + (row * PARTS + part) * VECTOR);
      const Ints branch = path.branch(row, part), subset = row ? path.subset(row, part) : branch;
      const Ints place = row ? scaled.places.of(own, subset) : scaled.first_places.of(own, subset);
      const Ints code = place * 2 + branch;
      products.add(row, part, own * (row ? levels.others[place * 4 + subset] : levels.first[code]));
      return code;
    });
    return products.take(rows);
  }
};

}  // namespace ISA

#endif
