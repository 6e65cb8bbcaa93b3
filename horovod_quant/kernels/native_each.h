// A kernel for each of many gradients in one call: where they are small, a call takes longer than its work.
//
// Included once for each instruction set, after native_kernels.h. Gradient i has counts[i] elements of types[i] at x[i].
// Norms and words of all gradients follow one another.

namespace ISA {

KERNEL(void, bucket_maxima_each)(i64 gradients, const void* const* x, const i64* types, const i64* counts,
                                 i64 bucket_size, float* out) {
  for (i64 i = 0; i < gradients; i++) {
    JOIN(bucket_maxima, ISA)(x[i], types[i], counts[i], bucket_size, out);
    out += ceil_div(counts[i], bucket_size);
  }
}

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

}  // namespace ISA
