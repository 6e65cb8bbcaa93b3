"""What the topics of the conformance suite are written with.

A topic is a generator function of a `Draw`. It yields calls, ``(kernel, *arguments)``, and is sent what the reference
returns, so that later calls can use it. A number selects arguments and random values, so ``(topic, number)`` names a
reproducible script of cases.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Generator
from functools import partial
from typing import Any, Callable, NamedTuple

import numpy as np

from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import ALL_ONES, Key, RngKey
from horovod_quant.kernels.layout import TILE, buckets

KEY = Key(0x12345678, 0x9ABCDEF0)
BFLOAT16 = np.uint16
DTYPES = (np.float32, np.float16, np.float64, BFLOAT16)
FAR = 2**35 * TILE  # the index of an element, beyond 32 bits
LONG = 17_000  # elements, more than a program of any Triton kernel takes
SPECIAL = np.array(
    [0, -0.0, 1e-45, -1e-40, 2.0**-126, -(2.0**-126), 2.0**-127, -(2.0**-96), 2.0**-96, 1e-30, 2.0**-24, -1]
    + [65519, 65520, -1e38, 3.4e38],
    np.float32,
)
NOT_FINITE = np.array([np.inf, -np.inf, np.nan], np.float32)

Script = Generator[tuple, Any, None]


class Out(NamedTuple):
    """An array for a kernel to fill; backends whose arrays cannot be written to return a new one."""

    elements: int
    dtype: Any


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


# ---- what a script draws


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
        self._turn = rounds + self.number
        self.rng = np.random.default_rng([zlib.crc32(name.encode()), number])
        self._drawn = 0

    def turn(self, *values: Any) -> Any:
        """Each value in turn, by the number."""
        return values[self.number % len(values)]

    def pick(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def length(self) -> int:
        any_length = int(self.rng.integers(5001))
        lengths = (
            any_length,
            1025,
            0,
            33,
            LONG,
            1,
            200,
            3 * TILE,
            65,
            32,
            TILE,
            63,
            257,
            31,
            513,
            1023,
            any_length,
        )
        return lengths[(self.number + 5 * self._drawn) % len(lengths)]

    def key(self) -> Key:
        """Of independent rounding, of correlated, and of anything else that kernels take, in turn."""
        k0, k1, addend = (int(word) for word in self.rng.integers(0, ALL_ONES, 3))
        rank, step = int(self.rng.integers(5)), int(self.rng.integers(2**40))
        correlated = RngKey(0, "w").correlated("worker", step, rank, rank + 1 + int(self.rng.integers(4)))
        shift = int(self.rng.integers(4))
        other = Key(k0, k1, shift, addend, self.pick(0, ALL_ONES), self.pick(0, ALL_ONES))
        return (Key(k0, k1), correlated, other)[(self._turn + self._drawn) % 3]

    def factor(self) -> float:
        return self.pick(1.0, 0.25, 1 / 3, -2.0, 1e-30, 1e38)

    def out(self, elements: int) -> Out:
        return Out(elements, self.pick(*DTYPES))

    def words(self, count: int) -> np.ndarray:
        """What no encoder wrote: decoders agree on any words."""
        return self.rng.integers(-(2**31), 2**31, count).astype(np.int32)

    def gradient(
        self, elements: int | None = None, dtype: Any = None, bucket_size: int | None = None
    ) -> Given:
        """Of any length and type: ordinary, of buckets of unlike scales, with zeros, subnormal and special numbers."""
        elements = self.length() if elements is None else elements
        self._drawn += 1
        dtype = DTYPES[(self.number + self._drawn) % len(DTYPES)] if dtype is None else dtype
        bucket_size = bucket_size or self.pick(
            32, 64, 96, 128, 192, 256, 384, 1024, 1120, 2048, 2**40, 32 * int(self.rng.integers(1, 100))
        )
        count = buckets(elements, bucket_size)
        scales = 2.0 ** self.rng.integers(-150, 120, count) if self.rng.random() < 0.4 else np.ones(count)
        scales = np.repeat(scales, min(bucket_size, max(elements, 1)))[:elements] * 2.0 ** self.rng.integers(
            -20, 20
        )
        x = (self.rng.standard_normal(elements) * scales).astype(np.float32)
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
