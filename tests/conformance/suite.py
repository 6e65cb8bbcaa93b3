"""One suite for the kernels of all backends: calls as data, compared with the numpy reference, bit for bit.

A *topic* is a generator function of a `Draw`. It yields calls, ``(kernel, *arguments)``, and is sent what the reference
returns, so that later calls can use it. Its number selects arguments and random values, so ``(topic, number)`` names
reproducible cases. A kernel is added by calls in a topic of ``*_topics.py``, and by a valid call in ``refusals.py``.

A backend is added by a subclass of `Backend` where its arrays are not those of numpy, by its name in the topics that
have its kernels, and by a test file that calls `assert_conforms` for the `numbers` of these topics,
`assert_all_are_compared`, `refusals.assert_refused`, and `exchanges.assert_exchanges_conform`.
"""

from __future__ import annotations

import copy
import inspect
import re
import zlib
from collections.abc import Collection, Generator, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest
from helpers import extended

from horovod_quant.kernels import reference
from horovod_quant.kernels.formats import RotatedFormat, Sums
from horovod_quant.kernels.keys import ALL_ONES, Key, RngKey
from horovod_quant.kernels.layout import TILE, buckets
from horovod_quant.kernels.segments import Batch, segment_kernels
from horovod_quant.transports import simulator

KEY = Key(0x12345678, 0x9ABCDEF0)
BFLOAT16 = np.uint16
DTYPES = (np.float32, np.float16, np.float64, BFLOAT16)
FAR = 2**35 * TILE  # the index of an element, beyond 32 bits
LONG = 17_000  # elements, more than a program of any Triton kernel takes
LENGTHS = (1025, 0, 33, LONG, 1, 200, 3 * TILE, 65, 32, TILE, 63, 257, 31, 513, 1023)
SPECIAL = np.array(
    [0, -0.0, 1e-45, -1e-40, 2.0**-126, -(2.0**-126), 2.0**-127, -(2.0**-96), 2.0**-96, 1e-30, 2.0**-24, -1]
    + [65519, 65520, -1e38, 3.4e38],
    np.float32,
)
NOT_FINITE = np.array([np.inf, -np.inf, np.nan], np.float32)
BUCKET_SIZES = (32, 64, 96, 128, 192, 256, 384, 1024, 1120, 2048, 2**40)

Script = Generator[tuple, Any, None]


class Out(NamedTuple):
    """An array for a kernel to fill; backends whose arrays cannot be written to return a new one."""

    elements: int
    dtype: Any


# ---- topics


class Topic(NamedTuple):
    """A script and its numbers.

    Attributes:
        period: how many numbers differ in more than random values.
        quick: numbers that slow backends run by default.
        backends: those that have its kernels.
    """

    script: Callable[[Draw], Script]
    period: int
    quick: Collection[int]
    backends: Collection[str]


TOPICS: dict[str, Topic] = {}


def topic(
    period: int,
    quick: Collection[int] = (0,),
    backends: Collection[str] = ("native", "triton", "tensorflow"),
    name: str = "",
    **given: Any,
) -> Callable[[Callable[..., Script]], Callable[..., Script]]:
    """Register a topic, by default under the name of its function, which is ``given`` more arguments."""

    def register(script: Callable[..., Script]) -> Callable[..., Script]:
        TOPICS[name or script.__name__] = Topic(partial(script, **given), period, quick, backends)
        return script

    return register


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
            found += [(pytest.param if number in chosen else extended)(name, number) for number in every]
    return found


class Given(NamedTuple):
    """A gradient and what its encoder needs."""

    x: np.ndarray
    norms: np.ndarray
    bucket_size: int
    start: int


class Draw:
    """Arguments and random values of a script."""

    def __init__(self, name: str, number: int) -> None:
        rounds, self.number = divmod(number, TOPICS[name].period)
        self._shift = rounds + self.number
        self.rng = np.random.default_rng([zlib.crc32(name.encode()), number])
        self._drawn = 0

    def cycle(self, *values: Any) -> Any:
        """The value of this number: consecutive numbers get one after another."""
        return values[self.number % len(values)]

    def pick(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def length(self) -> int:
        any_length = int(self.rng.integers(5001))
        lengths = (any_length, *LENGTHS, any_length)
        return lengths[(self.number + 5 * self._drawn) % len(lengths)]

    def next_length(self) -> int:
        """Another length than that of the gradients drawn before."""
        self._drawn += 1
        return self.length()

    def key(self) -> Key:
        """A key of independent rounding, of correlated rounding, or any other that kernels take."""
        k0, k1, addend = (int(word) for word in self.rng.integers(0, ALL_ONES, 3))
        rank, step = int(self.rng.integers(5)), int(self.rng.integers(2**40))
        correlated = RngKey(0, "w").correlated("worker", step, rank, rank + 1 + int(self.rng.integers(4)))
        shift = int(self.rng.integers(4))
        other = Key(k0, k1, shift, addend, self.pick(0, ALL_ONES), self.pick(0, ALL_ONES))
        return (Key(k0, k1), correlated, other)[(self._shift + self._drawn) % 3]

    def factor(self) -> float:
        return self.pick(1.0, 0.25, 1 / 3, -2.0, 1e-30, 1e38)

    def out(self, elements: int) -> Out:
        return Out(elements, self.pick(*DTYPES))

    def words(self, count: int) -> np.ndarray:
        """Words that no encoder wrote: decoders agree on any."""
        return self.rng.integers(-(2**31), 2**31, count).astype(np.int32)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def gradient(
        self, elements: int | None = None, dtype: Any = None, bucket_size: int | None = None
    ) -> Given:
        """A gradient of any length and type, with special numbers and with buckets of unlike scales."""
        elements = self.length() if elements is None else elements
        self._drawn += 1
        dtype = DTYPES[(self.number + self._drawn) % len(DTYPES)] if dtype is None else dtype
        bucket_size = bucket_size or self.pick(*BUCKET_SIZES, 32 * int(self.rng.integers(1, 100)))
        count = buckets(elements, bucket_size)
        scales = 2.0 ** self.rng.integers(-150, 120, count) if self.rng.random() < 0.4 else np.ones(count)
        scales = np.repeat(scales, min(bucket_size, max(elements, 1)))[:elements]
        x = (self.rng.standard_normal(elements) * scales * 2.0 ** self.rng.integers(-20, 20)).astype(
            np.float32
        )
        share = self.pick(0.0, 0.1, 0.5)
        odd = self.rng.random(elements) < share
        x[odd] = self.rng.choice(SPECIAL, int(odd.sum()))
        if share and elements and self.rng.random() < 0.5:
            x[self.rng.integers(elements)] = self.rng.choice(self.pick(NOT_FINITE, -NOT_FINITE))
        x[: int(elements * share / 2)] = 0
        wide = dtype == np.float64
        values = x.astype(np.float64) * (1 + 2.0**-30) if wide else as_type(x, dtype)
        return Given(values, self.norms(values, bucket_size), bucket_size, self.pick(0, TILE * 77, FAR))

    def norms(self, x: np.ndarray, bucket_size: int) -> np.ndarray:
        kind = self.pick("max", "l2", "any")
        if kind == "max":
            return reference.bucket_maxima(x, bucket_size)
        if kind == "l2":
            return reference.norms_of_square_sums(reference.bucket_square_sums(x, bucket_size))
        some = np.concatenate([SPECIAL, NOT_FINITE, 2.0 ** self.rng.integers(-90, 90, 9)]).astype(np.float32)
        found = np.abs(self.rng.choice(some, buckets(len(x), bucket_size)))
        if len(found):
            found[self.rng.integers(len(found))] = np.inf
        return found


def as_type(x: np.ndarray, dtype: Any) -> np.ndarray:
    return reference.store_float32(x, np.empty(len(x), dtype))


# ---- scripts become cases


class Case(NamedTuple):
    """A call of a kernel, what the reference returns, and the arrays among the arguments after the call."""

    kernel: str
    arguments: tuple
    results: list[np.ndarray]
    after: list[np.ndarray]


@lru_cache(maxsize=32)
def cases(name: str, number: int) -> list[Case]:
    """Return the cases of a script."""
    found, numpy = [], Backend(reference)
    with np.errstate(all="ignore"):
        script = TOPICS[name].script(Draw(name, number))
        answer = None
        while True:
            try:
                kernel, *arguments = script.send(answer)
            except StopIteration:
                return found
            kept = mapped(tuple(arguments), copy.copy)  # a script may write to its arrays
            answer, given = numpy.called(kernel, kept)
            found.append(Case(kernel, kept, [np.copy(one) for one in numpy.read(answer)], numpy.read(given)))


def function_of(backend: Any, kernel: str) -> Callable:
    """Return a backend's function; after ``segments.`` one for many segments, after ``composed.`` one of these."""
    kind, _, name = kernel.rpartition(".")
    if kind == "composed":
        return partial(COMPOSED[name], backend)
    return getattr(segment_kernels(backend) if kind else backend, name)


def encode_rotated_again(
    backend: Any, codec: RotatedFormat, batch: Batch, rounder: Any, at: Sequence[int], payload: Any
) -> Any:
    """Encode as the reducer of a shard does: with the steps that a payload has."""
    segments = segment_kernels(backend)
    words = segments.step_words(payload, at, batch.elements)
    return segments.encode_rotated(codec, batch, rounder, at, words)


def decode_rotated_of_step(backend: Any, x: Any, step: int, worker: int, out: Any) -> list[Any]:
    """Encode and decode with the key of a step that only the kernels read."""
    chain = getattr(backend, "RngKey", RngKey)(2**64 - 1, "w")
    key = backend.key_of_word(chain, "worker", backend.step_word(step), worker)
    encoded = backend.encode_rotated(x, 2, key)
    return [*encoded, backend.decode_rotated(*encoded, 2, key, 1.0, out)]


def random_bits_of_step(backend: Any, seed: int, step: Any, worker: Any) -> list[Any]:
    """Return random bits of keys whose step and worker are arrays."""
    chain = getattr(backend, "RngKey", RngKey)(seed, "layer/weight")
    if isinstance(step, np.ndarray):
        step, worker = int(step), int(worker)
    keys = [
        chain.key("worker", step, worker),
        chain.key("server", step),
        chain.key("worker", step, 2),
        chain.key("worker", 7, worker),
        backend.key_of_word(chain, "worker", backend.step_word(step), 7),
        *(chain.correlated("worker", step, rank, 5) for rank in range(5)),
    ]
    return [backend.hash32(0, 5, key) for key in keys]


COMPOSED = {
    function.__name__: function
    for function in (encode_rotated_again, decode_rotated_of_step, random_bits_of_step)
}


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return arguments with ``change`` applied to what is in their lists, tuples, batches and sums."""
    if isinstance(value, Batch):
        found = copy.copy(value)
        found.values, found.states, found.table = (
            mapped(value.values, change),
            mapped(value.states, change),
            None,
        )
        return found
    if isinstance(value, Sums):
        return value._replace(words=mapped(value.words, change), norms=mapped(value.norms, change))
    if type(value) in (list, tuple):
        return type(value)(mapped(one, change) for one in value)
    return change(value)


def make_out(out: Out) -> np.ndarray:
    return np.full(out.elements, 77, out.dtype)


# ---- backends


class Backend:
    """A backend's kernels on arrays of numpy; a subclass says how others are made and read.

    Args:
        kernels: the backend.
        how: a way to call it, for messages.
    """

    array_type: Any = np.ndarray

    def __init__(self, kernels: Any, how: str = "") -> None:
        self.kernels, self.how = kernels, how
        self.name: str = kernels.NAME

    def array(self, x: np.ndarray) -> Any:
        """Return the backend's copy of an array."""
        return x.copy()

    def out(self, out: Out) -> Any:
        """Return what kernels take to write to."""
        return self.array(make_out(out))

    def state(self, x: np.ndarray) -> Any:
        """Return what schemes take as BinSGDM's momentum or scale."""
        return self.array(x)

    def step(self, number: int) -> Any:
        """Return what schemes take as the number of a step."""
        return number

    def numpy(self, array: Any) -> np.ndarray:
        return array

    def has(self, kernel: str) -> bool:
        return "." in kernel or hasattr(self.kernels, kernel)

    def argument(self, kernel: str, value: Any) -> Any:
        """Return an argument in the backend's form."""
        if isinstance(value, np.ndarray):
            return self.array(value)
        return self.out(value) if isinstance(value, Out) else value

    def read(self, value: Any) -> list[np.ndarray]:
        """Return all arrays in a result or in arguments."""
        if isinstance(value, self.array_type):
            return [self.numpy(value)]
        if isinstance(value, Batch):
            return self.read((value.values, value.states))
        return (
            [found for one in value for found in self.read(one)] if isinstance(value, (list, tuple)) else []
        )

    def called(self, kernel: str, arguments: tuple) -> tuple[Any, tuple]:
        """Return the result of a kernel, and the arguments that it was given."""
        given = mapped(arguments, partial(self.argument, kernel))
        result = function_of(self.kernels, kernel)(*given)
        results = result if isinstance(result, tuple) else (result,)
        for argument, out in zip(arguments, given):
            if isinstance(argument, Out) and "." not in kernel:
                assert any(one is out for one in results), f"{kernel} returns another array than out"
        return result, given

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        """Return of each case the results, and the arrays among the arguments as they are afterwards."""
        for case in cases:
            result, given = self.called(case.kernel, case.arguments)
            yield self.read(result), self.read(given)

    def computed(self, function: Callable[[Any], Sequence[Any]], arrays: Any) -> list[np.ndarray]:
        """Return the results of a function of the backend's arrays."""
        return list(map(self.numpy, function(mapped(arrays, self.array))))

    def answers(self, requests: Sequence[Any], local_size: int) -> list[Any]:
        """Return a transport's answers to the requests of all workers."""
        requests = [request._replace(array=self.numpy(request.array)) for request in requests]
        with np.errstate(over="ignore"):
            return mapped(simulator._answers(requests, local_size, None), self.array)


def assert_conforms(backend: Backend, name: str, number: int) -> None:
    """Every kernel of the script that the backend has returns and leaves the reference's bits."""
    offered = [case for case in cases(name, number) if backend.has(case.kernel)]
    assert offered, f"{backend.name} has no kernel of {name}"
    count = 0
    with np.errstate(all="ignore"):
        for case, (results, after) in zip(offered, backend.run(offered)):
            label = f"{backend.name} {backend.how}, {name}-{number}, call {count}, {case.kernel}"
            assert_all_same_bits(case.results, results, f"{label}: result")
            if after:
                assert_all_same_bits(case.after, after, f"{label}: argument")
            count += 1
    assert count == len(offered)


def assert_all_are_compared(backend: Backend, modules: str, *others: str) -> None:
    """Topics call every function of a backend.

    Args:
        backend: the backend.
        modules: pattern of the modules in which it defines functions.
        others: names of functions that kernels and schemes alone call.
    """
    defined = {
        name
        for name, value in vars(backend.kernels).items()
        if inspect.isroutine(value) and name[0] != "_" and re.fullmatch(modules, value.__module__)
    }
    for name, (_, _, quick, backends) in TOPICS.items():
        if backend.name in backends:
            defined.difference_update(case.kernel for case in cases(name, min(quick, default=0)))
    assert defined == set(others)


def assert_all_same_bits(expected: Sequence[np.ndarray], actual: Sequence[np.ndarray], what: str) -> None:
    assert len(expected) == len(actual), f"{what}: {len(actual)} arrays, not {len(expected)}"
    for number, (one, other) in enumerate(zip(expected, actual)):
        assert_same_bits(one, other, f"{what} {number}")


def assert_same_bits(expected: np.ndarray, actual: np.ndarray, what: str) -> None:
    """The arrays are bit-identical, with NaN equal to NaN; 0 and -0 differ."""
    found = f"{actual.dtype} {actual.shape}"
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), f"{what}: {found}"
    differ = expected.view(f"u{expected.itemsize}") != actual.view(f"u{actual.itemsize}")
    if expected.dtype.kind == "f":
        differ &= ~(np.isnan(expected) & np.isnan(actual))
    at = np.flatnonzero(differ)
    if len(at):
        wrong, right = actual[at[:5]], expected[at[:5]]
        pytest.fail(f"{what}: {len(at)} of {len(actual)}, at {at[:5]}: {wrong}, not {right}")


from conformance import bit_topics, level_topics, segment_topics  # noqa: E402, F401 (they register their topics)
