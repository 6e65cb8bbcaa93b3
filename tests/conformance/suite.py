"""One suite for the kernels of all backends: cases as data, compared with the numpy reference, bit for bit.

A backend's test file parametrizes a test by `numbers` and gives `assert_conforms` its adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Callable, NamedTuple, Protocol

import numpy as np
import pytest
from conformance import bit_topics, level_topics, segment_topics  # noqa: F401 (register themselves)
from conformance.cases import TOPICS, Draw, Out
from helpers import extended

from horovod_quant.kernels import reference
from horovod_quant.kernels.formats import RotatedFormat, Sums
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.segments import Batch, segment_kernels


class Case(NamedTuple):
    """A call of a kernel, what the reference returns, and the arrays among the arguments after the call."""

    kernel: str
    arguments: tuple
    results: list[np.ndarray]
    after: list[np.ndarray]


def numbers(backend: str, rounds: int | None = None) -> list[Any]:
    """Parameters ``topic, number`` of a backend's test.

    Args:
        backend: name.
        rounds: of each period with --all, and one of them by default; None for the first period with --all, and the
            ``quick`` numbers by default.
    """
    found = []
    for name, (_, period, quick, backends) in TOPICS.items():
        chosen = quick if rounds is None else range(period)
        if backend in backends:
            every = range(period * (rounds or 1))
            found += [(name, number) if number in chosen else extended(name, number) for number in every]
    return found


# ---- scripts become cases


@lru_cache(maxsize=32)
def cases(name: str, number: int) -> list[Case]:
    """Those of a script, with what the reference makes of them."""
    found = []
    with np.errstate(all="ignore"):
        script = TOPICS[name].script(Draw(name, number))
        answer = None
        while True:
            try:
                kernel, *arguments = script.send(answer)
            except StopIteration:
                return found
            given = tuple(mapped(arguments, np.copy, make_out))
            answer = function_of(reference, kernel)(*given)
            results = [np.copy(array) for array in arrays_of(answer)]
            found.append(
                Case(kernel, tuple(mapped(arguments, np.copy, lambda out: out)), results, arrays_of(given))
            )


def function_of(backend: Any, kernel: str) -> Callable:
    """A backend's function; after ``segments.`` that of its kernels for many segments, after ``composed.`` ours."""
    kind, _, name = kernel.rpartition(".")
    if kind == "composed":
        return partial(COMPOSED[name], backend)
    return getattr(segment_kernels(backend) if kind else backend, name)


def encode_rotated_again(
    backend: Any, codec: RotatedFormat, batch: Batch, rounder: Any, at: Sequence[int], payload: Any
) -> Any:
    """As the reducer of a shard does: with the steps that a payload has."""
    segments = segment_kernels(backend)
    words = segments.step_words(payload, at, batch.elements)
    return segments.encode_rotated(codec, batch, rounder, at, words)


def decode_rotated_of_step(backend: Any, x: Any, step: int, worker: int, out: Any) -> list[Any]:
    """With the key of a step that only the kernels read."""
    chain = getattr(backend, "RngKey", RngKey)(2**64 - 1, "w")
    key = backend.key_of_word(chain, "worker", backend.step_word(step), worker)
    encoded = backend.encode_rotated(x, 2, key)
    return [*encoded, backend.decode_rotated(*encoded, 2, key, 1.0, out)]


COMPOSED = {function.__name__: function for function in (encode_rotated_again, decode_rotated_of_step)}


def mapped(
    value: Any, of_array: Callable[[np.ndarray], Any], of_out: Callable[[Out], Any], chain: Any = RngKey
) -> Any:
    """Arguments with their arrays replaced. ``chain`` is the backend's class of keys."""
    if isinstance(value, Out):
        return of_out(value)
    if isinstance(value, np.ndarray):
        return of_array(value)
    if isinstance(value, Batch):
        found = copy.copy(value)
        found.values, found.states = (mapped(part, of_array, of_out) for part in (value.values, value.states))
        found.chains, found.table = [chain(item.seed, item.name) for item in value.chains], None
        return found
    if isinstance(value, Sums):
        return value._replace(words=of_array(value.words), norms=of_array(value.norms))
    if type(value) in (list, tuple):
        return type(value)(mapped(one, of_array, of_out, chain) for one in value)
    return value


def make_out(out: Out) -> np.ndarray:
    return np.full(out.elements, 77, out.dtype)


def arrays_of(value: Any, kind: Any = np.ndarray) -> list[Any]:
    if isinstance(value, kind):
        return [value]
    if isinstance(value, Batch):
        return arrays_of((value.values, value.states), kind)
    return (
        [found for one in value for found in arrays_of(one, kind)] if isinstance(value, (list, tuple)) else []
    )


# ---- backends


class Backend(Protocol):
    """An adapter.

    Attributes:
        name: of the backend.
        kernels: names of the functions that it has.
    """

    name: str
    kernels: Collection[str]

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """Return of each case the results, and the arrays among the arguments as they are afterwards."""


def assert_conforms(backend: Backend, name: str, number: int) -> None:
    """Every kernel of the script that the backend has returns and leaves the reference's bits."""
    offered = [case for case in cases(name, number) if case.kernel in backend.kernels or "." in case.kernel]
    assert offered, f"{backend.name} has no kernel of {name}"
    count = 0
    with np.errstate(all="ignore"):
        for case, (results, after) in zip(offered, backend.run(offered)):
            label = f"{backend.name}, {name}-{number}, call {count}, {case.kernel}"
            assert_all_same_bits(case.results, results, f"{label}: result")
            if after:
                assert_all_same_bits(case.after, after, f"{label}: argument")
            count += 1
    assert count == len(offered)


def compared_kernels(backend: str) -> set[str]:
    """Names of all kernels in the cases that a backend's tests run."""
    found = set()
    for name, (_, _, quick, backends) in TOPICS.items():
        if backend in backends:
            found.update(case.kernel for case in cases(name, min(quick, default=0)))
    return found


def assert_all_same_bits(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray], what: str) -> None:
    assert len(expected) == len(actual), f"{what}: {len(actual)} arrays, not {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, actual)):
        assert_same_bits(one, other, f"{what} {number}")


def assert_same_bits(expected: np.ndarray, actual: np.ndarray, what: str) -> None:
    """The same bits, with NaN equal to NaN; 0 and -0 differ."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), (
        f"{what}: {actual.dtype} {actual.shape}"
    )
    differ = expected.view(f"u{expected.itemsize}") != actual.view(f"u{actual.itemsize}")
    if expected.dtype.kind == "f":
        differ &= ~(np.isnan(expected) & np.isnan(actual))
    at = np.flatnonzero(differ)
    if len(at):
        pytest.fail(
            f"{what}: {len(at)} of {len(actual)}, at {at[:5]}: {actual[at[:5]]}, not {expected[at[:5]]}"
        )
