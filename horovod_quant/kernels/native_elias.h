// Elias coding of packed codes: the stream is defined in entropy.py. The digits exist a tile at a time.

#if defined(NATIVE_ELIAS_H) == defined(NATIVE_PASS)
#ifdef NATIVE_ELIAS_H
#undef NATIVE_ELIAS_H
#else
#define NATIVE_ELIAS_H
#endif

#include "native_packing.h"

namespace ISA {

// Limits of entropy.py: no code word is longer than 57 bits, so one unaligned 64-bit word holds any.
constexpr i64 MAX_LOG = 28;

constexpr i64 floor_log2(u64 value) { return 63 - __builtin_clzll(value); }

INLINE u64 little_endian(u64 word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return __builtin_bswap64(word);
#else
  return word;
#endif
}

// `bits` bits, the first lowest.
struct CodeWord {
  u64 word;
  i64 bits;
};

// A number and the length of its code word, which is 0 where no valid code word starts.
struct Parsed {
  i64 value, bits;
};

struct Gamma {
  static INLINE i64 length(u64 value) { return 2 * floor_log2(value) + 1; }
  static INLINE CodeWord word(u64 value) {
    const i64 log = floor_log2(value);
    const u64 top = 1ull << log;
    return {top | (value ^ top) << (log + 1), 2 * log + 1};
  }
  static INLINE Parsed parse(u64 stream) {
    const i64 log = __builtin_ctzll(stream | 1ull << 63);
    if (log > MAX_LOG) return {0, 0};
    const u64 top = 1ull << log;
    return {(i64)(top | (stream >> (log + 1) & (top - 1))), 2 * log + 1};
  }
};

struct Omega {
  static INLINE i64 length(u64 value) { return word(value).bits; }
  static INLINE CodeWord word(u64 value) { return value < SMALL ? small.words[value] : make_word(value); }
  static INLINE Parsed parse(u64 stream) {
    i64 value = 1, bits = 1;
    while (stream & 1) {
      if (value > MAX_LOG) return {0, 0};
      const u64 top = 1ull << value;
      bits += value + 1;
      stream >>= 1;
      const u64 low = stream & (top - 1);
      stream >>= value;
      value = top | low;
    }
    return {value, bits};
  }

 private:
  static constexpr u64 SMALL = 256;

  static constexpr CodeWord make_word(u64 value) {
    CodeWord code{0, 1};
    for (; value > 1; value = floor_log2(value)) {
      const i64 log = floor_log2(value);
      code.word = code.word << (log + 1) | (value ^ 1ull << log) << 1 | 1;
      code.bits += log + 1;
    }
    return code;
  }

  // The code words of most gaps and magnitudes.
  struct Table {
    CodeWord words[SMALL] = {};
    constexpr Table() {
      for (u64 value = 1; value < SMALL; value++) words[value] = make_word(value);
    }
  };
  static const Table small;
};

constexpr Omega::Table Omega::small{};

INLINE u32 magnitude_of(i32 value) { return value < 0 ? -(u32)value : value; }

// Calls visit(first, digits, size) for each tile: `size` digits, followed by zeros up to the end of the row.
template <class Visit>
INLINE void for_digits(const u32* words, i64 count, i64 bits, Visit visit) {
  CodeFields fields(bits);
  alignas(64) i32 digits[TILE];
  for (i64 first = 0; first < count; first += TILE) {
    const i64 size = smaller(TILE, count - first);
    for (i64 i = 0; i < size; i += ROW, fields.advance()) {
      const bool straddles = fields.straddles();
#pragma GCC unroll 8
      for (i64 part = 0; part < PARTS; part++) {
        const Ints own = fields.digits(words, part, straddles);
        memcpy(digits + i + part * VECTOR, &own, sizeof own);
      }
    }
    for (i64 i = size; i % ROW; i++) digits[i] = 0;
    visit(first, digits, size);
  }
}

// Calls visit(index, digit) for each digit that is not zero. Zeros are skipped a row at a time.
template <class Visit>
INLINE void for_nonzero(const u32* words, i64 count, i64 bits, Visit visit) {
  for_digits(words, count, bits, [&](i64 first, const i32* digits, i64 size) {
    for (i64 row = 0; row < size; row += ROW) {
      u32 hits = 0;
      for (u32 lane = 0; lane < ROW; lane++) hits |= (u32)(digits[row + lane] != 0) << lane;
      for (; hits; hits &= hits - 1) {
        const i64 i = row + __builtin_ctz(hits);
        visit(first + i, digits[i]);
      }
    }
  });
}

// Bits of the stream in the sparse and in the dense layout.
template <class Code>
INLINE void elias_measure(const u32* words, i64 count, i64 bits, i64* sizes) {
  i64 last = -1, hits = 0, gap_bits = 0, sparse_bits = 0, dense_bits = 0;
  for_nonzero(words, count, bits, [&](i64 i, i32 digit) {
    const u32 magnitude = magnitude_of(digit);
    gap_bits += Code::length(i - last);
    sparse_bits += Code::length(magnitude);
    dense_bits += Code::length(magnitude + 1ull);
    hits++;
    last = i;
  });
  sizes[0] = 1 + gap_bits + sparse_bits + hits + Code::length(count - last);
  sizes[1] = 1 + (count - hits) * Code::length(1) + dense_bits + hits;
}

// Appends bits; may write up to 8 bytes behind the last.
struct BitWriter {
  u8* out;
  u64 pending = 0;  // fewer than 8 bits between calls
  i64 bits = 0;

  INLINE void put(CodeWord code) {
    pending |= code.word << bits;
    bits += code.bits;
    const u64 word = little_endian(pending);
    memcpy(out, &word, sizeof word);
    const i64 bytes = bits / 8;
    out += bytes;
    pending = pending >> 4 * bytes >> 4 * bytes;  // in two steps: a shift by 64 is undefined
    bits %= 8;
  }
};

template <class Code>
INLINE void elias_encode_codes(const u32* words, i64 count, i64 bits, i64 dense, u8* out) {
  BitWriter stream{out};
  stream.put({(u64)dense, 1});
  if (dense) {
    for_digits(words, count, bits, [&](i64, const i32* digits, i64 size) {
      for (i64 i = 0; i < size; i++) {
        CodeWord code = Code::word(magnitude_of(digits[i]) + 1ull);
        code.word |= (u64)(digits[i] < 0) << code.bits;
        code.bits += digits[i] != 0;
        stream.put(code);
      }
    });
    return;
  }
  i64 last = -1;
  for_nonzero(words, count, bits, [&](i64 i, i32 digit) {
    stream.put(Code::word(i - last));
    const CodeWord code = Code::word(magnitude_of(digit));
    stream.put({code.word << 1 | (digit < 0), code.bits + 1});
    last = i;
  });
  stream.put(Code::word(count - last));
}

// Reads bits at any position; zeros behind the end.
struct BitReader {
  const u8* data;
  i64 bytes;

  INLINE u64 at(i64 bit) const {
    const i64 byte = bit / 8;
    u64 word = 0;
    if (byte + 8 <= bytes)
      memcpy(&word, data + byte, sizeof word);
    else if (byte < bytes)
      memcpy(&word, data + byte, bytes - byte);
    return little_endian(word) >> bit % 8;
  }
};

// Packs digits that arrive in the order of their indices, with zeros for missing ones.
struct DigitPacker {
  u32* out;
  i64 count, bits;
  i64 first = 0;  // of the tile
  alignas(64) i32 digits[TILE] = {};

  INLINE DigitPacker(u32* out, i64 count, i64 bits) : out(out), count(count), bits(bits) {}

  INLINE void put(i64 i, i32 digit) {
    while (i - first >= TILE) write();
    digits[i - first] = digit;
  }
  INLINE void finish() {
    while (first < count) write();
  }

 private:
  __attribute__((noinline)) void write() {
    CodePacker packer(out, bits);
    const i64 size = smaller(TILE, count - first);
    for (i64 i = 0; i < size; i += ROW) packer.put(digits + i);
    packer.finish();
    memset(digits, 0, sizeof digits);
    out += bits * ROW;
    first += TILE;
  }
};

// The functions below return the bit behind the stream, or 0 if the payload is corrupt. `position` is checked before it
// is more than a code word and a sign behind the payload's end.
template <class Code>
INLINE i64 decode_sparse(BitReader stream, i64 count, i64 max_magnitude, DigitPacker& out) {
  const i64 end = 8 * stream.bytes;
  i64 position = 1, i = -1;
  for (;;) {
    const u64 word = stream.at(position);
    const Parsed gap = Code::parse(word);
    position += gap.bits;
    i += gap.value;
    if (gap.bits == 0 || position > end || i > count) return 0;
    if (i == count) return position;
    // `word` has at least 57 valid bits, of which a sign and a valid magnitude need 32.
    const u64 rest = gap.bits <= 25 ? word >> gap.bits : stream.at(position);
    const Parsed magnitude = Code::parse(rest >> 1);
    position += 1 + magnitude.bits;
    if (magnitude.bits == 0 || position > end || magnitude.value > max_magnitude) return 0;
    const i32 sign = -(i32)(rest & 1);
    out.put(i, ((i32)magnitude.value ^ sign) - sign);
  }
}

template <class Code>
INLINE i64 decode_dense(BitReader stream, i64 count, i64 max_magnitude, DigitPacker& out) {
  const i64 end = 8 * stream.bytes;
  i64 position = 1, left = 0;
  u64 word = 0;  // the next `left` bits
  for (i64 i = 0; i < count; i++) {
    if (left < 32) {  // enough for a valid element; an invalid one is rejected also without its end
      word = stream.at(position);
      left = 57;
    }
    const Parsed element = Code::parse(word);
    const i64 magnitude = element.value - 1, used = element.bits + (magnitude != 0);
    const i32 sign = -(i32)(word >> element.bits & 1);
    position += used;
    if (element.bits == 0 || magnitude > max_magnitude || position > end) return 0;
    word >>= used;
    left -= used;
    out.put(i, ((i32)magnitude ^ sign) - sign);
  }
  return position;
}

template <class Code>
INLINE i64 elias_decode_codes(const u8* payload, i64 bytes, i64 count, i64 bits, u32* words) {
  const BitReader stream{payload, bytes};
  DigitPacker out(words, count, bits);
  const i64 max_magnitude = (1 << (bits - 1)) - 1;
  const i64 end = stream.at(0) & 1 ? decode_dense<Code>(stream, count, max_magnitude, out)
                                   : decode_sparse<Code>(stream, count, max_magnitude, out);
  // Only zero bits may follow, up to the end of the byte.
  if (!end || ceil_div(end, 8) != bytes || (end % 8 && payload[bytes - 1] >> end % 8)) return 0;
  out.finish();
  return 1;
}

KERNEL(void, elias_measure)(const u32* words, i64 count, i64 bits, i64 omega, i64* sizes) {
  omega ? elias_measure<Omega>(words, count, bits, sizes) : elias_measure<Gamma>(words, count, bits, sizes);
}

// `out` holds the measured bits and 8 bytes more.
KERNEL(void, elias_encode_codes)(const u32* words, i64 count, i64 bits, i64 omega, i64 dense, u8* out) {
  omega ? elias_encode_codes<Omega>(words, count, bits, dense, out)
        : elias_encode_codes<Gamma>(words, count, bits, dense, out);
}

// Returns true if the payload is valid; `words` is undefined otherwise.
KERNEL(i64, elias_decode_codes)(const u8* payload, i64 bytes, i64 count, i64 bits, i64 omega, u32* words) {
  return omega ? elias_decode_codes<Omega>(payload, bytes, count, bits, words)
               : elias_decode_codes<Gamma>(payload, bytes, count, bits, words);
}

}  // namespace ISA

#endif
