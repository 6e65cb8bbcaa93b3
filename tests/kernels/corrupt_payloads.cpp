// Feeds damaged payloads to the decoders of native.cpp, which it includes. Built with sanitizers and run by
// test_corrupt_payloads.py. Every buffer is an allocation of its own, exactly as long as native.py lets it be, so that
// one byte too far is seen.

#include "native.cpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace {

#define KERNEL_OF(isa, name) isa::JOIN(name, isa)
#define KERNELS_OF(isa)                                                            \
  {                                                                                \
    KERNEL_OF(isa, elias_measure), KERNEL_OF(isa, elias_encode_codes),             \
        KERNEL_OF(isa, elias_decode_codes), KERNEL_OF(isa, decode_uniform_sum),    \
        KERNEL_OF(isa, decode_uniform_codes),                                      \
        KERNEL_OF(isa, decode_exponential), KERNEL_OF(isa, vote),                  \
        KERNEL_OF(isa, decode_signs), KERNEL_OF(isa, add_rotated),                 \
        KERNEL_OF(isa, decode_rotated_sum), KERNEL_OF(isa, rotated_sum_checks)     \
  }

struct Kernels {
  decltype(&KERNEL_OF(baseline, elias_measure)) elias_measure;
  decltype(&KERNEL_OF(baseline, elias_encode_codes)) elias_encode_codes;
  decltype(&KERNEL_OF(baseline, elias_decode_codes)) elias_decode_codes;
  decltype(&KERNEL_OF(baseline, decode_uniform_sum)) decode_uniform_sum;
  decltype(&KERNEL_OF(baseline, decode_uniform_codes)) decode_uniform_codes;
  decltype(&KERNEL_OF(baseline, decode_exponential)) decode_exponential;
  decltype(&KERNEL_OF(baseline, vote)) vote;
  decltype(&KERNEL_OF(baseline, decode_signs)) decode_signs;
  decltype(&KERNEL_OF(baseline, add_rotated)) add_rotated;
  decltype(&KERNEL_OF(baseline, decode_rotated_sum)) decode_rotated_sum;
  decltype(&KERNEL_OF(baseline, rotated_sum_checks)) rotated_sum_checks;
};

const Kernels KERNELS[] = {
    KERNELS_OF(baseline),
#if defined(__x86_64__)
    KERNELS_OF(avx2),
    KERNELS_OF(avx512),
#endif
};

using baseline::ceil_div;
using baseline::smaller;

i64 larger(i64 a, i64 b) { return a < b ? b : a; }

void require(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "FAILED: %s\n", what);
  abort();
}

// ---- random numbers, buffers ------------------------------------------------------------------------------------------

struct Dice {  // splitmix64
  u64 state;

  u64 next() {
    u64 z = state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }
  i64 below(i64 bound) { return (i64)(next() % (u64)bound); }
  i64 between(i64 low, i64 high) { return low + below(high - low + 1); }

  // Mostly short ones, and those around a tile.
  i64 length() {
    switch (below(4)) {
      case 0: return below(4);
      case 1: return below(200);
      case 2: return between(TILE - 2, TILE + 34);
      default: return below(700);
    }
  }
};

template <class T>
struct Buffer {
  i64 size;
  std::unique_ptr<T[]> data;

  explicit Buffer(i64 size) : size(size), data(new T[size]()) {}
  Buffer(const T* from, i64 count) : Buffer(count) {
    if (count) memcpy(data.get(), from, count * sizeof(T));
  }
  Buffer copy() const { return Buffer(data.get(), size); }
  T* get() const { return data.get(); }
  T& operator[](i64 i) const { return data[i]; }
};

void fill(Dice& dice, void* memory, i64 bytes) {
  u8* out = (u8*)memory;
  for (i64 i = 0; i < bytes; i += 8) {
    const u64 noise = dice.next();
    memcpy(out + i, &noise, smaller(8, bytes - i));
  }
}

// layout.py
i64 rows(i64 elements) { return ceil_div(elements, ROW); }
i64 code_words(i64 elements, i64 bits) { return ROW * ceil_div(rows(elements) * bits, 32); }
i64 sum_words(i64 elements, i64 width) { return ROW * ceil_div(rows(elements), 32 / width); }

// rotation.py
i64 rotated_elements(i64 elements) {
  i64 last = elements % TILE ? ROW : 0;
  while (last < elements % TILE) last *= 2;
  return elements / TILE * TILE + last;
}

// ---- Elias codes ------------------------------------------------------------------------------------------------------

struct Stream {
  Buffer<u8> payload;
  i64 count, bits, omega;

  Stream copy() const { return {payload.copy(), count, bits, omega}; }
};

Buffer<u8> encoded(const Kernels& kernels, const u32* words, i64 count, i64 bits, i64 omega, i64 dense) {
  i64 sizes[2];
  kernels.elias_measure(words, count, bits, omega, sizes);
  const i64 bytes = ceil_div(sizes[dense], 8);
  Buffer<u8> stream(bytes + 8);
  kernels.elias_encode_codes(words, count, bits, omega, dense, stream.get());
  return Buffer<u8>(stream.get(), bytes);
}

Stream sound_stream(const Kernels& kernels, Dice& dice) {
  const i64 count = dice.length(), bits = dice.between(2, 16), omega = dice.below(2), dense = dice.below(2);
  const i64 one_in = 1ll << dice.below(10), top = (1 << (bits - 1)) - 1;
  Buffer<i32> digits(rows(count) * ROW);
  for (i64 i = 0; i < count; i++) {
    if (dice.below(one_in)) continue;
    const i64 magnitude = larger(1, dice.between(1, top) >> dice.below(bits));
    digits[i] = (i32)(dice.below(2) ? -magnitude : magnitude);
  }
  Buffer<u32> words(code_words(count, bits));
  baseline::CodePacker packer(words.get(), bits);
  for (i64 row = 0; row < rows(count); row++) packer.put(digits.get() + row * ROW);
  packer.finish();
  return {encoded(kernels, words.get(), count, bits, omega, dense), count, bits, omega};
}

void flip(Dice& dice, const Buffer<u8>& payload) {
  if (!payload.size) return;
  const i64 bit = dice.below(8 * payload.size);
  payload[bit / 8] ^= 1 << bit % 8;
}

Buffer<u8> joined(const u8* first, i64 first_size, const u8* second, i64 second_size) {
  Buffer<u8> both(first_size + second_size);
  if (first_size) memcpy(both.get(), first, first_size);
  if (second_size) memcpy(both.get() + first_size, second, second_size);
  return both;
}

Stream damaged(Dice& dice, const Stream& sound) {
  Stream stream = sound.copy();
  const Buffer<u8>& payload = sound.payload;
  const i64 at = dice.below(payload.size), size = payload.size;
  Buffer<u8> noise(dice.between(1, 24));
  if (dice.below(2)) fill(dice, noise.get(), noise.size);
  switch (dice.below(9)) {
    case 0:
      for (i64 flips = dice.between(1, 3); flips; flips--) flip(dice, stream.payload);
      break;
    case 1: stream.payload = Buffer<u8>(payload.get(), at); break;
    case 2: stream.payload = joined(payload.get(), size, noise.get(), noise.size); break;
    case 3: fill(dice, stream.payload.get(), size); break;
    case 4: fill(dice, stream.payload.get() + at, size - at); break;
    case 5: memset(stream.payload.get() + at, dice.below(2) ? 255 : 0, size - at); break;
    case 6: stream.payload = joined(payload.get(), at, payload.get() + at / 2, size - at / 2); break;
    case 7: stream.count = larger(0, stream.count + dice.between(-2, 2)); break;
    case 8: stream.bits = larger(2, stream.bits - dice.between(0, 3)); break;
  }
  return stream;
}

// Whether the stream is refused; what is decoded has that stream for its encoding.
bool is_refused(const Kernels& kernels, const Stream& stream) {
  const auto& [payload, count, bits, omega] = stream;
  Buffer<u32> words(code_words(count, bits));
  Dice filler{1};
  fill(filler, words.get(), words.size * sizeof(u32));
  if (!kernels.elias_decode_codes(payload.get(), payload.size, count, bits, omega, words.get())) return true;
  const Buffer<u8> again = encoded(kernels, words.get(), count, bits, omega, payload[0] & 1);
  require(again.size == payload.size && !memcmp(again.get(), payload.get(), again.size), "another encoding");
  return false;
}

// ---- words of fixed width ---------------------------------------------------------------------------------------------

const float NORMS[] = {0.0f,   -0.0f,   1e-45f,  -1e-45f,   1e-39f,  0x1p-126f, 0x1p-96f, 1.0f,
                       -1.0f,  3e38f,   -3e38f,  INFINITY, -INFINITY, NAN,     -NAN};

Buffer<float> norms_of(Dice& dice, i64 count) {
  Buffer<float> norms(count);
  fill(dice, norms.get(), count * sizeof(float));
  const i64 kind = dice.below(3);  // any bits, odd numbers, ordinary numbers
  for (i64 i = 0; i < count && kind; i++)
    norms[i] = kind == 1 ? NORMS[dice.below(sizeof NORMS / sizeof *NORMS)] : 0.001f * dice.between(1, 1000);
  return norms;
}

// What came from some workers: any words, and norms.
struct Received {
  static constexpr i64 MOST = 4;
  Buffer<u32> words[MOST];
  Buffer<float> norms[MOST];
  const u32* word_pointers[MOST];
  const float* norm_pointers[MOST];

  Received(Dice& dice, i64 word_count, i64 norm_count)
      : words{Buffer<u32>(word_count), Buffer<u32>(word_count), Buffer<u32>(word_count), Buffer<u32>(word_count)},
        norms{norms_of(dice, norm_count), norms_of(dice, norm_count), norms_of(dice, norm_count),
              norms_of(dice, norm_count)} {
    for (i64 worker = 0; worker < MOST; worker++) {
      fill(dice, words[worker].get(), word_count * sizeof(u32));
      word_pointers[worker] = words[worker].get();
      norm_pointers[worker] = norms[worker].get();
    }
  }
};

bool all_finite(const void* data, i64 type, i64 count) {
  for (i64 i = 0; i < count; i++) {
    bool finite = true;
    switch (type) {
      case FLOAT32: finite = std::isfinite(((const float*)data)[i]); break;
      case FLOAT16: finite = (((const u16*)data)[i] & 0x7C00) != 0x7C00; break;
      case FLOAT64: finite = std::isfinite(((const double*)data)[i]); break;
      case BFLOAT16: finite = (((const u16*)data)[i] & 0x7F80) != 0x7F80; break;
    }
    if (!finite) return false;
  }
  return true;
}

// Decodes any words and norms in one of the ways; returns whether the result is finite.
bool decodes_to_finite(const Kernels& kernels, Dice& dice) {
  const i64 count = dice.length(), type = dice.below(4), workers = dice.between(1, Received::MOST);
  const i64 bucket_size = ROW * dice.between(1, 40), kind = dice.below(7);
  const i64 bits = kind == 5 ? dice.between(1, 4) : dice.between(2, kind == 2 || kind == 6 ? 8 : 16);
  const i64 tiles = ceil_div(count, TILE), coordinates = rotated_elements(count);
  const i64 word_count = kind == 0   ? sum_words(count, bits)
                         : kind == 3 ? tiles * ROW
                         : kind == 4 ? code_words(count, 1)
                         : kind == 5 ? code_words(coordinates, bits)
                         : kind == 6 ? sum_words(coordinates, bits)
                                     : code_words(count, bits);
  Received received(dice, word_count, kind >= 5 ? tiles : ceil_div(count, bucket_size));
  const auto &words = received.word_pointers;
  const auto &norms = received.norm_pointers;
  const float factor = NORMS[dice.below(sizeof NORMS / sizeof *NORMS)];
  Buffer<float> units(16 * workers);
  Buffer<u8> out(count * (type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2));
  Buffer<u32> integers(kind == 3 ? tiles * ROW : kind == 6 ? tiles : 0);
  switch (kind) {
    case 0:
      kernels.decode_uniform_sum(words[0], norms[0], count, bucket_size, dice.between(1, 32767), bits, factor,
                                 out.get(), type);
      break;
    case 1:
      kernels.decode_uniform_codes(words, norms, workers, count, bucket_size, bits, factor, units.get(), out.get(),
                                   type);
      break;
    case 2:
      kernels.decode_exponential(words, norms, workers, count, bucket_size, bits, factor, units.get(), out.get(), type);
      break;
    case 3: {
      const Key key{(u32)dice.next(), (u32)dice.next(), 0, (u32)dice.next() & 1, 0, 0};
      kernels.vote(words, workers, tiles, &key, 0, integers.get());
      break;
    }
    case 4: kernels.decode_signs(words[0], count, factor, out.get(), type); break;
    case 5: {
      Buffer<Key> keys(workers);
      for (i64 i = 0; i < workers; i++) keys[i] = {(u32)dice.next(), (u32)dice.next(), 0, 0, 0, 0};
      kernels.add_rotated(words, norms, workers, count, bits, dice.below(2), factor, keys.get(), 0, out.get(), type);
      break;
    }
    case 6: {
      const Key key{(u32)dice.next(), (u32)dice.next(), 0, 0, 0, 0};
      kernels.rotated_sum_checks(words[0], bits, coordinates, integers.get());
      kernels.decode_rotated_sum(words[0], norms[0], count, bits, factor, &key, 0, out.get(), type);
      break;
    }
  }
  return all_finite(out.get(), type, count);
}

}  // namespace

// The functions count, for an index of native_library.INSTRUCTION_SETS, what became of so many inputs.

EXPORT void fuzz_elias(i64 instruction_set, u64 seed, i64 inputs, i64* refused, i64* decoded) {
  constexpr i64 DAMAGES = 20;  // of one stream
  const Kernels& kernels = KERNELS[instruction_set];
  Dice dice{seed};
  for (i64 i = 0; i < inputs; i += DAMAGES) {
    const Stream sound = sound_stream(kernels, dice);
    require(!is_refused(kernels, sound), "a sound stream was refused");
    for (i64 damage = 0; damage < DAMAGES; damage++)
      is_refused(kernels, damaged(dice, sound)) ? ++*refused : ++*decoded;
  }
}

EXPORT void fuzz_fixed_width(i64 instruction_set, u64 seed, i64 inputs, i64* finite, i64* not_finite) {
  Dice dice{seed};
  for (i64 i = 0; i < inputs; i++)
    decodes_to_finite(KERNELS[instruction_set], dice) ? ++*finite : ++*not_finite;
}
