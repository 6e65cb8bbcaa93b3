"""Gives damaged payloads to every decoder. Run by test_corrupt_payloads.py on a library that checks each access.

python corrupt_payloads_driver.py DAMAGED PAIRED    prints, as JSON, how many inputs each decoder refused and decoded
python corrupt_payloads_driver.py overrun           reads one word too many

DAMAGED inputs, and as many of fixed width, are made and decoded in C++ (corrupt_payloads.cpp); with 0 the installed
library will do. PAIRED ones go through
`native` and `reference`, which must agree: on the bits, or that the input is wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers import same_bits

from horovod_quant.kernels import native, native_library, reference
from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.kernels.formats import CodeFormat, RotatedFormat
from horovod_quant.kernels.keys import Key, RngKey
from horovod_quant.kernels.layout import (
    ROW,
    TILE,
    buckets,
    ceil_div,
    code_words,
    split_points,
    sum_words,
    tiles,
)
from horovod_quant.kernels.rotation import rotated_elements
from horovod_quant.kernels.segments import Batch, segment_kernels

SEED = 20
KEY = Key(1, 2)
DTYPES = (np.float32, np.float16, np.float64, np.uint16)
NORMS = [0, -0.0, 1e-45, -1e-45, 1e-39, 2.0**-96, 1, -1, 3e38, -3e38, np.inf, -np.inf, np.nan]
REFUSAL = re.compile(
    "^(words: |words of lengths|norms: |scales: |steps: |[0-9]+ workers' |payload |offsets of |"
    "index [0-9]+ is out of bounds)"
)

Counts = dict[str, Counter]


class Out(NamedTuple):
    """Stands for an array to decode to: each backend gets its own."""

    elements: int
    dtype: Any


class Case(NamedTuple):
    """A call of a decoder. ``fits`` is whether the lengths are right; None where the decoder has to find out."""

    kernel: str
    arguments: tuple
    fits: bool | None


# ---- in C++ --------------------------------------------------------------------------------------------------------


def in_cpp(inputs: int, counts: Counts) -> None:
    library = ctypes.CDLL(os.environ["HOROVOD_QUANT_LIBRARY"])
    names = native_library.loaded().available
    for fuzzer, first, second in (
        ("fuzz_elias", "refused", "decoded"),
        ("fuzz_fixed_width", "finite", "not finite"),
    ):
        for number, name in enumerate(names):
            found = (ctypes.c_int64 * 2)()
            item = ctypes.c_int64(ceil_div(inputs, len(names)))
            seed = ctypes.c_uint64(SEED + number)
            at = [ctypes.byref(found, 8 * i) for i in range(2)]
            getattr(library, fuzzer)(ctypes.c_int64(number), seed, item, *at)
            counts[f"{fuzzer} {name}"].update({first: found[0], second: found[1]})


# ---- in both backends ----------------------------------------------------------------------------------------------


def length(rng: np.random.Generator) -> int:
    return int(rng.choice([rng.integers(0, 4), rng.integers(0, 200), rng.integers(TILE - 2, 2 * TILE + 3)]))


def words_of(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, count).astype(np.int32)


def norms_of(rng: np.random.Generator, count: int) -> np.ndarray:
    if rng.random() < 0.5:
        return rng.random(count).astype(np.float32)
    odd = rng.choice(np.array(NORMS, np.float32), count)
    return np.where(
        rng.random(count) < 0.3, rng.integers(0, 2**32, count).astype(np.uint32).view(np.float32), odd
    )


def resized(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Shorter, or longer: an array of its own, so that what is behind its end is not its neighbour."""
    if len(array) and rng.random() < 0.6:
        return array[: rng.choice([len(array) - 1, rng.integers(0, len(array))])].copy()
    return np.concatenate([array, array[:1], np.zeros(rng.integers(1, 40), array.dtype)])


def one_resized(rng: np.random.Generator, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """One of some workers' arrays resized; or an array missing."""
    worker = int(rng.integers(len(arrays)))
    if rng.random() < 0.2:
        return arrays[:worker] + arrays[worker + 1 :]
    return [resized(rng, array) if i == worker else array for i, array in enumerate(arrays)]


def sum_case(rng: np.random.Generator) -> Case:
    count, width, bucket_size = length(rng), int(rng.integers(1, 17)), ROW * int(rng.integers(1, 40))
    words, norms = words_of(rng, sum_words(count, width)), norms_of(rng, buckets(count, bucket_size))
    damage = rng.integers(3)
    words = resized(rng, words) if damage == 1 else words
    norms = resized(rng, norms) if damage == 2 else norms
    fits = len(words) == sum_words(count, width) and len(norms) >= buckets(count, bucket_size)
    levels, factor = int(rng.integers(1, 2**15)), float(rng.choice([1.0, 1 / 3, 1e30]))
    out = Out(count, rng.choice(DTYPES))
    return Case("decode_uniform_sum", (words, norms, bucket_size, levels, width, factor, out), fits)


def codes_case(kernel: str, most_bits: int) -> Callable[[np.random.Generator], Case]:
    def make(rng: np.random.Generator) -> Case:
        count, bits = length(rng), int(rng.integers(2, most_bits + 1))
        bucket_size, workers = ROW * int(rng.integers(1, 40)), int(rng.integers(1, 5))
        words = [words_of(rng, code_words(count, bits)) for _ in range(workers)]
        norms = [norms_of(rng, buckets(count, bucket_size)) for _ in range(workers)]
        damage = rng.integers(3)
        words = one_resized(rng, words) if damage == 1 else words
        norms = one_resized(rng, norms) if damage == 2 else norms
        fits = 0 < len(words) == len(norms)
        fits = fits and min(map(len, words)) >= code_words(count, bits)
        fits = fits and min(map(len, norms)) >= buckets(count, bucket_size)
        factor = float(rng.choice([1.0, 0.25, 1e30]))
        return Case(kernel, (words, norms, bucket_size, bits, factor, Out(count, rng.choice(DTYPES))), fits)

    return make


def vote_case(rng: np.random.Generator) -> Case:
    tile_count, workers = int(rng.integers(0, 4)), int(rng.integers(1, 6))
    words = [words_of(rng, ROW * tile_count) for _ in range(workers)]
    words = one_resized(rng, words) if rng.random() < 0.6 else words
    fits = bool(words) and len(set(map(len, words))) == 1 and not len(words[0]) % ROW
    return Case("vote", (words, KEY, TILE * int(rng.integers(5))), fits)


def signs_case(rng: np.random.Generator) -> Case:
    count = length(rng)
    words = words_of(rng, code_words(count, 1))
    words = resized(rng, words) if rng.random() < 0.6 else words
    magnitude = float(rng.choice([1.0, -0.3, 1e38, np.nan]))
    fits = len(words) >= code_words(count, 1)
    return Case("decode_signs", (words, magnitude, Out(count, rng.choice(DTYPES))), fits)


def flags_case(rng: np.random.Generator) -> Case:
    count = length(rng)
    words = words_of(rng, ceil_div(count, 32))
    words = resized(rng, words) if rng.random() < 0.6 else words
    return Case("unpack_flags", (words, count), len(words) == ceil_div(count, 32))


def elias_case(rng: np.random.Generator) -> Case:
    count, bits, code = length(rng) // 4, int(rng.integers(2, 17)), str(rng.choice(["gamma", "omega"]))
    top = reference.uniform_levels(bits)
    digits = rng.integers(-top, top + 1, count) * (rng.random(count) < rng.choice([0.01, 0.2, 1]))
    words = reference.pack_codes(reference.codes_of_digits(digits.astype(np.int32), bits), bits)
    payload = reference.elias_encode_codes(words, bits, count, code)
    damage = rng.integers(4)
    if damage == 1:
        payload = resized(rng, payload)
    elif damage == 2:
        payload = payload.copy()
        payload[rng.integers(0, len(payload), 2)] ^= (1 << rng.integers(0, 8, 2)).astype(np.uint8)
    elif damage == 3:
        payload = rng.integers(0, 256, len(payload)).astype(np.uint8)
    return Case("elias_decode_codes", (payload, count, bits, code), True if damage == 0 else None)


def rotated_case(rng: np.random.Generator) -> Case:
    count, bits, workers = length(rng), int(rng.integers(1, 5)), int(rng.integers(1, 4))
    needed = code_words(rotated_elements(count), bits)
    words = [words_of(rng, needed) for _ in range(workers)]
    scales = [norms_of(rng, tiles(count)) for _ in range(workers)]
    damage, keys = rng.integers(3), [Key(worker, 5) for worker in range(workers)]
    words = one_resized(rng, words) if damage == 1 else words
    scales = one_resized(rng, scales) if damage == 2 else scales
    fits = len(words) == len(scales) == workers
    fits = fits and min(map(len, words)) >= needed and min(map(len, scales)) >= tiles(count)
    out = Out(count, rng.choice(DTYPES))
    return Case("add_rotated", (words, scales, bits, keys, 0.5, out, 0, bool(rng.integers(2))), fits)


def rotated_sum_case(rng: np.random.Generator) -> Case:
    count, width = length(rng), int(rng.integers(4, 9))
    needed = sum_words(rotated_elements(count), width)
    words, steps = words_of(rng, needed), norms_of(rng, tiles(count))
    damage = rng.integers(3)
    words = resized(rng, words) if damage == 1 else words
    if rng.random() < 0.3:
        return Case("rotated_sum_checks", (words, width, count), len(words) == needed)
    steps = resized(rng, steps) if damage == 2 else steps
    fits = len(words) == needed and len(steps) >= tiles(count)
    out = Out(count, rng.choice(DTYPES))
    return Case("decode_rotated_sum", (words, steps, width, Key(3, 4), 0.5, out), fits)


def segments_case(rng: np.random.Generator) -> Case:
    """Payloads of several segments, of which one is too short, or longer than all of them."""
    elements = tuple(int(n) for n in rng.choice([0, 1, 40, 1025, 2100], int(rng.integers(2, 5))))
    outs = [Out(n, np.float32) for n in elements]
    chains = [RngKey(0, str(i)) for i in range(len(elements))]
    batch = Batch(elements, [0] * len(elements), chains, [0] * len(elements))
    bits, bucket_size = int(rng.integers(2, 5)), ROW * int(rng.integers(1, 40))
    kind = rng.integers(3)
    if kind == 0:
        lengths = [buckets(n, bucket_size) + code_words(n, bits) for n in elements]
    elif kind == 1:
        lengths = [min(n, 1) + code_words(rotated_elements(n), bits) + tiles(n) for n in elements]
    else:
        lengths = [ROW * tiles(n) + ceil_div(tiles(n), ROW) for n in elements]
    at = split_points(lengths)
    payloads = [words_of(rng, at[-1]) for _ in range(1 if kind == 2 else int(rng.integers(1, 4)))]
    needed = at[-1]
    if rng.random() < 0.5 and needed:
        worker = int(rng.integers(len(payloads)))
        longer = np.concatenate([payloads[worker], words_of(rng, 40)])
        payloads[worker] = (
            longer if rng.random() < 0.3 else payloads[worker][: rng.integers(0, needed)].copy()
        )
    fits = min(map(len, payloads)) >= needed
    if kind == 0:
        levels = str(rng.choice(["uniform", "exponential"]))
        codec = CodeFormat(levels, bits, "max", bucket_size)
        return Case("segments.decode_codes", (codec, payloads, at, 0.5, outs), fits)
    if kind == 1:
        arguments = (RotatedFormat(bits, bool(rng.integers(2))), batch, "worker", payloads, at, 0.5, outs)
        return Case("segments.decode_rotated", arguments, fits)
    return Case("segments.decode_signs", (payloads[0], batch, at, 0.5, outs), fits)


MAKERS = [
    rotated_case,
    rotated_sum_case,
    segments_case,
    sum_case,
    codes_case("decode_uniform_codes", 16),
    codes_case("decode_exponential", 8),
    vote_case,
    signs_case,
    flags_case,
    elias_case,
]


def outcome(backend: Any, case: Case) -> np.ndarray | str:
    """What a backend decodes, or the message with which it refuses."""
    arguments = [made(argument) for argument in case.arguments]
    refusal = CorruptPayloadError if case.kernel == "elias_decode_codes" else (ValueError, IndexError)
    kind, _, kernel = case.kernel.rpartition(".")
    try:
        found = getattr(segment_kernels(backend) if kind else backend, kernel)(*arguments)
    except refusal as error:
        return str(error)
    return np.concatenate([np.zeros(0, np.float32), *found]) if kind else found


def made(argument: Any) -> Any:
    if isinstance(argument, Out):
        return np.full(argument.elements, 77, argument.dtype)
    is_outs = isinstance(argument, list) and argument and isinstance(argument[0], Out)
    return list(map(made, argument)) if is_outs else argument


def in_both_backends(inputs: int, counts: Counts) -> None:
    rng = np.random.default_rng(SEED)
    instruction_sets = native_library.loaded().available
    for number in range(inputs):
        case = MAKERS[number % len(MAKERS)](rng)
        native_library.loaded().use(instruction_sets[number // len(MAKERS) % len(instruction_sets)])
        one, other = outcome(native, case), outcome(reference, case)
        if isinstance(one, str):
            assert isinstance(other, str), f"{case}: native alone refuses: {one}"
            assert not case.fits, f"{case}: refused: {one}"
            assert REFUSAL.match(one), one
            assert REFUSAL.match(other), other
        else:
            assert not isinstance(other, str), f"{case}: reference alone refuses: {other}"
            assert case.fits is not False, f"{case}: decoded"
            assert same_bits(one, other), f"{case}: other bits"
        counts[case.kernel]["refused" if isinstance(one, str) else "decoded"] += 1


def overrun() -> None:
    words, out = np.zeros(ROW - 1, np.int32), np.zeros(TILE, np.float32)
    native_library.call("decode_signs", address(words), TILE, 1.0, address(out), 0)


def main() -> None:
    native_library.load()
    if sys.argv[1] == "overrun":
        overrun()
        return
    counts: Counts = defaultdict(Counter)
    if damaged := int(sys.argv[1]):
        in_cpp(damaged, counts)
    with np.errstate(all="ignore"):
        in_both_backends(int(sys.argv[2]), counts)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
