// A hash of the kernels' signatures, by which native_library.py refuses a library built from other sources, so that its
// declarations equal the compiled functions. A kernel that changes its meaning but not its types needs another name.

#pragma once

#include "native_base.h"

// All kernels that native_library.py declares.
#define KERNELS(X) \
  X(add_rotated) X(add_rotated_each) X(binarize) X(binarize_each) X(bucket_magnitude_sums) X(bucket_maxima)          \
  X(bucket_maxima_each) X(bucket_square_sums) X(bucket_square_sums_each) X(bucket_sums) X(decode_exponential)        \
  X(decode_exponential_each) X(decode_rotated_sum) X(decode_signs) X(decode_signs_each) X(decode_uniform_codes)      \
  X(decode_uniform_codes_each) X(decode_uniform_sum) X(decode_uniform_sum_each) X(elias_decode_codes)                \
  X(elias_encode_codes) X(elias_measure) X(encode_exponential) X(encode_norms_and_codes_each) X(encode_rotated)      \
  X(encode_rotated_each) X(encode_rotated_sum) X(encode_uniform_codes) X(encode_uniform_sum)                         \
  X(encode_uniform_sum_each) X(rotated_samples) X(rotated_sum_checks) X(round_exponential) X(scale_each) X(vote)     \
  X(vote_each)

namespace {

template <class T>
constexpr char letter_of() {
  static_assert(std::is_pointer_v<T> || std::is_same_v<T, i64> || std::is_same_v<T, float> || std::is_void_v<T>);
  return std::is_pointer_v<T> ? 'p' : std::is_same_v<T, float> ? 'f' : std::is_void_v<T> ? 'v' : 'i';
}

constexpr u64 fnv1a(const char* text, u64 hash) {
  for (; *text; text++) hash = (hash ^ (u8)*text) * 0x100000001B3;
  return hash;
}

template <class Result, class... Arguments>
constexpr u64 signature_hash(const char* name, Result (*)(Arguments...)) {
  const char letters[] = {' ', letter_of<Result>(), letter_of<Arguments>()..., '\0'};
  return fnv1a(letters, fnv1a(name, 0xCBF29CE484222325));
}

}  // namespace
