// EDEN's kernels: rotation.py says what they mean. Included once for each instruction set, after native_kernels.h.
//
// A bucket is a tile, which stays in the first-level cache. Transforms take the stages in the order of rotation.py: those
// within a vector of the instruction set by shuffles, the others between vectors.

namespace ISA {

constexpr i64 VECTOR = VECTOR_BYTES / 4;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef i32 Ints __attribute__((vector_size(VECTOR_BYTES)));

// The order of lanes in which each has the place of the one at a distance of h.
template <i64 H>
INLINE Ints swapped_lanes() {
  Ints lanes;
  for (i64 lane = 0; lane < VECTOR; lane++) lanes[lane] = lane ^ H;
  return lanes;
}

// The sign bit where a lane is the second one of its pair.
template <i64 H>
INLINE Ints second_lanes() {
  Ints signs;
  for (i64 lane = 0; lane < VECTOR; lane++) signs[lane] = lane & H ? (i32)0x80000000 : 0;
  return signs;
}

// (a + b, a - b) of lanes at a distance of h, as other + own or other + (-own).
template <i64 H>
INLINE Floats stage_within(Floats own) {
#if defined(__clang__)
  Floats other;
  for (i64 lane = 0; lane < VECTOR; lane++) other[lane] = own[lane ^ H];
#else
  const Floats other = __builtin_shuffle(own, swapped_lanes<H>());
#endif
  return other + (Floats)((Ints)own ^ second_lanes<H>());
}

INLINE Floats stages_within(Floats values) {
  values = stage_within<1>(values);
  values = stage_within<2>(values);
  if (VECTOR > 4) values = stage_within<4 % VECTOR>(values);
  if (VECTOR > 8) values = stage_within<8 % VECTOR>(values);
  return values;
}

INLINE void butterfly(Floats& a, Floats& b) {
  const Floats sum = a + b;
  b = a - b;
  a = sum;
}

// Two stages, h and 2 h, between vectors; h in vectors.
INLINE void two_stages_between(Floats* values, i64 count, i64 h) {
  for (i64 block = 0; block < count; block += 4 * h)
    for (i64 i = block; i < block + h; i++) {
      Floats a = values[i], b = values[i + h], c = values[i + 2 * h], d = values[i + 3 * h];
      butterfly(a, b);
      butterfly(c, d);
      butterfly(a, c);
      butterfly(b, d);
      values[i] = a, values[i + h] = b, values[i + 2 * h] = c, values[i + 3 * h] = d;
    }
}

INLINE void stages_between(Floats* values, i64 count) {
  i64 h = 1;
  for (; 4 * h <= count; h *= 4) two_stages_between(values, count, h);
  if (h < count)
    for (i64 i = 0; i < h; i++) butterfly(values[i], values[i + h]);
}

// A bit of a word, as a sign bit.
INLINE u32 sign_at(u32 word, i64 place) { return word >> place << 31; }

struct Signs {
  Random<GENERAL> random;
  i64 first_row;

  INLINE Signs(const Key* key, i64 start) : random(*key, 0), first_row(start / ROW) {}
  INLINE u32 of(i64 row, i64 number) const {
    return random.hash((u32)(2 * (first_row + row) + number) * WEYL + random.k0, 0);
  }
};

struct Bucket {
  alignas(64) float values[TILE];

  // The transform of `size` elements; before it the signs of that number, whose first row in the array is `row`.
  template <bool SIGNED>
  INLINE void transform(const Signs& signs, i64 row, i64 number, i64 size) {
    Floats* vectors = (Floats*)values;
    Ints places;
    for (i64 lane = 0; lane < VECTOR; lane++) places[lane] = 31 - lane;
    for (i64 i = 0; i < size; i += ROW) {
      const u32 hash = SIGNED ? signs.of(row + i / ROW, number) : 0;
      for (i64 part = 0; part < ROW / VECTOR; part++) {
        Floats& own = vectors[i / VECTOR + part];
        Floats flipped = own;
        if (SIGNED) {
          const Ints bits = (Ints{} + (i32)(hash >> part * VECTOR)) << places;
          flipped = (Floats)((Ints)flipped ^ (bits & (i32)0x80000000));
        }
        own = stages_within(flipped);
      }
    }
    stages_between(vectors, size / VECTOR);
  }

  // The inverse rotation, times a unit.
  INLINE void turn_back(const Signs& signs, i64 first_row, i64 size, float unit, float* RESTRICT out) {
    transform<false>(signs, 0, 0, size);
    transform<true>(signs, first_row, 1, size);
    for (i64 i = 0; i < size; i += ROW) {
      const u32 hash = signs.of(first_row + i / ROW, 0);
      for (i64 lane = 0; lane < ROW; lane++)
        out[i + lane] = float_of(bits_of(values[i + lane]) ^ sign_at(hash, lane)) * unit;
    }
  }
};

INLINE i64 rotated_elements(i64 count) {  // of a bucket
  i64 size = ROW;
  while (size < count) size *= 2;
  return size;
}

INLINE double tree(double* lanes) {
  for (i64 half = ROW / 2; half; half /= 2)
    for (i64 lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

struct LloydMax {
  i64 bits;
  const float *levels, *thresholds;
};

INLINE LloydMax lloyd_max(i64 bits) {
  static const float LEVELS[] = {0.7978846f, 0.4527800f, 1.5104176f, 0.2450942f, 0.7560053f,
                                 1.3439093f, 2.1519457f, 0.1283950f, 0.3880483f, 0.6567591f,
                                 0.9423405f, 1.2562312f, 1.6180464f, 2.0690172f, 2.7325896f};
  static const float THRESHOLDS[] = {0.9815988f, 0.5005497f, 1.0499573f, 1.7479275f, 0.2582217f, 0.5224037f,
                                     0.7995498f, 1.0992858f, 1.4371388f, 1.8435318f, 2.4008034f};
  return {bits, LEVELS + (1 << (bits - 1)) - 1, THRESHOLDS + (1 << (bits - 1)) - bits};
}

// Elements of a table of eight, by the lower bits of the indices of a row.
INLINE void look_up(const float* table, const u32* RESTRICT indices, float* RESTRICT values) {
#if !defined(__clang__)
  if (VECTOR >= 8) {  // a shuffle takes the indices modulo the number of lanes
    Floats lanes;
    for (i64 lane = 0; lane < VECTOR; lane++) lanes[lane] = table[lane % 8];
    for (i64 i = 0; i < ROW; i += VECTOR) {
      Ints own;
      memcpy(&own, indices + i, sizeof own);
      const Floats found = __builtin_shuffle(lanes, own);
      memcpy(values + i, &found, sizeof found);
    }
    return;
  }
#endif
  for (i64 lane = 0; lane < ROW; lane++) values[lane] = table[indices[lane] % 8];
}

// A row's codes, and their levels times the coordinates, added to the lanes.
template <i64 BITS>
INLINE void level_row(const float* RESTRICT z, const float* RESTRICT limits, const float* RESTRICT levels,
                      u32* RESTRICT codes, double* RESTRICT lanes) {
  constexpr i64 COUNT = 1 << (BITS - 1);
  alignas(64) u32 indices[ROW];
  alignas(64) float chosen[ROW];
  for (i64 lane = 0; lane < ROW; lane++) {
    const float magnitude = float_of(bits_of(z[lane]) & ABS);
    u32 index = 0;
    for (i64 k = 0; k < COUNT - 1; k++) index += magnitude > limits[k];
    indices[lane] = index;
    codes[lane] = index | (u32)(z[lane] < 0) << (BITS - 1);
  }
  look_up(levels, indices, chosen);
  for (i64 lane = 0; lane < ROW; lane++)
    lanes[lane] += (double)float_of(bits_of(z[lane]) & ABS) * (double)chosen[lane];
}

template <i64 BITS>
INLINE void encode_rotated(const void* x, i64 type, i64 count, const Signs& signs, u32* out, float* scales) {
  DefaultArithmetic scope;
  Reader in(x, type, count);
  const LloydMax table = lloyd_max(BITS);
  for (i64 tile = 0; tile < in.tiles(); tile++) {
    const float* source = in.tile(tile);
    const i64 size = rotated_elements(in.elements(tile));
    CodePacker packer(out + tile * BITS * ROW, BITS);
    Maximum largest;
    for (i64 i = 0; i < size; i += ROW) largest.add(source + i);
    const float maximum = largest.take();
    alignas(64) u32 codes[ROW] = {};
    if (!(maximum >= 0x1p-96f && maximum < float_of(INFINITE))) {
      scales[tile] = maximum < float_of(INFINITE) ? 0.0f : float_of(0x7FC00000);
      for (i64 i = 0; i < size; i += ROW) packer.put_codes(codes);
      packer.finish();
      continue;
    }
    const i64 exponent = (i64)(bits_of(maximum) >> 23) - 127, shift = smaller(exponent, 126);
    const float power = float_of((u32)(127 - shift) << 23);
    Bucket bucket;
    alignas(64) double lanes[ROW] = {};
    for (i64 i = 0; i < size; i += ROW) {
      in.prefetch_next(tile, i / ROW);
      float* RESTRICT values = bucket.values + i;
      for (i64 lane = 0; lane < ROW; lane++) {
        const float value = source[i + lane] * power;
        values[lane] = float_of(bits_of(value) & ABS) < 0x1p-100f ? 0.0f : value;
      }
      for (i64 lane = 0; lane < ROW; lane++) lanes[lane] += (double)values[lane] * (double)values[lane];
    }
    const double squares = tree(lanes);
    bucket.transform<true>(signs, tile * ROW, 0, size);
    bucket.transform<true>(signs, tile * ROW, 1, size);

    const float unit = (float)__builtin_sqrt(squares * (double)size);
    float limits[8], levels[8];
    for (i64 k = 0; k < 8; k++) levels[k] = table.levels[k & ((1 << (BITS - 1)) - 1)];
    for (i64 k = 0; k < (1 << (BITS - 1)) - 1; k++) limits[k] = table.thresholds[k] * unit;
    for (double& lane : lanes) lane = 0;
    for (i64 i = 0; i < size; i += ROW) {
      level_row<BITS>(bucket.values + i, limits, levels, codes, lanes);
      packer.put_codes(codes);
    }
    packer.finish();
    const u64 two_to_shift = (u64)(1023 + shift) << 52;
    double factor;
    memcpy(&factor, &two_to_shift, sizeof factor);
    scales[tile] = (float)(squares / tree(lanes) * factor);
  }
}

KERNEL(void, encode_rotated)(const void* x, i64 type, i64 count, i64 bits, const Key* key, i64 start, u32* out,
                             float* scales) {
  const Signs signs(key, start);
  switch (bits) {
    case 1: return encode_rotated<1>(x, type, count, signs, out, scales);
    case 2: return encode_rotated<2>(x, type, count, signs, out, scales);
    case 3: return encode_rotated<3>(x, type, count, signs, out, scales);
    case 4: return encode_rotated<4>(x, type, count, signs, out, scales);
  }
}

KERNEL(void, decode_rotated)(const u32* words, const float* scales, i64 count, i64 bits, float factor, const Key* key,
                             i64 start, void* data, i64 type) {
  DefaultArithmetic scope;
  Writer out(data, type, count);
  const Signs signs(key, start);
  const LloydMax table = lloyd_max(bits);
  float levels[8];
  for (i64 i = 0; i < 8; i++) levels[i] = table.levels[i & ((1 << (bits - 1)) - 1)];
  for (i64 tile = 0; tile < out.tiles(); tile++) {
    const i64 size = rotated_elements(out.elements(tile));
    CodeFields fields(bits);
    Bucket bucket;
    for (i64 i = 0; i < size; i += ROW, fields.advance()) {
      out.prefetch_next(tile, i / ROW);
      alignas(64) u32 codes[ROW];
      fields.read_codes(words + tile * bits * ROW, fields.straddles(), [&](i64 lane, u32 code) { codes[lane] = code; });
      float* RESTRICT values = bucket.values + i;
      look_up(levels, codes, values);
      for (i64 lane = 0; lane < ROW; lane++)
        values[lane] = float_of(bits_of(values[lane]) ^ sign_at(codes[lane], bits - 1));
    }
    bucket.turn_back(signs, tile * ROW, size, scales[tile] * factor, out.tile(tile));
    out.store(tile);
  }
}

}  // namespace ISA
