// Element types, and gradients in memory as float32.
//
// A gradient is processed tile by tile (1,024 elements), a tile row by row. The compiler vectorizes the loops over the
// 32 lanes of a row; shift, scale and counter of a row are scalars there, so one loop is for every width.

#if defined(NATIVE_ELEMENTS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_ELEMENTS_H
#undef NATIVE_ELEMENTS_H
#else
#define NATIVE_ELEMENTS_H
#endif

#include "native_vectors.h"

namespace ISA {

INLINE u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr u32 ABS = 0x7FFFFFFF, INFINITE = 0x7F800000, ONE = 0x3F800000;

INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
INLINE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// ---- element types ------------------------------------------------------------------------------------------------

struct Half {
  u16 bits;
};
struct BFloat {
  u16 bits;
};

INLINE float to_float(float value) { return value; }
INLINE float to_float(double value) { return (float)value; }
INLINE float to_float(BFloat value) { return float_of((u32)value.bits << 16); }
INLINE float to_float(Half value) {
  const u32 sign = (value.bits & 0x8000u) << 16, magnitude = (value.bits & 0x7FFFu) << 13;
  const u32 smallest = 113u << 23;  // bits of 2^-14, the smallest normal half
  const u32 subnormal = bits_of(float_of(magnitude + smallest) - float_of(smallest));
  const u32 finite = magnitude < (0x0400u << 13) ? subnormal : magnitude + (112u << 23);
  return float_of(sign | (magnitude < (0x7C00u << 13) ? finite : magnitude | INFINITE));
}

INLINE void from_float(float value, float& out) { out = value; }
INLINE void from_float(float value, double& out) { out = value; }
INLINE void from_float(float value, BFloat& out) {
  const u32 bits = bits_of(value);
  out.bits = (bits & ABS) > INFINITE ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
INLINE void from_float(float value, Half& out) {
  const u32 bits = bits_of(value), magnitude = bits & ABS;
  const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);  // 0.5 and subnormal halves end at 2^-24
  const u32 normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  const u32 finite = magnitude < (113u << 23) ? subnormal : normal;
  const u32 special = magnitude > INFINITE ? 0x7E00 : 0x7C00;
  out.bits = (bits >> 16 & 0x8000) | (magnitude < (143u << 23) ? finite : special);
}

template <class T>
void read_as_float(const T* RESTRICT from, i64 count, float* RESTRICT to) {
  i64 i = 0;
#if VECTOR_BYTES == 64
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 16 <= count; i += 16)
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif VECTOR_BYTES == 32
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
  for (; i < count; i++) to[i] = to_float(from[i]);
}

template <class T>
void write_from_float(const float* RESTRICT from, i64 count, T* RESTRICT to) {
  i64 i = 0;
#if VECTOR_BYTES == 64
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 16 <= count; i += 16)
      _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif VECTOR_BYTES == 32
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; i++) from_float(from[i], to[i]);
}

__attribute__((noinline)) void read_as_float(const void* data, i64 type, i64 first, i64 count, float* to) {
  switch (type) {
    case FLOAT32: return read_as_float((const float*)data + first, count, to);
    case FLOAT16: return read_as_float((const Half*)data + first, count, to);
    case FLOAT64: return read_as_float((const double*)data + first, count, to);
    case BFLOAT16: return read_as_float((const BFloat*)data + first, count, to);
  }
}

INLINE i64 row_bytes(i64 type) { return ROW * (type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2); }

// A gradient in memory, tile by tile.
template <class Memory>
struct Tiles {
  Memory* data;
  i64 type, count;
  i64 row_bytes = ISA::row_bytes(type);
  alignas(64) float buffer[TILE];

  INLINE Tiles(Memory* data, i64 type, i64 count) : data(data), type(type), count(count) {}

  INLINE i64 tiles() const { return ceil_div(count, TILE); }
  INLINE i64 elements(i64 tile) const { return smaller(TILE, count - tile * TILE); }
  INLINE i64 rows(i64 tile) const { return ceil_div(elements(tile), ROW); }
  INLINE bool is_float32(i64 tile) const { return type == FLOAT32 && elements(tile) == TILE; }

  // Fetches the same row of the next tile. In loops with much computation the processor's prefetching leaves most of
  // the memory's speed unused.
  INLINE void prefetch_next(i64 tile, i64 row) const {
    const char* next = (const char*)data + ((tile + 1) * 32 + row) * row_bytes;
    __builtin_prefetch(next);
    __builtin_prefetch(next + row_bytes / 2);
  }
};

// Reads tiles as float32, followed by zeros where the gradient ends.
struct Reader : Tiles<const void> {
  INLINE Reader(const void* data, i64 type, i64 count) : Tiles(data, type, count) {}

  INLINE const float* tile(i64 tile) {
    if (is_float32(tile)) return (const float*)data + tile * TILE;
    return converted(tile * TILE, elements(tile));
  }

 private:
  __attribute__((noinline)) const float* converted(i64 first, i64 count) {
    read_as_float(data, type, first, count, buffer);
    for (i64 i = count; i < TILE; i++) buffer[i] = 0;
    return buffer;
  }
};

// Reads blocks of `size` elements, whole rows, as float32, followed by zeros where the last row ends.
struct Blocks {
  static constexpr i64 LARGEST = 16 * TILE;  // 64 KB: two loops over a block share it through the caches
  const void* data;
  i64 type, count, size;
  i64 row_bytes = ISA::row_bytes(type);
  alignas(64) float buffer[LARGEST];

  INLINE Blocks(const void* data, i64 type, i64 count, i64 size) : data(data), type(type), count(count), size(size) {}

  INLINE i64 blocks() const { return ceil_div(count, size); }
  INLINE i64 rows(i64 block) const { return ceil_div(smaller(size, count - block * size), ROW); }
  INLINE const float* block(i64 block) {
    const i64 first = block * size, own = smaller(size, count - first);
    if (type == FLOAT32 && own % ROW == 0) return (const float*)data + first;
    read_as_float(data, type, first, own, buffer);
    for (i64 i = own; i % ROW; i++) buffer[i] = 0;
    return buffer;
  }
  INLINE void prefetch_next(i64 block, i64 row) const {  // like `Tiles::prefetch_next`
    const char* next = (const char*)data + ((block + 1) * (size / ROW) + row) * row_bytes;
    __builtin_prefetch(next);
    __builtin_prefetch(next + row_bytes / 2);
  }
};

// Decoders' output: a tile of float32 that store() rounds to the gradient's type.
struct Writer : Tiles<void> {
  INLINE Writer(void* data, i64 type, i64 count) : Tiles(data, type, count) {}

  INLINE float* tile(i64 tile) { return is_float32(tile) ? (float*)data + tile * TILE : buffer; }
  INLINE void store(i64 tile) {
    if (!is_float32(tile)) convert(tile * TILE, elements(tile));
  }

 private:
  __attribute__((noinline)) void convert(i64 first, i64 count) {
    switch (type) {
      case FLOAT32: write_from_float(buffer, count, (float*)data + first); break;
      case FLOAT16: write_from_float(buffer, count, (Half*)data + first); break;
      case FLOAT64: write_from_float(buffer, count, (double*)data + first); break;
      case BFLOAT16: write_from_float(buffer, count, (BFloat*)data + first); break;
    }
  }
};

}  // namespace ISA

#endif
