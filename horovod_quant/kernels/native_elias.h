// Elias coding: the stream is defined in entropy.py. Included once for each instruction set: no include guard.

namespace ISA {

// Limits of entropy.py: no code word is longer than 57 bits, so one unaligned 64-bit word holds any.
constexpr u32 MAX_MAGNITUDE = (1 << 15) - 1;
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

// A number and the length of its code word, which is 0 where no code word of ours starts.
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

// Calls visit(index, value) for each non-zero value. Zeros are skipped a row at a time.
template <class Visit>
INLINE void for_nonzero(const i32* values, i64 count, Visit visit) {
  for (i64 first = 0; first < count; first += ROW) {
    u32 hits = 0;
    if (first + ROW <= count)
      for (u32 lane = 0; lane < ROW; lane++) hits |= (u32)(values[first + lane] != 0) << lane;
    else
      for (u32 lane = 0; lane < count - first; lane++) hits |= (u32)(values[first + lane] != 0) << lane;
    for (; hits; hits &= hits - 1) {
      const i64 i = first + __builtin_ctz(hits);
      visit(i, values[i]);
    }
  }
}

// Bits of the stream in the sparse and in the dense layout. Returns 0 if a magnitude is too large for either.
template <class Code>
INLINE i64 elias_measure(const i32* values, i64 count, i64* bits) {
  i64 last = -1, hits = 0, gap_bits = 0, sparse_bits = 0, dense_bits = 0;
  u32 largest = 0;
  for_nonzero(values, count, [&](i64 i, i32 value) {
    const u32 magnitude = magnitude_of(value);
    largest = magnitude > largest ? magnitude : largest;
    gap_bits += Code::length(i - last);
    sparse_bits += Code::length(magnitude);
    dense_bits += Code::length(magnitude + 1ull);
    hits++;
    last = i;
  });
  bits[0] = 1 + gap_bits + sparse_bits + hits + Code::length(count - last);
  bits[1] = 1 + (count - hits) * Code::length(1) + dense_bits + hits;
  return largest <= MAX_MAGNITUDE;
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
INLINE void elias_encode(const i32* values, i64 count, i64 dense, u8* out) {
  BitWriter stream{out};
  stream.put({(u64)dense, 1});
  if (dense) {
    for (i64 i = 0; i < count; i++) {
      CodeWord code = Code::word(magnitude_of(values[i]) + 1ull);
      code.word |= (u64)(values[i] < 0) << code.bits;
      code.bits += values[i] != 0;
      stream.put(code);
    }
    return;
  }
  i64 last = -1;
  for_nonzero(values, count, [&](i64 i, i32 value) {
    stream.put(Code::word(i - last));
    const CodeWord code = Code::word(magnitude_of(value));
    stream.put({code.word << 1 | (value < 0), code.bits + 1});
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

// The functions below return the bit behind the stream, or 0 if the payload is corrupt. `position` never gets further
// than a code word and a sign behind the payload's end before it is checked.
template <class Code>
INLINE i64 decode_sparse(BitReader stream, i64 count, i64 max_magnitude, i32* out) {
  const i64 end = 8 * stream.bytes;
  i64 position = 1, i = -1;
  for (;;) {
    const u64 word = stream.at(position);
    const Parsed gap = Code::parse(word);
    position += gap.bits;
    i += gap.value;
    if (gap.bits == 0 || position > end || i > count) return 0;
    if (i == count) return position;
    // Of the 57 bits that are certain to be in `word`, a sign and a sound magnitude need 32.
    const u64 rest = gap.bits <= 25 ? word >> gap.bits : stream.at(position);
    const Parsed magnitude = Code::parse(rest >> 1);
    position += 1 + magnitude.bits;
    if (magnitude.bits == 0 || position > end || magnitude.value > max_magnitude) return 0;
    const i32 sign = -(i32)(rest & 1);
    out[i] = ((i32)magnitude.value ^ sign) - sign;
  }
}

template <class Code>
INLINE i64 decode_dense(BitReader stream, i64 count, i64 max_magnitude, i32* out) {
  const i64 end = 8 * stream.bytes;
  i64 position = 1, left = 0;
  u64 word = 0;  // the next `left` bits
  for (i64 i = 0; i < count; i++) {
    if (left < 32) {  // which is enough for a sound element; any other is refused too when its end is missing
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
    out[i] = ((i32)magnitude ^ sign) - sign;
  }
  return position;
}

template <class Code>
INLINE i64 elias_decode(const u8* payload, i64 bytes, i64 count, i64 max_magnitude, i32* out) {
  const BitReader stream{payload, bytes};
  const i64 end = stream.at(0) & 1 ? decode_dense<Code>(stream, count, max_magnitude, out)
                                   : decode_sparse<Code>(stream, count, max_magnitude, out);
  // Nothing but zero bits follows, up to the end of the byte.
  return end && ceil_div(end, 8) == bytes && (end % 8 == 0 || payload[bytes - 1] >> end % 8 == 0);
}

KERNEL(i64, elias_measure)(const i32* values, i64 count, i64 omega, i64* bits) {
  return omega ? elias_measure<Omega>(values, count, bits) : elias_measure<Gamma>(values, count, bits);
}

// `out` holds the measured bits and 8 bytes more.
KERNEL(void, elias_encode)(const i32* values, i64 count, i64 omega, i64 dense, u8* out) {
  omega ? elias_encode<Omega>(values, count, dense, out) : elias_encode<Gamma>(values, count, dense, out);
}

// `out` is zero before. Returns whether the payload is sound.
KERNEL(i64, elias_decode)(const u8* payload, i64 bytes, i64 count, i64 max_magnitude, i64 omega, i32* out) {
  return omega ? elias_decode<Omega>(payload, bytes, count, max_magnitude, out)
               : elias_decode<Gamma>(payload, bytes, count, max_magnitude, out);
}

}  // namespace ISA
