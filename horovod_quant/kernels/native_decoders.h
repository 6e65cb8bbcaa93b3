// Sums of uniform and exponential levels, times the scales of their buckets.

#if defined(NATIVE_DECODERS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_DECODERS_H
#undef NATIVE_DECODERS_H
#else
#define NATIVE_DECODERS_H
#endif

#include "native_norms.h"
#include "native_packing.h"

namespace ISA {

// Three forms beside `decode`; measured with 1 million elements, 4 and 8 workers, buckets of 256, as the share of the
// time that their kernel takes without them:
//   decode_by_table, AVX-512, at most 4 bits: 0.71 to 0.88 with uniform levels, 0.74 to 1.04 with exponential ones
//   decode_words: 0.69 to 0.86 with 8 bits, 0.78 to 0.87 with 4 bits and AVX2
//   UpperUniformValue, within the others: 0.64 to 0.88 with AVX2, 0.75 to 0.79 with AVX-512 and 8 bits

// `at` returns the values of a part of a row. In words of whole codes a number selects the codes of four rows, one per
// byte: `ready` is computed once for the four, then `in_words` returns the values of one.

struct UniformValue {
  template <class Fields>
  INLINE Floats at(const Fields& fields, const u32* words, i64 part, bool straddles) const {
    return __builtin_convertvector(fields.digits(words, part, straddles), Floats);
  }
};

// Digits in the highest bits of 32, which saves a shift: `at` returns values times 2^(32 - bits), `in_words` times
// 2^24.
struct UpperUniformValue {
  i64 bits;

  INLINE Floats at(const CodeFields& fields, const u32* words, i64 part, bool straddles) const {
    const Words codes = fields.upper_codes(words, part, straddles);
    const Words magnitudes = codes & ((1u << (bits - 1)) - 1) << (32 - bits);
    return __builtin_convertvector(with_sign((Ints)magnitudes, (Ints)codes), Floats);
  }
  // Digits of one byte each.
  template <i64 BITS, i64 NUMBER>
  INLINE Words ready(Words words) const {
    constexpr u32 MAGNITUDES = ((1u << (BITS - 1)) - 1) * 0x01010101u;
    return bytes_with_sign(words >> (u32)(BITS * NUMBER) & MAGNITUDES, words << (u32)(8 - BITS * (NUMBER + 1)));
  }
  template <i64 BITS, i64 NUMBER>
  INLINE Floats in_words(Words digits, i64 byte) const {
    return __builtin_convertvector((Ints)byte_on_top(digits, byte), Floats);
  }
};

// True if the units of all buckets can be divided by 2^30 without rounding.
INLINE bool can_shrink(const float* const* norms, i64 workers, i64 buckets, DecodingScale scale) {
  DefaultArithmetic scope;
  i32 smallest = bits_of(1.0f);
  for (i64 worker = 0; worker < workers; worker++)
    for (i64 bucket = 0; bucket < buckets; bucket++) {
      const i32 unit = bits_of(scale(norms[worker][bucket])) & ABS;
      smallest = unit != 0 && unit < smallest ? unit : smallest;
    }
  return smallest >= (i32)bits_of(0x1p-96f);
}

// reference.exponential_values of codes with the sign as the highest bit. An index is the exponent of a power of two
// that is too small by a constant factor. The sum is exact, and converts -0 to 0.
INLINE Floats exponential_values(Words upper_codes, i64 bits) {
  const u32 top = (1u << (bits - 1)) - 1;
  const Ints powers = (Ints)upper_codes >> (i32)(9 - bits) & (i32)(top << 23 | 0x80000000);
  return multiply_add((Floats)powers, Floats{} + float_of((254 - top) << 23), Floats{});
}

struct ExponentialValue {
  i64 bits;

  INLINE Floats at(const CodeFields& fields, const u32* words, i64 part, bool straddles) const {
    return exponential_values(fields.upper_codes(words, part, straddles), bits);
  }
  template <i64 BITS, i64 NUMBER>
  INLINE Words ready(Words words) const {
    return words;
  }
  template <i64 BITS, i64 NUMBER>
  INLINE Floats in_words(Words words, i64 byte) const {
    return exponential_values(words << (u32)(32 - BITS * (NUMBER + 1) - 8 * byte), BITS);
  }
};

// A row of the sum over the workers, in rank order. `of(worker)` returns a function of a part of the worker's row.
template <class Of>
INLINE void sum_row(i64 workers, float* out, Of of) {
  Floats sum[PARTS];
  const auto first = of(0);
#pragma GCC unroll 8
  for (i64 part = 0; part < PARTS; part++) sum[part] = first(part);
  for (i64 worker = 1; worker < workers; worker++) {
    const auto own = of(worker);
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) sum[part] += own(part);
  }
#pragma GCC unroll 8
  for (i64 part = 0; part < PARTS; part++) memcpy(out + part * VECTOR, sum + part, sizeof(Floats));
}

template <class Fields, class Value>
INLINE void decode_row(const Fields& fields, bool straddles, const u32* const* words, const float* units, i64 workers,
                       Value value, float* out) {
  sum_row(workers, out, [&](i64 worker) INLINE_LAMBDA {
    const u32* own = words[worker];
    const float unit = units[worker];
    return [&fields, straddles, value, own, unit](i64 part) INLINE_LAMBDA {
      return value.at(fields, own, part, straddles) * unit;
    };
  });
}

// `units` has room for one float a worker.
template <class Fields, class Value, class Scale>
INLINE void decode(const u32* const* words, const float* const* norms, i64 workers, i64 count, i64 bucket_size,
                   Fields fields, Value value, Scale scale, float* units, void* data, i64 type) {
  DefaultArithmetic scope;
  Writer out(data, type, count);
  BucketRows buckets(bucket_size);
  i64 bucket = 0;
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    float* values = out.tile(tile);
    const i64 rows = out.rows(tile);
    for (i64 row = 0; row < rows; row++, values += ROW, fields.advance()) {
      if (buckets.begins()) {
        for (i64 worker = 0; worker < workers; worker++) units[worker] = scale(norms[worker][bucket]);
        bucket++;
      }
      out.prefetch_next(tile, row);
      if (fields.straddles())
        decode_row(fields, true, words, units, workers, value, values);
      else
        decode_row(fields, false, words, units, workers, value, values);
    }
    out.store(tile);
  }
}

// `decode` for codes of at most four bits, by a table lookup in a vector, with one table per worker.
template <class Value>
INLINE void decode_by_table(const u32* const* words, const float* const* norms, i64 workers, i64 count, i64 bucket_size,
                            i64 bits, Value value, DecodingScale scale, float* tables, void* data, i64 type) {
  DefaultArithmetic scope;
  Writer out(data, type, count);
  BucketRows buckets(bucket_size);
  CodeFields fields(bits);
  u32 codes[VECTOR];
  for (i64 lane = 0; lane < VECTOR; lane++) codes[lane] = lane;
  const Floats of_codes = value.at(fields, codes, 0, false);
  i64 bucket = 0;
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    float* values = out.tile(tile);
    const i64 rows = out.rows(tile);
    for (i64 row = 0; row < rows; row++, values += ROW, fields.advance()) {
      if (buckets.begins()) {
        for (i64 worker = 0; worker < workers; worker++) {
          const Floats own = of_codes * scale(norms[worker][bucket]);
          memcpy(tables + worker * VECTOR, &own, sizeof own);
        }
        bucket++;
      }
      out.prefetch_next(tile, row);
      const bool straddles = fields.straddles();
      sum_row(workers, values, [&](i64 worker) INLINE_LAMBDA {
        const u32* own = words[worker];
        Table table;
        memcpy(table.of, tables + worker * VECTOR, sizeof table.of);
        return [&fields, straddles, own, table](i64 part) INLINE_LAMBDA {
          return table[(Ints)fields.codes(own, part, straddles)];
        };
      });
    }
    out.store(tile);
  }
}

// The sums of the four rows whose codes have this number in a byte. Two parts at a time: with AVX2 they are a cache
// line, and their sums stay in registers.
template <i64 BITS, i64 NUMBER, class Value>
INLINE void sum_rows_of_words(const u32* const* words, i64 word, const float* units, i64 workers, Value value,
                              float* out) {
  for (i64 part = 0; part < PARTS; part += 2) {
    Floats sums[2][4];
    const auto for_values_of = [&](i64 worker, auto use) INLINE_LAMBDA {
      const u32* own = words[worker] + word + part * VECTOR;
      const float unit = units[worker];
#pragma GCC unroll 2
      for (i64 i = 0; i < 2; i++) {
        const Words ready = value.template ready<BITS, NUMBER>(vector_at<Words>(own + i * VECTOR));
#pragma GCC unroll 4
        for (i64 byte = 0; byte < 4; byte++)
          use(sums[i][byte], value.template in_words<BITS, NUMBER>(ready, byte) * unit);
      }
    };
    for_values_of(0, [](Floats& sum, Floats own) INLINE_LAMBDA { sum = own; });
    for (i64 worker = 1; worker < workers; worker++)
      for_values_of(worker, [](Floats& sum, Floats own) INLINE_LAMBDA { sum += own; });
#pragma GCC unroll 4
    for (i64 byte = 0; byte < 4; byte++)
#pragma GCC unroll 2
      for (i64 i = 0; i < 2; i++)
        memcpy(out + (byte * 8 / BITS + NUMBER) * ROW + (part + i) * VECTOR, &sums[i][byte], sizeof(Floats));
  }
}

// `decode` for buckets of whole words of whole codes: all rows in a word at once.
template <i64 BITS, class Value, class Scale>
INLINE void decode_words(const u32* const* words, const float* const* norms, i64 workers, i64 count, i64 bucket_size,
                         Value value, Scale scale, float* units, void* data, i64 type) {
  constexpr i64 ROWS = 32 / BITS;
  DefaultArithmetic scope;
  Writer out(data, type, count);
  BucketRows buckets(bucket_size / ROWS);
  i64 bucket = 0, word = 0;
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    float* values = out.tile(tile);
    const i64 rows = out.rows(tile);
    for (i64 row = 0; row < rows; row += ROWS, values += ROWS * ROW, word += ROW) {
      if (buckets.begins()) {
        for (i64 worker = 0; worker < workers; worker++) units[worker] = scale(norms[worker][bucket]);
        bucket++;
      }
      for (i64 i = 0; i < ROWS; i++) out.prefetch_next(tile, row + i);
      sum_rows_of_words<BITS, 0>(words, word, units, workers, value, values);
      if constexpr (BITS == 4) sum_rows_of_words<BITS, 1>(words, word, units, workers, value, values);
    }
    out.store(tile);
  }
}

// Calls `decode_words` if it is faster than `decode`, and returns true then. One worker's codes wait for memory, which
// is faster with rows in order.
template <class Value, class Scale>
INLINE bool decode_if_whole(const u32* const* words, const float* const* norms, i64 workers, i64 count, i64 bucket_size,
                            i64 bits, Value value, Scale scale, float* units, void* out, i64 type) {
  if (bits == 8 && bucket_size % (4 * ROW) == 0)
    decode_words<8>(words, norms, workers, count, bucket_size, value, scale, units, out, type);
  else if (bits == 4 && workers > 1 && bucket_size % (8 * ROW) == 0)
    decode_words<4>(words, norms, workers, count, bucket_size, value, scale, units, out, type);
  else
    return false;
  return true;
}

KERNEL(void, decode_uniform_sum)(const u32* words, const float* norms, i64 count, i64 bucket_size, i64 levels,
                                 i64 width, float factor, void* out, i64 type) {
  const DecodingScale scale{(float)levels, factor};
  float unit;
  decode(&words, &norms, 1, count, bucket_size, SumFields(width), UniformValue{}, scale, &unit, out, type);
}

// `units` has room for 16 floats a worker.
KERNEL(void, decode_uniform_codes)(const u32* const* words, const float* const* norms, i64 workers, i64 count,
                                   i64 bucket_size, i64 bits, float factor, float* units, void* out, i64 type) {
  const DecodingScale scale{(float)((1 << (bits - 1)) - 1), factor};
  if constexpr (VECTOR == 16)
    if (bits <= 4)
      return decode_by_table(words, norms, workers, count, bucket_size, bits, UniformValue{}, scale, units, out, type);
  const CodeFields fields(bits);
  if (!can_shrink(norms, workers, (count + bucket_size - 1) / bucket_size, scale))
    return decode(words, norms, workers, count, bucket_size, fields, UniformValue{}, scale, units, out, type);
  const UpperUniformValue value{bits};
  const ShiftedScale of_bytes{scale, 0x1p-24f}, of_codes{scale, float_of((95 + bits) << 23)};
  if (!decode_if_whole(words, norms, workers, count, bucket_size, bits, value, of_bytes, units, out, type))
    decode(words, norms, workers, count, bucket_size, fields, value, of_codes, units, out, type);
}

KERNEL(void, decode_exponential)(const u32* const* words, const float* const* norms, i64 workers, i64 count,
                                 i64 bucket_size, i64 bits, float factor, float* units, void* out, i64 type) {
  const DecodingScale scale{1.0f, factor};
  const ExponentialValue value{bits};
  if constexpr (VECTOR == 16)
    if (bits <= 4)
      return decode_by_table(words, norms, workers, count, bucket_size, bits, value, scale, units, out, type);
  if (!decode_if_whole(words, norms, workers, count, bucket_size, bits, value, scale, units, out, type))
    decode(words, norms, workers, count, bucket_size, CodeFields(bits), value, scale, units, out, type);
}

}  // namespace ISA

#endif
