// Packed digits and codes, row by row, in the layout of layout.py.

#if defined(NATIVE_PACKING_H) == defined(NATIVE_PASS)
#ifdef NATIVE_PACKING_H
#undef NATIVE_PACKING_H
#else
#define NATIVE_PACKING_H
#endif

#include "native_elements.h"

namespace ISA {

// Takes rows of digits; does not pack them.
struct PlainDigits {
  i32* out;
  i64 left;

  INLINE void put(const i32* digits) {
    memcpy(out, digits, sizeof(i32) * smaller(ROW, left));
    out += ROW;
    left -= ROW;
  }
  INLINE void finish() {}
};

// reference.pack_sum
struct SumPacker {
  u32* out;
  i64 width;
  i64 shift = 0;
  alignas(64) u32 words[ROW] = {};

  INLINE SumPacker(u32* out, i64 width) : out(out), width(width) {}

  INLINE void put(const i32* RESTRICT digits) {
    for (i64 lane = 0; lane < ROW; lane++) words[lane] += (u32)digits[lane] << shift;
    shift += width;
    if (shift + width > 32) write();
  }
  INLINE void finish() {
    if (shift) write();
  }

 private:
  INLINE void write() {
    memcpy(out, words, sizeof words);
    memset(words, 0, sizeof words);
    out += ROW;
    shift = 0;
  }
};

// reference.codes_of_digits
INLINE u32 code_of(i32 digit, i64 bits) {
  const u32 negative = 1u << (bits - 1);
  return digit < 0 ? negative - (u32)digit : (u32)digit;
}

// reference.pack_codes: one dense stream of bits in each lane.
struct CodePacker {
  u32* out;
  i64 bits;
  i64 shift = 0;
  alignas(64) u32 words[ROW] = {};

  INLINE CodePacker(u32* out, i64 bits) : out(out), bits(bits) {}

  INLINE void put(const i32* RESTRICT digits) {
    alignas(64) u32 codes[ROW];
    for (i64 lane = 0; lane < ROW; lane++) codes[lane] = code_of(digits[lane], bits);
    for (i64 lane = 0; lane < ROW; lane++) words[lane] |= codes[lane] << shift;
    shift += bits;
    if (shift < 32) return;
    write();
    shift -= 32;
    // The rest: the upper `shift` bits of each code, possibly none.
    for (i64 lane = 0; lane < ROW; lane++) words[lane] = codes[lane] >> (bits - shift);
  }
  INLINE void finish() {
    if (shift) write();
  }

 private:
  INLINE void write() {
    memcpy(out, words, sizeof words);
    out += ROW;
  }
};

// Iterators over the rows of packed words. digits() returns those of a part of the row; several workers' words are read
// at the same position. The argument `straddles`, true if the row is in two words, is a constant for the compiler.

struct SumFields {  // reference.unpack_sum
  i64 width;
  u32 bias = 0;
  i64 word = 0, shift = 0;

  INLINE explicit SumFields(i64 width) : width(width) {
    for (i64 field = 0; field < 32 / width; field++) bias += 1u << (width * field + width - 1);
  }
  INLINE bool straddles() const { return false; }
  INLINE Ints digits(const u32* words, i64 part, bool) const {
    const Words fields = (vector_at<Words>(words + word + part * VECTOR) + bias) >> (u32)shift;
    return (Ints)(fields & ((1u << width) - 1)) - (1 << (width - 1));
  }
  INLINE void advance() {
    shift += width;
    if (shift + width <= 32) return;
    shift = 0;
    word += ROW;
  }
};

struct CodeFields {  // reference.unpack_codes and reference.digits_of_codes
  i64 bits;
  i64 word = 0, shift = 0;

  INLINE explicit CodeFields(i64 bits) : bits(bits) {}

  INLINE bool straddles() const { return shift + bits > 32; }
  // With other bits above them.
  INLINE Words codes(const u32* words, i64 part, bool straddles) const {
    const u32* low = words + word + part * VECTOR;
    const Words codes = vector_at<Words>(low) >> (u32)shift;
    return straddles ? codes | vector_at<Words>(low + ROW) << (u32)(32 - shift) : codes;
  }
  INLINE Ints digits(const u32* words, i64 part, bool straddles) const {
    const Words all = codes(words, part, straddles), magnitudes = all & ((1u << (bits - 1)) - 1);
    return with_sign((Ints)magnitudes, (Ints)(all << (u32)(32 - bits)));  // a code of zero has a sign bit of zero
  }
  // With the sign as the highest bit, and other bits below them.
  INLINE Words upper_codes(const u32* words, i64 part, bool straddles) const {
    if (straddles) return codes(words, part, true) << (u32)(32 - bits);
    return vector_at<Words>(words + word + part * VECTOR) << (u32)(32 - bits - shift);
  }
  INLINE void advance() {
    shift += bits;
    if (shift < 32) return;
    shift -= 32;
    word += ROW;
  }
};

}  // namespace ISA

#endif
