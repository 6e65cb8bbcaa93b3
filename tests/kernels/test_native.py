"""The C++ kernels return the reference's bits: installed and built otherwise, on each instruction set."""

from __future__ import annotations

import ctypes
import inspect
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
from conformance.exchanges import EXCHANGES, assert_exchanges_conform
from conformance.refusals import REFUSED, Refused, assert_refused
from conformance.suite import (
    Case,
    arrays_of,
    assert_conforms,
    compared_kernels,
    function_of,
    make_out,
    mapped,
    numbers,
)
from helpers import extended, same_bits
from native_builds import (
    BUILDS,
    CONTROL_REGISTER,
    FLUSH_AND_ROUND_TOWARDS_ZERO,
    SOURCE,
    compile_library,
    load_installed,
    sanitized,
)

from horovod_quant.kernels import native, native_library, reference
from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.formats import CodeFormat, RotatedFormat, SumFormat, Sums
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.segments import Batch, Rounder

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


def itself(x: np.ndarray) -> np.ndarray:
    return x


class Native:
    """The backend with an instruction set.

    Args:
        instruction_set: name.
        array: makes its arrays of contiguous ones.
        given: makes of arrays what kernels get as the values of a batch, and to write to.
    """

    kernels = dir(native)

    def __init__(self, instruction_set: str, array: Callable = np.copy, given: Callable = itself) -> None:
        self.name = f"native {instruction_set}"
        self._instruction_set = instruction_set
        self._array = array
        self._given = given

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        native_library.force_instruction_set(self._instruction_set)
        for case in cases:
            outs: list[np.ndarray] = []

            def make(out: Any) -> Any:
                outs.append(self._array(make_out(out)))  # noqa: B023
                return self._given(outs[-1])  # noqa: B023

            arguments = mapped(case.arguments, self._array, make)
            after = arrays_of(arguments)
            for batch in (each for each in arguments if isinstance(each, Batch)):
                batch.values = list(map(self._given, batch.values))
            results = arrays_of(function_of(native, case.kernel)(*arguments))
            if outs and case.kernel.startswith(("encode", "bucket", "vote", "decode", "add")):
                assert any(result is outs[0] for result in results), f"{case.kernel} returns another array"
            yield (results, after) if self._given is itself else (outs or results, [])


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


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("topic", [name for name in TOPICS if name.startswith("segments_of")])
def test_kernels_for_many_segments_take_addresses(topic: str, number: int) -> None:
    assert_conforms(Native(native_library.instruction_set(), given=view_of), topic, number)


def test_every_kernel_is_compared() -> None:
    functions = {name for name, value in vars(native).items() if inspect.isfunction(value) and name[0] != "_"}
    own = {name for name in functions if getattr(native, name).__module__ == native.__name__}
    assert own <= compared_kernels("native")
    assert own <= set(dir(reference))


# ---- what does not fit


@pytest.mark.usefixtures("loaded")
def test_arrays_that_do_not_fit_are_refused() -> None:
    assert_refused(native, REFUSED, "native", itself, make_out)


X, NORMS, WORDS = np.ones(100, np.float32), np.ones(4, np.float32), np.zeros(512, np.int32)
WIDE, SHORT, ROUNDER = X.astype(np.float64), WORDS[:31], Rounder("worker")


def batch_of(*values: np.ndarray, starts: int | None = None, states: Sequence = ()) -> Batch:
    """Segments that begin their tensors. ``starts`` is the number of their starts, if not that of the values."""
    lengths = tuple(map(len, values))
    zeros = [0] * len(lengths)
    return Batch(lengths, zeros[:starts], [RngKey(0, "w")] * len(lengths), zeros, values, states)


def uniform(bits: int) -> CodeFormat:
    return CodeFormat("uniform", bits, "max", 32)


def exponential(bits: int, bucket_size: int = 32) -> CodeFormat:
    return CodeFormat("exponential", bits, "l2", bucket_size)


ONE, TWO, UNLIKE = batch_of(X), batch_of(X, X), batch_of(X, X, starts=1)
AT, OUTS = [0, 64, 128], [X, X]
SUMS = SumFormat(4, 7, "max", 32)
STATE = (X, X, 0.9)

REFUSED_TOGETHER = [
    Refused("convert", (batch_of(X, X.astype(np.int32)), "float32"), "x has dtype int32"),
    Refused("convert", (batch_of(X.reshape(10, 10)), "float32"), r"x has shape \(10, 10\)"),
    Refused("scale", ([X], 1.0, [X[:99]]), "arrays of"),
    Refused("scale", ([X, X], 1.0, [X]), "arrays of"),
    Refused("norms", ("max", 33, ONE), "bucket_size=33"),
    Refused("encode_sums", (SUMS, ONE, ROUNDER, NORMS[:3]), "3 norms for 4 buckets"),
    Refused("encode_sums", (SumFormat(4, 0, "max", 32), ONE, ROUNDER, NORMS), "levels=0"),
    Refused("encode_sums", (SUMS, UNLIKE, ROUNDER, X[:8]), "1 starts, 2 chains"),
    Refused("encode_sums", (SUMS, Batch((100,), [0], [], [], [X]), ROUNDER, NORMS), "0 chains"),
    Refused("encode_sums", (SUMS, ONE.with_values([X, X]), ROUNDER, X[:8]), "of 2 gradients"),
    Refused("decode_sums", (SUMS, Sums(SHORT, NORMS, (100,)), [0], 1.0, [X]), "31 words"),
    Refused("decode_sums", (SUMS, Sums(WORDS, NORMS[:3], (100,)), [0], 1.0, [X]), "3 norms"),
    Refused("binarize", (ONE, ROUNDER, AT), "0 states of 1"),
    Refused("binarize", (batch_of(X, states=[(X[:99], X, 0.9)]), ROUNDER, AT),
            r"momenta\[0\] is float32\[99\]; it must be float32\[100\]"),
    Refused("binarize", (batch_of(X, X, states=[STATE, (X, WIDE, 0.9)]), ROUNDER, AT),
            r"scales\[1\] is float64\[100\]; it must be float32\[100\]"),
    Refused("binarize", (batch_of(X, starts=0, states=[STATE]), ROUNDER, AT), "0 starts"),
    Refused("binarize", (batch_of(X, states=[STATE]), ROUNDER, [0, 31]), "not all within 31 words"),
    Refused("vote", ([], ONE, ROUNDER, AT), "no payloads"),
    Refused("vote", ([WORDS, SHORT], ONE, ROUNDER, AT), "not all within 31 words"),
    Refused("vote", ([WORDS], UNLIKE, ROUNDER, AT), "1 starts"),
    Refused("decode_signs", (WORDS[:95], TWO, AT, 1.0, OUTS), "not all within 95 words"),
    Refused("encode_codes", (uniform(17), ONE, ROUNDER, AT), "bits=17"),
    Refused("encode_codes", (exponential(9), ONE, ROUNDER, AT), "bits=9"),
    Refused("encode_codes", (exponential(4, 33), ONE, ROUNDER, AT), "bucket_size=33"),
    Refused("encode_codes", (uniform(4), UNLIKE, ROUNDER, AT), "1 starts"),
    Refused("encode_codes", (uniform(4), ONE, ROUNDER, [1, 20]), "offsets of 1 gradients' payloads"),
    Refused("encode_codes", (uniform(4), ONE, ROUNDER, [-1, 64]), "offsets of"),
    Refused("decode_codes", (uniform(4), [], AT, 1.0, OUTS), "no payloads"),
    Refused("decode_codes", (exponential(4), [WORDS, WORDS[:64]], AT, 1.0, OUTS), "not all within 64"),
    Refused("decode_codes", (exponential(9), [WORDS], AT, 1.0, OUTS), "bits=9"),
    Refused("decode_codes", (exponential(4, 33), [WORDS], AT, 1.0, OUTS), "bucket_size=33"),
    Refused("decode_codes", (uniform(4), [WIDE], AT, 1.0, OUTS), "payloads has dtype float64"),
    Refused("encode_rotated", (RotatedFormat(5), ONE, ROUNDER, AT), "bits=5"),
    Refused("encode_rotated", (RotatedFormat(2), ONE, ROUNDER, [0, 32]), "gradients' words"),
    Refused("encode_rotated", (RotatedFormat(2), ONE, ROUNDER, [0, 33]), "gradients' scales"),
    Refused("encode_rotated", (RotatedFormat(2), ONE, ROUNDER, [-2, 64]), "offsets of"),
    Refused("decode_rotated", (RotatedFormat(2), TWO, "worker", [], AT, 1.0, OUTS), "no payloads"),
    Refused("decode_rotated", (RotatedFormat(2), TWO, "worker", [WORDS, WORDS[:96]], AT, 1.0, OUTS), "offsets of"),
    Refused("decode_rotated", (RotatedFormat(2), UNLIKE, "worker", [WORDS], AT, 1.0, OUTS), "1 starts"),
]  # fmt: skip
"""The arguments of kernels for many gradients."""


@pytest.mark.usefixtures("loaded")
def test_many_gradients_that_do_not_fit_are_refused() -> None:
    assert_refused(native.segments, REFUSED_TOGETHER, "native", itself, make_out)


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
@pytest.mark.parametrize("name", EXCHANGES)
def test_whole_exchanges(name: str) -> None:
    assert_exchanges_conform(native, name, np.copy, np.copy)


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
    select = f"{INSTALLED} or strided or unaligned or addresses or refuse or exchanges"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", __file__, "-k", select]
    environment = sanitized(tmp_path)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert " passed" in result.stdout
