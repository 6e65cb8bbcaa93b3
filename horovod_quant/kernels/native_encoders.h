// Stochastic rounding to uniform and exponential levels.

#if defined(NATIVE_ENCODERS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_ENCODERS_H
#undef NATIVE_ENCODERS_H
#else
#define NATIVE_ENCODERS_H
#endif

#include "native_norms.h"
#include "native_packing.h"
#include "native_random.h"

namespace ISA {

// reference.round_uniform. Up to 127 levels have 24 fraction bits; shifts by a constant are faster.
template <bool IS_24, class Random>
struct UniformRounding {
  const float* norms;
  i64 fraction_bits;
  InverseNorm inverse;
  BucketRows buckets;
  Random random;
  float scale = 0;

  INLINE UniformRounding(const float* norms, i64 bucket_size, i64 levels, i64 fraction_bits, Random random)
      : norms(norms),
        fraction_bits(fraction_bits),
        inverse{(float)(levels << fraction_bits)},
        buckets(bucket_size),
        random(random) {}

  INLINE void row(const float* RESTRICT x, i64 row, i32* RESTRICT digits) {
    if (buckets.begins()) scale = inverse(*norms++);
    const u32 counter = random.counter(row);
    const i64 k = IS_24 ? 24 : fraction_bits;
    const float high = inverse.numerator, low = -high;
    for (u32 lane = 0; lane < ROW; lane++) {
      float y = x[lane] * scale;
      y = y < high ? y : high;  // in this form for NaN
      y = y > low ? y : low;
      const i32 fraction = random.hash(counter, lane) >> (32 - k);
      digits[lane] = ((i32)y + fraction) >> k;
    }
  }
};

// reference.round_exponential. At 8 bits the smallest level is the smallest normal float, and subnormals are linear
// anyway.
template <bool IS_8_BITS, class Random>
struct ExponentialRounding {
  const float* norms;
  u32 top;
  BucketRows buckets;
  Random random;
  float scale = 0;

  INLINE ExponentialRounding(const float* norms, i64 bucket_size, i64 bits, Random random)
      : norms(norms), top((1u << (bits - 1)) - 1), buckets(bucket_size), random(random) {}

  // Computes indices with fraction bits, linear between levels, and rounds them.
  INLINE void row(const float* RESTRICT x, i64 row, i32* RESTRICT digits) {
    if (buckets.begins()) scale = InverseNorm{1.0f}(*norms++);
    const u32 counter = random.counter(row), smallest = (128 - top) << 23;
    const float unit = float_of((top + 150) << 23);  // 2^24 / smallest
    for (u32 lane = 0; lane < ROW; lane++) {
      const u32 y = bits_of(x[lane] * scale);
      const u32 magnitude = (i32)(y & ABS) < (i32)ONE ? y & ABS : ONE;
      const u32 h = random.hash(counter, lane);
      if (IS_8_BITS) {
        digits[lane] = random.template rounded<23>(magnitude, h, (i32)y < 0);
        continue;
      }
      const float value = float_of((i32)magnitude < (i32)smallest ? magnitude : smallest);
      const i32 above = (magnitude - ((127 - top) << 23)) * 2;
      const i32 index = (i32)magnitude < (i32)smallest ? (i32)(value * unit) : above;
      digits[lane] = random.template rounded<24>(index, h, (i32)y < 0);
    }
  }
};

template <class Rounding, class Packer>
INLINE void encode(const void* x, i64 type, i64 count, Rounding&& rounding, Packer&& packer) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  for (i64 tile = 0; tile < in.tiles(); tile++) {
    const float* values = in.tile(tile);
    const i64 rows = in.rows(tile);
    for (i64 row = 0; row < rows; row++) {
      in.prefetch_next(tile, row);
      alignas(64) i32 digits[ROW];
      rounding.row(values + row * ROW, tile * ROW + row, digits);
      packer.put(digits);
    }
  }
  packer.finish();
}

// Calls `use` with the rounding to `levels` levels.
template <class Use>
INLINE void with_uniform_rounding(const float* norms, i64 bucket_size, i64 levels, const Key* key, i64 start, Use use) {
  const i64 bits = smaller(24, __builtin_clz((u32)levels) - 1);  // reference.fraction_bits
  with_random(key, start, [&](auto random) INLINE_LAMBDA {
    using Random = decltype(random);
    if (bits == 24)
      use(UniformRounding<true, Random>(norms, bucket_size, levels, bits, random));
    else
      use(UniformRounding<false, Random>(norms, bucket_size, levels, bits, random));
  });
}

template <class Use>
INLINE void with_exponential_rounding(const float* norms, i64 bucket_size, i64 bits, const Key* key, i64 start,
                                      Use use) {
  with_random(key, start, [&](auto random) INLINE_LAMBDA {
    using Random = decltype(random);
    if (bits == 8)
      use(ExponentialRounding<true, Random>(norms, bucket_size, bits, random));
    else
      use(ExponentialRounding<false, Random>(norms, bucket_size, bits, random));
  });
}

template <class Packer>
INLINE void encode_uniform(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size, i64 levels,
                           const Key* key, i64 start, Packer&& packer) {
  with_uniform_rounding(norms, bucket_size, levels, key, start,
                        [&](auto rounding) INLINE_LAMBDA { encode(x, type, count, rounding, packer); });
}

KERNEL(void, encode_uniform_sum)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size, i64 levels,
                                 const Key* key, i64 start, i64 width, u32* out) {
  encode_uniform(x, type, count, norms, bucket_size, levels, key, start, SumPacker(out, width));
}

KERNEL(void, round_exponential)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size,
                                const Key* key, i64 start, i64 bits, i32* out) {
  with_exponential_rounding(norms, bucket_size, bits, key, start, [&](auto rounding) INLINE_LAMBDA {
    encode(x, type, count, rounding, PlainDigits{out, count});
  });
}

// ---- norms and codes ----------------------------------------------------------------------------------------------

enum NormKind : i64 { GIVEN, MAXIMUM, ROOT };  // MAXIMUM and ROOT: _NORM_KINDS of native_segments.py

template <class Norm>
__attribute__((noinline)) float* block_norms(const float* values, i64 rows, i64 bucket_rows, float* out) {
  for (i64 row = 0; row < rows;) {
    Norm norm;
    for (const i64 stop = smaller(rows, row + bucket_rows); row < stop; row++) norm.add(values + row * ROW);
    *out++ = norm.take();
  }
  return out;
}

// Norms of a gradient: given, or computed with its blocks, or all at once if a bucket exceeds a block.
struct Norms {
  i64 kind, bucket_size, block;
  float* out;

  INLINE Norms(i64 kind, const void* x, i64 type, i64 count, i64 bucket_size, float* out)
      : kind(kind), bucket_size(bucket_size), block(TILE), out(out) {
    const i64 bucket = smaller(bucket_size, ceil_div(count, ROW) * ROW);
    if (kind == GIVEN || count == 0) return;
    if (bucket <= Blocks::LARGEST) {
      block = bucket < TILE ? TILE / bucket * bucket : bucket;
      return;
    }
    this->kind = GIVEN;
    if (kind == MAXIMUM)
      for_buckets<Maximum>(x, type, count, bucket_size, out);
    else
      for_buckets<Root>(x, type, count, bucket_size, out);
  }
  INLINE void find(const float* values, i64 rows) {
    if (kind == MAXIMUM) out = block_norms<Maximum>(values, rows, bucket_size / ROW, out);
    if (kind == ROOT) out = block_norms<Root>(values, rows, bucket_size / ROW, out);
  }
};

template <class Rounding>
INLINE void encode_blocks(const void* x, i64 type, i64 count, Norms norms, Rounding&& rounding, CodePacker&& packer) {
  DefaultArithmetic scope;
  Blocks in(x, type, count, norms.block);
  for (i64 block = 0, first = 0; block < in.blocks(); block++, first += norms.block / ROW) {
    const float* values = in.block(block);
    const i64 rows = in.rows(block);
    norms.find(values, rows);
    for (i64 row = 0; row < rows; row++) {
      in.prefetch_next(block, row);
      alignas(64) i32 digits[ROW];
      rounding.row(values + row * ROW, first + row, digits);
      packer.put(digits);
    }
  }
  packer.finish();
}

void encode_uniform_codes(const void* x, i64 type, i64 count, i64 norm, float* norms, i64 bucket_size, const Key* key,
                          i64 start, i64 bits, u32* out) {
  const Norms found(norm, x, type, count, bucket_size, norms);
  with_uniform_rounding(norms, bucket_size, (1 << (bits - 1)) - 1, key, start, [&](auto rounding) INLINE_LAMBDA {
    encode_blocks(x, type, count, found, rounding, CodePacker(out, bits));
  });
}

void encode_exponential(const void* x, i64 type, i64 count, i64 norm, float* norms, i64 bucket_size, const Key* key,
                        i64 start, i64 bits, u32* out) {
  const Norms found(norm, x, type, count, bucket_size, norms);
  with_exponential_rounding(norms, bucket_size, bits, key, start, [&](auto rounding) INLINE_LAMBDA {
    encode_blocks(x, type, count, found, rounding, CodePacker(out, bits));
  });
}

KERNEL(void, encode_uniform_codes)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size,
                                   const Key* key, i64 start, i64 bits, u32* out) {
  encode_uniform_codes(x, type, count, GIVEN, const_cast<float*>(norms), bucket_size, key, start, bits, out);
}

KERNEL(void, encode_exponential)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size,
                                 const Key* key, i64 start, i64 bits, u32* out) {
  encode_exponential(x, type, count, GIVEN, const_cast<float*>(norms), bucket_size, key, start, bits, out);
}

}  // namespace ISA

#endif
