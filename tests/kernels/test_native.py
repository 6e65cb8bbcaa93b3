"""The C++ kernels return the reference's bits: installed and built otherwise, on each instruction set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from conformance.cases import TOPICS
from conformance.refusals import assert_refused
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
from helpers import extended
from native_builds import (
    BUILDS,
    SOURCE,
    compile_library,
    load_installed,
)

from horovod_quant.kernels import native, native_library, reference
from horovod_quant.kernels.arrays import address
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.segments import Batch

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
