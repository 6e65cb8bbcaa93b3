// The kernels of reference.py as plain loops, and as vectors where compilers vectorize loops badly, compiled once for
// each instruction set and chosen at run time.
//
// A C interface for ctypes; native_library.py declares it, native.py checks every size. A kernel `name` of the
// headers becomes the symbols name_baseline, name_avx2 and name_avx512.
//
// Results must not depend on the compiler: no contraction to fused multiply-adds (-ffp-contract=off), no -ffast-math,
// and every sum in a stated order.

#include "native_base.h"
#include "native_interface.h"

#define ISA baseline
#define VECTOR_BYTES 16
#include "native_all.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,fma,f16c")
#endif
#define ISA avx2
#define VECTOR_BYTES 32
#include "native_all.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx2,bmi,bmi2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define ISA avx512
#define VECTOR_BYTES 64
#include "native_all.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

EXPORT u64 interface_version() {
  u64 sum = 0;
#define ADD_HASH(name) sum += signature_hash(#name, baseline::JOIN(name, baseline));
  KERNELS(ADD_HASH)
#undef ADD_HASH
  return sum;
}

#if defined(__x86_64__)
// Some compilers do not know "f16c" in __builtin_cpu_supports.
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

// Index of this processor's best instruction set: 0 baseline, 1 AVX2, 2 AVX-512.
EXPORT i64 best_instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx2 ? (avx512 ? 2 : 1) : 0;
#else
  return 0;
#endif
}
