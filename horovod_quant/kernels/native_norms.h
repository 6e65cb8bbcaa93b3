// Norms and sums of buckets, and scales computed from norms.

#if defined(NATIVE_NORMS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_NORMS_H
#undef NATIVE_NORMS_H
#else
#define NATIVE_NORMS_H
#endif

#include "native_elements.h"

namespace ISA {

// A bucket's rows are accumulated in 32 lanes, which are combined at its end.
struct Maximum {
  // As integers, magnitudes are in order and NaN is the largest.
  Ints lanes[PARTS] = {};

  INLINE void add(const float* x) {
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) add(part, vector_at<Floats>(x + part * VECTOR));
  }
  INLINE void add(i64 part, Floats x) {
    const Ints magnitude = (Ints)x & (i32)ABS;
    lanes[part] = magnitude > lanes[part] ? magnitude : lanes[part];
  }
  INLINE float take() {
    alignas(64) i32 all[ROW];
    memcpy(all, lanes, sizeof all);
    i32 largest = 0;
    for (i32 lane : all) largest = lane > largest ? lane : largest;
    *this = Maximum();
    return float_of(largest < (i32)INFINITE ? largest : INFINITE);
  }
};

struct Itself {
  static INLINE void add(ProductSums& sums, i64 part, Floats x) { sums.add(part, x, Floats{} + 1.0f); }
};
struct Magnitude {
  static INLINE void add(ProductSums& sums, i64 part, Floats x) {
    sums.add(part, (Floats)((Ints)x & (i32)ABS), Floats{} + 1.0f);
  }
};
struct Square {
  static INLINE void add(ProductSums& sums, i64 part, Floats x) { sums.add(part, x, x); }
};

template <class Term>
struct Sum {
  ProductSums sums;

  INLINE void add(const float* x) {
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) Term::add(sums, part, vector_at<Floats>(x + part * VECTOR));
  }
  INLINE double take() {
    const double exact = sums.take();
    sums = ProductSums();
    u64 bits;
    memcpy(&bits, &exact, sizeof bits);
    const u64 infinite = 0x7FF0000000000000, magnitude = bits & ~(1ull << 63), half_step = 1 << 28;
    bits = magnitude < infinite ? (bits + half_step) >> 29 << 29 : infinite;
    double sum;
    memcpy(&sum, &bits, sizeof sum);
    return sum;
  }
};

// reference.norms_of_square_sums
struct Root {
  Sum<Square> squares;

  INLINE void add(const float* x) { squares.add(x); }
  INLINE float take() { return (float)__builtin_sqrt(squares.take()); }
};

template <class Norm, class T>
INLINE void for_buckets(const void* x, i64 type, i64 count, i64 bucket_size, T* out) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  Norm norm;
  i64 left = bucket_size / ROW;
  for (i64 tile = 0; tile < in.tiles(); tile++) {
    const float* values = in.tile(tile);
    const i64 rows = in.rows(tile);
    for (i64 row = 0; row < rows;) {
      const i64 stop = smaller(rows, row + left);
      left -= stop - row;
      for (; row < stop; row++) {
        in.prefetch_next(tile, row);
        norm.add(values + row * ROW);
      }
      if (left > 0) continue;
      *out++ = norm.take();
      left = bucket_size / ROW;
    }
  }
  if (left < bucket_size / ROW) *out = norm.take();
}

KERNEL(void, bucket_maxima)(const void* x, i64 type, i64 count, i64 bucket_size, float* out) {
  for_buckets<Maximum>(x, type, count, bucket_size, out);
}

KERNEL(void, bucket_square_sums)(const void* x, i64 type, i64 count, i64 bucket_size, double* out) {
  for_buckets<Sum<Square>>(x, type, count, bucket_size, out);
}

KERNEL(void, bucket_sums)(const void* x, i64 type, i64 count, i64 bucket_size, double* out) {
  for_buckets<Sum<Itself>>(x, type, count, bucket_size, out);
}

KERNEL(void, bucket_magnitude_sums)(const void* x, i64 type, i64 count, i64 bucket_size, double* out) {
  for_buckets<Sum<Magnitude>>(x, type, count, bucket_size, out);
}

// ---- scales --------------------------------------------------------------------------------------------------------

struct InverseNorm {  // reference.inverse_norms
  float numerator;
  INLINE float operator()(float norm) const {
    const bool usable = norm >= 0x1p-96f && norm < float_of(INFINITE);
    return usable ? numerator / norm : 0;
  }
};

struct DecodingScale {  // reference.decoding_scales
  float levels, factor;
  INLINE float operator()(float norm) const {
    return norm < float_of(INFINITE) ? norm / levels * factor : float_of(0x7FC00000);
  }
};

// A scale times a power of two.
struct ShiftedScale {
  DecodingScale scale;
  float power;
  INLINE float operator()(float norm) const { return scale(norm) * power; }
};

// Finds the rows where buckets begin.
struct BucketRows {
  i64 bucket_rows;
  i64 left = 0;

  INLINE explicit BucketRows(i64 bucket_size) : bucket_rows(bucket_size / ROW) {}

  INLINE bool begins() {
    if (left == 0) {
      left = bucket_rows - 1;
      return true;
    }
    left--;
    return false;
  }
};

}  // namespace ISA

#endif
