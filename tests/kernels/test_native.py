"""The C++ kernels return the reference's bits: installed and built otherwise, on each instruction set."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest
from helpers import SCHEMES, examples, extended, keys, on_the_edge, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from native_builds import (
    BUILDS,
    CONTROL_REGISTER,
    FLUSH_AND_ROUND_TOWARDS_ZERO,
    SANITIZERS,
    SOURCE,
    compile_library,
)

from horovod_quant import kernels, simulator
from horovod_quant.kernels import entropy, native, native_each, native_library, reference, rotation
from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.keys import Key, RngKey, joint_keys_of, keys_of
from horovod_quant.kernels.layout import ROW, TILE, buckets, code_words, sum_words, tiles
from horovod_quant.kernels.native_each import SegmentTable
from horovod_quant.schemes.base import BinaryState

KEY = Key(0x12345678, 0x9ABCDEF0)
INSTALLED = "installed"
BFLOAT16 = np.uint16
DTYPES = (np.float32, np.float16, np.float64, BFLOAT16)
SPECIAL = np.array(
    [0, -0.0, 1e-45, -1e-40, 2.0**-126, -(2.0**-96), 1e-30, 2.0**-24, -1, 65519, 65520, -1e38, 3.4e38],
    np.float32,
)
NOT_FINITE = np.array([np.inf, -np.inf, np.nan], np.float32)

few = examples(20)


# ---- which library, which instruction set


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(
    scope="module",
    params=[
        f"{build}-{name}" if build == INSTALLED else extended(f"{build}-{name}")
        for build in (INSTALLED, *BUILDS)
        for name in native_library.INSTRUCTION_SETS
    ],
)
def instruction_set(request: pytest.FixtureRequest, folder: Path) -> Iterator[None]:
    build, name = request.param.rsplit("-", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "_library", None)
        if build == INSTALLED:
            load_installed()
        else:
            compiler, *flags = BUILDS[build]
            library = folder / f"{build}.so"
            native_library.load(
                library if library.exists() else compile_library(library, SOURCE, compiler, *flags)
            )
        if name not in native_library.available_instruction_sets():
            pytest.skip(f"this processor has no {name}")
        native_library.force_instruction_set(name)
        yield


each_instruction_set = pytest.mark.usefixtures("instruction_set")


def load_installed() -> None:
    try:
        native_library.load()
    except native_library.NativeKernelsUnavailable as error:
        if shutil.which("g++"):
            pytest.fail(f"{error}; there is a compiler: run scripts/setup")
        pytest.skip(str(error))


@pytest.fixture
def loaded() -> Iterator[None]:
    """The installed library with its best instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "_library", None)
        load_installed()
        yield


@pytest.mark.parametrize("header", sorted(SOURCE.parent.glob("native_*.h")), ids=lambda header: header.name)
def test_a_header_includes_what_it_needs(header: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-I", str(SOURCE.parent), "-x", "c++", "-"]
    result = subprocess.run(command, input=f'#include "{header.name}"\n', capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(header.read_text(encoding="utf-8").splitlines()) <= 400


# ---- inputs


def as_type(x: np.ndarray, dtype: Any) -> np.ndarray:
    return reference.store_float32(x, np.empty(len(x), dtype))


class Input(NamedTuple):
    """A gradient and what a kernel needs beside it."""

    x: np.ndarray
    norms: np.ndarray
    bucket_size: int
    start: int
    seed: int

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def words(self, count: int) -> np.ndarray:
        """What no encoder wrote: decoders agree on any words."""
        return self.rng().integers(-(2**31), 2**31, count).astype(np.int32)

    def out(self, dtype: Any) -> np.ndarray:
        return np.full(len(self.x), 77, dtype)


def make_input(
    count: int, bucket_size: int, start: int, seed: int, dtype: Any, norm: str, special: float
) -> Input:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20)).astype(np.float32)
    odd = rng.random(count) < special
    x[odd] = rng.choice(SPECIAL, int(odd.sum()))
    if special and count and rng.random() < 0.5:
        x[rng.integers(count)] = rng.choice(NOT_FINITE)
    x[: int(count * special)] = 0
    values = as_type(x, dtype)
    if norm == "max":
        norms = reference.bucket_maxima(values, bucket_size)
    elif norm == "l2":
        norms = reference.norms_of_square_sums(reference.bucket_square_sums(values, bucket_size))
    else:
        norms = np.abs(rng.choice(np.concatenate([SPECIAL, NOT_FINITE]), buckets(count, bucket_size)))
    return Input(values, norms, bucket_size, start, seed)


lengths = st.one_of(
    st.sampled_from([0, 1, 31, 32, 33, 63, TILE - 1, TILE, TILE + 1, 3 * TILE]), st.integers(0, 5000)
)
bucket_sizes = st.one_of(
    st.sampled_from([32, 64, 96, 1024, 2048]), st.integers(1, 100).map(lambda rows: 32 * rows)
)
seeds = st.integers(0, 2**32 - 1)
inputs = st.builds(
    make_input,
    lengths,
    bucket_sizes,
    st.one_of(st.just(0), st.integers(0, 2**35).map(lambda tile: tile * TILE)),
    seeds,
    st.sampled_from(DTYPES),
    st.sampled_from(["max", "l2", "any"]),
    st.sampled_from([0.0, 0.1, 0.5]),
)
factors = st.sampled_from([1.0, 0.25, 1 / 3, -2.0, 1e-30, 1e38])
dtypes = st.sampled_from(DTYPES)
code_bits = st.integers(2, 16)
exponential_bits = st.integers(2, 8)


def assert_same(kernel: str, *arguments: Any) -> Any:
    """Both backends return the same bits, and leave the same in the arrays that they write to."""
    copies = [[a.copy() if isinstance(a, np.ndarray) else a for a in arguments] for _ in range(2)]
    with np.errstate(all="ignore"):
        expected = getattr(reference, kernel)(*copies[0])
    actual = getattr(native, kernel)(*copies[1])
    for one, other in zip(_arrays([expected, *copies[0]]), _arrays([actual, *copies[1]])):
        assert one.shape == other.shape, kernel
        assert same_bits(one, other), f"{kernel}: {np.flatnonzero(one != other)[:5]} of {len(one)} differ"
        assert not _zeros_differ(one, other), f"{kernel}: 0 and -0 differ"
    return actual


def _arrays(values: Sequence[Any]) -> list[np.ndarray]:
    found = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += _arrays(value)
        elif isinstance(value, np.ndarray):
            found.append(value)
    return found


def _zeros_differ(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype.kind == "f" and bool(
        np.any(np.signbit(one) & (one == 0) ^ np.signbit(other) & (other == 0))
    )


# ---- norms, uniform levels


@each_instruction_set
@few
@given(given=inputs)
def test_norms(given: Input) -> None:
    assert_same("bucket_maxima", given.x, given.bucket_size)
    assert_same("bucket_square_sums", given.x, given.bucket_size)
    count = buckets(len(given.x), given.bucket_size)
    assert_same("bucket_maxima", given.x, given.bucket_size, np.full(count, 7, np.float32))
    assert_same("bucket_square_sums", given.x, given.bucket_size, np.full(count, 7, np.float64))


@each_instruction_set
@few
@given(given=inputs)
def test_sums_and_statistics(given: Input) -> None:
    count = buckets(len(given.x), given.bucket_size)
    for kernel in ("bucket_sums", "bucket_magnitude_sums"):
        assert_same(kernel, given.x, given.bucket_size)
        assert_same(kernel, given.x, given.bucket_size, np.full(count, 7, np.float64))
    for kernel in ("tensor_maximum", "tensor_mean_magnitude", "tensor_deviation"):
        assert_same(kernel, given.x)


@each_instruction_set
@few
@given(given=inputs, levels=st.one_of(st.integers(1, 200), st.integers(1, native.MAX_LEVELS)), key=keys)
def test_round_uniform(given: Input, levels: int, key: Key) -> None:
    assert_same("round_uniform", given.x, given.norms, given.bucket_size, levels, key, given.start)


@each_instruction_set
@pytest.mark.parametrize("bits", [2, 3, 8, 9])
def test_the_last_random_bit_decides(bits: int) -> None:
    levels = reference.uniform_levels(bits)
    x, norms = on_the_edge(levels, KEY)
    digits = assert_same("round_uniform", x, norms, 4096, levels, KEY)
    assert digits[::8].all()
    assert not digits[4::8].any()
    assert_same("encode_uniform_sum", x, norms, 4096, levels, bits, KEY)
    assert_same("encode_uniform_codes", x, norms, 4096, bits, KEY)


@each_instruction_set
@pytest.mark.parametrize("width", range(2, 17))
@settings(max_examples=4)
@given(given=inputs, key=keys, factor=factors, dtype=dtypes, workers=st.integers(1, 9))
def test_uniform_sums_of_each_width(
    width: int, given: Input, key: Key, factor: float, dtype: Any, workers: int
) -> None:
    x, norms, bucket_size, start, _ = given
    levels = max(1, ((1 << (width - 1)) - 1) // workers)
    words = assert_same("encode_uniform_sum", x, norms, bucket_size, levels, width, key, start)
    assert_same("encode_uniform_sum", x, norms, bucket_size, levels, width, key, start, np.zeros_like(words))
    for packed in (words, given.words(len(words))):
        assert_same("decode_uniform_sum", packed, norms, bucket_size, levels, width, factor, given.out(dtype))


@each_instruction_set
def test_many_gradients_in_one_call_have_the_bits_of_a_call_for_each() -> None:
    xs = many_gradients()
    chains, steps = [RngKey(3, f"w{i}") for i in range(len(xs))], list(range(5, 5 + len(xs)))
    starts = [1024 * i for i in range(len(xs))]
    for bucket_size, width in ((32, 4), (1024, 8), (2**40, 5)):
        table = SegmentTable(xs)
        norms = native_each.bucket_maxima_each(table, bucket_size)
        parts = [native.bucket_maxima(x, bucket_size) for x in xs]
        assert same_bits(norms, np.concatenate(parts))
        keys = [chain.joint("worker", step, 1, 3) for chain, step in zip(chains, steps)]
        arguments = (bucket_size, 7, width)
        words = [
            native.encode_uniform_sum(x, own, *arguments, key, start)
            for x, own, key, start in zip(xs, parts, keys, starts)
        ]
        out = np.zeros(sum(map(len, words)), np.int32)
        many = joint_keys_of(chains, "worker", steps, 1, 3)
        assert native_each.encode_uniform_sum_each(table, norms, *arguments, many, starts, out) is out
        assert same_bits(out, np.concatenate(words))
        outs = [np.zeros_like(x) for x in xs]
        native_each.decode_uniform_sum_each(out, norms, *arguments, 0.5, outs)
        again = [np.zeros_like(x, order="C") for x in xs]
        native_each.decode_uniform_sum_each(out, norms, *arguments, 0.5, again, SegmentTable(again))
        assert all(map(same_bits, outs, again))
        others = [np.zeros_like(x) for x in xs]
        others[4] = np.repeat(others[4], 2)[::2]  # is not contiguous
        for table_of in (outs, others, [*others[:-1], outs[-1]]):
            native_each.decode_uniform_sum_each(out, norms, *arguments, 1.0, others, SegmentTable(table_of))
            assert all(map(same_bits, outs, again))
            assert all((2 * own == other).all() for own, other in zip(outs, others))
        for own, norm, x, decoded in zip(words, parts, xs, outs):
            assert same_bits(
                native.decode_uniform_sum(own, norm, *arguments, 0.5, np.zeros_like(x, order="C")), decoded
            )


def many_gradients() -> list[np.ndarray]:
    """Of several types, one of which is not contiguous."""
    generator = np.random.default_rng(4)
    lengths = [1, 31, 1024, 1025, 4096, 70, 3333, 0]
    dtypes = [np.float32, np.float16, np.float64, np.float32, np.float32, np.float16, np.float32, np.float32]
    xs = [generator.standard_normal(length).astype(dtype) for length, dtype in zip(lengths, dtypes)]
    xs[4] = np.repeat(xs[4], 2)[::2]
    return xs


def longer_gradients() -> list[np.ndarray]:
    """Longer than what the encoder reads twice at once; the last has no finite sum of squares in float32."""
    generator = np.random.default_rng(5)
    xs = [generator.standard_normal(length).astype(np.float32) for length in (16_384, 40_001)]
    xs[1][20_000] = 1e30
    return [*xs, xs[1].astype(np.float64), np.full(70, 3e38, np.float32)]


@each_instruction_set
def test_places_of_gradients_do_as_well_as_arrays() -> None:
    arrays = [x for x in many_gradients() if len(x) and x.flags.c_contiguous]
    norms = native_each.bucket_maxima_each(SegmentTable(arrays), 1024)
    table = SegmentTable(list(map(_span, arrays)))
    assert same_bits(native_each.bucket_maxima_each(table, 1024), norms)
    assert (table.buckets(1024), table.sum_words(4)) == (
        len(norms),
        SegmentTable(arrays).sum_words(4),
    )
    words = np.arange(table.sum_words(4), dtype=np.int32)
    expected = [np.zeros_like(x) for x in arrays]
    native_each.decode_uniform_sum_each(words, norms, 1024, 7, 4, 0.5, expected)
    for known in (False, True):
        found = [np.zeros_like(x) for x in arrays]
        outs = list(map(_span, found))
        native_each.decode_uniform_sum_each(
            words, norms, 1024, 7, 4, 0.5, outs, SegmentTable(outs) if known else None
        )
        assert all(map(same_bits, found, expected))
        assert all(x.any() for x in found if len(x) > 1)


def _span(array: np.ndarray) -> BufferView:
    return BufferView(array.dtype, len(array), np.asarray).at(address(array), array, array)


@each_instruction_set
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_bits_of_many_gradients_in_one_call_are_those_of_a_call_for_each(workers: int) -> None:
    xs = many_gradients()
    xs[2][5] = np.inf
    chains, steps = [RngKey(3, f"w{i}") for i in range(len(xs))], list(range(5, 5 + len(xs)))
    starts, betas = [1024 * i for i in range(len(xs))], [0.5 + 0.05 * i for i in range(len(xs))]
    votes = []
    tile_counts = np.array([tiles(len(x)) for x in xs])
    at = np.concatenate([[0], np.cumsum(32 * tile_counts + 1)])  # with a word between
    for rank in range(workers):
        generator = np.random.default_rng(rank)
        momenta = [generator.standard_normal(len(x)).astype(np.float32) for x in xs]
        scales = [np.abs(momentum) + np.float32(0.1) for momentum in momenta]
        momenta[4] = np.repeat(momenta[4], 2)[::2]
        ms, bs = [own.copy() for own in momenta], [own.copy() for own in scales]
        keys = [chain.key("worker", step, rank) for chain, step in zip(chains, steps)]
        one_by_one = [native.binarize(*own) for own in zip(xs, ms, bs, betas, keys, starts)]
        many = keys_of(chains, "worker", steps, rank)
        words = np.zeros(at[-1], np.int32)
        table = SegmentTable(xs)
        broken = native_each.binarize_each(table, momenta, scales, betas, many, starts, at[:-1], words)
        for (own, _), low in zip(one_by_one, at):
            assert same_bits(words[low : low + len(own)], own)
        assert broken.tolist() == np.concatenate([own for _, own in one_by_one]).tolist()
        assert broken.sum() == 1
        assert all(map(same_bits, momenta, ms))
        assert all(map(same_bits, scales, bs))
        votes.append(words)
    keys = [chain.key("server", step) for chain, step in zip(chains, steps)]
    expected = [
        native.vote([own[low : high - 1] for own in votes], key, start)
        for low, high, key, start in zip(at, at[1:], keys, starts)
    ]
    served = np.zeros(at[-1], np.int32)
    native_each.vote_each(votes, at[:-1], tile_counts, keys_of(chains, "server", steps), starts, served)
    for own, low in zip(expected, at):
        assert same_bits(served[low : low + len(own)], own)
    outs = [np.zeros_like(x) for x in xs]
    outs[6] = np.repeat(outs[6], 2)[::2]
    native_each.decode_signs_each(served, at[:-1], 0.5, outs)
    for out, words in zip(outs, expected):
        assert same_bits(out.copy(), native.decode_signs(words, 0.5, np.zeros_like(out, order="C")))


@each_instruction_set
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("trellis", [False, True])
def test_rotations_of_many_gradients_in_one_call_have_the_bits_of_a_call_for_each(
    bits: int, trellis: bool
) -> None:
    xs = many_gradients()
    chains, starts = [RngKey(3, f"w{i}") for i in range(len(xs))], [1024 * i for i in range(len(xs))]
    ranks, steps = range(3), [[7 + rank + i for i in range(len(xs))] for rank in range(3)]
    lengths = [code_words(rotation.rotated_elements(len(x)), bits) for x in xs]
    ends = np.cumsum([length + tiles(len(x)) + 1 for length, x in zip(lengths, xs)])
    scales_at = ends - np.array([tiles(len(x)) for x in xs])
    words_at = scales_at - np.array(lengths)
    pieces, expected = [], []
    for rank in ranks:
        own_keys = [chain.key("worker", step, rank) for chain, step in zip(chains, steps[rank])]
        parts = [
            native.encode_rotated(x, bits, key, start, trellis=trellis)
            for x, key, start in zip(xs, own_keys, starts)
        ]
        out = np.zeros(ends[-1], np.int32)
        many = keys_of(chains, "worker", steps[rank], rank)
        table = SegmentTable(xs)
        found = native_each.encode_rotated_each(table, bits, many, starts, words_at, scales_at, out, trellis)
        assert found is out
        for (words, scales), at, scale_at in zip(parts, words_at, scales_at):
            assert same_bits(out[at : at + len(words)], words)
            assert same_bits(out[scale_at : scale_at + len(scales)].view(np.float32), scales)
        pieces.append(out)
        expected.append((parts, own_keys))
    keys = np.stack([keys_of(chains, "worker", steps[rank], rank) for rank in ranks], axis=1)
    outs = [np.zeros_like(x) for x in xs]
    outs[6] = np.repeat(outs[6], 2)[::2]
    native_each.add_rotated_each(pieces, words_at, scales_at, bits, keys, 0.25, outs, starts, trellis=trellis)
    for i, out in enumerate(outs):
        words, scales = zip(*(parts[i] for parts, _ in expected))
        own = [own_keys[i] for _, own_keys in expected]
        zeros = np.zeros_like(out, order="C")
        alone = native.add_rotated(words, scales, bits, own, 0.25, zeros, starts[i], trellis)
        assert same_bits(out.copy(), alone)
    again = [np.zeros_like(x, order="C") for x in xs]
    table = SegmentTable(again)
    native_each.add_rotated_each(pieces, words_at, scales_at, bits, keys, 0.25, again, starts, table, trellis)
    assert all(same_bits(own.copy(), other) for own, other in zip(outs, again))


CODES = {
    "uniform": (native.encode_uniform_codes, native.decode_uniform_codes),
    "exponential": (native.encode_exponential, native.decode_exponential),
}


@each_instruction_set
@pytest.mark.parametrize("levels", CODES)
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize(
    ("bits", "bucket_size"),
    [(2, 32), (4, 96), (4, 256), (4, 1024), (5, 4096), (4, 2**14), (4, 2**15), (8, 2**40)],
)
def test_codes_of_many_gradients_in_one_call_have_the_bits_of_a_call_for_each(
    levels: str, norm: str, bits: int, bucket_size: int
) -> None:
    encode, decode = CODES[levels]
    xs, ranks = [*many_gradients(), *longer_gradients()], range(3)
    xs[6][1500] = np.nan
    chains, starts = [RngKey(3, f"w{i}") for i in range(len(xs))], [1024 * i for i in range(len(xs))]
    steps = list(range(5, 5 + len(xs)))
    norm_counts = [buckets(len(x), bucket_size) for x in xs]
    norms_at = np.cumsum([0, *norm_counts[:-1]])
    lengths = [code_words(len(x), bits) for x in xs]
    # A word that is none before each payload.
    ends = np.cumsum([1 + count + length for count, length in zip(norm_counts, lengths)])
    words_at = ends - np.array(lengths)
    payloads_at = words_at - np.array(norm_counts)
    table = SegmentTable(xs)
    sums = native_each.bucket_square_sums_each(table, bucket_size)
    assert same_bits(sums, np.concatenate([native.bucket_square_sums(x, bucket_size) for x in xs]))
    maxima = native_each.bucket_maxima_each(table, bucket_size)
    norms = maxima if norm == "max" else reference.norms_of_square_sums(sums)
    parts = [norms[at : at + count] for at, count in zip(norms_at, norm_counts)]
    pieces = []
    for rank in ranks:
        out = np.full(ends[-1], 77, np.int32)
        many = joint_keys_of(chains, "worker", steps, rank, 3)
        arguments = (table, bucket_size, bits, many, starts, payloads_at, out)
        assert native_each.encode_norms_and_codes_each(levels, norm, *arguments) is out
        for x, own, chain, step, start, first, middle, end in zip(
            xs, parts, chains, steps, starts, payloads_at, words_at, ends
        ):
            key = chain.joint("worker", step, rank, 3)
            assert same_bits(out[first:middle].view(np.float32), own)
            assert same_bits(out[middle:end], encode(x, own, bucket_size, bits, key, start))
            assert out[first - 1] == 77
        pieces.append(out)
    outs = [np.zeros_like(x) for x in xs]
    outs[6] = np.repeat(outs[6], 2)[::2]
    all_norms = [norms, 2 * norms, norms]
    decoded = (pieces, words_at, all_norms, norms_at, bucket_size, bits, 0.25)
    native_each.decode_codes_each(levels, *decoded, outs)
    for i, out in enumerate(outs):
        words = [piece[words_at[i] : words_at[i] + lengths[i]] for piece in pieces]
        own = [each[norms_at[i] : norms_at[i] + norm_counts[i]] for each in all_norms]
        alone = decode(words, own, bucket_size, bits, 0.25, np.zeros_like(out, order="C"))
        assert same_bits(out.copy(), alone)
    assert np.isnan(outs[6]).any()
    again = [np.zeros_like(x, order="C") for x in xs]
    native_each.decode_codes_each(levels, *decoded, again, SegmentTable(again))
    assert all(same_bits(own.copy(), other) for own, other in zip(outs, again))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: SegmentTable([X, X.astype(np.int32)]), "x has dtype int32"),
        (lambda: SegmentTable([X.reshape(10, 10)]), r"x has shape \(10, 10\)"),
        (lambda: native_each.bucket_maxima_each(SegmentTable([X]), 33), "bucket_size=33"),
        (lambda: native_each.encode_uniform_sum_each(
            SegmentTable([X]), NORMS[:3], 32, 7, 4, np.zeros((1, 6)), [0], WORDS), "3 norms for 4 buckets"),
        (lambda: native_each.encode_uniform_sum_each(
            SegmentTable([X]), NORMS[:4], 32, 7, 4, np.zeros((2, 6)), [0], WORDS), "keys are"),
        (lambda: native_each.encode_uniform_sum_each(
            SegmentTable([X]), NORMS[:4], 32, 7, 4, np.zeros((1, 6)), [0], WORDS[:31]), r"it must be int32\[32\]"),
        (lambda: native_each.decode_uniform_sum_each(WORDS[:31], NORMS[:4], 32, 7, 4, 1.0, [X.copy()]), "31 words"),
        (lambda: native_each.decode_uniform_sum_each(WORDS[:32], NORMS[:3], 32, 7, 4, 1.0, [X.copy()]), "3 norms"),
        (lambda: native_each.binarize_each(
            SegmentTable([X]), [], [X.copy()], [0.9], np.zeros((1, 6)), [0], AT, WORDS),
            "0 momenta, 1 scales and 1 betas"),
        (lambda: native_each.binarize_each(
            SegmentTable([X]), [X[:99].copy()], [X.copy()], [0.9], np.zeros((1, 6)), [0], AT, WORDS),
            r"momenta\[0\] is float32\[99\]; it must be float32\[100\]"),
        (lambda: native_each.binarize_each(
            SegmentTable([X, X]), [X.copy()] * 2, [X.copy(), X.astype(np.float64)], [0.9] * 2, np.zeros((2, 6)),
            [0, 0], AT, WORDS),
            r"scales\[1\] is float64\[100\]; it must be float32\[100\]"),
        (lambda: native_each.binarize_each(
            SegmentTable([X]), [X.copy()], [X.copy()], [0.9], np.zeros((2, 6)), [0], AT, WORDS), "keys are"),
        (lambda: native_each.binarize_each(
            SegmentTable([X]), [X.copy()], [X.copy()], [0.9], np.zeros((1, 6)), [0], AT, WORDS[:31]),
            "not all within 31 words"),
        (lambda: native_each.vote_each([], AT, ONE, np.zeros((1, 6)), [0], WORDS), "0 workers' pieces"),
        (lambda: native_each.vote_each(
            [WORDS[:32], WORDS[:31]], AT, ONE, np.zeros((1, 6)), [0], WORDS), "not all within 31 words"),
        (lambda: native_each.vote_each([WORDS], AT, -ONE, np.zeros((1, 6)), [0], WORDS), "give at least one"),
        (lambda: native_each.vote_each([WORDS], AT, ONE, np.zeros((1, 6)), [], WORDS), "keys are"),
        (lambda: native_each.decode_signs_each(WORDS[:31], AT, 1.0, [X.copy()]), "not all within 31 words"),
        (lambda: native_each.scale_each(SegmentTable([X]), 1.0, [X[:99].copy()]), "arrays of"),
        (lambda: native_each.encode_norms_and_codes_each(
            "uniform", "max", SegmentTable([X]), 32, 17, np.zeros((1, 6)), [0], AT, WORDS), "bits=17"),
        (lambda: native_each.encode_norms_and_codes_each(
            "exponential", "l2", SegmentTable([X]), 32, 9, np.zeros((1, 6)), [0], AT, WORDS), "bits=9"),
        (lambda: native_each.encode_norms_and_codes_each(
            "exponential", "l2", SegmentTable([X]), 33, 4, np.zeros((1, 6)), [0], AT, WORDS), "bucket_size=33"),
        (lambda: native_each.encode_norms_and_codes_each(
            "uniform", "l2", SegmentTable([X]), 32, 4, np.zeros((2, 6)), [0], AT, WORDS), "keys are"),
        (lambda: native_each.encode_norms_and_codes_each(
            "uniform", "max", SegmentTable([X]), 32, 4, np.zeros((1, 6)), [0], AT + 1, np.zeros(36, np.int32)),
            "places of 1 gradients' payloads"),
        (lambda: native_each.encode_norms_and_codes_each(
            "uniform", "max", SegmentTable([X]), 32, 4, np.zeros((1, 6)), [0], AT - 1, WORDS.copy()),
            "places of"),
        (lambda: native_each.decode_codes_each(
            "uniform", [], AT, [], AT, 32, 4, 1.0, [X.copy()]), "0 workers' pieces"),
        (lambda: native_each.decode_codes_each(
            "uniform", [WORDS], AT, [NORMS[:3]], AT, 32, 4, 1.0, [X.copy()]), "places of 1 gradients' norms"),
        (lambda: native_each.decode_codes_each(
            "exponential", [WORDS, WORDS[:11]], AT, [NORMS, NORMS], AT, 32, 4, 1.0, [X.copy()]),
            "places of 1 gradients' words"),
        (lambda: native_each.decode_codes_each(
            "exponential", [WORDS], AT, [NORMS.astype(np.float64)], AT, 32, 4, 1.0, [X.copy()]),
            "norms has dtype float64"),
        (lambda: native_each.decode_codes_each(
            "exponential", [WORDS], AT, [NORMS], AT, 33, 4, 1.0, [X.copy()]), "bucket_size=33"),
        (lambda: native_each.encode_rotated_each(
            SegmentTable([X]), 5, np.zeros((1, 6)), [0], AT, AT + 31, WORDS), "bits=5"),
        (lambda: native_each.encode_rotated_each(
            SegmentTable([X]), 2, np.zeros((1, 6)), [0], AT, AT + 32, WORDS[:32].copy()), "places of"),
        (lambda: native_each.encode_rotated_each(
            SegmentTable([X]), 2, np.zeros((1, 6)), [0], AT - 1, AT + 32, WORDS.copy()), "places of"),
        (lambda: native_each.add_rotated_each([], AT, AT, 2, np.zeros((1, 0, 6)), 1.0, [X.copy()], [0]), "no pieces"),
        (lambda: native_each.add_rotated_each(
            [WORDS, WORDS[:31]], AT, AT, 2, np.zeros((1, 2, 6)), 1.0, [X.copy()], [0]), "places of"),
        (lambda: native_each.add_rotated_each(
            [WORDS], AT, AT, 2, np.zeros((1, 2, 6)), 1.0, [X.copy()], [0]), "keys are"),
    ],
)  # fmt: skip
def test_many_gradients_that_do_not_fit_are_refused(function: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        function()


@each_instruction_set
@pytest.mark.parametrize("bits", range(2, 17))
@settings(max_examples=4)
@given(given=inputs, key=keys, factor=factors, dtype=dtypes, workers=st.integers(1, 5))
def test_uniform_codes_of_each_width(
    bits: int, given: Input, key: Key, factor: float, dtype: Any, workers: int
) -> None:
    x, norms, bucket_size, start, _ = given
    words = assert_same("encode_uniform_codes", x, norms, bucket_size, bits, key, start)
    assert_same("encode_uniform_codes", x, norms, bucket_size, bits, key, start, np.zeros_like(words))
    check_decoder("decode_uniform_codes", given, words, bits, factor, dtype, workers)


def check_decoder(
    kernel: str, given: Input, words: np.ndarray, bits: int, factor: float, dtype: Any, workers: int
) -> None:
    everybody = [words, *(given.words(len(words)) for _ in range(1, workers))]
    norms = [np.roll(given.norms, worker) for worker in range(workers)]
    assert_same(kernel, everybody, norms, given.bucket_size, bits, factor, given.out(dtype))


# ---- exponential levels


@each_instruction_set
@pytest.mark.parametrize("bits", range(2, 9))
@settings(max_examples=8)
@given(given=inputs, key=keys, factor=factors, dtype=dtypes, workers=st.integers(1, 5))
def test_exponential_codes_of_each_width(
    bits: int, given: Input, key: Key, factor: float, dtype: Any, workers: int
) -> None:
    x, norms, bucket_size, start, _ = given
    assert_same("round_exponential", x, norms, bucket_size, bits, key, start)
    words = assert_same("encode_exponential", x, norms, bucket_size, bits, key, start)
    assert_same("encode_exponential", x, norms, bucket_size, bits, key, start, np.zeros_like(words))
    check_decoder("decode_exponential", given, words, bits, factor, dtype, workers)


@each_instruction_set
@pytest.mark.parametrize("kernel", ["decode_uniform_codes", "decode_exponential"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 4, 8, 12, 32])
def test_decoders_of_buckets_with_and_without_whole_words(kernel: str, bits: int, rows: int) -> None:
    check_decoder_of_norms(kernel, bits, rows, np.abs(np.concatenate([SPECIAL, NOT_FINITE])))


@each_instruction_set
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8, 12, 16])
@pytest.mark.parametrize("rows", [3, 8])
@pytest.mark.parametrize("smallest", [2.0**-96, 2.0**-97, 2.0**-149])
def test_uniform_decoders_of_norms_that_are_just_large_enough_to_be_made_smaller(
    bits: int, rows: int, smallest: float
) -> None:
    units = smallest * np.linspace(1, 2, 17) * (1 + 2.0**-23)
    norms = (2 ** (bits - 1) - 1) * units
    check_decoder_of_norms("decode_uniform_codes", bits, rows, np.float32([*norms, 0, np.inf, np.nan]))


def check_decoder_of_norms(kernel: str, bits: int, rows: int, some_norms: np.ndarray) -> None:
    rng = np.random.default_rng(rows)
    count, bucket_size = 3 * TILE + 7 * ROW + 5, rows * ROW
    for workers, factor in [(1, -2.0), (1, 1.0), (2, 1 / 3), (3, -0.25), (4, -1.0), (5, 1e38)]:
        words = rng.integers(-(2**31), 2**31, (workers, code_words(count, bits))).astype(np.int32)
        norms = rng.random((workers, buckets(count, bucket_size)), np.float32)
        norms[:, ::3] = rng.choice(some_norms, norms[:, ::3].shape)
        assert_same(kernel, list(words), list(norms), bucket_size, bits, factor, np.zeros(count, np.float32))


@each_instruction_set
@pytest.mark.parametrize("kernel", ["decode_uniform_codes", "decode_exponential"])
@pytest.mark.parametrize("bits", [4, 8])
def test_decoders_of_negative_zeros(kernel: str, bits: int) -> None:
    negative_zeros = sum(1 << (shift + bits - 1) for shift in range(0, 32, bits))
    words = np.full(code_words(TILE, bits), negative_zeros, np.uint32).view(np.int32)
    for workers, factor in [(1, 1.0), (1, -1.0), (2, -1.0)]:
        norms = [np.ones(1, np.float32)] * workers
        assert_same(kernel, [words] * workers, norms, TILE, bits, factor, np.ones(TILE, np.float32))


# ---- rotation


@each_instruction_set
@pytest.mark.parametrize("bits", range(1, 5))
@pytest.mark.parametrize("trellis", [False, True])
@settings(max_examples=8)
@given(given=inputs, key=keys, factor=factors, dtype=dtypes, workers=st.integers(1, 4))
def test_rotation(
    bits: int, trellis: bool, given: Input, key: Key, factor: float, dtype: Any, workers: int
) -> None:
    words, scales = assert_same("encode_rotated", given.x, bits, key, given.start, None, None, trellis)
    places = np.zeros_like(words), np.zeros_like(scales)
    assert_same("encode_rotated", given.x, bits, key, given.start, *places, trellis)
    for codes, units in ((words, scales), (given.words(len(words)), np.float32([-2.5, 1e38, np.inf]))):
        units = np.resize(units, len(scales))
        assert_same("decode_rotated", codes, units, bits, key, factor, given.out(dtype), given.start, trellis)
    sent = [words, *(given.words(len(words)) for _ in range(1, workers))]
    own_scales = [np.roll(scales, worker) for worker in range(workers)]
    signs = [Key(worker, key.k0) for worker in range(workers)]
    out = given.out(dtype)
    assert_same("add_rotated", sent, own_scales, bits, signs, factor, out, given.start, trellis)


@each_instruction_set
@pytest.mark.parametrize("width", range(4, 9))
@settings(max_examples=8)
@given(given=inputs, key=keys, factor=factors, dtype=dtypes, samples=st.integers(1, TILE))
def test_rotated_sums(width: int, given: Input, key: Key, factor: float, dtype: Any, samples: int) -> None:
    signs = Key(3, 4)
    assert_same("rotated_samples", given.x, samples, signs, given.start)
    steps = np.resize(np.float32([0.03, 1e-30, 0.0, np.nan, 1e30, np.inf]), tiles(len(given.x)))
    words, checks = assert_same("encode_rotated_sum", given.x, steps, width, signs, key, given.start)
    out = np.zeros_like(words), np.zeros_like(checks)
    assert_same("encode_rotated_sum", given.x, steps, width, signs, key, given.start, *out)
    for each in (words, given.words(len(words))):
        assert_same("rotated_sum_checks", each, width, len(given.x))
        assert_same("decode_rotated_sum", each, steps, width, signs, factor, given.out(dtype), given.start)


# ---- one bit


@each_instruction_set
@few
@given(given=inputs, key=keys, beta=st.sampled_from([0.0, 0.9, 0.999, 1.0]), fresh=st.booleans())
def test_binarize(given: Input, key: Key, beta: float, fresh: bool) -> None:
    count = len(given.x)
    scale = np.zeros(count, np.float32) if fresh else np.abs(given.rng().choice(SPECIAL, count))
    momentum = (scale * given.rng().choice(np.array([-1, -0.3, 0, 1], np.float32), count)).astype(np.float32)
    assert_same("binarize", given.x, momentum, scale, beta, key, given.start)
    words = np.full(tiles(count) * ROW, -1, np.int32)
    assert_same("binarize", given.x, momentum, scale, beta, key, given.start, words)


@each_instruction_set
@few
@given(
    tile_count=st.integers(0, 4), workers=st.one_of(st.integers(1, 9), st.sampled_from([12, 16, 32, 63, 64, 300])),
    key=keys, seed=seeds,
    dtype=dtypes, magnitude=st.sampled_from([1.0, -0.3, 0.0, 1e38, 1e-41]), cut=st.integers(0, TILE - 1),
)  # fmt: skip
def test_vote_and_signs(
    tile_count: int, workers: int, key: Key, seed: int, dtype: Any, magnitude: float, cut: int
) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, (workers, tile_count * ROW)).astype(np.int32)
    assert_same("vote", list(words), key, seed * TILE)
    result = assert_same("vote", list(words), key, seed * TILE, np.zeros(tile_count * ROW, np.int32))
    out = np.full(max(0, tile_count * TILE - cut), 77, dtype)
    assert_same("decode_signs", result, magnitude, out)


# ---- packing


@each_instruction_set
@pytest.mark.parametrize("width", range(1, 17))
@settings(max_examples=4)
@given(count=lengths, seed=seeds, whole_tiles=st.booleans())
def test_packing(width: int, count: int, seed: int, whole_tiles: bool) -> None:
    rng = np.random.default_rng(seed)
    assert_same("pack_sum", rng.integers(-(2**31), 2**31, count).astype(np.int32), width)
    assert_same(
        "unpack_sum", rng.integers(-(2**31), 2**31, sum_words(count, width)).astype(np.int32), width, count
    )
    codes = rng.integers(0, 1 << width, count).astype(np.uint32)
    words = assert_same("pack_codes", codes, width, None, whole_tiles)
    assert same_bits(assert_same("unpack_codes", words, width, count), codes)
    if width > 1:
        top = (1 << (width - 1)) - 1
        assert_same("codes_of_digits", rng.integers(-top, top + 1, count).astype(np.int32), width)


# ---- Elias coding


class Codes(NamedTuple):
    """Packed codes, and how many of how many bits."""

    words: np.ndarray
    bits: int
    count: int


def sparse_codes(count: int, density: float, bits: int, seed: int) -> Codes:
    rng = np.random.default_rng(seed)
    top = reference.uniform_levels(bits)
    digits = np.minimum(rng.geometric(min(1.0, 3 / top), count), top) * rng.choice([-1, 1], count)
    return packed(np.where(rng.random(count) < density, digits, 0).astype(np.int32), bits)


def packed(digits: np.ndarray, bits: int) -> Codes:
    return Codes(reference.pack_codes(reference.codes_of_digits(digits, bits), bits), bits, len(digits))


sparse = st.builds(sparse_codes, lengths, st.sampled_from([0, 0.0005, 0.01, 0.1, 0.5, 1]), code_bits, seeds)
codes = pytest.mark.parametrize("code", ["gamma", "omega"])


@each_instruction_set
@codes
@few
@given(given=sparse)
def test_elias_streams(code: str, given: Codes) -> None:
    words, bits, count = given
    stream = assert_same("elias_encode_codes", words, bits, count, code)
    assert same_bits(native._try_elias_decode_codes(stream, count, bits, code), words)
    assert_same("elias_decode_codes", stream, count, bits, code, np.full_like(words, -1))
    largest = int(np.abs(entropy.decode(stream, count, entropy.MAX_MAGNITUDE, code)).max(initial=0))
    if bits > 2 and largest > reference.uniform_levels(bits - 1):
        assert native._try_elias_decode_codes(stream, count, bits - 1, code) is None


@each_instruction_set
@codes
@few
@given(bits=code_bits, count=lengths, seed=seeds, longer=st.integers(0, 40))
def test_elias_streams_of_any_words(code: str, bits: int, count: int, seed: int, longer: int) -> None:
    """Words that no encoder wrote: signs of zeros, and codes behind the last."""
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2**31), 2**31, code_words(count, bits) + longer).astype(np.int32)
    words[rng.random(len(words)) < 0.5] = -(2**31)
    stream = assert_same("elias_encode_codes", words, bits, count, code)
    assert_same("elias_decode_codes", stream, count, bits, code)


@each_instruction_set
@codes
def test_elias_of_a_long_gap(code: str) -> None:
    digits = np.zeros(5_000_000, np.int32)
    digits[[4_000_000, 4_000_001]] = [entropy.MAX_MAGNITUDE, -1]
    words, bits, count = packed(digits, 16)
    stream = assert_same("elias_encode_codes", words, bits, count, code)
    assert same_bits(native._try_elias_decode_codes(stream, count, bits, code), words)


@each_instruction_set
@codes
def test_elias_decoders_refuse_what_the_reference_refuses(code: str) -> None:
    """A fuzz with fixed seeds: streams with flipped bits, cut, lengthened, of another count, and random bytes."""
    rng = np.random.default_rng(20)
    refused = 0
    for trial in range(300):
        count = int(rng.integers(0, 300)) + TILE * int(rng.integers(0, 3))
        bits = int(rng.choice([2, 4, 16]))
        words, _, _ = sparse_codes(count, float(rng.choice([0.01, 0.2, 1])), bits, trial)
        payload = reference.elias_encode_codes(words, bits, count, code)
        kind = trial % 5
        if kind == 0:
            at = rng.integers(0, len(payload), int(rng.integers(1, 4)))
            payload[at] ^= (1 << rng.integers(0, 8, len(at))).astype(np.uint8)
        elif kind == 1:
            payload = payload[: int(rng.integers(0, len(payload)))].copy()
        elif kind == 2:
            payload = np.concatenate([payload, np.zeros(int(rng.integers(1, 10)), np.uint8)])
        elif kind == 3:
            count = max(0, count + int(rng.integers(-2, 3)))
        else:
            payload = (rng.integers(0, 256, int(rng.integers(1, 100))) & rng.integers(0, 256)).astype(
                np.uint8
            )
        refused += not decodes_alike(payload, count, bits, code)
    assert 100 < refused < 300


def decodes_alike(payload: np.ndarray, count: int, bits: int, code: str) -> bool:
    """Whether both decoders accept the payload; they agree on that, on the words, and on the message."""
    actual = native._try_elias_decode_codes(payload, count, bits, code)
    try:
        expected = reference.elias_decode_codes(payload, count, bits, code)
    except entropy.CorruptPayloadError as error:
        message = str(error)
    else:
        assert same_bits(actual, expected)
        return True
    assert actual is None
    with pytest.raises(entropy.CorruptPayloadError, match=re.escape(message)):
        native.elias_decode_codes(payload, count, bits, code)
    return False


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    "payload", [None, [1, 2], np.zeros(0, np.uint8), np.zeros((1, 1), np.uint8), np.zeros(1)]
)
def test_elias_decoder_refuses_what_is_no_payload(payload: Any) -> None:
    with pytest.raises(entropy.CorruptPayloadError):
        native.elias_decode_codes(payload, 3, 2)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        ("elias_encode_codes", (np.zeros(32, np.uint32), 2, 3), "words has dtype uint32"),
        ("elias_encode_codes", (np.zeros((32, 1), np.int32), 2, 3), "flat"),
        ("elias_encode_codes", (np.zeros(31, np.int32), 2, 3), "31 words cannot hold"),
        ("elias_encode_codes", (np.zeros(32, np.int32), 1, 3), "bits=1"),
        ("elias_encode_codes", (np.zeros(32, np.int32), 17, 3), "bits=17"),
        ("elias_encode_codes", (np.zeros(32, np.int32), 2, 3, "delta"), "delta"),
        ("elias_decode_codes", (np.zeros(3, np.uint8), -1, 2), "count"),
        ("elias_decode_codes", (np.zeros(3, np.uint8), 2**29, 2), "count"),
        ("elias_decode_codes", (np.zeros(3, np.uint8), 2.5, 2), "count"),
        ("elias_decode_codes", (np.zeros(3, np.uint8), 1, 1), "bits=1"),
        ("elias_decode_codes", (np.zeros(3, np.uint8), 1, 17), "bits=17"),
        ("elias_decode_codes", (np.zeros(3, np.uint8), 1, 2, None), "None"),
        (
            "elias_decode_codes",
            (np.zeros(3, np.uint8), 1, 2, "gamma", np.zeros(31, np.int32)),
            r"int32\[32\]",
        ),
    ],
)
def test_elias_arguments(kernel: str, arguments: tuple, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(native, kernel)(*arguments)


# ---- arrays as they come


def strided(x: np.ndarray) -> np.ndarray:
    wide = np.zeros(2 * len(x), x.dtype)
    wide[::2] = x
    return wide[::2]


def unaligned(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    result = raw[1:].view(x.dtype)
    result[:] = x
    return result


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("odd", [strided, unaligned])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_unaligned_arrays(odd: Any, dtype: Any) -> None:
    x = as_type(np.random.default_rng(0).standard_normal(3000).astype(np.float32), dtype)
    norms = reference.bucket_maxima(x, 64)
    assert same_bits(native.bucket_maxima(odd(x), 64, odd(np.zeros_like(norms))), norms)
    words = reference.encode_uniform_sum(x, norms, 64, 7, 4, KEY)
    into = odd(np.zeros_like(words))
    assert native.encode_uniform_sum(odd(x), odd(norms), 64, 7, 4, KEY, 0, into) is into
    assert same_bits(into, words)
    decoded = reference.decode_uniform_sum(words, norms, 64, 7, 4, 0.5, np.zeros_like(x))
    back = odd(np.zeros_like(x))
    assert native.decode_uniform_sum(odd(words), odd(norms), 64, 7, 4, 0.5, back) is back
    assert same_bits(back, decoded)

    states = [np.ones(3000, np.float32), np.ones(3000, np.float32)]
    odd_states = [odd(state) for state in states]
    signs, _ = reference.binarize(x, *states, 0.9, KEY)
    assert same_bits(native.binarize(odd(x), *odd_states, 0.9, KEY)[0], signs)
    assert all(same_bits(one, other) for one, other in zip(states, odd_states))
    words = reference.encode_uniform_codes(x, norms, 64, 4, KEY)
    stream = reference.elias_encode_codes(words, 4, 3000)
    assert same_bits(native.elias_encode_codes(odd(words), 4, 3000), stream)
    into = odd(np.zeros_like(words))
    assert native.elias_decode_codes(odd(stream), 3000, 4, "gamma", into) is into
    assert same_bits(into, words)


X = np.ones(100, np.float32)
NORMS = np.ones(4, np.float32)
WORDS = np.zeros(512, np.int32)
AT, ONE = np.array([0]), np.array([1])


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        ("bucket_maxima", (X.astype(np.int32), 32), "float32, float16, float64, or bfloat16"),
        ("bucket_maxima", (X.astype(">f4"), 32), "dtype >f4"),
        ("bucket_maxima", (X.reshape(10, 10), 32), "must be flat"),
        ("bucket_maxima", (X, 33), "multiple of 32"),
        ("bucket_maxima", (X, 0), "multiple of 32"),
        ("bucket_maxima", (X, -32), "multiple of 32"),
        ("bucket_maxima", (X, 32, np.empty(3, np.float32)), r"float32\[4\]"),
        ("bucket_maxima", (X, 32, np.empty(4, np.float64)), r"float32\[4\]"),
        ("bucket_square_sums", (X, 32, np.empty(4, np.float32)), r"float64\[4\]"),
        ("bucket_maxima", (X, 32, np.broadcast_to(np.float32(0), 4)), "read-only"),
        ("round_uniform", (X, NORMS[:3], 32, 7, KEY), "3 norms for 100 elements"),
        ("round_uniform", (X, NORMS.astype(np.float64), 32, 7, KEY), "norms has dtype float64"),
        ("round_uniform", (X, NORMS, 32, 0, KEY), "levels=0"),
        ("round_uniform", (X, NORMS, 32, 2**15, KEY), "levels=32768"),
        ("round_exponential", (X, NORMS, 32, 9, KEY), "bits=9"),
        ("encode_uniform_sum", (X, NORMS, 32, 7, 17, KEY), "width=17"),
        ("encode_uniform_sum", (X, NORMS, 32, 7, 4, KEY, 0, WORDS[:31]), r"int32\[32\]"),
        ("encode_uniform_codes", (X, NORMS, 32, 1, KEY), "bits=1"),
        ("encode_exponential", (X, NORMS, 32, 1, KEY), "bits=1"),
        ("decode_uniform_sum", (WORDS[:31], NORMS, 32, 7, 4, 1.0, X.copy()), "31 words cannot hold"),
        ("decode_uniform_sum", (WORDS[:64], NORMS, 32, 7, 4, 1.0, X.copy()), "64 words cannot hold"),
        ("decode_uniform_sum", (WORDS[:32], NORMS, 32, 7, 0, 1.0, X.copy()), "width=0"),
        ("decode_uniform_sum", (WORDS[:32], NORMS, 32, 7, 4, 1.0, X.astype(np.int16)), "out has dtype int16"),
        (
            "decode_uniform_sum",
            (WORDS[:32].view(np.uint32), NORMS, 32, 7, 4, 1.0, X.copy()),
            "words has dtype",
        ),
        ("decode_uniform_codes", ([], [], 32, 4, 1.0, X.copy()), "0 workers"),
        ("decode_uniform_codes", ([WORDS], [NORMS, NORMS], 32, 4, 1.0, X.copy()), "2 workers' norms"),
        ("decode_uniform_codes", ([WORDS, WORDS[:31]], [NORMS, NORMS], 32, 4, 1.0, X.copy()), "31 words"),
        ("decode_exponential", ([WORDS], [NORMS[:3]], 32, 4, 1.0, X.copy()), "3 norms"),
        ("decode_exponential", ([WORDS], [NORMS], 32, 9, 1.0, X.copy()), "bits=9"),
        ("add_rotated", ([], [], 4, [], 1.0, X.copy()), "0 workers"),
        ("add_rotated", ([WORDS], [NORMS], 4, [KEY, KEY], 1.0, X.copy()), "2 keys"),
        ("add_rotated", ([WORDS], [NORMS], 5, [KEY], 1.0, X.copy()), "bits=5"),
        ("add_rotated", ([WORDS, WORDS[:31]], [NORMS] * 2, 4, [KEY] * 2, 1.0, X.copy()), "31 words"),
        ("add_rotated", ([WORDS], [NORMS[:0]], 4, [KEY], 1.0, X.copy()), "0 scales for 100 elements"),
        ("add_rotated", ([WORDS], [NORMS.astype(np.float64)], 4, [KEY], 1.0, X.copy()), "scales has dtype"),
        ("binarize", (X, X[:99].copy(), X.copy(), 0.9, KEY), r"float32\[100\]"),
        ("binarize", (X, X.copy(), X.astype(np.float64), 0.9, KEY), r"float32\[100\]"),
        ("binarize", (X, X.copy(), X.copy(), 0.9, KEY, 0, WORDS[:31].copy()), r"int32\[32\]"),
        ("vote", ([], KEY), "multiple of 32"),
        ("vote", ([WORDS, WORDS[:32]], KEY), "multiple of 32"),
        ("vote", ([WORDS[:31]], KEY), "multiple of 32"),
        ("decode_signs", (WORDS[:31], 1.0, X.copy()), "31 words"),
        ("codes_of_digits", (X, 4), "digits has dtype float32"),
        ("pack_sum", (WORDS, 0), "width=0"),
        ("pack_codes", (WORDS, 4), "codes has dtype int32"),
        ("pack_codes", (WORDS.view(np.uint32), 17), "bits=17"),
        ("unpack_sum", (WORDS[:33], 4, 100), "33 words"),
        ("unpack_codes", (WORDS[:31], 4, 100), "31 words"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(kernel: str, arguments: tuple, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(native, kernel)(*arguments)


@pytest.mark.usefixtures("loaded")
def test_longer_words_than_needed_are_cut() -> None:
    assert_same("decode_uniform_codes", [WORDS], [np.ones(9, np.float32)], 32, 4, 1.0, X)
    assert_same("unpack_codes", WORDS, 4, 100)
    assert code_words(100, 4) < len(WORDS)


@pytest.mark.usefixtures("loaded")
@pytest.mark.skipif(
    platform.machine() not in FLUSH_AND_ROUND_TOWARDS_ZERO,
    reason="this processor's settings are not known",
)
def test_the_callers_floating_point_settings_do_not_matter(tmp_path: Path) -> None:
    source = tmp_path / "settings.cpp"
    source.write_text(CONTROL_REGISTER)
    processor = ctypes.CDLL(str(compile_library(tmp_path / "settings.so", source, "g++")))
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float32) * np.float32(1e-33)
    x[::64] = 2.0**-90
    x[1::64] = 1e-40
    norms = reference.bucket_maxima(x, 96)
    words = reference.encode_exponential(x, norms, 96, 8, KEY)
    decoded = reference.decode_exponential([words], [norms], 96, 8, 1e-9, np.zeros_like(x))
    assert np.any((decoded != 0) & (np.abs(decoded) < 2.0**-126))
    back = np.zeros_like(x)
    before = processor.get_settings()
    other, mask = FLUSH_AND_ROUND_TOWARDS_ZERO[platform.machine()]
    processor.set_settings(before | other)
    try:
        encoded = native.encode_exponential(x, norms, 96, 8, KEY)
        native.decode_exponential([words], [norms], 96, 8, 1e-9, back)
        after = processor.get_settings()
    finally:
        processor.set_settings(before)
    assert after & mask == (before | other) & mask
    assert same_bits(encoded, words)
    assert same_bits(back, decoded)


# ---- the backend as a whole


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", SCHEMES)
def test_whole_exchanges(name: str) -> None:
    gradients = list(np.random.default_rng(3).standard_normal((3, 2500)).astype(np.float32))
    gradients[1][:200] = 0

    def decoded(backend: str) -> list[np.ndarray]:
        states = [[BinaryState(np.zeros_like(own), np.zeros_like(own), 0.9)] for own in gradients]
        result = simulator.run(SCHEMES[name], gradients, states=states, kernels=backend)
        return [own[0] for own in result.decoded] + [array for own in states for array in own[0][:2]]

    assert all(same_bits(one, other) for one, other in zip(decoded("numpy"), decoded("native")))


def test_the_backends_offer_the_same() -> None:
    assert set(native.__all__) <= set(dir(reference))
    assert kernels.get("native") is native
    assert kernels.get("numpy") is reference
    with pytest.raises(ValueError, match="no such backend"):
        kernels.get("fortran")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if the package had just been imported, with none of its environment variables."""
    monkeypatch.setattr(native_library, "_library", None)
    monkeypatch.setattr(kernels, "_warned", False)
    for name in ("HOROVOD_QUANT_KERNELS", "HOROVOD_QUANT_ISA"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_the_library_numpy_serves_and_says_so_once(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.delenv("HOROVOD_QUANT_LIBRARY", raising=False)
    fresh.setattr(native_library, "__file__", str(tmp_path / "native_library.py"))
    with pytest.warns(RuntimeWarning, match="slow numpy kernels.*no compiled library"):
        assert kernels.get() is reference
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert kernels.get("auto") is reference
    assert not caught
    assert "numpy kernels" in kernels.describe()
    assert f"no compiled library in {tmp_path}" in kernels.describe()
    with pytest.raises(ImportError, match="no compiled library"):
        kernels.get("native")


def test_a_library_that_does_not_fit_is_not_used(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"not a library")
    fresh.setenv("HOROVOD_QUANT_LIBRARY", str(broken))
    with pytest.raises(ImportError, match=r"cannot load .*kernels\.so"):
        native_library.load()
    source = tmp_path / "old.cpp"
    source.write_text(
        'extern "C" long best_instruction_set() { return 0; } extern "C" long interface_version() { return 0; }'
    )
    with pytest.raises(ImportError, match="built from other sources"):
        native_library.load(compile_library(tmp_path / "old.so", source, "g++"))


@pytest.mark.usefixtures("loaded")
def test_what_is_declared_otherwise_than_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_sum = native_library._SIGNATURES["pack_sum"]
    for arguments in (pack_sum[1:], (ctypes.c_float, *pack_sum[1:])):
        monkeypatch.setitem(native_library._SIGNATURES, "pack_sum", arguments)
        with pytest.raises(ImportError, match="built from other sources"):
            native_library.load(native_library._library_path())


def test_the_environment_chooses_the_backend(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("HOROVOD_QUANT_KERNELS", "numpy")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert kernels.get("auto") is reference
    assert not caught
    assert kernels.describe() == "numpy kernels, requested by HOROVOD_QUANT_KERNELS"
    assert kernels.get("native") is native


def test_the_environment_chooses_the_instruction_set(fresh: pytest.MonkeyPatch) -> None:
    load_installed()
    best = native_library.available_instruction_sets()[-1]
    assert native_library.instruction_set() == best
    assert kernels.describe().startswith(f"native kernels with {best}")
    fresh.setattr(native_library, "_library", None)
    fresh.setenv("HOROVOD_QUANT_ISA", "baseline")
    assert kernels.describe().startswith("native kernels with baseline")
    fresh.setattr(native_library, "_library", None)
    fresh.setenv("HOROVOD_QUANT_ISA", "mmx")
    with pytest.raises(ValueError, match="'mmx': this processor has baseline"):
        kernels.get("auto")


@pytest.mark.extended
def test_address_and_undefined_behaviour_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The tests of the installed kernels again, on a library that checks each access, in a process of its own."""
    library = compile_library(tmp_path / "sanitized.so", SOURCE, "g++", *SANITIZERS)
    runtime = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    select = f"{INSTALLED} or strided or refused or longer or exchanges"
    environment = dict(
        os.environ,
        HOROVOD_QUANT_LIBRARY=str(library),
        LD_PRELOAD=runtime,
        ASAN_OPTIONS="detect_leaks=0",
        UBSAN_OPTIONS="print_stacktrace=1",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        select,
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout
