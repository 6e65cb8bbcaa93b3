"""The Triton kernels return the reference's bits: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
ON_GPU = torch.cuda.is_available()


def interpret(patch: pytest.MonkeyPatch) -> None:
    """Triton asks for it when it is imported, when a kernel is made, and when the first one runs."""
    if not ON_GPU:
        patch.setenv("TRITON_INTERPRET", "1")


with pytest.MonkeyPatch.context() as at_import:
    interpret(at_import)
    pytest.importorskip("triton")
    from horovod_quant.kernels import triton as kernels
    from horovod_quant.kernels.triton import launching
    from horovod_quant.kernels.triton.ranges import Ranges

from helpers import SCHEMES, buckets_of_all_sizes, by_default, in_turn, keys, on_the_edge, used_states  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from literature import LITERATURE, load  # noqa: E402
from test_native import (  # noqa: E402
    BFLOAT16,
    DTYPES,
    KEY,
    NOT_FINITE,
    SPECIAL,
    Input,
    as_type,
    make_input,
)

from horovod_quant.kernels import reference  # noqa: E402
from horovod_quant.kernels.keys import Key, RngKey  # noqa: E402
from horovod_quant.kernels.layout import ROW, TILE, buckets, code_words, tiles  # noqa: E402
from horovod_quant.schemes.base import BinaryState, Gradient, Scheme, Workers  # noqa: E402
from horovod_quant.schemes.hierarchical import Hierarchical  # noqa: E402
from horovod_quant.transports import simulator  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
FACTORS = (1.0, 0.25, 1 / 3, -2.0, 1e-30, 1e38)
LENGTHS = (0, 1, 31, 33, 1023, 1025, 5000)
LONG = 17_000  # more than a program of any kernel takes
BUCKETS = (32, 96, 1024, 2048, 64, 1120, 128)
FEW_WIDTHS = (3, 8, 13)
FAR = 2**35 * TILE  # an element's index beyond 32 bits


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        yield


many = settings(max_examples=int(os.environ.get("KERNEL_EXAMPLES", 300 if ON_GPU else 3)))


def test_kernels_run_where_they_can() -> None:
    assert kernels.INTERPRETED != ON_GPU


# ---- one computation, by the reference and by Triton


def to_tensor(value: Any) -> Any:
    """A copy on the device; bfloat16 for its bits."""
    if isinstance(value, (list, tuple)) and not isinstance(value, Key):
        return [to_tensor(one) for one in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == BFLOAT16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(value.copy()).to(DEVICE)


def to_array(tensor: Any) -> np.ndarray:
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def arrays_of(values: Sequence[Any]) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for value in values:
        if isinstance(value, (tuple, list)) and not isinstance(value, Key):
            found += arrays_of(value)
        elif isinstance(value, torch.Tensor):
            found.append(to_array(value))
        elif isinstance(value, np.ndarray):
            found.append(value)
    return found


def assert_same(kernel: str, *arguments: Any) -> Any:
    """Both backends return the same bits, and leave the same in the arrays that they write to."""
    copies = [np.copy(a) if isinstance(a, np.ndarray) else a for a in arguments]
    tensors = to_tensor(list(arguments))
    with np.errstate(all="ignore"):
        expected = getattr(reference, kernel)(*copies)
        actual = getattr(kernels, kernel)(*tensors)
    assert_all_the_same_bits(arrays_of([expected, *copies]), arrays_of([actual, *tensors]), kernel)
    return expected


def assert_all_the_same_bits(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray], what: str) -> None:
    assert len(expected) == len(actual), what
    for number, (one, other) in enumerate(zip(expected, actual)):
        assert_same_bits(one, other, f"{what}, array {number}")


def assert_same_bits(expected: np.ndarray, actual: np.ndarray, what: str) -> None:
    """The same bits, with NaN equal to NaN."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    differ = expected.view(f"u{expected.itemsize}") != actual.view(f"u{actual.itemsize}")
    if expected.dtype.kind == "f":
        differ &= ~(np.isnan(expected) & np.isnan(actual))
    at = np.flatnonzero(differ)
    assert not len(at), (
        f"{what}: {len(at)} of {len(actual)}, at {at[:5]}: {actual[at[:5]]}, not {expected[at[:5]]}"
    )


def inputs_of(number: int, dtypes: Sequence[Any] = DTYPES) -> Iterator[Input]:
    """A few gradients of all types and lengths, with their norms; others for each number."""
    for turn in range(len(LENGTHS) if ON_GPU else 2):
        pick = number + turn * 3
        yield make_input(
            LENGTHS[pick % len(LENGTHS)] if turn else number + (3000 if number % 3 else LONG),
            BUCKETS[pick % len(BUCKETS)],
            (0, FAR)[turn % 2],
            pick,
            dtypes[pick % len(dtypes)],
            ("any", "max", "l2")[pick % 3],
            (0.1, 0.5, 0.0)[turn % 3],
        )


def outs(case: Input) -> Iterator[tuple[float, np.ndarray]]:
    """Factors, and arrays to decode to."""
    for number, dtype in enumerate(DTYPES if ON_GPU else DTYPES[case.seed % 2 :: 2]):
        yield FACTORS[(case.seed + number) % len(FACTORS)], case.out(dtype)


# ---- norms


@pytest.mark.parametrize("number", by_default((0, 3, 5), range(len(LENGTHS))))
def test_norms(number: int) -> None:
    for case in inputs_of(number):
        x, _, bucket_size, _, _ = case
        out = np.full(buckets(len(x), bucket_size), 7, np.float64)
        assert_same("bucket_maxima", x, bucket_size)
        sums = assert_same("bucket_square_sums", x, bucket_size, out)
        assert_same("norms_of_square_sums", sums)


@pytest.mark.parametrize("count", [0, 33, 1025])
def test_norms_of_a_bucket_that_is_larger_than_any_tensor(count: int) -> None:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    for kernel in ("bucket_maxima", "bucket_square_sums"):
        assert_same(kernel, x, 2**40)
    norms = np.full(1, 3, np.float32)
    words = assert_same("encode_uniform_codes", x, norms, 2**40, 2, KEY)
    assert_same("decode_uniform_codes", [words], [norms], 2**40, 2, 1.0, np.zeros(count, np.float32))
    words = assert_same("encode_uniform_sum", x, norms, 2**40, 1, 4, KEY)
    assert_same("decode_uniform_sum", words, norms, 2**40, 1, 4, 1.0, np.zeros(count, np.float32))


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
def test_every_short_float(dtype: Any) -> None:
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype)
    assert_same("to_float32", every, np.zeros(65536, np.float32))
    assert_same("to_float16", every, np.zeros(65536, np.float16))
    assert_same("bucket_maxima", every, 32)
    if ON_GPU:
        assert_same("bucket_square_sums", every, 32)


def test_squares_are_added_row_by_row() -> None:
    """From the first row on each tiny square is lost; together they would count."""
    bucket_size = 8 * TILE
    first = np.zeros((bucket_size // ROW, ROW), np.float32)
    first[0, 0], first[1, 0], first[2:, 0] = 1, 2.0**-12 * (1 - 2.0**-24), 2.0**-27
    forward = assert_same("bucket_square_sums", first.reshape(-1), bucket_size)
    backward = assert_same("bucket_square_sums", first[::-1].reshape(-1), bucket_size)
    assert forward != backward


def test_lanes_are_added_in_a_tree() -> None:
    """The odd lanes meet the others last. Added to 1 one after another they would be lost; together they just count."""
    x = np.zeros(32, np.float32)
    x[0], x[16], x[8] = 1, 2.0**-12 * (1 - 2.0**-24), np.sqrt(2.0**-47 - 2.0**-52)
    x[1:8:2] = 2.0**-27
    assert assert_same("bucket_square_sums", x, 32) == 1 + 2.0**-23
    x[:] = np.random.default_rng(0).standard_normal(32) * 2.0 ** np.arange(-16, 16)
    assert_same("bucket_square_sums", x, 32)


@pytest.mark.parametrize("count", [0, 1, 1024, 3100])
@pytest.mark.parametrize("broken", [False, True])
def test_clipping(count: int, broken: bool) -> None:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    if broken:
        x[: count // 2 : 7] = np.nan
    for most in (1e-30, 0.01, 1.0, 1e6):
        assert_same("clip", x, most)


# ---- sums, statistics, arithmetic of schemes' own


@pytest.mark.parametrize("number", by_default((0, 3, 5), range(len(LENGTHS))))
def test_sums_and_statistics(number: int) -> None:
    for case in inputs_of(number):
        out = np.full(buckets(len(case.x), case.bucket_size), 7, np.float64)
        assert_same("bucket_sums", case.x, case.bucket_size)
        assert_same("bucket_magnitude_sums", case.x, case.bucket_size, out)
        for kernel in ("tensor_maximum", "tensor_mean_magnitude", "tensor_deviation"):
            assert_same(kernel, case.x)


@pytest.mark.parametrize("kernel", ["tensor_maximum", "tensor_mean_magnitude", "tensor_deviation"])
def test_statistics_of_every_short_float_and_of_nothing(kernel: str) -> None:
    for dtype in (np.float16, BFLOAT16):
        every = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype)
        assert_same(kernel, every[np.isfinite(reference.as_float32(every))])
    for x in (np.zeros(0, np.float32), np.full(5, -0.0, np.float32), np.array([1e300, 1])):
        assert_same(kernel, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_comparisons_choices_and_minima(dtype: Any) -> None:
    values = np.concatenate([SPECIAL, -SPECIAL, NOT_FINITE, -NOT_FINITE])
    a, b = (as_type(pair.reshape(-1), dtype) for pair in np.meshgrid(values, values))
    assert_same("next_powers_of_two", a)
    for other in (b, b[7:8], b[-1:], 1e-45, -0.0, math.nan, 1e300):
        flags = assert_same("less", a, other)
        assert_same("minimum", a, other)
        assert_same("where", flags, a, other)
        assert_same("where", flags, other, np.float32(3))
    for kernel in ("less", "minimum", "where"):
        first = flags if kernel == "where" else a
        with pytest.raises(ValueError, match="an array of 2 elements beside"):
            getattr(kernels, kernel)(*to_tensor([first, *[b[:2]] * (1 + (kernel == "where"))]))


def test_arithmetic_finds_what_was_collected() -> None:
    x = torch.full([3000], -2.0, device=DEVICE)
    with kernels.batch():
        own = kernels.to_float32(x, None)
        doubled = kernels.scale([own], 2.0, kernels.empty(3000))
        least = kernels.minimum(doubled, kernels.tensor_mean_magnitude(doubled))
        assert bool(torch.all(kernels.less(own, 0.0)))
        chosen = kernels.where(kernels.less(own, 0.0), least, 0.0)
    assert chosen.tolist() == [-4.0] * 3000


# ---- levels


@pytest.mark.parametrize("width", by_default(FEW_WIDTHS, range(2, 17)))
def test_uniform_sums_of_each_width(width: int) -> None:
    levels = max(1, ((1 << (width - 1)) - 1) // (1 + width % 3))
    for case in inputs_of(width):
        x, norms, bucket_size, start, _ = case
        words = assert_same("encode_uniform_sum", x, norms, bucket_size, levels, width, KEY, start)
        for factor, out in outs(case):
            sums = case.words(len(words)) if factor < 1 else words
            assert_same("decode_uniform_sum", sums, norms, bucket_size, levels, width, factor, out)


@pytest.mark.parametrize("bits", [2, 9])
def test_the_last_random_bit_decides(bits: int) -> None:
    levels = reference.uniform_levels(bits)
    x, norms = on_the_edge(levels, KEY)
    assert_same("encode_uniform_sum", x, norms, 4096, levels, bits, KEY)
    assert_same("encode_uniform_codes", x, norms, 4096, bits, KEY)


@pytest.mark.parametrize("bits", by_default(FEW_WIDTHS, range(2, 17)))
def test_uniform_codes_of_each_width(bits: int) -> None:
    for case in inputs_of(bits):
        assert_same_codes("uniform_codes", case, bits)


@pytest.mark.parametrize("bits", by_default(FEW_WIDTHS, range(2, 9)))
def test_exponential_codes_of_each_width(bits: int) -> None:
    for case in inputs_of(bits):
        assert_same_codes("exponential", case, bits)


def assert_same_codes(levels: str, case: Input, bits: int) -> None:
    x, norms, bucket_size, start, _ = case
    words = assert_same(f"encode_{levels}", x, norms, bucket_size, bits, KEY, start)
    for workers, (factor, out) in zip((1, 3, 2, 5), outs(case)):
        everybody = [words, *(case.words(len(words)) for _ in range(1, workers))]
        own_norms = [np.roll(norms, worker) for worker in range(workers)]
        assert_same(f"decode_{levels}", everybody, own_norms, bucket_size, bits, factor, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_that_are_not_finite_keep_the_references_codes(dtype: Any) -> None:
    """The sign of a NaN goes into the code, and that of infinity times zero is the processor's."""
    bucket = np.zeros(32, np.float32)
    bucket[: 2 * len(NOT_FINITE) + len(SPECIAL)] = np.concatenate([NOT_FINITE, -NOT_FINITE, SPECIAL])
    x = as_type(np.tile(bucket, 3), dtype)
    norms = np.array([0, 1, np.inf], np.float32)
    signs = np.signbit(reference.as_float32(x)[:6])
    assert dtype == BFLOAT16 or signs[2] != signs[5]
    words = assert_same("encode_exponential", x, norms, 32, 4, KEY)
    assert len(set(np.sign(reference.digits_of_codes(reference.unpack_codes(words, 4, 96), 4))[64:70])) > 1
    assert_same("encode_uniform_codes", x, norms, 32, 4, KEY)


def test_exact_ties_of_a_subnormal_quotient() -> None:
    """Half-way between two subnormal numbers: a multiplication by a rounded 1/98 would miss some."""
    norms = (98 * np.arange(1, 257, 2) * 2.0**-150).astype(np.float32)
    words = reference.pack_sum(np.ones(32 * len(norms), np.int32), 8)
    assert_same("decode_uniform_sum", words, norms, 32, 98, 8, 1.0, np.zeros(32 * len(norms), np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_type_to_decode_to(dtype: Any) -> None:
    """Products that are subnormal in each type, or overflow it."""
    rng = np.random.default_rng(5)
    norms = (rng.uniform(1, 2, 128) * 2.0 ** rng.integers(-152, 20, 128)).astype(np.float32)
    words = [rng.integers(-(2**31), 2**31, code_words(4096, 8)).astype(np.int32) for _ in range(2)]
    for factor in (1.0, 2.0**-20, 2.0**120):
        out = np.zeros(4096, dtype)
        assert_same("decode_uniform_codes", words, [norms, norms[::-1].copy()], 32, 8, factor, out)


# ---- rotated


both_roundings = pytest.mark.parametrize("trellis", [False, True], ids=["nearest", "trellis"])


@pytest.mark.parametrize("bits", by_default((3,), range(1, 5)))
@both_roundings
def test_rotated(bits: int, trellis: bool) -> None:
    """Whole programs and parts of them, with keys of one worker and of several."""
    own_keys = [*(RngKey(3, "w").joint("worker", bits, rank, 3) for rank in (0, 2)), KEY]
    for case in inputs_of(bits + 4):
        x, norms, _, start, _ = case
        words, scales = assert_same("encode_rotated", x, bits, KEY, start, None, None, trellis)
        outs_of_encoding = np.zeros_like(words), np.zeros_like(scales)
        assert_same("encode_rotated", x, bits, own_keys[0], start, *outs_of_encoding, trellis)
        units = np.resize(np.concatenate([norms, [-2.5, np.inf]]), len(scales)).astype(np.float32)
        everybody = [words, *(case.words(len(words)) for _ in own_keys[1:])]
        own_scales = [np.roll(units, worker) for worker in range(len(own_keys))]
        (factor, out), (other_factor, other_out), *_ = outs(case)
        assert_same("add_rotated", everybody, own_scales, bits, own_keys, factor, out, start, trellis)
        assert_same("decode_rotated", words, scales, bits, KEY, other_factor, other_out, start, trellis)


@pytest.mark.parametrize("bits", by_default((2,), range(1, 5)))
@both_roundings
def test_rotated_numbers_of_all_sizes(bits: int, trellis: bool) -> None:
    """Sixteen buckets are a whole program of each kernel."""
    whole = [buckets_of_all_sizes(seed) for seed in (bits, bits + 4)]
    x = np.concatenate([*whole, np.zeros(TILE, np.float32), NOT_FINITE])
    words, scales = assert_same("encode_rotated", x, bits, KEY, 0, None, None, trellis)
    assert_same("decode_rotated", words, scales, bits, KEY, 0.5, np.zeros_like(x), 0, trellis)


@both_roundings
def test_each_length_of_a_last_bucket(trellis: bool) -> None:
    """Each power of two that it is filled up to, alone and behind another bucket."""
    for count in (1, 33, 65, 200, 257, 513):
        x = np.random.default_rng(count).standard_normal(count + TILE * (count % 2)).astype(np.float32)
        words, scales = assert_same("encode_rotated", x, 2, KEY, 0, None, None, trellis)
        assert_same("decode_rotated", words, scales, 2, KEY, 1.0, np.zeros_like(x), 0, trellis)


def test_keys_of_words_are_those_of_their_steps() -> None:
    """The step is read by the kernels alone, and where a batch has yet to write it."""
    chain, x = RngKey(2**64 - 1, "w"), np.random.default_rng(0).standard_normal(100).astype(np.float32)
    for step, worker in ((0, 0), (7, 3), (2**31 - 1, 1), (2**32 - 1, 0), (2**32 + 7, 2)):
        words, scales = reference.encode_rotated(x, 2, chain.key("worker", step % 2**32, worker))
        out = torch.zeros(100, device=DEVICE)
        with kernels.batch():
            word = kernels.step_word(step)
            key = kernels.key_of_word(chain, "worker", word, worker)
            encoded = kernels.encode_rotated(to_tensor(x), 2, key)
            kernels.decode_rotated(*encoded, 2, key, 1.0, out)
        assert_same_bits(reference.step_word(step), to_array(word), "word")
        assert_all_the_same_bits([words, scales], arrays_of(encoded), f"step {step}")
        expected = reference.decode_rotated(
            words, scales, 2, chain.key("worker", step % 2**32, worker), 1.0, np.zeros_like(x)
        )
        assert_same_bits(expected, to_array(out), f"step {step}")


# ---- one bit


@pytest.mark.parametrize("count", LENGTHS)
def test_binarize(count: int) -> None:
    case = make_input(count, 32, FAR, count, DTYPES[count % 4], "max", 0.1 if count % 2 else 0.0)
    rng = case.rng()
    scale = np.abs(rng.choice(SPECIAL, count))
    momentum = (scale * rng.choice(np.array([-1, -0.3, 0, 1], np.float32), count)).astype(np.float32)
    for beta in (0.0, 0.9, 0.999, 1.0)[: 4 if ON_GPU else 2]:
        assert_same("binarize", case.x, momentum, scale, beta, KEY, FAR)
    zeros, words = np.zeros(count, np.float32), np.full(tiles(count) * ROW, -1, np.int32)
    assert_same("binarize", case.x, zeros, zeros, 0.9, KEY, 0, words)


def test_momentum_is_rounded_after_each_operation() -> None:
    """What a fused multiply-add would get wrong."""
    rng = np.random.default_rng(0)
    x, momentum, scale = rng.standard_normal((3, 4 * TILE)).astype(np.float32)
    fused = (
        np.float32(0.9) * momentum.astype(np.float64) + np.float32(1 - 0.9) * x.astype(np.float64)
    ).astype(np.float32)
    rounded = np.float32(0.9) * momentum + np.float32(1 - 0.9) * x
    assert np.mean(fused != rounded) > 0.1
    assert_same("binarize", x, momentum, np.abs(scale), 0.9, KEY)


@pytest.mark.parametrize(("tile_count", "workers", "cut"), [(0, 1, 0), (1, 1, 1), (3, 4, 1000), (2, 300, 33)])
def test_vote_and_signs(tile_count: int, workers: int, cut: int) -> None:
    rng = np.random.default_rng(workers)
    workers = workers if ON_GPU else min(workers, 20)
    words = list(rng.integers(-(2**31), 2**31, (workers, tile_count * ROW)).astype(np.int32))
    result = assert_same("vote", words, KEY, FAR)
    for number, magnitude in enumerate((1.0, -0.3, 0.0, 1e38, 1e-41)):
        out = np.full(max(0, tile_count * TILE - cut), 77, DTYPES[number % 4])
        assert_same("decode_signs", result, magnitude, out)


@pytest.mark.parametrize("count", [0, 1, 32, 33, 600])
def test_flags(count: int) -> None:
    flags = np.random.default_rng(count).random(count) < 0.3
    words = assert_same("pack_flags", flags)
    assert_same("unpack_flags", words, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_tiles(dtype: Any) -> None:
    for count, broken in ((0, []), (1, [True]), (3000, [True, False, True]), (2048, [False, True])):
        assert_same("with_nan_tiles", np.ones(count, dtype), np.array(broken, bool))


# ---- whole arrays


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions(dtype: Any) -> None:
    for count in (0, 1, 4097):
        x = make_input(count, 32, 0, count, dtype, "max", 0.2).x
        assert_same("to_float32", x, np.zeros(count, np.float32))
        assert_same("to_float16", x, np.zeros(count, np.float16))
        values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
        for factor in (1 / 3, 1e-40, 1e38):
            assert_same(
                "scale",
                [values, values[: count // 3], SPECIAL],
                factor,
                np.zeros(count + count // 3 + len(SPECIAL), dtype),
            )


@pytest.mark.parametrize("workers", [1, 3])
def test_mean(workers: int) -> None:
    assert_same("mean", list(np.random.default_rng(0).standard_normal((workers, 5000)).astype(np.float32)))


def test_arrays_are_joined() -> None:
    x, y = np.arange(7, dtype=np.float32), np.arange(5, dtype=np.float32)
    assert_same("concatenate", [np.zeros(0, np.float32), x, y])
    joined = kernels.concatenate([np.zeros(0, np.float32), to_tensor(x)])
    assert_same_bits(x, to_array(joined), "concatenate")
    assert_same_bits(x.view(np.int32), to_array(kernels.view(to_tensor(x), np.int32)), "view")
    assert kernels.empty(3).dtype is torch.float32


# ---- many tensors, one launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The launches so far: a kernel's name, and how many tensors it worked on."""
    found: list[tuple[str, int]] = []
    launch = launching.Kernel.__call__

    def count(self, jobs, constants):
        found.append((self.function.__name__, len(jobs)))
        launch(self, jobs, constants)

    monkeypatch.setattr(launching.Kernel, "__call__", count)
    return found


def test_a_groups_stage_is_one_launch(launches: list) -> None:
    gradients = [[make_input(n, 96, 0, n, np.float32, "max", 0.0).x for n in (1, 5000, 0, 1025)]]
    norms = reference.bucket_maxima(gradients[0][1], 96)
    assert len(norms)
    compare_exchanges(SCHEMES["global-max"], gradients)
    assert Counter(launches) == {
        ("bucket_maxima", 3): 1, ("encode_sum", 3): 1, ("write_word", 1): 1, ("decode_sum", 3): 1,
    }  # fmt: skip
    launches.clear()
    compare_exchanges(SCHEMES["qsgd"], gradients)
    assert Counter(launches) == {
        ("bucket_square_sums", 3): 1, ("copy_words", 3): 1, ("encode_codes", 3): 1, ("decode_codes", 3): 1,
    }  # fmt: skip
    launches.clear()
    compare_exchanges(SCHEMES["eden-alltoall"], gradients)
    assert Counter(launches) == {
        ("write_word", 3): 1, ("encode_rotated", 3): 2, ("copy_words", 3): 1, ("add_rotated", 3): 2,
    }  # fmt: skip
    launches.clear()
    compare_exchanges(SCHEMES["binsgdm"], gradients)
    assert Counter(name for name, _ in launches) == {
        "binarize": 1, "pack_flags": 1, "vote": 1, "any_bits": 1, "decode_signs": 1, "write_nan_tiles": 1,
    }  # fmt: skip


def test_types_and_sizes_of_buckets_take_launches_of_their_own(launches: list) -> None:
    with kernels.batch():
        for dtype in (np.float32, np.float16, np.float32):
            kernels.bucket_maxima(to_tensor(np.ones(100, dtype)), 32)
        kernels.bucket_maxima(to_tensor(np.ones(100, np.float32)), 64)
    assert launches == [("bucket_maxima", 2), ("bucket_maxima", 1), ("bucket_maxima", 1)]


def test_jobs_wait_for_what_they_depend_on(launches: list) -> None:
    """Reading what was written, writing what is read, writing again; tensors that only touch do not matter."""
    x = np.random.default_rng(0).standard_normal((2, 2048)).astype(np.float32)
    tensors = to_tensor(x)
    buffer = torch.zeros(4096, device=DEVICE)
    with kernels.batch():
        for i in range(2):
            own = buffer[2048 * i : 2048 * (i + 1)]
            kernels.to_float32(tensors[i], own)
            maxima = kernels.bucket_maxima(own[1024:], 32)
            kernels.scale([own], 2.0, own)
            words = kernels.encode_uniform_codes(own[:1024], maxima, 32, 4, KEY)
            kernels.decode_uniform_codes([words], [maxima], 32, 4, 1.0, own[:1024])
    assert launches == [
        ("convert", 2), ("bucket_maxima", 2), ("convert", 2), ("encode_codes", 2), ("decode_codes", 2),
    ]  # fmt: skip
    for i in range(2):
        expected = x[i] * 2
        maxima = reference.bucket_maxima(x[i, 1024:], 32)
        words = reference.encode_uniform_codes(expected[:1024], maxima, 32, 4, KEY)
        reference.decode_uniform_codes([words], [maxima], 32, 4, 1.0, expected[:1024])
        assert_same_bits(expected, to_array(buffer[2048 * i : 2048 * (i + 1)]), str(i))


def test_one_kernel_twice_and_writing_what_is_read(launches: list) -> None:
    x, once, twice = (torch.full([100], value, device=DEVICE) for value in (1.0, 5.0, 2.0))
    with kernels.batch():
        kernels.scale([x], 3.0, once)
        kernels.scale([twice], 3.0, twice)
        kernels.scale([twice], 5.0, twice)
        maxima = kernels.bucket_maxima(x, 32)
        kernels.scale([once], 2.0, x)
    assert launches == [("convert", 2), ("convert", 1), ("bucket_maxima", 1), ("convert", 1)]
    assert once.tolist() == [3.0] * 100
    assert twice.tolist() == [30.0] * 100
    assert maxima.tolist() == [1.0] * 4
    assert x.tolist() == [6.0] * 100


def test_pytorchs_operations_find_what_was_collected(launches: list) -> None:
    x = torch.full([100], 2.0, device=DEVICE)
    flags = torch.ones(40, dtype=torch.bool, device=DEVICE)
    with kernels.batch():
        maxima = kernels.bucket_maxima(x, 32)
        assert not launches
        assert kernels.concatenate([maxima, maxima]).tolist() == [2.0] * 8
        assert bool(torch.all(kernels.unpack_flags(kernels.pack_flags(flags), 40)))
        clipped = kernels.clip(kernels.to_float32(x, None), 10.0)
        assert kernels.concatenate([x]).tolist() == [2.0] * 100
    assert clipped.tolist() == [1.0] * 100


def test_a_batch_that_fails_launches_nothing(launches: list) -> None:
    x = to_tensor(np.ones(100, np.float32))

    def fail() -> None:
        with kernels.batch():
            kernels.bucket_maxima(x, 32)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert not launches
    kernels.bucket_maxima(x, 32)
    assert launches == [("bucket_maxima", 1)]


intervals = st.tuples(st.integers(0, 60), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair)))


@given(added=st.lists(intervals), asked=st.lists(intervals, min_size=1))
def test_ranges(added: list, asked: list) -> None:
    ranges, numbers = Ranges(), set()
    for low, high in added:
        ranges.add(low, high)
        numbers.update(range(low, high))
    for low, high in asked:
        assert ranges.meets(low, high) == bool(numbers & set(range(low, high)))


# ---- the backend as a whole


def compare_exchanges(scheme: Scheme, groups: Sequence[Sequence[np.ndarray]], local_size: int = 1) -> None:
    """Everything that the workers send, decode and keep has the reference's bits."""
    assert_all_the_same_bits(
        exchanged(scheme, groups, reference, np.copy, local_size),
        exchanged(scheme, groups, kernels, to_tensor, local_size),
        type(scheme).__name__,
    )


def exchanged(
    scheme: Scheme, groups: Sequence[Sequence[np.ndarray]], backend: Any, place: Callable, local_size: int
) -> list[np.ndarray]:
    """What the workers send, decode and keep."""
    workers = [Workers(rank, len(groups), local_size=local_size) for rank in range(len(groups))]
    scheme = scheme.for_workers(workers[0])
    states, exchanges, found = [], [], []
    for rank, own in enumerate(groups):
        members = []
        for i, (array, state) in enumerate(zip(own, used_states(own))):
            low, high = scheme.owned(str(i), len(array), workers[rank])
            state = BinaryState(place(state.momentum[low:high]), place(state.scale[low:high]), state.beta)
            states += state[:2]
            members.append(Gradient(place(array), RngKey(0, str(i)), 3 + rank, state))
        exchanges.append(scheme.begin(members, workers[rank], backend))
    answers: list[Any] = [None] * len(groups)
    while True:
        requests, finished = [], []
        for exchange, answer in zip(exchanges, answers):
            try:
                requests.append(exchange.send(answer))
            except StopIteration as stop:
                finished.append(stop.value)
        if finished:
            break
        sent = arrays_of([request.array for request in requests])
        found += sent
        requests = [request._replace(array=array) for request, array in zip(requests, sent)]
        with np.errstate(over="ignore"):
            answers = simulator._answers(requests, local_size, None)
        if backend is kernels:
            answers = to_tensor(answers)
    for own, decoded in zip(groups, finished):
        targets = [place(np.zeros_like(array)) for array in own]
        with kernels.batch():
            decoded.decode(range(len(targets)), 1 / len(groups), targets)
        found += arrays_of(targets)
    return found + arrays_of(states)


EXCHANGES = {
    **{name: (scheme, 2, 1) for name, scheme in SCHEMES.items() if scheme.host_requirement() is None},
    **{name: (scheme, 3, 1) for name, scheme in LITERATURE.items()},
    "mean-signs": (load(Path(__file__).parents[1] / "newcomer" / "mean_signs.py").MeanSigns(96), 2, 1),
    "hierarchical-terngrad": (Hierarchical(LITERATURE["terngrad"]), 4, 2),
    "hierarchical": (Hierarchical(SCHEMES["global-max"]), 4, 2),
    "hierarchical-binsgdm": (Hierarchical(SCHEMES["binsgdm"]), 4, 2),
    "hierarchical-binsgdm-average": (Hierarchical(SCHEMES["binsgdm-average"]), 6, 2),
    "inside-float16": (Hierarchical(SCHEMES["global-max"], "float16"), 4, 2),
    "inside-8": (Hierarchical(SCHEMES["qsgd"], 8), 4, 2),
    "hierarchical-eden": (Hierarchical(SCHEMES["eden-alltoall"]), 6, 2),
    "hierarchical-exponential": (Hierarchical(SCHEMES["exponential-max"]), 4, 2),
    "one-node": (Hierarchical(SCHEMES["global-max"]), 2, 2),
}
FEW_EXCHANGES = [
    "nuqsgd-inf-alltoall",
    "exponential-max",
    "terngrad",
    "hierarchical-binsgdm",
    "hierarchical-binsgdm-average",
]
"""Others are in `test_a_groups_stage_is_one_launch`."""


@pytest.mark.parametrize("name", by_default(FEW_EXCHANGES, EXCHANGES))
def test_whole_exchanges(name: str) -> None:
    scheme, size, local_size = EXCHANGES[name]
    groups = [
        [
            make_input(count, 96, 0, 10 * rank + i, dtype, "max", 0.0).x
            for i, (count, dtype) in enumerate(
                [(1500, np.float32), (70, np.float16), (0, np.float32), (1025, BFLOAT16)]
            )
        ]
        for rank in range(size)
    ]
    groups[0][0][:200] = 0
    groups[-1][3][-1] = BFLOAT16(0x7FC0)
    compare_exchanges(scheme, groups, local_size=local_size)


def test_the_backend_offers_what_the_reference_does() -> None:
    assert set(kernels.__all__) - {"batch", "segments", "INTERPRETED"} <= set(dir(reference))


@pytest.mark.parametrize(("bits", "rank", "size"), in_turn((4, 2, 8), [(2, 3), (0, 2), (3, 8)]))
def test_joint_rounding(bits: int, rank: int, size: int) -> None:
    key = RngKey(3, "w").joint("worker", 5, rank, size)
    x = np.random.default_rng(4).standard_normal(1100).astype(np.float32)
    x[:6] = [0.0, -0.0, np.nan, -np.inf, 1e-40, -1e-40]
    norms = reference.bucket_maxima(x, 64)
    assert_same("encode_uniform_sum", x, norms, 64, 1, bits, key, 64)
    assert_same("encode_uniform_codes", x, norms, 64, bits, key)
    assert_same("encode_exponential", x, norms, 64, bits, key)


@many
@given(
    count=st.integers(0, 9000), bucket_size=st.integers(1, 70).map(lambda rows: 32 * rows),
    dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32 - 1), bits=st.integers(2, 8),
    key=keys,
)  # fmt: skip
def test_any_gradient(count: int, bucket_size: int, dtype: Any, seed: int, bits: int, key: Key) -> None:
    x, norms, _, start, _ = make_input(count, bucket_size, seed * TILE, seed, dtype, "any", 0.1)
    assert_same("bucket_maxima", x, bucket_size)
    assert_same("bucket_square_sums", x, bucket_size)
    assert_same("encode_uniform_sum", x, norms, bucket_size, 1, bits, key, start)
    assert_same("encode_uniform_codes", x, norms, bucket_size, bits, key, start)
    words = assert_same("encode_exponential", x, norms, bucket_size, bits, key, start)
    assert_same("decode_exponential", [words], [norms], bucket_size, bits, 0.5, np.zeros_like(x))


# ---- what does not fit


X = torch.ones(100, device=DEVICE)
NORMS = torch.ones(4, device=DEVICE)
WORDS = torch.zeros(512, dtype=torch.int32, device=DEVICE)
KEY_OF_WORD = kernels.key_of_word(RngKey(0, "w"), "worker", WORDS[:1])


@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        ("bucket_maxima", (np.ones(3, np.float32), 32), "x is a ndarray"),
        ("bucket_maxima", (X.to(torch.int32), 32), "x has dtype torch.int32"),
        ("bucket_maxima", (X.view(10, 10), 32), "flat and contiguous"),
        ("bucket_maxima", (X[::2], 32), "flat and contiguous"),
        ("bucket_maxima", (X, 33), "multiple of 32"),
        ("bucket_maxima", (X, 0), "multiple of 32"),
        ("bucket_maxima", (X, 32, NORMS[:3]), r"float32\[4\]"),
        ("bucket_square_sums", (X, 32, NORMS), r"float64\[4\]"),
        ("encode_uniform_sum", (X, NORMS[:3], 32, 7, 4, KEY), "3 norms for 100 elements"),
        ("encode_uniform_sum", (X, NORMS.to(torch.float64), 32, 7, 4, KEY), "norms has dtype"),
        ("encode_uniform_sum", (X, NORMS, 32, 0, 4, KEY), "levels=0"),
        ("encode_uniform_sum", (X, NORMS, 32, 2**15, 4, KEY), "levels=32768"),
        ("encode_uniform_sum", (X, NORMS, 32, 7, 17, KEY), "width=17"),
        ("encode_uniform_sum", (X, NORMS, 32, 7, 4, KEY, 0, WORDS[:31]), r"int32\[32\]"),
        ("encode_uniform_sum", (X, NORMS, 32, 7, 4, KEY_OF_WORD), "key is a KeyOfWord"),
        ("encode_uniform_codes", (X, NORMS, 32, 1, KEY), "bits=1"),
        ("encode_exponential", (X, NORMS, 32, 9, KEY), "bits=9"),
        ("decode_uniform_sum", (WORDS[:31], NORMS, 32, 7, 4, 1.0, X), "31 words cannot hold"),
        ("decode_uniform_codes", ([], [], 32, 4, 1.0, X), "0 workers"),
        ("decode_uniform_codes", ([WORDS], [NORMS, NORMS], 32, 4, 1.0, X), "2 workers' norms"),
        ("decode_uniform_codes", ([WORDS, WORDS[:31]], [NORMS, NORMS], 32, 4, 1.0, X), "31 words"),
        ("decode_exponential", ([WORDS], [NORMS[:3]], 32, 4, 1.0, X), "3 norms"),
        ("encode_rotated", (X, 5, KEY), "bits=5: use 1 to 4"),
        ("encode_rotated", (X, 2, KEY, 0, WORDS[:31]), r"int32\[32\]"),
        ("encode_rotated", (X, 2, KEY, 0, None, NORMS), r"float32\[1\]"),
        ("decode_rotated", (WORDS[:31], NORMS, 2, KEY, 1.0, X), "31 words cannot hold 128 codes"),
        ("decode_rotated", (WORDS, NORMS[:0], 2, KEY, 1.0, X), "0 scales for 100 elements"),
        ("decode_rotated", (WORDS, WORDS, 2, KEY, 1.0, X), "scales has dtype"),
        ("add_rotated", ([WORDS], [NORMS], 2, [KEY, KEY], 1.0, X), "2 keys"),
        ("key_of_word", (RngKey(0, "w"), "worker", WORDS), "512 words, where one holds the step"),
        ("key_of_word", (RngKey(0, "w"), "worker", X[:1]), "word has dtype"),
        ("binarize", (X, X[:99], X, 0.9, KEY), r"float32\[100\]"),
        ("vote", ([], KEY), "multiple of 32"),
        ("vote", ([WORDS, WORDS[:32]], KEY), "multiple of 32"),
        ("decode_signs", (WORDS[:31], 1.0, X), "31 words"),
        ("pack", ([(3, np.int32, lambda out: WORDS[:2])],), r"a part is torch.int32\[2\]"),
        ("scale", ([X], 1.0, X[:50]), "for 50 elements"),
        ("mean", ([X, X[:50]],), "must be the same"),
        ("unpack_flags", (WORDS[:3], 100), "3 words cannot hold"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(kernel: str, arguments: tuple, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(kernels, kernel)(*arguments)


# ---- without Triton, and without its interpreter


@pytest.mark.parametrize("missing", ["torch", "triton"])
def test_what_to_install_is_said(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import horovod_quant.kernels.triton"
    done = run_python(["-c", code])
    assert done.returncode == 1
    assert done.stderr.strip().endswith("pip install torch triton")


@pytest.mark.skipif(ON_GPU, reason="on the CPU")
def test_tensors_in_the_hosts_memory_are_refused() -> None:
    code = "import torch; from horovod_quant.kernels import triton; triton.bucket_maxima(torch.ones(5), 32)"
    done = run_python(["-c", code])
    assert done.returncode == 1
    assert "TypeError: x is in the host's memory" in done.stderr


def run_python(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess:
    """A process that may compile kernels."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )


# ---- compiled, without a GPU


@pytest.mark.extended
def test_compiled_kernels_round_each_operation(tmp_path: Path) -> None:
    """No fused multiply-add but by 1 or -1, nothing approximate or flushed to zero; accesses of vectors."""
    script = str(Path(__file__).with_name("triton_builds.py"))
    done = run_python([script, "90"], TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = json.loads(done.stdout)
    for label, instructions in compiled.items():
        inexact = {name for name in instructions if FORBIDDEN.search(name)}
        if label.split()[0] in WITH_TRANSFORMS:
            # The butterflies within rows: 5 stages, 32 rows, in a loop over two transforms.
            assert instructions.count("fma.rn.f32") % 160 == 0, label
            inexact -= {"fma.rn.f32"}
        assert not inexact, f"{label}: {inexact}"
    names = Counter(label.split()[0] for label in compiled)
    assert names.keys() >= {kernel.function.__name__ for kernel in all_kernels()}
    for exact in ("div.rn.f32", "div.rn.f64", "sqrt.rn.f64"):
        assert any(exact in instructions for instructions in compiled.values())
    for kernel, instruction in {
        "bucket_maxima": "ld", "bucket_square_sums": "ld", "binarize": "st", "decode_signs": "st",
    }.items():  # fmt: skip
        moves = [instructions for label, instructions in compiled.items() if label.startswith(f"{kernel} ")]
        assert f"{instruction}.global.v4.b32" in moves[0], kernel
    # A bucket stays in a warp's registers: its threads exchange elements, and nothing goes through shared memory.
    for label, instructions in compiled.items():
        if label.split()[0] in WITH_TRANSFORMS:
            assert not [name for name in instructions if ".shared" in name], label


WITH_TRANSFORMS = ("encode_rotated", "rotate", "add_rotated")
FORBIDDEN = re.compile(r"\b(fma|mad)\..*f(16|32|64)|\.ftz|\.approx|\.full|\.sat|div\.r[zmp]")


def all_kernels() -> list[launching.Kernel]:
    modules = [
        importlib.import_module(f"horovod_quant.kernels.triton.{name}")
        for name in ("arrays", "functions", "rotated")
    ]
    return [
        value for module in modules for value in vars(module).values() if isinstance(value, launching.Kernel)
    ]


# ---- the benchmark


@pytest.mark.extended
def test_the_benchmarks_calls_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    cuda_kernels = importlib.import_module("cuda_kernels")
    for case in cuda_kernels.cases(3000, 96, DEVICE):
        case.call()
    x = torch.randn(3000, device=DEVICE)
    norms = kernels.bucket_maxima(x, 96)
    decoded = cuda_kernels.eager_decode(cuda_kernels.eager_encode(x, norms, 96, 7), norms, 96, 7, 3000)
    step = norms.repeat_interleave(96)[:3000] / 7
    assert bool(torch.all(torch.abs(decoded - x) <= step * 1.001))


@pytest.mark.extended
def test_the_benchmark_needs_a_gpu() -> None:
    script = str(ROOT / "benchmarks" / "kernels.py")
    done = run_python([script, "--device", "cuda", "--sizes", "1M", "--rounds", "1"])
    if ON_GPU:
        assert done.returncode == 0, done.stderr
        assert "bucket_maxima" in done.stdout
    else:
        assert done.returncode == 2
        assert "PyTorch sees no CUDA device" in done.stderr
