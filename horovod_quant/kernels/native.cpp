// The kernels of reference.py as plain loops, and as vectors where compilers make too little of loops, compiled once for
// each instruction set and chosen at run time.
//
// A C interface for ctypes; native_library.py declares it, native.py checks every size. A function `name` of
// native_kernels.h or native_elias.h becomes the symbols name_baseline, name_avx2 and name_avx512.
//
// Which bits come out must not depend on the compiler: no contraction to fused multiply-adds (-ffp-contract=off), no
// -ffast-math, and every sum in a stated order.

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of GCC's own intrinsics, until GCC 13
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <cpuid.h>
#include <immintrin.h>
#endif

using i32 = int32_t;
using i64 = int64_t;
using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

// Without `restrict` the compiler must assume that a store changes what it is about to load.
#define RESTRICT __restrict
#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define EXPORT extern "C" __attribute__((visibility("default")))
#define KERNEL(result, name) EXPORT result JOIN(name, ISA)

namespace {

enum Type : i64 { FLOAT32, FLOAT16, FLOAT64, BFLOAT16 };

constexpr i64 ROW = 32;  // elements that share a word's position in its lane: layout.py
constexpr i64 TILE = 32 * ROW;

// keys.Key
struct Key {
  u32 k0, k1, shift, addend, flip, mirror;
};

// Rounds to nearest and keeps subnormals until the end of the scope, whatever the caller's settings are (PyTorch can
// be told to flush subnormals). No load or store moves across the barriers, and all operands come from memory.
class DefaultArithmetic {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();

 public:
  INLINE DefaultArithmetic() {
    _mm_setcsr(0x1F80);
    asm volatile("" ::: "memory");
  }
  INLINE ~DefaultArithmetic() {
    asm volatile("" ::: "memory");
    _mm_setcsr(saved);
  }
#elif defined(__aarch64__)
  u64 saved;

 public:
  INLINE DefaultArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    asm volatile("msr fpcr, xzr" ::: "memory");
  }
  INLINE ~DefaultArithmetic() { asm volatile("msr fpcr, %0" ::"r"(saved) : "memory"); }
#else
 public:
  INLINE DefaultArithmetic() {}
  INLINE ~DefaultArithmetic() {}
#endif
};

}  // namespace

#define ISA baseline
#define VECTOR_BYTES 16
#include "native_vectors.h"
#include "native_kernels.h"
#include "native_elias.h"
#include "native_rotation.h"
#include "native_levels.h"
#include "native_trellis.h"
#include "native_rotated_codes.h"
#include "native_rotated_sum.h"
#include "native_each.h"
#undef VECTOR_BYTES
#undef ISA

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2,fma,f16c")
#endif
#define ISA avx2
#define VECTOR_BYTES 32
#include "native_vectors.h"
#include "native_kernels.h"
#include "native_elias.h"
#include "native_rotation.h"
#include "native_levels.h"
#include "native_trellis.h"
#include "native_rotated_codes.h"
#include "native_rotated_sum.h"
#include "native_each.h"
#undef VECTOR_BYTES
#undef ISA
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
#include "native_vectors.h"
#include "native_kernels.h"
#include "native_elias.h"
#include "native_rotation.h"
#include "native_levels.h"
#include "native_trellis.h"
#include "native_rotated_codes.h"
#include "native_rotated_sum.h"
#include "native_each.h"
#undef VECTOR_BYTES
#undef ISA
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

// Changes with every signature, so that native_library.py loads no library that was built from other sources.
EXPORT i64 interface_version() { return 14; }

#if defined(__x86_64__)
// Not every compiler knows its name in __builtin_cpu_supports.
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

// Index of the best instruction set this processor has: 0 baseline, 1 AVX2, 2 AVX-512.
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
