// Vectors of the instruction set, and operations that compilers do not generate from loops.

#if defined(NATIVE_VECTORS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_VECTORS_H
#undef NATIVE_VECTORS_H
#else
#define NATIVE_VECTORS_H
#endif

#include "native_base.h"

#ifndef ISA
#define ISA baseline
#define VECTOR_BYTES 16
#endif

namespace ISA {

constexpr i64 VECTOR = VECTOR_BYTES / 4;
constexpr i64 PARTS = ROW / VECTOR;  // vectors of a row

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));
typedef i32 Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef u32 Words __attribute__((vector_size(VECTOR_BYTES)));

// `tree_sum` adds the upper half of the lanes to the lower, until one is left. `multiply_add` is `a * b + c`, for
// products that are exact: it does not matter then whether they are rounded. Many processors have other units for it
// than for additions. `widened` is half of a vector as float64, `marked` an index with a bit set where a > b, `chosen`
// one of two numbers by a > b, `with_sign` a magnitude with the sign of a number that is zero only where the magnitude
// is.
#if VECTOR_BYTES == 64
INLINE double tree_sum(Doubles lanes) {
  const __m512d all = (__m512d)lanes;
  const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(all), _mm512_extractf64x4_pd(all, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return two[0] + two[1];
}
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
  return (Doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
template <bool UPPER>
INLINE Doubles widened(Floats values) {
  const __m512 all = (__m512)values;
  return (Doubles)_mm512_cvtps_pd(UPPER ? _mm512_extractf32x8_ps(all, 1) : _mm512_castps512_ps256(all));
}
INLINE Ints marked(Ints index, Floats a, Floats b, i32 bit) {
  const __mmask16 larger = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
  return (Ints)_mm512_mask_or_epi32((__m512i)index, larger, (__m512i)index, _mm512_set1_epi32(bit));
}
INLINE Floats chosen(Floats a, Floats b, Floats larger, Floats other) {
  const __mmask16 is_larger = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
  return (Floats)_mm512_mask_blend_ps(is_larger, (__m512)other, (__m512)larger);
}
INLINE Words smaller_of(Words a, Words b) { return (Words)_mm512_min_epu32((__m512i)a, (__m512i)b); }
INLINE Ints with_sign(Ints magnitude, Ints sign) {
  const __m512i own = (__m512i)magnitude;
  return (Ints)_mm512_mask_sub_epi32(own, _mm512_movepi32_mask((__m512i)sign), _mm512_setzero_si512(), own);
}
#elif VECTOR_BYTES == 32
INLINE double tree_sum(Doubles lanes) {
  const __m256d four = (__m256d)lanes;
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return two[0] + two[1];
}
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) {
  return (Doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
template <bool UPPER>
INLINE Doubles widened(Floats values) {
  const __m256 all = (__m256)values;
  return (Doubles)_mm256_cvtps_pd(UPPER ? _mm256_extractf128_ps(all, 1) : _mm256_castps256_ps128(all));
}
INLINE Ints marked(Ints index, Floats a, Floats b, i32 bit) { return index | ((a > b) & bit); }
INLINE Floats chosen(Floats a, Floats b, Floats larger, Floats other) {
  return (Floats)_mm256_blendv_ps((__m256)other, (__m256)larger, (__m256)(a > b));
}
INLINE Words smaller_of(Words a, Words b) { return (Words)_mm256_min_epu32((__m256i)a, (__m256i)b); }
INLINE Ints with_sign(Ints magnitude, Ints sign) {
  return (Ints)_mm256_sign_epi32((__m256i)magnitude, (__m256i)sign);
}
#else
INLINE double tree_sum(Doubles lanes) { return lanes[0] + lanes[1]; }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return a * b + c; }
template <bool UPPER>
INLINE Doubles widened(Floats values) {
  return Doubles{values[UPPER ? 2 : 0], values[UPPER ? 3 : 1]};
}
INLINE Ints marked(Ints index, Floats a, Floats b, i32 bit) { return index | ((a > b) & bit); }
INLINE Floats chosen(Floats a, Floats b, Floats larger, Floats other) {
  const Ints is_larger = a > b;
  return (Floats)(((Ints)larger & is_larger) | ((Ints)other & ~is_larger));
}
INLINE Words smaller_of(Words a, Words b) { return a < b ? a : b; }
INLINE Ints with_sign(Ints magnitude, Ints sign) {
  const Ints negative = sign >> 31;
  return (magnitude ^ negative) - negative;
}
#endif

// Bytes of magnitudes below 128, with the signs of `signs`, which is zero only where magnitudes are.
INLINE Words bytes_with_sign(Words magnitudes, Words signs) {
#if VECTOR_BYTES == 32
  return (Words)_mm256_sign_epi8((__m256i)magnitudes, (__m256i)signs);
#else
  typedef int8_t Bytes __attribute__((vector_size(VECTOR_BYTES)));
  const Bytes negative = (Bytes)signs < 0;
  return (Words)(((Bytes)magnitudes ^ negative) - negative);
#endif
}

// Moves a byte of each word to its top, above zeros.
INLINE Words byte_on_top(Words words, i64 byte) {
#if VECTOR_BYTES == 32
  const Words places = (Words{0, 4, 8, 12, 0, 4, 8, 12} + (u32)byte) << 24 | 0x00808080u;
  return (Words)_mm256_shuffle_epi8((__m256i)words, (__m256i)places);
#else
  return words << (u32)(24 - 8 * byte) & 0xFF000000u;
#endif
}

template <class Vector, class T>
INLINE Vector vector_at(const T* values) {
  Vector own;
  memcpy(&own, values, sizeof own);
  return own;
}

// Numbers by the lower bits of an index: one for each lane of a vector, eight at least.
struct Table {
  static constexpr i64 SIZE = VECTOR > 8 ? VECTOR : 8;
  alignas(64) float of[SIZE];

  INLINE Floats operator[](Ints indices) const {
    Floats found;
#if !defined(__clang__)
    if (VECTOR == SIZE) {  // a shuffle takes the indices modulo the number of lanes
      memcpy(&found, of, sizeof found);
      return __builtin_shuffle(found, indices);
    }
#endif
    for (i64 lane = 0; lane < VECTOR; lane++) found[lane] = of[(u32)indices[lane] % SIZE];
    return found;
  }
};

// Sums in float64 of products, row by row into 32 lanes.
struct ProductSums {
  Doubles lanes[2 * PARTS] = {};

  INLINE void add(i64 part, Floats a, Floats b) {
    const i64 lower = 2 * part, upper = lower + 1;
    lanes[lower] = multiply_add(widened<false>(a), widened<false>(b), lanes[lower]);
    lanes[upper] = multiply_add(widened<true>(a), widened<true>(b), lanes[upper]);
  }
  INLINE double take() const {
    Doubles sums[2 * PARTS];
    memcpy(sums, lanes, sizeof sums);
#pragma GCC unroll 8
    for (i64 half = PARTS; half; half /= 2)
#pragma GCC unroll 8
      for (i64 i = 0; i < half; i++) sums[i] += sums[i + half];
    return tree_sum(sums[0]);
  }
};

// rotation.lane_sums: float32 sums of eight rows' terms, added in float64.
struct TermSums {
  static constexpr i64 ROWS = 8;
  ProductSums longer;
  Floats own[PARTS] = {};

  INLINE void add(i64 row, i64 part, Floats term) {
    own[part] += term;
    if (row % ROWS == ROWS - 1) widen(part);
  }
  INLINE double take(i64 rows) {
    if (rows < ROWS)
      for (i64 part = 0; part < PARTS; part++) widen(part);
    return longer.take();
  }

 private:
  INLINE void widen(i64 part) {
    longer.lanes[2 * part] += widened<false>(own[part]);
    longer.lanes[2 * part + 1] += widened<true>(own[part]);
    own[part] = Floats{};
  }
};

}  // namespace ISA

#endif
