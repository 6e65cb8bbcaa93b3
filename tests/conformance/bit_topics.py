"""Cases of rotations, of one bit an element, of packing, Elias codes and random bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from conformance.suite import FAR, KEY, LONG, NOT_FINITE, SPECIAL, Draw, Out, Script, topic
from helpers import buckets_of_all_sizes

from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import Key, RngKey, hash32
from horovod_quant.kernels.layout import ROW, TILE, buckets, code_words, sum_words, tiles
from horovod_quant.kernels.rotation import rotated_elements

LONG_GAPS = (28, 29)  # numbers of `elias`, with each code and 16 bits
LARGEST = (0, 2.0**-64, 2.0**-20, 1.0, 2.0**59, 2.0**60 * (1 - 2.0**-24), 2.0**60, 2.0**127)

# ---- rotations


@topic(40, quick=(1, 4, 6, 8, 12, 14))
def rotated(draw: Draw) -> Script:
    """Whole buckets and parts of them, with keys of one worker and of several."""
    bits, trellis = 1 + draw.number % 4, draw.number // 4 % 2 == 1
    x, norms, _, start = draw.gradient()
    words, scales = yield "encode_rotated", x, bits, KEY, start, None, None, trellis
    outs = Out(len(words), np.int32), Out(len(scales), np.float32)
    yield "encode_rotated", x, bits, draw.key(), start, *outs, trellis
    units = np.resize(np.concatenate([norms, [-2.5, 1e38, np.inf]]), len(scales)).astype(np.float32)
    for sent in ((words, scales), (draw.words(len(words)), units)):
        yield "decode_rotated", *sent, bits, KEY, draw.factor(), draw.out(len(x)), start, trellis
    workers = draw.pick(2, 3, 4)
    everybody = [words, *(draw.words(len(words)) for _ in range(1, workers))]
    all_scales = [np.roll(units, worker) for worker in range(workers)]
    keys = [RngKey(3, "w").correlated("worker", bits, 0, 3), *(draw.key() for _ in range(1, workers))]
    yield "add_rotated", everybody, all_scales, bits, keys, draw.factor(), draw.out(len(x)), start, trellis


def around_zero(draw: Draw, largest: float) -> Iterator[np.ndarray]:
    """A bucket's range may stay as it is unless something in it is too large or tiny."""
    x = np.clip(draw.rng.standard_normal(TILE) / 5, -1, 1).astype(np.float32) * np.float32(largest)
    x[0], x[1::7] = largest, 0.0
    for tiny in np.float32([largest * 2.0**-60, 2.0**-63, 1.75 * largest * 2.0**-61, 2.0**-126, 1e-45]):
        for x[5] in (tiny, -np.nextafter(tiny, np.float32(0))):
            yield x


@topic(64, quick=(1, 4, 11))
def rotated_numbers_of_all_sizes(draw: Draw) -> Script:
    """Around what counts as zero, or of sixteen buckets, a whole program of each of Triton's kernels."""
    bits, trellis, largest = 1 + draw.number % 4, draw.number // 4 % 2 == 1, LARGEST[draw.number // 8]
    whole = [*map(buckets_of_all_sizes, (bits, bits + 4)), np.zeros(TILE, np.float32), NOT_FINITE]
    for x in around_zero(draw, largest) if largest else [np.concatenate(whole)]:
        words, scales = yield "encode_rotated", x, bits, KEY, 0, None, None, trellis
    yield "decode_rotated", words, scales, bits, KEY, 0.5, Out(len(x), np.float32), 0, trellis


@topic(2, quick=(1,))
def rotated_with_keys_of_words(draw: Draw) -> Script:
    x = draw.normal(100)
    steps = (0, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 7, 2**40, int(draw.rng.integers(2**62)))
    for worker, step in enumerate(steps):
        yield "step_word", step
        yield "composed.decode_rotated_of_step", x, step, worker, Out(100, np.float32)


@topic(40, backends=("native",))
def rotated_sums(draw: Draw) -> Script:
    width, signs = 4 + draw.number % 5, Key(3, 4)
    x, _, _, start = draw.gradient()
    count = len(x)
    yield "rotated_samples", x, int(draw.rng.integers(1, TILE + 1)), signs, start
    steps = np.resize(np.float32([0.03, 1e-30, 0.0, np.nan, 1e30, np.inf]), tiles(count))
    key = draw.key()
    words, checks = yield "encode_rotated_sum", x, steps, width, signs, key, start
    outs = Out(len(words), np.int32), Out(len(checks), np.int32)
    yield "encode_rotated_sum", x, steps, width, signs, key, start, *outs
    for given in (words, draw.words(len(words))):
        yield "rotated_sum_checks", given, width, count
        yield "decode_rotated_sum", given, steps, width, signs, draw.factor(), draw.out(count), start


# ---- one bit


def one_bit(draw: Draw, beta: float) -> Script:
    x, _, _, start = draw.gradient()
    count = len(x)
    scale = np.abs(draw.normal(count) * 2.0 ** draw.rng.integers(-150, 100, count)).astype(np.float32)
    odd = draw.rng.random(count) < 0.3
    scale[odd] = np.abs(draw.rng.choice(SPECIAL, int(odd.sum())))
    momentum = (scale * draw.rng.choice(np.float32([-1, -0.3, 0, 1]), count)).astype(np.float32)
    yield "binarize", x, momentum, scale, beta, draw.key(), start
    zeros = np.zeros(count, np.float32)
    yield "binarize", x, zeros, zeros, beta, KEY, 0, Out(tiles(count) * ROW, np.int32)


@topic(24, quick=(0, 3, 7))
def binarize(draw: Draw) -> Script:
    yield from one_bit(draw, draw.cycle(0.9, 0.999, 0.5))


@topic(12, quick=(1,), backends=("native", "triton"))
def binarize_with_extreme_betas(draw: Draw) -> Script:
    """TensorFlow's optimizer of graphs replaces ``x * 0`` by 0, which loses the sign of a zero momentum."""
    yield from one_bit(draw, draw.cycle(0.0, 1.0))


@topic(1)
def binarize_rounds_each_operation(draw: Draw) -> Script:
    """What a fused multiply-add would get wrong, and draws that round to exactly the momentum, which are no 1."""
    x, momentum, scale = draw.normal(3, 4 * TILE)
    yield "binarize", x, momentum, np.abs(scale), 0.9, KEY
    count = 5 * TILE
    scale = draw.rng.uniform(1, 2, count).astype(np.float32)
    uniform = (hash32(0, count, KEY).view(np.int32) >> 8) * 2.0**-23
    yield "binarize", np.zeros(count, np.float32), (uniform * scale).astype(np.float32), scale, 1.0, KEY


@topic(24, quick=(0, 2, 3))
def vote_and_signs(draw: Draw) -> Script:
    tile_count = draw.cycle(1, 0, 3, 2)
    workers = draw.cycle(3, 1, 4, 20, 12, 2, 300, 9, 64, 5, 63, 16, 32)
    words = list(draw.words(workers * tile_count * ROW).reshape(workers, -1))
    yield "vote", words, draw.key(), draw.pick(0, FAR)
    found = yield "vote", words, KEY, 5 * TILE, Out(tile_count * ROW, np.int32)
    count = max(0, tile_count * TILE - draw.pick(0, 1, 33, 1000))
    # One of them: within one graph XLA takes such constants for each other.
    tiny = draw.pick(0.0, 1e-41, 3e-45)
    for magnitude in (1.0, -0.3, tiny, 1e38, tiny, 65519.999):
        yield "decode_signs", found, magnitude, draw.out(count)


# ---- packing, Elias codes, random bits


@topic(48, quick=(0, 16, 20), backends=("native", "tensorflow"))
def packing(draw: Draw) -> Script:
    for width in (1 + draw.number % 16, *range(2 + draw.number % 5, 17, 5)):
        count = draw.next_length() if draw.number % 4 else draw.pick(5000, 1024, LONG)
        yield "pack_sum", draw.words(count), width
        yield "unpack_sum", draw.words(sum_words(count, width)), width, count
        codes = draw.rng.integers(0, 1 << width, count).astype(np.uint32)
        words = yield "pack_codes", codes, width, None, draw.pick(False, True)
        yield "unpack_codes", words, width, count
        yield "unpack_codes", draw.words(len(words) + 40), width, count
        if width > 1:
            digits = yield "digits_of_codes", codes, width
            yield "codes_of_digits", digits, width


@topic(48, backends=("native",))
def elias(draw: Draw) -> Script:
    """Of sparse codes, and of words that no encoder wrote: signs of zeros, and codes behind the last."""
    code, bits, count = draw.cycle("gamma", "omega"), 2 + draw.number // 2 % 15, draw.length() % 6000
    has_long_gap = draw.number in LONG_GAPS
    count = 5_000_000 if has_long_gap else count
    top, share = (
        reference.uniform_levels(bits),
        0 if has_long_gap else draw.pick(0, 0.0005, 0.01, 0.1, 0.5, 1),
    )
    digits = np.minimum(draw.rng.geometric(min(1.0, 3 / top), count), top) * draw.rng.choice([-1, 1], count)
    digits = np.where(draw.rng.random(count) < share, digits, 0).astype(np.int32)
    if has_long_gap:
        digits[4_000_000:4_000_002] = top, -1
    words = reference.pack_codes(reference.codes_of_digits(digits, bits), bits)
    stream = yield "elias_encode_codes", words, bits, count, code
    yield "elias_decode_codes", stream, count, bits, code, Out(len(words), np.int32)
    count %= LONG
    words = draw.words(code_words(count, bits) + int(draw.rng.integers(40)))
    words[draw.rng.random(len(words)) < 0.5] = -(2**31)
    stream = yield "elias_encode_codes", words, bits, count, code
    yield "elias_decode_codes", stream, count, bits, code


@topic(3, quick=(0, 1, 2), backends=("tensorflow",))
def random_bits(draw: Draw) -> Script:
    for start, count in ((0, 0), (0, 1), (37, 100), (2**32 - 50, 100), (2**40, 5)):
        for key in (KEY, draw.key(), draw.key(), Key(1, 2, 1, 7, 2**32 - 1, 2**32 - 1)):
            yield "hash32", start, count, key


@topic(3, quick=(0, 1, 2), backends=("tensorflow",))
def random_bits_of_steps(draw: Draw) -> Script:
    """Steps and workers that are known only when a graph runs."""
    for step in (0, 1, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**63 - 1, int(draw.rng.integers(2**62))):
        seed = draw.cycle(0, -1, 2**70 + 3)
        yield "composed.random_bits_of_step", seed, np.array(step), np.array(step % 1000)


@topic(1, quick=())
def many_elements(draw: Draw) -> Script:
    """What is rare."""
    count, bucket_size = 300_000, 1024
    x, momentum = draw.normal(2, count)
    norms = list(draw.rng.uniform(0.1, 10, (3, buckets(count, bucket_size))).astype(np.float32))
    words = [draw.words(code_words(count, 4)) for _ in range(3)]
    yield "binarize", x, momentum, np.abs(draw.normal(count)), 0.9, KEY
    yield "decode_uniform_codes", words, norms, bucket_size, 4, 1 / 3, Out(count, np.float32)
    yield "encode_uniform_sum", x, norms[0], bucket_size, 31, 8, KEY
    yield "encode_exponential", x, norms[0], bucket_size, 4, KEY
    yield "bucket_square_sums", x, bucket_size
    yield "encode_rotated", x[: 40 * TILE], 3, KEY
    assert rotated_elements(40 * TILE) == 40 * TILE
