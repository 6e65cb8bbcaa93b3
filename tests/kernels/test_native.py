"""The C++ kernels return the reference's bits: installed and built otherwise, on each instruction set."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from conformance.cases import KEY, TOPICS
from conformance.refusals import assert_refused
from conformance.suite import (
    Case,
    arrays_of,
    assert_conforms,
    assert_same_bits,
    compared_kernels,
    function_of,
    make_out,
    mapped,
    numbers,
)
from helpers import SCHEMES, extended, same_bits
from native_builds import (
    BUILDS,
    CONTROL_REGISTER,
    FLUSH_AND_ROUND_TOWARDS_ZERO,
    SANITIZERS,
    SOURCE,
    compile_library,
    load_installed,
)

from horovod_quant import simulator
from horovod_quant.kernels import entropy, native, native_each, native_library, reference
from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.native_each import SegmentTable
from horovod_quant.kernels.segments import Batch
from horovod_quant.schemes.base import BinaryState

INSTALLED = "installed"

# ---- how arrays lie in memory


def strided(x: np.ndarray) -> np.ndarray:
    wide = np.zeros(2 * len(x), x.dtype)
    wide[::2] = x
    return wide[::2]


def unaligned(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    result = raw[1:].view(x.dtype)
    result[:] = x
    return result


def view_of(x: np.ndarray) -> Any:
    """An address, as frontends give kernels for many segments."""
    return BufferView(x.dtype, len(x), np.asarray).at(address(x), x, x)


class Native:
    """The backend with an instruction set, and arrays that ``array`` makes of contiguous ones."""

    kernels = native.__all__

    def __init__(self, instruction_set: str, array: Callable[[np.ndarray], np.ndarray] = np.copy) -> None:
        self.name = f"native {instruction_set}"
        self._instruction_set = instruction_set
        self._array = array

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        native_library.force_instruction_set(self._instruction_set)
        for case in cases:
            outs: list[np.ndarray] = []

            def make(out: Any) -> np.ndarray:
                outs.append(self._array(np.full(out.elements, 77, out.dtype)))  # noqa: B023
                return outs[-1]  # noqa: B023

            arguments = mapped(case.arguments, self._array, make)
            results = arrays_of(function_of(native, case.kernel)(*arguments))
            if outs and case.kernel.startswith(("encode", "bucket", "vote", "decode", "add")):
                assert any(result is outs[0] for result in results), f"{case.kernel} returns another array"
            yield results, arrays_of(arguments)


# ---- which library


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module", params=[INSTALLED, *map(extended, BUILDS)])
def build(request: pytest.FixtureRequest, folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "_library", None)
        if request.param == INSTALLED:
            load_installed()
        else:
            compiler, *flags = BUILDS[request.param]
            native_library.load(compile_library(folder / f"{request.param}.so", SOURCE, compiler, *flags))
        yield


@pytest.fixture
def loaded() -> Iterator[None]:
    """The installed library with its best instruction set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_library, "_library", None)
        load_installed()
        yield


# ---- the suite


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(("topic", "number"), numbers("native", 4))
def test_kernels_conform_on_each_instruction_set(topic: str, number: int) -> None:
    for name in native_library.available_instruction_sets():
        assert_conforms(Native(name), topic, number)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("array", [strided, unaligned])
@pytest.mark.parametrize(("topic", "number"), numbers("native"))
def test_kernels_take_arrays_as_they_lie(array: Callable, topic: str, number: int) -> None:
    assert_conforms(Native(native_library.available_instruction_sets()[-1], array), topic, number)


class Addresses(Native):
    """Gives kernels for many segments addresses of values and results."""

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        for case in cases:
            outs: list[np.ndarray] = []

            def make(out: Any) -> BufferView:
                outs.append(make_out(out))  # noqa: B023
                return view_of(outs[-1])  # noqa: B023

            arguments = mapped(case.arguments, np.copy, make)
            for argument in arguments:
                if isinstance(argument, Batch):
                    argument.values = list(map(view_of, argument.values))
            results = arrays_of(function_of(native, case.kernel)(*arguments))
            yield outs or results, []


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("topic", [name for name in TOPICS if name.startswith("segments_of")])
def test_kernels_for_many_segments_take_addresses(topic: str, number: int) -> None:
    assert_conforms(Addresses(native_library.instruction_set()), topic, number)


def test_every_kernel_is_compared() -> None:
    shared = {name for name in native.__all__ if getattr(native, name) is getattr(reference, name)}
    assert set(native.__all__) - shared <= compared_kernels("native")
    assert set(native.__all__) <= set(dir(reference))


# ---- what does not fit


@pytest.mark.usefixtures("loaded")
def test_arrays_that_do_not_fit_are_refused() -> None:
    assert_refused(native, "native", lambda array: array, make_out)


X, NORMS, WORDS = np.ones(100, np.float32), np.ones(4, np.float32), np.zeros(512, np.int32)
AT, ONE = np.array([0]), np.array([1])
KEYS, START = np.zeros((1, 6)), [0]


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: SegmentTable([X, X.astype(np.int32)]), "x has dtype int32"),
        (lambda: SegmentTable([X.reshape(10, 10)]), r"x has shape \(10, 10\)"),
        (lambda: native_each.bucket_maxima_each(SegmentTable([X]), 33), "bucket_size=33"),
        (lambda: native_each.encode_uniform_sum_each(
            SegmentTable([X]), NORMS[:3], 32, 7, 4, KEYS, START, WORDS), "3 norms for 4 buckets"),
        (lambda: native_each.encode_uniform_sum_each(
            SegmentTable([X]), NORMS[:4], 32, 7, 4, np.zeros((2, 6)), [0], WORDS), "keys are"),
        (lambda: native_each.encode_uniform_sum_each(
            SegmentTable([X]), NORMS[:4], 32, 7, 4, KEYS, START, WORDS[:31]), r"it must be int32\[32\]"),
        (lambda: native_each.decode_uniform_sum_each(WORDS[:31], NORMS[:4], 32, 7, 4, 1.0, [X.copy()]), "31 words"),
        (lambda: native_each.decode_uniform_sum_each(WORDS[:32], NORMS[:3], 32, 7, 4, 1.0, [X.copy()]), "3 norms"),
        (lambda: native_each.binarize_each(
            SegmentTable([X]), [], [X.copy()], [0.9], KEYS, START, AT, WORDS),
            "0 momenta, 1 scales and 1 betas"),
        (lambda: native_each.binarize_each(
            SegmentTable([X]), [X[:99].copy()], [X.copy()], [0.9], KEYS, START, AT, WORDS),
            r"momenta\[0\] is float32\[99\]; it must be float32\[100\]"),
        (lambda: native_each.binarize_each(
            SegmentTable([X, X]), [X.copy()] * 2, [X.copy(), X.astype(np.float64)], [0.9] * 2, np.zeros((2, 6)),
            [0, 0], AT, WORDS),
            r"scales\[1\] is float64\[100\]; it must be float32\[100\]"),
        (lambda: native_each.binarize_each(
            SegmentTable([X]), [X.copy()], [X.copy()], [0.9], np.zeros((2, 6)), [0], AT, WORDS), "keys are"),
        (lambda: native_each.binarize_each(
            SegmentTable([X]), [X.copy()], [X.copy()], [0.9], KEYS, START, AT, WORDS[:31]),
            "not all within 31 words"),
        (lambda: native_each.vote_each([], AT, ONE, KEYS, START, WORDS), "0 workers' pieces"),
        (lambda: native_each.vote_each(
            [WORDS[:32], WORDS[:31]], AT, ONE, KEYS, START, WORDS), "not all within 31 words"),
        (lambda: native_each.vote_each([WORDS], AT, -ONE, KEYS, START, WORDS), "give at least one"),
        (lambda: native_each.vote_each([WORDS], AT, ONE, np.zeros((1, 6)), [], WORDS), "keys are"),
        (lambda: native_each.decode_signs_each(WORDS[:31], AT, 1.0, [X.copy()]), "not all within 31 words"),
        (lambda: native_each.scale_each(SegmentTable([X]), 1.0, [X[:99].copy()]), "arrays of"),
        (lambda: native_each.encode_norms_and_codes_each(
            "uniform", "max", SegmentTable([X]), 32, 17, KEYS, START, AT, WORDS), "bits=17"),
        (lambda: native_each.encode_norms_and_codes_each(
            "exponential", "l2", SegmentTable([X]), 32, 9, KEYS, START, AT, WORDS), "bits=9"),
        (lambda: native_each.encode_norms_and_codes_each(
            "exponential", "l2", SegmentTable([X]), 33, 4, KEYS, START, AT, WORDS), "bucket_size=33"),
        (lambda: native_each.encode_norms_and_codes_each(
            "uniform", "l2", SegmentTable([X]), 32, 4, np.zeros((2, 6)), [0], AT, WORDS), "keys are"),
        (lambda: native_each.encode_norms_and_codes_each(
            "uniform", "max", SegmentTable([X]), 32, 4, KEYS, START, AT + 1, np.zeros(36, np.int32)),
            "offsets of 1 gradients' payloads"),
        (lambda: native_each.encode_norms_and_codes_each(
            "uniform", "max", SegmentTable([X]), 32, 4, KEYS, START, AT - 1, WORDS.copy()),
            "offsets of"),
        (lambda: native_each.decode_codes_each(
            "uniform", [], AT, [], AT, 32, 4, 1.0, [X.copy()]), "0 workers' pieces"),
        (lambda: native_each.decode_codes_each(
            "uniform", [WORDS], AT, [NORMS[:3]], AT, 32, 4, 1.0, [X.copy()]), "offsets of 1 gradients' norms"),
        (lambda: native_each.decode_codes_each(
            "exponential", [WORDS, WORDS[:11]], AT, [NORMS, NORMS], AT, 32, 4, 1.0, [X.copy()]),
            "offsets of 1 gradients' words"),
        (lambda: native_each.decode_codes_each(
            "exponential", [WORDS], AT, [NORMS.astype(np.float64)], AT, 32, 4, 1.0, [X.copy()]),
            "norms has dtype float64"),
        (lambda: native_each.decode_codes_each(
            "exponential", [WORDS], AT, [NORMS], AT, 33, 4, 1.0, [X.copy()]), "bucket_size=33"),
        (lambda: native_each.encode_rotated_each(
            SegmentTable([X]), 5, KEYS, START, AT, AT + 31, WORDS), "bits=5"),
        (lambda: native_each.encode_rotated_each(
            SegmentTable([X]), 2, KEYS, START, AT, AT + 32, WORDS[:32].copy()), "offsets of"),
        (lambda: native_each.encode_rotated_each(
            SegmentTable([X]), 2, KEYS, START, AT - 1, AT + 32, WORDS.copy()), "offsets of"),
        (lambda: native_each.add_rotated_each([], AT, AT, 2, np.zeros((1, 0, 6)), 1.0, [X.copy()], [0]), "no pieces"),
        (lambda: native_each.add_rotated_each(
            [WORDS, WORDS[:31]], AT, AT, 2, np.zeros((1, 2, 6)), 1.0, [X.copy()], [0]), "offsets of"),
        (lambda: native_each.add_rotated_each(
            [WORDS], AT, AT, 2, np.zeros((1, 2, 6)), 1.0, [X.copy()], [0]), "keys are"),
    ],
)  # fmt: skip
def test_many_gradients_that_do_not_fit_are_refused(function: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        function()


@pytest.mark.usefixtures("loaded")
def test_longer_words_and_norms_than_needed_are_cut() -> None:
    expected, actual = (
        kernels.decode_uniform_codes([WORDS], [np.ones(9, np.float32)], 32, 4, 1.0, np.zeros(100, np.float32))
        for kernels in (reference, native)
    )
    assert_same_bits(expected, actual, "decoded")


@pytest.mark.usefixtures("loaded")
def test_elias_decoder_refuses_what_is_no_payload() -> None:
    for payload in (None, [1, 2], np.zeros(0, np.uint8), np.zeros((1, 1), np.uint8), np.zeros(1)):
        with pytest.raises(entropy.CorruptPayloadError):
            native.elias_decode_codes(payload, 3, 2)
    words = reference.pack_codes(reference.codes_of_digits(np.array([7], np.int32), 4), 4)
    payload = native.elias_encode_codes(words, 4, 1)
    assert same_bits(native._try_elias_decode_codes(payload, 1, 4, "gamma"), words)
    assert native._try_elias_decode_codes(payload, 1, 3, "gamma") is None  # 7 has four bits


# ---- the processor, the compiler, the backend as a whole


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


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", SCHEMES)
def test_whole_exchanges(name: str) -> None:
    gradients = list(np.random.default_rng(3).standard_normal((3, 2500)).astype(np.float32))
    gradients[1][:200] = 0

    def decoded(backend: str) -> list[np.ndarray]:
        states = [[BinaryState(np.zeros_like(item), np.zeros_like(item), 0.9)] for item in gradients]
        result = simulator.run(SCHEMES[name], gradients, states=states, kernels=backend)
        return [item[0] for item in result.decoded] + [array for item in states for array in item[0][:2]]

    assert all(same_bits(one, other) for one, other in zip(decoded("numpy"), decoded("native")))


@pytest.mark.parametrize("header", sorted(SOURCE.parent.glob("native_*.h")), ids=lambda header: header.name)
def test_a_header_includes_what_it_needs(header: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-I", str(SOURCE.parent), "-x", "c++", "-"]
    result = subprocess.run(command, input=f'#include "{header.name}"\n', capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(header.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.extended
def test_address_and_undefined_behaviour_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The tests of the installed kernels again, on a library that checks each access, in a process of its own."""
    library = compile_library(tmp_path / "sanitized.so", SOURCE, "g++", *SANITIZERS)
    runtime = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    select = f"{INSTALLED} or strided or unaligned or addresses or refuse or longer or exchanges"
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
