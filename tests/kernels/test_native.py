"""The C++ kernels return the reference's bits: installed and built otherwise, on each instruction set."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from conformance import suite
from conformance.exchanges import EXCHANGES, assert_exchanges_conform
from conformance.refusals import assert_refused
from conformance.suite import KEY, TOPICS, Out, numbers
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
from horovod_quant.kernels.segments import Batch

INSTALLED = "installed"

# ---- the backend, and how arrays lie in memory


def strided(x: np.ndarray) -> np.ndarray:
    wide = np.zeros(2 * len(x), x.dtype)
    wide[::2] = x
    return wide[::2]


def unaligned(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    result = raw[1:].view(x.dtype)
    result[:] = x
    return result


def itself(x: np.ndarray) -> np.ndarray:
    return x


class Native(suite.Backend):
    """The backend with an instruction set, by default the best one.

    Args:
        instruction_set: name.
        array: makes its arrays of contiguous ones.
    """

    def __init__(self, instruction_set: str = "", array: Callable = np.copy) -> None:
        super().__init__(native, instruction_set or native_library.loaded().available[-1])
        self._array = array

    def array(self, x: np.ndarray) -> np.ndarray:
        return self._array(x)

    def run(self, cases: Any) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        native_library.loaded().use(self.how)
        return super().run(cases)


class WithAddresses(Native):
    """Kernels for many segments get addresses of values and results, as from frontends."""

    def called(self, kernel: str, arguments: tuple) -> tuple[Any, tuple]:
        outs: list[np.ndarray] = []

        def argument(value: Any) -> Any:
            if isinstance(value, Out):
                outs.append(suite.make_out(value))
                return view_of(outs[-1])
            return self.argument(kernel, value)

        given = suite.mapped(arguments, argument)
        for batch in given:
            if isinstance(batch, Batch):
                batch.values = list(map(view_of, batch.values))
        result = suite.function_of(native, kernel)(*given)
        return outs or result, ()


def view_of(x: np.ndarray) -> BufferView:
    return BufferView(x.dtype, len(x), np.asarray).at(address(x), x, x)


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
    for name in native_library.loaded().available:
        suite.assert_conforms(Native(name), topic, number)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("array", [strided, unaligned])
@pytest.mark.parametrize(("topic", "number"), numbers("native"))
def test_kernels_take_arrays_as_they_lie(array: Callable, topic: str, number: int) -> None:
    suite.assert_conforms(Native(array=array), topic, number)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("topic", [name for name in TOPICS if name.startswith("segments_of")])
def test_kernels_for_many_segments_take_addresses(topic: str, number: int) -> None:
    suite.assert_conforms(WithAddresses(), topic, number)


@pytest.mark.usefixtures("loaded")
def test_every_kernel_is_compared() -> None:
    suite.assert_all_are_compared(Native(), native.__name__)


@pytest.mark.usefixtures("loaded")
def test_arguments_that_do_not_fit_are_refused() -> None:
    assert_refused(Native(array=itself))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("name", EXCHANGES)
def test_whole_exchanges(name: str) -> None:
    assert_exchanges_conform(Native(), name)


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
