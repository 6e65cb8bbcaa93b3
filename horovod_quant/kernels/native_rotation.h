// Random rotations, which rotation.py defines.
//
// A bucket is a tile, which stays in the first-level cache. Transforms have the stages in the order of rotation.py:
// within a vector of the instruction set by shuffles, then between vectors, eight of which stay in registers for three
// stages.

#if defined(NATIVE_ROTATION_H) == defined(NATIVE_PASS)
#ifdef NATIVE_ROTATION_H
#undef NATIVE_ROTATION_H
#else
#define NATIVE_ROTATION_H
#endif

#include "native_norms.h"
#include "native_random.h"

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

// Signs of the two diagonals for a bucket's elements: hashes 2 r and 2 r + 1 of a row.
struct Signs {
  Random<GENERAL> random;
  i64 first_row;
  alignas(64) u32 hashes[2 * TILE / ROW];

  INLINE Signs(const Key* key, i64 start) : random(*key, 0), first_row(start / ROW) {}

  // Computes the signs of the bucket whose first row in the array is `row`.
  INLINE void take(i64 row) {
    const u32 counter = (u32)(2 * (first_row + row)) * WEYL + random.k0;
    for (u32 i = 0; i < 2 * TILE / ROW; i++) hashes[i] = random.hash(counter, i);
  }

  // Applies the signs of a diagonal to a vector of the bucket.
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

  // Rotates the elements that `load` returns.
  template <class Load>
  INLINE void rotate(const Signs& signs, i64 size, Load load) {
    transform_twice(
        size, [&](i64 i) INLINE_LAMBDA { return signs.applied(load(i), i, 0); },
        [&](i64 i, Floats own) INLINE_LAMBDA { return signs.applied(own, i, 1); },
        [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = own; });
  }

  // Inverts the rotation of the elements that `load` returns, times a unit.
  template <class Load, class Store>
  INLINE void turn_back(const Signs& signs, i64 size, float unit, Load load, Store store) {
    transform_twice(
        size, load, [&](i64 i, Floats own) INLINE_LAMBDA { return signs.applied(own, i, 1); },
        [&](i64 i, Floats own) INLINE_LAMBDA { store(i, signs.applied(own, i, 0) * unit); });
  }

 private:
  // Transforms `size` elements twice. `load` is called once per vector, in order; `between` changes the vectors of the
  // first result; `store` receives the results.
  template <class Load, class Between, class Store>
  INLINE void transform_twice(i64 size, Load load, Between between, Store store) {
    const auto keep = [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = own; };
    const auto kept = [&](i64 i) INLINE_LAMBDA { return at(i); };
    if (size != TILE) {
      transform_short(size / VECTOR, load, [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = between(i, own); });
      transform_short(size / VECTOR, kept, store);
    } else if (VECTORS == 64) {
      // Sixteen vectors stay in registers. Of the three passes the second ends one transform and begins the other.
      first_stages<16>(VECTORS, load, keep);
      stages_of_both(between);
      stages_at<16>(VECTORS, 4, store);
    } else {
      transform(load, [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = between(i, own); });
      transform(kept, store);
    }
  }

  // The last two stages of one transform, and the first ones of another, up to a distance of two vectors.
  template <class Between>
  INLINE void stages_of_both(Between between) {
    for (i64 block = 0; block < 16; block += 4) {
      Floats own[16];
#pragma GCC unroll 4
      for (i64 i = 0; i < 4; i++) {
        Floats column[4];
#pragma GCC unroll 4
        for (i64 k = 0; k < 4; k++) column[k] = at(block + i + 16 * k);
        stages_between<4>(column);
#pragma GCC unroll 4
        for (i64 k = 0; k < 4; k++) own[4 * k + i] = stages_within(between(block + i + 16 * k, column[k]));
      }
#pragma GCC unroll 4
      for (i64 k = 0; k < 4; k++) {
        stages_between<4>(own + 4 * k);
#pragma GCC unroll 4
        for (i64 i = 0; i < 4; i++) at(block + i + 16 * k) = own[4 * k + i];
      }
    }
  }

  template <class Load, class Store>
  INLINE void transform(Load load, Store store) {
    const auto keep = [&](i64 i, Floats own) INLINE_LAMBDA { at(i) = own; };
    first_stages<8>(VECTORS, load, keep);
    if (VECTORS > 32) stages_at<VECTORS / 32>(VECTORS, 8, keep);
    stages_at<4>(VECTORS, VECTORS / 4, store);
  }

  template <class Load, class Store>
  INLINE void transform_short(i64 vectors, Load load, Store store) {
    for (i64 i = 0; i < vectors; i++) at(i) = load(i);
    stages_of_short(vectors);
    for (i64 i = 0; i < vectors; i++) store(i, at(i));
  }

  __attribute__((noinline)) void stages_of_short(i64 vectors) {
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

}  // namespace ISA

#endif
