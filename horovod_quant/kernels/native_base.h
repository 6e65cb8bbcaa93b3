// Definitions for all instruction sets.

#pragma once

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

// Rounds to nearest and keeps subnormals until the end of the scope, regardless of the caller's settings (PyTorch can
// flush subnormals). No load or store moves across the barriers, and all operands come from memory.
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
