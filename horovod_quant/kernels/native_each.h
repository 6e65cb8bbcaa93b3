// Kernels for many gradients in one call: a call costs more than the work on a small gradient.
//
// Gradient i has counts[i] elements of types[i] at x[i]. Norms and words of all gradients are consecutive, except those
// with pointers.

#if defined(NATIVE_EACH_H) == defined(NATIVE_PASS)
#ifdef NATIVE_EACH_H
#undef NATIVE_EACH_H
#else
#define NATIVE_EACH_H
#endif

#include "native_decoders.h"
#include "native_encoders.h"
#include "native_rotated_codes.h"
#include "native_signs.h"

namespace ISA {

KERNEL(void, bucket_maxima_each)(i64 gradients, const void* const* x, const i64* types, const i64* counts,
                                 i64 bucket_size, float* out) {
  for (i64 i = 0; i < gradients; i++) {
    JOIN(bucket_maxima, ISA)(x[i], types[i], counts[i], bucket_size, out);
    out += ceil_div(counts[i], bucket_size);
  }
}

KERNEL(void, bucket_square_sums_each)(i64 gradients, const void* const* x, const i64* types, const i64* counts,
                                      i64 bucket_size, double* out) {
  for (i64 i = 0; i < gradients; i++) {
    JOIN(bucket_square_sums, ISA)(x[i], types[i], counts[i], bucket_size, out);
    out += ceil_div(counts[i], bucket_size);
  }
}

// The payload of gradient i begins at out[at[i]]: its norms, then its codes.
KERNEL(void, encode_norms_and_codes_each)(i64 gradients, const void* const* x, const i64* types, const i64* counts,
                                          i64 exponential, i64 norm, i64 bucket_size, i64 bits, const Key* keys,
                                          const i64* starts, const i64* at, u32* out) {
  const auto encode = exponential ? encode_exponential : encode_uniform_codes;
  for (i64 i = 0; i < gradients; i++) {
    u32 *norms = out + at[i], *words = norms + ceil_div(counts[i], bucket_size);
    encode(x[i], types[i], counts[i], norm, (float*)norms, bucket_size, keys + i, starts[i], bits, words);
  }
}

// Words and norms: pointers by gradient, then by worker. `units` has room for one gradient.
#define DECODE_CODES_EACH(KIND)                                                                                        \
  KERNEL(void, decode_##KIND##_each)(i64 gradients, const u32* const* words, const float* const* norms, i64 workers,   \
                                     const i64* counts, i64 bucket_size, i64 bits, float factor, float* units,         \
                                     void* const* out, const i64* types) {                                             \
    for (i64 i = 0; i < gradients; i++) {                                                                              \
      const i64 first = i * workers;                                                                                   \
      JOIN(decode_##KIND, ISA)                                                                                         \
      (words + first, norms + first, workers, counts[i], bucket_size, bits, factor, units, out[i], types[i]);          \
    }                                                                                                                  \
  }

DECODE_CODES_EACH(uniform_codes)
DECODE_CODES_EACH(exponential)

KERNEL(void, encode_uniform_sum_each)(i64 gradients, const void* const* x, const i64* types, const i64* counts,
                                      const float* norms, i64 bucket_size, i64 levels, const Key* keys,
                                      const i64* starts, i64 width, u32* out) {
  for (i64 i = 0; i < gradients; i++) {
    JOIN(encode_uniform_sum, ISA)
    (x[i], types[i], counts[i], norms, bucket_size, levels, keys + i, starts[i], width, out);
    norms += ceil_div(counts[i], bucket_size);
    out += ROW * ceil_div(ceil_div(counts[i], ROW), 32 / width);
  }
}

KERNEL(void, decode_uniform_sum_each)(i64 gradients, const u32* words, const float* norms, const i64* counts,
                                      i64 bucket_size, i64 levels, i64 width, float factor, void* const* out,
                                      const i64* types) {
  for (i64 i = 0; i < gradients; i++) {
    JOIN(decode_uniform_sum, ISA)
    (words, norms, counts[i], bucket_size, levels, width, factor, out[i], types[i]);
    norms += ceil_div(counts[i], bucket_size);
    words += ROW * ceil_div(ceil_div(counts[i], ROW), 32 / width);
  }
}

KERNEL(void, binarize_each)(i64 gradients, const void* const* x, const i64* types, const i64* counts,
                            float* const* momenta, float* const* scales, const float* keep, const float* take,
                            const Key* keys, const i64* starts, u32* const* out, u8* broken) {
  for (i64 i = 0; i < gradients; i++) {
    JOIN(binarize, ISA)
    (x[i], types[i], counts[i], momenta[i], scales[i], keep[i], take[i], keys + i, starts[i], out[i], broken);
    broken += ceil_div(counts[i], TILE);
  }
}

// Words: pointers by gradient, then by worker.
KERNEL(void, vote_each)(i64 gradients, const i64* tiles, const u32* const* words, i64 workers, const Key* keys,
                        const i64* starts, u32* const* out) {
  for (i64 i = 0; i < gradients; i++)
    JOIN(vote, ISA)(words + i * workers, workers, tiles[i], keys + i, starts[i], out[i]);
}

KERNEL(void, decode_signs_each)(i64 gradients, const u32* const* words, const i64* counts, float magnitude,
                                void* const* out, const i64* types) {
  for (i64 i = 0; i < gradients; i++) JOIN(decode_signs, ISA)(words[i], counts[i], magnitude, out[i], types[i]);
}

KERNEL(void, encode_rotated_each)(i64 gradients, const void* const* x, const i64* types, const i64* counts, i64 bits,
                                  i64 trellis, const Key* keys, const i64* starts, u32* const* words,
                                  float* const* scales) {
  for (i64 i = 0; i < gradients; i++)
    JOIN(encode_rotated, ISA)(x[i], types[i], counts[i], bits, trellis, keys + i, starts[i], words[i], scales[i]);
}

// Words, scales and keys: by gradient, then by worker.
KERNEL(void, add_rotated_each)(i64 gradients, const u32* const* words, const float* const* scales, i64 workers,
                               const i64* counts, i64 bits, i64 trellis, float factor, const Key* keys,
                               const i64* starts, void* const* out, const i64* types) {
  for (i64 i = 0; i < gradients; i++) {
    const i64 first = i * workers;
    JOIN(add_rotated, ISA)
    (words + first, scales + first, workers, counts[i], bits, trellis, factor, keys + first, starts[i], out[i],
     types[i]);
  }
}

// The elements as float32, times a factor, in the types of `out`.
KERNEL(void, scale_each)(i64 gradients, const void* const* x, const i64* types, const i64* counts, float factor,
                         void* const* out, const i64* out_types) {
  DefaultArithmetic scope;
  for (i64 i = 0; i < gradients; i++) {
    Reader in(x[i], types[i], counts[i]);
    Writer to(out[i], out_types[i], counts[i]);
    for (i64 tile = 0; tile < in.tiles(); tile++) {
      const float* RESTRICT from = in.tile(tile);
      float* RESTRICT place = to.tile(tile);
      for (i64 j = 0; j < in.elements(tile); j++) place[j] = from[j] * factor;
      to.store(tile);
    }
  }
}

}  // namespace ISA

#endif
