// Kernels on gradients and packed words. Included once for each instruction set: no include guard.
//
// A gradient is processed tile by tile (1,024 elements), a tile row by row. The loops over the 32 lanes of a row are
// those that the compiler vectorizes; what differs from row to row (shift, scale, counter) is a scalar there, so one
// loop serves every width.

namespace ISA {

INLINE u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

constexpr u32 ABS = 0x7FFFFFFF, INFINITE = 0x7F800000, ONE = 0x3F800000;

INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
INLINE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

// ---- element types ------------------------------------------------------------------------------------------------

struct Half {
  u16 bits;
};
struct BFloat {
  u16 bits;
};

INLINE float to_float(float value) { return value; }
INLINE float to_float(double value) { return (float)value; }
INLINE float to_float(BFloat value) { return float_of((u32)value.bits << 16); }
INLINE float to_float(Half value) {
  const u32 sign = (value.bits & 0x8000u) << 16, magnitude = (value.bits & 0x7FFFu) << 13;
  const u32 smallest = 113u << 23;  // bits of 2^-14, the smallest normal half
  const u32 subnormal = bits_of(float_of(magnitude + smallest) - float_of(smallest));
  const u32 finite = magnitude < (0x0400u << 13) ? subnormal : magnitude + (112u << 23);
  return float_of(sign | (magnitude < (0x7C00u << 13) ? finite : magnitude | INFINITE));
}

INLINE void from_float(float value, float& out) { out = value; }
INLINE void from_float(float value, double& out) { out = value; }
INLINE void from_float(float value, BFloat& out) {
  const u32 bits = bits_of(value);
  out.bits = (bits & ABS) > INFINITE ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
INLINE void from_float(float value, Half& out) {
  const u32 bits = bits_of(value), magnitude = bits & ABS;
  const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);  // 0.5's last bit is 2^-24, as theirs
  const u32 normal = (magnitude + 0xFFF + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  const u32 finite = magnitude < (113u << 23) ? subnormal : normal;
  const u32 special = magnitude > INFINITE ? 0x7E00 : 0x7C00;
  out.bits = (bits >> 16 & 0x8000) | (magnitude < (143u << 23) ? finite : special);
}

template <class T>
void read_as_float(const T* RESTRICT from, i64 count, float* RESTRICT to) {
  i64 i = 0;
#if VECTOR_BYTES == 64
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 16 <= count; i += 16)
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif VECTOR_BYTES == 32
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
  for (; i < count; i++) to[i] = to_float(from[i]);
}

template <class T>
void write_from_float(const float* RESTRICT from, i64 count, T* RESTRICT to) {
  i64 i = 0;
#if VECTOR_BYTES == 64
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 16 <= count; i += 16)
      _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif VECTOR_BYTES == 32
  if constexpr (std::is_same_v<T, Half>)
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < count; i++) from_float(from[i], to[i]);
}

__attribute__((noinline)) void read_as_float(const void* data, i64 type, i64 first, i64 count, float* to) {
  switch (type) {
    case FLOAT32: return read_as_float((const float*)data + first, count, to);
    case FLOAT16: return read_as_float((const Half*)data + first, count, to);
    case FLOAT64: return read_as_float((const double*)data + first, count, to);
    case BFLOAT16: return read_as_float((const BFloat*)data + first, count, to);
  }
}

INLINE i64 row_bytes(i64 type) { return ROW * (type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2); }

// A gradient in memory, tile by tile.
template <class Memory>
struct Tiles {
  Memory* data;
  i64 type, count;
  i64 row_bytes = ISA::row_bytes(type);
  alignas(64) float buffer[TILE];

  INLINE Tiles(Memory* data, i64 type, i64 count) : data(data), type(type), count(count) {}

  INLINE i64 tiles() const { return ceil_div(count, TILE); }
  INLINE i64 elements(i64 tile) const { return smaller(TILE, count - tile * TILE); }
  INLINE i64 rows(i64 tile) const { return ceil_div(elements(tile), ROW); }
  INLINE bool is_float32(i64 tile) const { return type == FLOAT32 && elements(tile) == TILE; }

  // Fetches the same row of the next tile. The processor's own prefetching leaves most of the memory's speed unused
  // by loops with so much to compute.
  INLINE void prefetch_next(i64 tile, i64 row) const {
    const char* next = (const char*)data + ((tile + 1) * 32 + row) * row_bytes;
    __builtin_prefetch(next);
    __builtin_prefetch(next + row_bytes / 2);
  }
};

// Gives tiles as float32, followed by zeros where the gradient ends.
struct Reader : Tiles<const void> {
  INLINE Reader(const void* data, i64 type, i64 count) : Tiles(data, type, count) {}

  INLINE const float* tile(i64 tile) {
    if (is_float32(tile)) return (const float*)data + tile * TILE;
    return converted(tile * TILE, elements(tile));
  }

 private:
  __attribute__((noinline)) const float* converted(i64 first, i64 count) {
    read_as_float(data, type, first, count, buffer);
    for (i64 i = count; i < TILE; i++) buffer[i] = 0;
    return buffer;
  }
};

// Gives blocks of `size` elements, whole rows, as float32, followed by zeros where the last row ends.
struct Blocks {
  static constexpr i64 LARGEST = 16 * TILE;  // 64 KB: what two loops over a block share by the caches
  const void* data;
  i64 type, count, size;
  i64 row_bytes = ISA::row_bytes(type);
  alignas(64) float buffer[LARGEST];

  INLINE Blocks(const void* data, i64 type, i64 count, i64 size) : data(data), type(type), count(count), size(size) {}

  INLINE i64 blocks() const { return ceil_div(count, size); }
  INLINE i64 rows(i64 block) const { return ceil_div(smaller(size, count - block * size), ROW); }
  INLINE const float* block(i64 block) {
    const i64 first = block * size, own = smaller(size, count - first);
    if (type == FLOAT32 && own % ROW == 0) return (const float*)data + first;
    read_as_float(data, type, first, own, buffer);
    for (i64 i = own; i % ROW; i++) buffer[i] = 0;
    return buffer;
  }
  INLINE void prefetch_next(i64 block, i64 row) const {  // as that of `Tiles`
    const char* next = (const char*)data + ((block + 1) * (size / ROW) + row) * row_bytes;
    __builtin_prefetch(next);
    __builtin_prefetch(next + row_bytes / 2);
  }
};

// Where decoders write: a tile of float32 that store() rounds to the gradient's type.
struct Writer : Tiles<void> {
  INLINE Writer(void* data, i64 type, i64 count) : Tiles(data, type, count) {}

  INLINE float* tile(i64 tile) { return is_float32(tile) ? (float*)data + tile * TILE : buffer; }
  INLINE void store(i64 tile) {
    if (!is_float32(tile)) convert(tile * TILE, elements(tile));
  }

 private:
  __attribute__((noinline)) void convert(i64 first, i64 count) {
    switch (type) {
      case FLOAT32: write_from_float(buffer, count, (float*)data + first); break;
      case FLOAT16: write_from_float(buffer, count, (Half*)data + first); break;
      case FLOAT64: write_from_float(buffer, count, (double*)data + first); break;
      case BFLOAT16: write_from_float(buffer, count, (BFloat*)data + first); break;
    }
  }
};

// ---- random bits, scales ------------------------------------------------------------------------------------------

constexpr u32 WEYL = 0x9E3779B9;

// How random bits are made of the hash: they are the hash itself; it is added to a constant, or subtracted from one, as
// by joint keys of all but one of an odd number of workers; as any key says.
enum Bits { PLAIN, SUM, DIFFERENCE, GENERAL };

// keys.hash32: the counter of a row's first element, then the bits of a lane. ((h << shift) + addend) ^ flip, where the
// flip is of all bits or none, is `factor * h + addend`.
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
  // A magnitude in units of 2^-FRACTION, rounded by the bits h, and its sign. With the mirror of joint keys that is
  // floor(y + u) of the element.
  template <i64 FRACTION>
  INLINE i32 rounded(i32 magnitude, u32 h, bool negative) const {
    if (BITS == GENERAL) h ^= negative ? mirror : 0;
    const i32 fraction = h >> (32 - FRACTION);
    if (BITS == SUM || BITS == DIFFERENCE) return ((negative ? -magnitude : magnitude) + fraction) >> FRACTION;
    const i32 index = (magnitude + fraction) >> FRACTION;
    return negative ? -index : index;
  }
};

// Calls `use` with what makes the random bits of a key.
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

// As `with_random`, for what need not be fast with joint keys.
template <class Use>
INLINE void with_any_random(const Key* key, i64 start, Use use) {
  if (!(key->shift | key->addend | key->flip | key->mirror))
    use(Random<PLAIN>(*key, start));
  else
    use(Random<GENERAL>(*key, start));
}

struct InverseNorm {  // reference.inverse_norms
  float numerator;
  INLINE float operator()(float norm) const {
    const bool usable = norm >= 0x1p-96f && norm < float_of(INFINITE);
    return usable ? numerator / norm : 0;
  }
};

struct DecodingScale {  // reference.decoding_scales
  float levels, factor;
  INLINE float operator()(float norm) const {
    return norm < float_of(INFINITE) ? norm / levels * factor : float_of(0x7FC00000);
  }
};

// A scale times a power of two.
struct ShiftedScale {
  DecodingScale scale;
  float power;
  INLINE float operator()(float norm) const { return scale(norm) * power; }
};

// Tells at each row whether a bucket begins there.
struct BucketRows {
  i64 bucket_rows;
  i64 left = 0;

  INLINE explicit BucketRows(i64 bucket_size) : bucket_rows(bucket_size / ROW) {}

  INLINE bool begins() {
    if (left == 0) {
      left = bucket_rows - 1;
      return true;
    }
    left--;
    return false;
  }
};

// ---- norms --------------------------------------------------------------------------------------------------------

// A bucket's rows go into 32 lanes, which are joined at its end.
struct Maximum {
  // As integers, magnitudes are in order and NaN is the largest.
  Ints lanes[PARTS] = {};

  INLINE void add(const float* x) {
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) add(part, vector_at<Floats>(x + part * VECTOR));
  }
  INLINE void add(i64 part, Floats x) {
    const Ints magnitude = (Ints)x & (i32)ABS;
    lanes[part] = magnitude > lanes[part] ? magnitude : lanes[part];
  }
  INLINE float take() {
    alignas(64) i32 all[ROW];
    memcpy(all, lanes, sizeof all);
    i32 largest = 0;
    for (i32 lane : all) largest = lane > largest ? lane : largest;
    *this = Maximum();
    return float_of(largest < (i32)INFINITE ? largest : INFINITE);
  }
};

struct Itself {
  static INLINE void add(ProductSums& sums, i64 part, Floats x) { sums.add(part, x, Floats{} + 1.0f); }
};
struct Magnitude {
  static INLINE void add(ProductSums& sums, i64 part, Floats x) {
    sums.add(part, (Floats)((Ints)x & (i32)ABS), Floats{} + 1.0f);
  }
};
struct Square {
  static INLINE void add(ProductSums& sums, i64 part, Floats x) { sums.add(part, x, x); }
};

template <class Term>
struct Sum {
  ProductSums sums;

  INLINE void add(const float* x) {
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) Term::add(sums, part, vector_at<Floats>(x + part * VECTOR));
  }
  INLINE double take() {
    const double exact = sums.take();
    sums = ProductSums();
    u64 bits;
    memcpy(&bits, &exact, sizeof bits);
    const u64 infinite = 0x7FF0000000000000, magnitude = bits & ~(1ull << 63), half_step = 1 << 28;
    bits = magnitude < infinite ? (bits + half_step) >> 29 << 29 : infinite;
    double sum;
    memcpy(&sum, &bits, sizeof sum);
    return sum;
  }
};

// reference.norms_of_square_sums
struct Root {
  Sum<Square> squares;

  INLINE void add(const float* x) { squares.add(x); }
  INLINE float take() { return (float)__builtin_sqrt(squares.take()); }
};

template <class Norm, class T>
INLINE void for_buckets(const void* x, i64 type, i64 count, i64 bucket_size, T* out) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  Norm norm;
  i64 left = bucket_size / ROW;
  for (i64 tile = 0; tile < in.tiles(); tile++) {
    const float* values = in.tile(tile);
    const i64 rows = in.rows(tile);
    for (i64 row = 0; row < rows;) {
      const i64 stop = smaller(rows, row + left);
      left -= stop - row;
      for (; row < stop; row++) {
        in.prefetch_next(tile, row);
        norm.add(values + row * ROW);
      }
      if (left > 0) continue;
      *out++ = norm.take();
      left = bucket_size / ROW;
    }
  }
  if (left < bucket_size / ROW) *out = norm.take();
}

KERNEL(void, bucket_maxima)(const void* x, i64 type, i64 count, i64 bucket_size, float* out) {
  for_buckets<Maximum>(x, type, count, bucket_size, out);
}

KERNEL(void, bucket_square_sums)(const void* x, i64 type, i64 count, i64 bucket_size, double* out) {
  for_buckets<Sum<Square>>(x, type, count, bucket_size, out);
}

KERNEL(void, bucket_sums)(const void* x, i64 type, i64 count, i64 bucket_size, double* out) {
  for_buckets<Sum<Itself>>(x, type, count, bucket_size, out);
}

KERNEL(void, bucket_magnitude_sums)(const void* x, i64 type, i64 count, i64 bucket_size, double* out) {
  for_buckets<Sum<Magnitude>>(x, type, count, bucket_size, out);
}

// ---- packing ------------------------------------------------------------------------------------------------------

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

  INLINE void put_codes(const u32* RESTRICT codes) {
    for (i64 lane = 0; lane < ROW; lane++) words[lane] |= codes[lane] << shift;
    shift += bits;
    if (shift < 32) return;
    write();
    shift -= 32;
    // What did not fit: the upper `shift` bits of each code, which may be none.
    for (i64 lane = 0; lane < ROW; lane++) words[lane] = codes[lane] >> (bits - shift);
  }
  INLINE void put(const i32* RESTRICT digits) {
    alignas(64) u32 codes[ROW];
    for (i64 lane = 0; lane < ROW; lane++) codes[lane] = code_of(digits[lane], bits);
    put_codes(codes);
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

// Walks over the rows of packed words. digits() are those of a part of the row; several workers' words are read at the
// same place. The caller says whether the row straddles two words, so that the compiler can know.

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
    return with_sign((Ints)magnitudes, (Ints)(all << (u32)(32 - bits)));  // a sign that is zero where a code is
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

// Hands an array to a packer row by row, zeros behind its end.
template <class T, class Put>
INLINE void for_rows(const T* values, i64 count, Put put) {
  i64 i = 0;
  for (; i + ROW <= count; i += ROW) put(values + i);
  if (i == count) return;
  T last[ROW] = {};
  memcpy(last, values + i, sizeof(T) * (count - i));
  put(last);
}

KERNEL(void, codes_of_digits)(const i32* RESTRICT digits, i64 count, i64 bits, u32* RESTRICT out) {
  for (i64 i = 0; i < count; i++) out[i] = code_of(digits[i], bits);
}

KERNEL(void, pack_sum)(const i32* digits, i64 count, i64 width, u32* out) {
  SumPacker packer(out, width);
  for_rows(digits, count, [&](const i32* row) { packer.put(row); });
  packer.finish();
}

KERNEL(void, pack_codes)(const u32* codes, i64 count, i64 bits, u32* out) {
  CodePacker packer(out, bits);
  for_rows(codes, count, [&](const u32* row) { packer.put_codes(row); });
  packer.finish();
}

KERNEL(void, unpack_sum)(const u32* words, i64 count, i64 width, i32* out) {
  SumFields fields(width);
  for (i64 i = 0; i < count; i += ROW, fields.advance()) {
    Ints digits[PARTS];
    for (i64 part = 0; part < PARTS; part++) digits[part] = fields.digits(words, part, false);
    memcpy(out + i, digits, sizeof(i32) * smaller(ROW, count - i));
  }
}

KERNEL(void, unpack_codes)(const u32* words, i64 count, i64 bits, u32* out) {
  CodeFields fields(bits);
  for (i64 i = 0; i < count; i += ROW, fields.advance()) {
    Words codes[PARTS];
    for (i64 part = 0; part < PARTS; part++)
      codes[part] = fields.codes(words, part, fields.straddles()) & ((1u << bits) - 1);
    memcpy(out + i, codes, sizeof(u32) * smaller(ROW, count - i));
  }
}

// ---- encoders -----------------------------------------------------------------------------------------------------

// reference.round_uniform. Up to 127 levels have 24 fraction bits; shifts by a constant are faster.
template <bool IS_24, class Random>
struct UniformRounding {
  const float* norms;
  i64 fraction_bits;
  InverseNorm inverse;
  BucketRows buckets;
  Random random;
  float scale = 0;

  INLINE UniformRounding(const float* norms, i64 bucket_size, i64 levels, i64 fraction_bits, Random random)
      : norms(norms),
        fraction_bits(fraction_bits),
        inverse{(float)(levels << fraction_bits)},
        buckets(bucket_size),
        random(random) {}

  INLINE void row(const float* RESTRICT x, i64 row, i32* RESTRICT digits) {
    if (buckets.begins()) scale = inverse(*norms++);
    const u32 counter = random.counter(row);
    const i64 k = IS_24 ? 24 : fraction_bits;
    const float high = inverse.numerator, low = -high;
    for (u32 lane = 0; lane < ROW; lane++) {
      float y = x[lane] * scale;
      y = y < high ? y : high;  // in this form for NaN
      y = y > low ? y : low;
      const i32 fraction = random.hash(counter, lane) >> (32 - k);
      digits[lane] = ((i32)y + fraction) >> k;
    }
  }
};

// reference.round_exponential. At 8 bits the smallest level is the smallest normal float, below which floats are linear
// anyway.
template <bool IS_8_BITS, class Random>
struct ExponentialRounding {
  const float* norms;
  u32 top;
  BucketRows buckets;
  Random random;
  float scale = 0;

  INLINE ExponentialRounding(const float* norms, i64 bucket_size, i64 bits, Random random)
      : norms(norms), top((1u << (bits - 1)) - 1), buckets(bucket_size), random(random) {}

  // Indices with fraction bits, linear between levels; then their rounding.
  INLINE void row(const float* RESTRICT x, i64 row, i32* RESTRICT digits) {
    if (buckets.begins()) scale = InverseNorm{1.0f}(*norms++);
    const u32 counter = random.counter(row), smallest = (128 - top) << 23;
    const float unit = float_of((top + 150) << 23);  // 2^24 / smallest
    for (u32 lane = 0; lane < ROW; lane++) {
      const u32 y = bits_of(x[lane] * scale);
      const u32 magnitude = (i32)(y & ABS) < (i32)ONE ? y & ABS : ONE;
      const u32 h = random.hash(counter, lane);
      if (IS_8_BITS) {
        digits[lane] = random.template rounded<23>(magnitude, h, (i32)y < 0);
        continue;
      }
      const float value = float_of((i32)magnitude < (i32)smallest ? magnitude : smallest);
      const i32 above = (magnitude - ((127 - top) << 23)) * 2;
      const i32 index = (i32)magnitude < (i32)smallest ? (i32)(value * unit) : above;
      digits[lane] = random.template rounded<24>(index, h, (i32)y < 0);
    }
  }
};

template <class Rounding, class Packer>
INLINE void encode(const void* x, i64 type, i64 count, Rounding&& rounding, Packer&& packer) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  for (i64 tile = 0; tile < in.tiles(); tile++) {
    const float* values = in.tile(tile);
    const i64 rows = in.rows(tile);
    for (i64 row = 0; row < rows; row++) {
      in.prefetch_next(tile, row);
      alignas(64) i32 digits[ROW];
      rounding.row(values + row * ROW, tile * ROW + row, digits);
      packer.put(digits);
    }
  }
  packer.finish();
}

// Calls `use` with the rounding to so many levels.
template <class Use>
INLINE void with_uniform_rounding(const float* norms, i64 bucket_size, i64 levels, const Key* key, i64 start, Use use) {
  const i64 bits = smaller(24, __builtin_clz((u32)levels) - 1);  // reference.fraction_bits
  with_random(key, start, [&](auto random) INLINE_LAMBDA {
    using Random = decltype(random);
    if (bits == 24)
      use(UniformRounding<true, Random>(norms, bucket_size, levels, bits, random));
    else
      use(UniformRounding<false, Random>(norms, bucket_size, levels, bits, random));
  });
}

template <class Use>
INLINE void with_exponential_rounding(const float* norms, i64 bucket_size, i64 bits, const Key* key, i64 start,
                                      Use use) {
  with_random(key, start, [&](auto random) INLINE_LAMBDA {
    using Random = decltype(random);
    if (bits == 8)
      use(ExponentialRounding<true, Random>(norms, bucket_size, bits, random));
    else
      use(ExponentialRounding<false, Random>(norms, bucket_size, bits, random));
  });
}

template <class Packer>
INLINE void encode_uniform(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size, i64 levels,
                           const Key* key, i64 start, Packer&& packer) {
  with_uniform_rounding(norms, bucket_size, levels, key, start,
                        [&](auto rounding) INLINE_LAMBDA { encode(x, type, count, rounding, packer); });
}

KERNEL(void, round_uniform)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size, i64 levels,
                            const Key* key, i64 start, i32* out) {
  encode_uniform(x, type, count, norms, bucket_size, levels, key, start, PlainDigits{out, count});
}

KERNEL(void, encode_uniform_sum)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size, i64 levels,
                                 const Key* key, i64 start, i64 width, u32* out) {
  encode_uniform(x, type, count, norms, bucket_size, levels, key, start, SumPacker(out, width));
}

KERNEL(void, round_exponential)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size,
                                const Key* key, i64 start, i64 bits, i32* out) {
  with_exponential_rounding(norms, bucket_size, bits, key, start, [&](auto rounding) INLINE_LAMBDA {
    encode(x, type, count, rounding, PlainDigits{out, count});
  });
}

// ---- norms and codes ----------------------------------------------------------------------------------------------

enum NormKind : i64 { GIVEN, MAXIMUM, ROOT };  // MAXIMUM and ROOT: as native_each.py has them

template <class Norm>
__attribute__((noinline)) float* block_norms(const float* values, i64 rows, i64 bucket_rows, float* out) {
  for (i64 row = 0; row < rows;) {
    Norm norm;
    for (const i64 stop = smaller(rows, row + bucket_rows); row < stop; row++) norm.add(values + row * ROW);
    *out++ = norm.take();
  }
  return out;
}

// The norms of a gradient: they are there, or are found as its blocks come, or at once where no block holds a bucket.
struct Norms {
  i64 kind, bucket_size, block;
  float* out;

  INLINE Norms(i64 kind, const void* x, i64 type, i64 count, i64 bucket_size, float* out)
      : kind(kind), bucket_size(bucket_size), block(TILE), out(out) {
    const i64 bucket = smaller(bucket_size, ceil_div(count, ROW) * ROW);
    if (kind == GIVEN || count == 0) return;
    if (bucket <= Blocks::LARGEST) {
      block = bucket < TILE ? TILE / bucket * bucket : bucket;
      return;
    }
    this->kind = GIVEN;
    if (kind == MAXIMUM)
      for_buckets<Maximum>(x, type, count, bucket_size, out);
    else
      for_buckets<Root>(x, type, count, bucket_size, out);
  }
  INLINE void find(const float* values, i64 rows) {
    if (kind == MAXIMUM) out = block_norms<Maximum>(values, rows, bucket_size / ROW, out);
    if (kind == ROOT) out = block_norms<Root>(values, rows, bucket_size / ROW, out);
  }
};

template <class Rounding>
INLINE void encode_blocks(const void* x, i64 type, i64 count, Norms norms, Rounding&& rounding, CodePacker&& packer) {
  DefaultArithmetic scope;
  Blocks in(x, type, count, norms.block);
  for (i64 block = 0, first = 0; block < in.blocks(); block++, first += norms.block / ROW) {
    const float* values = in.block(block);
    const i64 rows = in.rows(block);
    norms.find(values, rows);
    for (i64 row = 0; row < rows; row++) {
      in.prefetch_next(block, row);
      alignas(64) i32 digits[ROW];
      rounding.row(values + row * ROW, first + row, digits);
      packer.put(digits);
    }
  }
  packer.finish();
}

void encode_uniform_codes(const void* x, i64 type, i64 count, i64 norm, float* norms, i64 bucket_size, const Key* key,
                          i64 start, i64 bits, u32* out) {
  const Norms found(norm, x, type, count, bucket_size, norms);
  with_uniform_rounding(norms, bucket_size, (1 << (bits - 1)) - 1, key, start, [&](auto rounding) INLINE_LAMBDA {
    encode_blocks(x, type, count, found, rounding, CodePacker(out, bits));
  });
}

void encode_exponential(const void* x, i64 type, i64 count, i64 norm, float* norms, i64 bucket_size, const Key* key,
                        i64 start, i64 bits, u32* out) {
  const Norms found(norm, x, type, count, bucket_size, norms);
  with_exponential_rounding(norms, bucket_size, bits, key, start, [&](auto rounding) INLINE_LAMBDA {
    encode_blocks(x, type, count, found, rounding, CodePacker(out, bits));
  });
}

KERNEL(void, encode_uniform_codes)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size,
                                   const Key* key, i64 start, i64 bits, u32* out) {
  encode_uniform_codes(x, type, count, GIVEN, const_cast<float*>(norms), bucket_size, key, start, bits, out);
}

KERNEL(void, encode_exponential)(const void* x, i64 type, i64 count, const float* norms, i64 bucket_size,
                                 const Key* key, i64 start, i64 bits, u32* out) {
  encode_exponential(x, type, count, GIVEN, const_cast<float*>(norms), bucket_size, key, start, bits, out);
}

// ---- decoders -----------------------------------------------------------------------------------------------------

// `at` gives values from a part of a row. Words of whole codes have those of four rows under the same number, one in
// each byte: `ready` is what is computed once for the four, `in_words` then gives the values of one.

struct UniformValue {
  template <class Fields>
  INLINE Floats at(const Fields& fields, const u32* words, i64 part, bool straddles) const {
    return __builtin_convertvector(fields.digits(words, part, straddles), Floats);
  }
};

// Digits in the highest bits of 32, which saves bringing them down: `at` gives values times 2^(32 - bits), `in_words`
// times 2^24.
struct UpperUniformValue {
  i64 bits;

  INLINE Floats at(const CodeFields& fields, const u32* words, i64 part, bool straddles) const {
    const Words codes = fields.upper_codes(words, part, straddles);
    const Words magnitudes = codes & ((1u << (bits - 1)) - 1) << (32 - bits);
    return __builtin_convertvector(with_sign((Ints)magnitudes, (Ints)codes), Floats);
  }
  // Digits of one byte each.
  template <i64 BITS, i64 NUMBER>
  INLINE Words ready(Words words) const {
    constexpr u32 MAGNITUDES = ((1u << (BITS - 1)) - 1) * 0x01010101u;
    return bytes_with_sign(words >> (u32)(BITS * NUMBER) & MAGNITUDES, words << (u32)(8 - BITS * (NUMBER + 1)));
  }
  template <i64 BITS, i64 NUMBER>
  INLINE Floats in_words(Words digits, i64 byte) const {
    return __builtin_convertvector((Ints)byte_on_top(digits, byte), Floats);
  }
};

// Whether the units of all buckets can be made 2^30 times as small without rounding.
INLINE bool can_shrink(const float* const* norms, i64 workers, i64 buckets, DecodingScale scale) {
  DefaultArithmetic scope;
  i32 smallest = bits_of(1.0f);
  for (i64 worker = 0; worker < workers; worker++)
    for (i64 bucket = 0; bucket < buckets; bucket++) {
      const i32 unit = bits_of(scale(norms[worker][bucket])) & ABS;
      smallest = unit != 0 && unit < smallest ? unit : smallest;
    }
  return smallest >= (i32)bits_of(0x1p-96f);
}

// reference.exponential_values of codes with the sign as the highest bit. An index is an exponent, of a power of two
// that is too small by the same factor everywhere. The sum is exact, and makes -0 a 0.
INLINE Floats exponential_values(Words upper_codes, i64 bits) {
  const u32 top = (1u << (bits - 1)) - 1;
  const Ints powers = (Ints)upper_codes >> (i32)(9 - bits) & (i32)(top << 23 | 0x80000000);
  return multiply_add((Floats)powers, Floats{} + float_of((254 - top) << 23), Floats{});
}

struct ExponentialValue {
  i64 bits;

  INLINE Floats at(const CodeFields& fields, const u32* words, i64 part, bool straddles) const {
    return exponential_values(fields.upper_codes(words, part, straddles), bits);
  }
  template <i64 BITS, i64 NUMBER>
  INLINE Words ready(Words words) const {
    return words;
  }
  template <i64 BITS, i64 NUMBER>
  INLINE Floats in_words(Words words, i64 byte) const {
    return exponential_values(words << (u32)(32 - BITS * (NUMBER + 1) - 8 * byte), BITS);
  }
};

// A row of the sum over the workers, in rank order. `of(worker)` gives what gives the parts of a worker's row.
template <class Of>
INLINE void sum_row(i64 workers, float* out, Of of) {
  Floats sum[PARTS];
  const auto first = of(0);
#pragma GCC unroll 8
  for (i64 part = 0; part < PARTS; part++) sum[part] = first(part);
  for (i64 worker = 1; worker < workers; worker++) {
    const auto own = of(worker);
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) sum[part] += own(part);
  }
#pragma GCC unroll 8
  for (i64 part = 0; part < PARTS; part++) memcpy(out + part * VECTOR, sum + part, sizeof(Floats));
}

template <class Fields, class Value>
INLINE void decode_row(const Fields& fields, bool straddles, const u32* const* words, const float* units, i64 workers,
                       Value value, float* out) {
  sum_row(workers, out, [&](i64 worker) INLINE_LAMBDA {
    const u32* own = words[worker];
    const float unit = units[worker];
    return [&fields, straddles, value, own, unit](i64 part) INLINE_LAMBDA {
      return value.at(fields, own, part, straddles) * unit;
    };
  });
}

// `units` has room for one float a worker.
template <class Fields, class Value, class Scale>
INLINE void decode(const u32* const* words, const float* const* norms, i64 workers, i64 count, i64 bucket_size,
                   Fields fields, Value value, Scale scale, float* units, void* data, i64 type) {
  DefaultArithmetic scope;
  Writer out(data, type, count);
  BucketRows buckets(bucket_size);
  i64 bucket = 0;
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    float* values = out.tile(tile);
    const i64 rows = out.rows(tile);
    for (i64 row = 0; row < rows; row++, values += ROW, fields.advance()) {
      if (buckets.begins()) {
        for (i64 worker = 0; worker < workers; worker++) units[worker] = scale(norms[worker][bucket]);
        bucket++;
      }
      out.prefetch_next(tile, row);
      if (fields.straddles())
        decode_row(fields, true, words, units, workers, value, values);
      else
        decode_row(fields, false, words, units, workers, value, values);
    }
    out.store(tile);
  }
}

// As `decode`, of codes of at most four bits, each of which has its place in a vector. The tables are one a worker.
template <class Value>
INLINE void decode_by_table(const u32* const* words, const float* const* norms, i64 workers, i64 count, i64 bucket_size,
                            i64 bits, Value value, DecodingScale scale, float* tables, void* data, i64 type) {
  DefaultArithmetic scope;
  Writer out(data, type, count);
  BucketRows buckets(bucket_size);
  CodeFields fields(bits);
  u32 codes[VECTOR];
  for (i64 lane = 0; lane < VECTOR; lane++) codes[lane] = lane;
  const Floats of_codes = value.at(fields, codes, 0, false);
  i64 bucket = 0;
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    float* values = out.tile(tile);
    const i64 rows = out.rows(tile);
    for (i64 row = 0; row < rows; row++, values += ROW, fields.advance()) {
      if (buckets.begins()) {
        for (i64 worker = 0; worker < workers; worker++) {
          const Floats own = of_codes * scale(norms[worker][bucket]);
          memcpy(tables + worker * VECTOR, &own, sizeof own);
        }
        bucket++;
      }
      out.prefetch_next(tile, row);
      const bool straddles = fields.straddles();
      sum_row(workers, values, [&](i64 worker) INLINE_LAMBDA {
        const u32* own = words[worker];
        Table table;
        memcpy(table.of, tables + worker * VECTOR, sizeof table.of);
        return [&fields, straddles, own, table](i64 part) INLINE_LAMBDA {
          return table[(Ints)fields.codes(own, part, straddles)];
        };
      });
    }
    out.store(tile);
  }
}

// The sums of the four rows whose codes have that number in a byte. Two parts at a time: of AVX2 they are a line of the
// caches, and their sums stay in registers.
template <i64 BITS, i64 NUMBER, class Value>
INLINE void sum_rows_of_words(const u32* const* words, i64 word, const float* units, i64 workers, Value value,
                              float* out) {
  for (i64 part = 0; part < PARTS; part += 2) {
    Floats sums[2][4];
    const auto for_values_of = [&](i64 worker, auto use) INLINE_LAMBDA {
      const u32* own = words[worker] + word + part * VECTOR;
      const float unit = units[worker];
#pragma GCC unroll 2
      for (i64 i = 0; i < 2; i++) {
        const Words ready = value.template ready<BITS, NUMBER>(vector_at<Words>(own + i * VECTOR));
#pragma GCC unroll 4
        for (i64 byte = 0; byte < 4; byte++)
          use(sums[i][byte], value.template in_words<BITS, NUMBER>(ready, byte) * unit);
      }
    };
    for_values_of(0, [](Floats& sum, Floats own) INLINE_LAMBDA { sum = own; });
    for (i64 worker = 1; worker < workers; worker++)
      for_values_of(worker, [](Floats& sum, Floats own) INLINE_LAMBDA { sum += own; });
#pragma GCC unroll 4
    for (i64 byte = 0; byte < 4; byte++)
#pragma GCC unroll 2
      for (i64 i = 0; i < 2; i++)
        memcpy(out + (byte * 8 / BITS + NUMBER) * ROW + (part + i) * VECTOR, &sums[i][byte], sizeof(Floats));
  }
}

// As `decode`, of buckets of whole words of whole codes: all rows in a word at once.
template <i64 BITS, class Value, class Scale>
INLINE void decode_words(const u32* const* words, const float* const* norms, i64 workers, i64 count, i64 bucket_size,
                         Value value, Scale scale, float* units, void* data, i64 type) {
  constexpr i64 ROWS = 32 / BITS;
  DefaultArithmetic scope;
  Writer out(data, type, count);
  BucketRows buckets(bucket_size / ROWS);
  i64 bucket = 0, word = 0;
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    float* values = out.tile(tile);
    const i64 rows = out.rows(tile);
    for (i64 row = 0; row < rows; row += ROWS, values += ROWS * ROW, word += ROW) {
      if (buckets.begins()) {
        for (i64 worker = 0; worker < workers; worker++) units[worker] = scale(norms[worker][bucket]);
        bucket++;
      }
      for (i64 i = 0; i < ROWS; i++) out.prefetch_next(tile, row + i);
      sum_rows_of_words<BITS, 0>(words, word, units, workers, value, values);
      if constexpr (BITS == 4) sum_rows_of_words<BITS, 1>(words, word, units, workers, value, values);
    }
    out.store(tile);
  }
}

// `decode_words` where it is faster than `decode`; whether it is. One worker's codes wait for memory, which prefers
// rows in their order.
template <class Value, class Scale>
INLINE bool decode_if_whole(const u32* const* words, const float* const* norms, i64 workers, i64 count, i64 bucket_size,
                            i64 bits, Value value, Scale scale, float* units, void* out, i64 type) {
  if (bits == 8 && bucket_size % (4 * ROW) == 0)
    decode_words<8>(words, norms, workers, count, bucket_size, value, scale, units, out, type);
  else if (bits == 4 && workers > 1 && bucket_size % (8 * ROW) == 0)
    decode_words<4>(words, norms, workers, count, bucket_size, value, scale, units, out, type);
  else
    return false;
  return true;
}

KERNEL(void, decode_uniform_sum)(const u32* words, const float* norms, i64 count, i64 bucket_size, i64 levels,
                                 i64 width, float factor, void* out, i64 type) {
  const DecodingScale scale{(float)levels, factor};
  float unit;
  decode(&words, &norms, 1, count, bucket_size, SumFields(width), UniformValue{}, scale, &unit, out, type);
}

// `units` has room for 16 floats a worker.
KERNEL(void, decode_uniform_codes)(const u32* const* words, const float* const* norms, i64 workers, i64 count,
                                   i64 bucket_size, i64 bits, float factor, float* units, void* out, i64 type) {
  const DecodingScale scale{(float)((1 << (bits - 1)) - 1), factor};
  if constexpr (VECTOR == 16)
    if (bits <= 4)
      return decode_by_table(words, norms, workers, count, bucket_size, bits, UniformValue{}, scale, units, out, type);
  const CodeFields fields(bits);
  if (!can_shrink(norms, workers, (count + bucket_size - 1) / bucket_size, scale))
    return decode(words, norms, workers, count, bucket_size, fields, UniformValue{}, scale, units, out, type);
  const UpperUniformValue value{bits};
  const ShiftedScale of_bytes{scale, 0x1p-24f}, of_codes{scale, float_of((95 + bits) << 23)};
  if (!decode_if_whole(words, norms, workers, count, bucket_size, bits, value, of_bytes, units, out, type))
    decode(words, norms, workers, count, bucket_size, fields, value, of_codes, units, out, type);
}

KERNEL(void, decode_exponential)(const u32* const* words, const float* const* norms, i64 workers, i64 count,
                                 i64 bucket_size, i64 bits, float factor, float* units, void* out, i64 type) {
  const DecodingScale scale{1.0f, factor};
  const ExponentialValue value{bits};
  if constexpr (VECTOR == 16)
    if (bits <= 4)
      return decode_by_table(words, norms, workers, count, bucket_size, bits, value, scale, units, out, type);
  if (!decode_if_whole(words, norms, workers, count, bucket_size, bits, value, scale, units, out, type))
    decode(words, norms, workers, count, bucket_size, CodeFields(bits), value, scale, units, out, type);
}

// ---- one bit ------------------------------------------------------------------------------------------------------

template <class Random>
struct Binarizer {  // reference.binarize
  float keep, take;
  Random random;

  // Sets `bit` of the words whose elements draw a 1.
  template <bool UPDATE>
  INLINE void row(const float* RESTRICT x, i64 row, float* RESTRICT momentum, float* RESTRICT scale, u32 bit,
                  u32* RESTRICT words) const {
    const u32 counter = random.counter(row);
    for (u32 lane = 0; lane < ROW; lane++) {
      float m = momentum[lane], b = scale[lane];
      if (UPDATE) {
        momentum[lane] = m = keep * m + take * x[lane];
        scale[lane] = b = keep * b + take * float_of(bits_of(x[lane]) & ABS);
      }
      const float width = b >= 0x1p-126f ? b : 1.0f;
      const float uniform = (float)((i32)random.hash(counter, lane) >> 8) * 0x1p-23f;
      words[lane] |= bit & -(u32)(uniform * width < m);
    }
  }

  // The last row of a gradient whose length is no multiple of 32.
  template <bool UPDATE>
  void part_row(const float* x, i64 row, i64 count, float* momentum, float* scale, u32 bit, u32* words) const {
    float m[ROW] = {}, b[ROW] = {};
    memcpy(m, momentum, sizeof(float) * count);
    memcpy(b, scale, sizeof(float) * count);
    this->row<UPDATE>(x, row, m, b, bit, words);
    memcpy(momentum, m, sizeof(float) * count);
    memcpy(scale, b, sizeof(float) * count);
    for (i64 lane = count; lane < ROW; lane++) words[lane] &= ~bit;
  }

  template <bool UPDATE>
  INLINE void tile(const float* x, i64 first_row, i64 count, float* momentum, float* scale, u32* out) const {
    alignas(64) u32 words[ROW] = {};
    u32 bit = 1;
    i64 i = 0, row = first_row;
    for (; i + ROW <= count; i += ROW, row++, bit <<= 1) {
      for (i64 lane = 0; lane < ROW; lane += 16) {
        __builtin_prefetch(momentum + i + TILE + lane);
        __builtin_prefetch(scale + i + TILE + lane);
      }
      this->row<UPDATE>(x + i, row, momentum + i, scale + i, bit, words);
    }
    if (i < count) part_row<UPDATE>(x + i, row, count - i, momentum + i, scale + i, bit, words);
    memcpy(out, words, sizeof words);
  }
};

template <class Random>
INLINE void binarize(const void* x, i64 type, i64 count, float* momentum, float* scale,
                     const Binarizer<Random>& binarizer, u32* out, u8* broken) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  for (i64 tile = 0; tile < in.tiles(); tile++, momentum += TILE, scale += TILE, out += ROW) {
    const float* values = in.tile(tile);
    Maximum largest;
    for (i64 row = 0; row < 32; row++) {
      in.prefetch_next(tile, row);
      largest.add(values + row * ROW);
    }
    broken[tile] = largest.take() == float_of(INFINITE);
    if (broken[tile])
      binarizer.template tile<false>(values, tile * ROW, in.elements(tile), momentum, scale, out);
    else
      binarizer.template tile<true>(values, tile * ROW, in.elements(tile), momentum, scale, out);
  }
}

KERNEL(void, binarize)(const void* x, i64 type, i64 count, float* momentum, float* scale, float keep, float take,
                       const Key* key, i64 start, u32* out, u8* broken) {
  with_any_random(key, start, [&](auto random) INLINE_LAMBDA {
    binarize(x, type, count, momentum, scale, Binarizer<decltype(random)>{keep, take, random}, out, broken);
  });
}

// The number of ones among the workers' bits of a part of a tile's words, a binary digit a plane.
template <i64 PLANES>
INLINE void count_ones(const u32* const* words, i64 workers, i64 at, Words* planes) {
  for (i64 plane = 0; plane < PLANES; plane++) planes[plane] = Words{};
  for (i64 worker = 0; worker < workers; worker++) {
    Words carry = vector_at<Words>(words[worker] + at);
#pragma GCC unroll 8
    for (i64 plane = 0; plane < PLANES; plane++) {
      const Words both = planes[plane] & carry;
      planes[plane] ^= carry;
      carry = both;
    }
  }
}

// Of 2^LOG workers: the upper bits of the hash are less than the count. Both as planes, compared once for 32 rows.
template <i64 LOG, class Random>
INLINE void vote_of_a_power(const u32* const* words, i64 tiles, const Random& random, u32* out) {
  for (i64 tile = 0; tile < tiles; tile++, out += ROW) {
    Words uniform[LOG][PARTS] = {};
    for (i64 row = 0; row < 32; row++) {
      alignas(64) u32 hashes[ROW];
      const u32 counter = random.counter(tile * ROW + row);
      for (u32 lane = 0; lane < ROW; lane++) hashes[lane] = random.hash(counter, lane);
#pragma GCC unroll 8
      for (i64 part = 0; part < PARTS; part++) {
        const Words own = vector_at<Words>(hashes + part * VECTOR);
#pragma GCC unroll 8
        for (i64 bit = 0; bit < LOG; bit++)  // the rows before move down
          uniform[bit][part] = uniform[bit][part] >> 1 | ((own << (u32)(LOG - 1 - bit)) & 0x80000000u);
      }
    }
#pragma GCC unroll 8
    for (i64 part = 0; part < PARTS; part++) {
      Words ones[LOG + 1], less{};
      count_ones<LOG + 1>(words, 1 << LOG, tile * ROW + part * VECTOR, ones);
#pragma GCC unroll 8
      for (i64 bit = 0; bit < LOG; bit++) {
        const Words own = uniform[bit][part];
        less = (~own & ones[bit]) | (~(own ^ ones[bit]) & less);
      }
      less |= ones[LOG];
      memcpy(out + part * VECTOR, &less, sizeof less);
    }
  }
}

template <class Random>
INLINE void vote(const u32* const* words, i64 workers, i64 tiles, const Random& random, u32* out) {
  const i64 random_bits = smaller(24, __builtin_clz((u32)workers));
  for (i64 tile = 0; tile < tiles; tile++, out += ROW) {
    alignas(64) u32 result[ROW] = {};
    for (i64 row = 0; row < 32; row++) {
      const u32 counter = random.counter(tile * ROW + row), bit = 1u << row;
      alignas(64) u32 ones[ROW] = {};
      for (i64 worker = 0; worker < workers; worker++) {
        asm volatile("");  // else GCC interleaves two workers, and then does not vectorize
        const u32* word = words[worker] + tile * ROW;
        for (i64 lane = 0; lane < ROW; lane++) ones[lane] += word[lane] >> row & 1;
      }
      for (u32 lane = 0; lane < ROW; lane++) {
        const u32 uniform = random.hash(counter, lane) >> (32 - random_bits);
        result[lane] |= bit & -(u32)(uniform * (u32)workers < ones[lane] << random_bits);
      }
    }
    memcpy(out, result, sizeof result);
  }
}

KERNEL(void, vote)(const u32* const* words, i64 workers, i64 tiles, const Key* key, i64 start, u32* out) {
  with_any_random(key, start, [&](auto random) INLINE_LAMBDA {
    switch (workers) {
      case 2: return vote_of_a_power<1>(words, tiles, random, out);
      case 4: return vote_of_a_power<2>(words, tiles, random, out);
      case 8: return vote_of_a_power<3>(words, tiles, random, out);
      case 16: return vote_of_a_power<4>(words, tiles, random, out);
      case 32: return vote_of_a_power<5>(words, tiles, random, out);
      default: return vote(words, workers, tiles, random, out);
    }
  });
}

KERNEL(void, decode_signs)(const u32* words, i64 count, float magnitude, void* data, i64 type) {
  Writer out(data, type, count);
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    float* RESTRICT values = out.tile(tile);
    const u32* RESTRICT word = words + tile * ROW;
    const i64 rows = out.rows(tile);
    for (i64 row = 0; row < rows; row++) {
      out.prefetch_next(tile, row);
      for (i64 lane = 0; lane < ROW; lane++)
        values[row * ROW + lane] = word[lane] & 1u << row ? magnitude : -magnitude;
    }
    out.store(tile);
  }
}

}  // namespace ISA
