// Random bits, which keys.py defines.

#if defined(NATIVE_RANDOM_H) == defined(NATIVE_PASS)
#ifdef NATIVE_RANDOM_H
#undef NATIVE_RANDOM_H
#else
#define NATIVE_RANDOM_H
#endif

#include "native_elements.h"

namespace ISA {

constexpr u32 WEYL = 0x9E3779B9;

// Random bits from the hash: the hash itself; its sum with a constant, or its difference from one, as for correlated
// keys of all but one of an odd number of workers; or by the general formula of a key.
enum Bits { PLAIN, SUM, DIFFERENCE, GENERAL };

// keys.hash32: the counter of a row's first element, then the bits of a lane. ((h << shift) + addend) ^ flip, where
// flip has all bits or none, is `factor * h + addend`.
template <Bits BITS>
struct Random {
  u32 k0, k1, factor, addend, mirror;
  i64 start;

  INLINE Random(const Key& key, i64 start)
      : k0(key.k0),
        k1(key.k1),
        factor((key.flip ? -1u : 1u) << key.shift),
        addend(key.addend ^ key.flip),
        mirror(key.mirror),
        start(start) {}

  INLINE u32 counter(i64 row) const { return (u32)(start + row * ROW) * WEYL + k0; }
  INLINE u32 hash(u32 counter, u32 lane) const {
    u32 h = counter + lane * WEYL;
    h ^= h >> 16;
    h *= 0x7FEB352D;
    h ^= h >> 15;
    h += k1;
    h *= 0x846CA68B;
    h ^= h >> 16;
    switch (BITS) {
      case PLAIN: return h;
      case SUM: return addend + h;
      case DIFFERENCE: return addend - h;
      default: return factor * h + addend;
    }
  }
  // A magnitude in units of 2^-FRACTION, rounded by the bits h, and its sign. With the mirror of correlated keys this
  // is floor(y + u) of the element.
  template <i64 FRACTION>
  INLINE i32 rounded(i32 magnitude, u32 h, bool negative) const {
    if (BITS == GENERAL) h ^= negative ? mirror : 0;
    const i32 fraction = h >> (32 - FRACTION);
    if (BITS == SUM || BITS == DIFFERENCE) return ((negative ? -magnitude : magnitude) + fraction) >> FRACTION;
    const i32 index = (magnitude + fraction) >> FRACTION;
    return negative ? -index : index;
  }
};

// Calls `use` with the generator of a key's random bits.
template <class Use>
INLINE void with_random(const Key* key, i64 start, Use use) {
  if (!(key->shift | key->addend | key->flip | key->mirror))
    use(Random<PLAIN>(*key, start));
  else if (key->shift || !key->mirror)
    use(Random<GENERAL>(*key, start));
  else if (key->flip)
    use(Random<DIFFERENCE>(*key, start));
  else
    use(Random<SUM>(*key, start));
}

// `with_random` for kernels that need no speed with correlated keys.
template <class Use>
INLINE void with_any_random(const Key* key, i64 start, Use use) {
  if (!(key->shift | key->addend | key->flip | key->mirror))
    use(Random<PLAIN>(*key, start));
  else
    use(Random<GENERAL>(*key, start));
}

}  // namespace ISA

#endif
