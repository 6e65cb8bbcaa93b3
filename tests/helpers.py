"""What several test files share.

Monte Carlo checks have fixed seeds and a proved rate of false alarms. ``assert_unbiased`` compares means by the
empirical Bernstein bound (Maurer and Pontil 2009, theorem 4): with N independent samples of range R and sample
variance V, the mean is off by more than ``sqrt(2 V L / N) + 7 R L / (3 (N - 1))`` with probability at most
``4 exp(-L)``, here 6e-11 a comparison. ``assert_mean`` compares a mean of many independent terms by 6 standard errors
(2e-9 for a normal mean).
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from horovod_quant.frontends import methods
from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import ALL_ONES, Key, RngKey, hash32
from horovod_quant.kernels.layout import TILE
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, BinSGDM, GlobalQSGD
from horovod_quant.schemes.base import (
    Allreduce,
    BinaryState,
    Decoded,
    Exchange,
    Gradient,
    Scheme,
    Workers,
    map_requests,
)
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.transports import simulator
from horovod_quant.transports.emulate_with_allreduce import emulate_with_allreduce

EVERY_EXAMPLE = 100
"""Of a property test that says nothing else; see conftest.py."""

LEAST_EXAMPLES = 10

ALARM = 25.0
LENGTHS = (0, 1, 31, 33, 1024, 1025)

EXPONENTIAL = GlobalQSGD(4, levels="exponential", bucket_size=64)
_CHOSEN: dict[str, Scheme] = {
    "qsgd": QSGD(4, "l2", 96),
    "qsgd-inf": QSGD(3, norm="max", bucket_size=96, rounding="independent"),
    "qsgd-elias": QSGD(4, "l2", 96, "elias"),
    "qsgd-alltoall": QSGD(4, "l2", 96, exchange="alltoall"),
    "nuqsgd-finer": NUQSGD(4, "l2", 96, exchange="alltoall", server_bits=6),
    "nuqsgd-inf-alltoall": NUQSGD(4, norm="max", exchange="alltoall"),
    "nuqsgd": NUQSGD(4, bucket_size=96),
    "nuqsgd-inf-omega": NUQSGD(4, "max", 96, "elias-omega", rounding="independent"),
    "global-max": GlobalQSGD(12, bucket_size=96),
    "global-l2": GlobalQSGD(12, norm="l2", bucket_size=96, rounding="independent"),
    "global-rotated": GlobalQSGD(8, rotate=True),
    "exponential-max": EXPONENTIAL,
    "exponential-l2": GlobalQSGD(4, "l2", "exponential", 2048, "independent"),
    "eden": EDEN(),
    "eden-trellis": EDEN(2, exchange="alltoall", trellis=True),
    "eden-alltoall": EDEN(1, server_bits=4, exchange="alltoall"),
    "binsgdm": BinSGDM(),
    "binsgdm-average": BinSGDM(server_bits=3),
}
_KINDS = set(map(type, _CHOSEN.values()))
SCHEMES = {
    **_CHOSEN,
    **{name: scheme for name, scheme in methods.examples().items() if type(scheme) not in _KINDS},
}
"""Chosen ones, and any further scheme of the package in each of its presets."""


_words = st.integers(0, ALL_ONES)
_all_or_none = st.sampled_from([0, ALL_ONES])
plain_keys = st.builds(Key, _words, _words, st.just(0), st.just(0), st.just(0), st.just(0))
correlated_keys = st.tuples(st.integers(0, 2**40), st.integers(1, 9), st.integers(0, 8)).map(
    lambda drawn: RngKey(0, "w").correlated("worker", drawn[0], drawn[2] % drawn[1], drawn[1])
)
keys = st.one_of(
    plain_keys,
    correlated_keys,
    st.builds(Key, _words, _words, st.integers(0, 3), _words, _all_or_none, _all_or_none),
)
"""Of any rounding: of one worker, of workers that draw jointly, and whatever the kernels take besides."""


def on_the_edge(levels: int, key: Key) -> tuple[np.ndarray, np.ndarray]:
    """Elements that their random bits just lift to the next level, or just do not; and the norm of the only bucket.

    By chance none of some million elements is so close to the edge that an error in the last bit moves it. Of each
    four, two are positive, one is negative and rounded as ``floor(y + u)``, and one is negative and rounded by its
    magnitude.
    """
    bits, count = reference.fraction_bits(levels), 4096
    random = (hash32(0, count, key) >> np.uint32(32 - bits)).astype(np.int64)
    number = np.arange(count)
    random += number // 4 % 2  # one too few
    up = (1 << bits) - random
    y = np.choose(number % 4, [up, up, -random, -up])
    return (y / 2**bits).astype(np.float32), np.full(1, levels, np.float32)


def part(count: int) -> int:
    """``count`` with --all, and as large a part of it by default as of a property test's examples."""
    return count * settings().max_examples // EVERY_EXAMPLE


def examples(count: int) -> settings:
    """Of a property test: so many with --all, a part of them by default."""
    return settings(max_examples=max(min(count, LEAST_EXAMPLES), part(count)))


def extended(*values: Any) -> Any:
    """Values of a test's parameters that are left to --all."""
    return pytest.param(*values, marks=pytest.mark.extended)


def by_default(chosen: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """A test's parameter: those ``chosen``, and all the others with --all."""
    return [value if value in chosen else extended(value) for value in values]


def in_turn(ways: Sequence[Any], cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Parameters of a test, a way and a case: by default each case in one of the ways, with --all in each."""
    return [
        (way, *case) if number % len(ways) == turn else extended(way, *case)
        for number, case in enumerate(cases)
        for turn, way in enumerate(ways)
    ]


def no_more_than(variance: Any, reach: float, samples: int) -> Any:
    """How far a mean of ``samples`` terms in a range of ``reach`` may be off."""
    return np.sqrt(2 * variance * ALARM / samples) + 7 * reach * ALARM / (3 * (samples - 1))


def assert_unbiased(samples: np.ndarray, expected: np.ndarray, reach: float, slack: float = 0.0) -> None:
    """Each column's mean is as expected, and so are the pooled means of errors and of errors along the signs.

    The pooled means see a small bias that all elements share: a shift, or a shrinkage towards zero.
    """
    errors = samples.astype(np.float64) - expected
    count = len(errors)
    allowed = no_more_than(errors.var(axis=0, ddof=1), reach, count) + slack
    worst = int(np.argmax(np.abs(errors.mean(axis=0)) / allowed))
    assert abs(errors.mean(axis=0)[worst]) <= allowed[worst], f"element {worst}"
    for weights in (np.ones_like(expected), np.sign(expected)):
        pooled = weights * errors
        limit = no_more_than(pooled.var(), 2 * reach, pooled.size) + slack
        assert abs(pooled.mean()) <= limit, f"{pooled.mean()} is more than {limit}"


def assert_mean(samples: np.ndarray, expected: float, slack: float = 0.0) -> None:
    error = samples.std(ddof=1) / math.sqrt(len(samples))
    assert abs(samples.mean() - expected) <= 6 * error + slack


def fresh_states(gradients: Sequence[np.ndarray], beta: float = 0.9) -> list[BinaryState]:
    """BinSGDM's before the first step. The step's bits are the gradient's signs then, whatever is drawn."""
    return [
        BinaryState(np.zeros(np.size(g), np.float32), np.zeros(np.size(g), np.float32), beta)
        for g in gradients
    ]


def used_states(gradients: Sequence[np.ndarray], beta: float = 0.9) -> list[BinaryState]:
    """BinSGDM's as after some steps, ``|momentum| <= scale``; a function of the gradients' lengths alone."""
    states = []
    for g in gradients:
        scale = 1 + np.abs(heavy_tailed(np.size(g), np.size(g)))
        ratio = np.random.default_rng(np.size(g)).uniform(-1, 1, np.size(g)).astype(np.float32)
        states.append(BinaryState(ratio * scale, scale, beta))
    return states


def owned_states(
    scheme: Scheme, gradients: Sequence[np.ndarray], workers: Workers, names: Sequence[str] | None = None
) -> list[BinaryState]:
    """What a worker keeps of `used_states`."""
    found = []
    for i, state in enumerate(used_states(gradients)):
        start, stop = scheme.owned(names[i] if names else str(i), len(state.momentum), workers)
        found.append(state._replace(momentum=state.momentum[start:stop], scale=state.scale[start:stop]))
    return found


def simulate(scheme: Scheme, groups: Sequence[Any], **arguments: Any) -> simulator.Result:
    """The simulator with the numpy kernels, and used states for BinSGDM."""
    if isinstance(inner_of(scheme), BinSGDM) and "states" not in arguments:
        members = [own if isinstance(own, list) else [own] for own in groups]
        local_size = arguments.get("local_size", 1)
        arguments["states"] = [
            owned_states(
                scheme, own, Workers(rank, len(groups), local_size=local_size), arguments.get("names")
            )
            for rank, own in enumerate(members)
        ]
    return simulator.run(scheme, groups, kernels="numpy", **arguments)


def sent_by(exchanges: Sequence[Any], answers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The workers' next requests, and the results of the exchanges that have ended."""
    requests, finished = [], []
    for exchange, answer in zip(exchanges, answers):
        try:
            requests.append(exchange.send(answer))
        except StopIteration as stop:
            finished.append(stop.value)
    return requests, finished


def lockstep(
    scheme: Scheme,
    groups: Sequence[Sequence[np.ndarray]],
    states: Sequence[Sequence[BinaryState]] | None = None,
    custom_reduction: bool = False,
    local_size: int = 1,
    steps: Sequence[Any] | None = None,
    kernels: Any = reference,
    answer: Callable[[list[Any]], list[Any]] | None = None,
) -> list[Decoded]:
    """What each worker's exchange of arrays of any dtype leaves, not yet decoded.

    Args:
        steps: the number of the exchange by each worker's own count.
        kernels: the backend.
        answer: of the workers' requests; by default as the simulator does.
    """
    size = len(groups)
    answer = answer or partial(simulator._answers, local_size=local_size, merges=None)
    chain, exchanges = getattr(kernels, "RngKey", RngKey), []
    for rank, own in enumerate(groups):
        state = states[rank] if states else used_states(own)
        step = steps[rank] if steps else 0
        members = [Gradient(a, chain(0, str(i)), step, state[i]) for i, a in enumerate(own)]
        workers = Workers(rank, size, custom_reduction, local_size)
        exchanges.append(scheme.begin(members, workers, kernels))
    answers: list[Any] = [None] * size
    while True:
        requests, finished = sent_by(exchanges, answers)
        if finished:
            assert not requests
            return finished
        answers = answer(requests)


class OverAllreduce(Scheme):
    """Another scheme by sums alone; counts them."""

    def __init__(self, inner: Scheme) -> None:
        self.inner = inner
        self.requests = 0

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        def answer(request: Any) -> Any:
            assert isinstance(request, Allreduce)
            self.requests += workers.rank == 0
            return (yield request)

        return map_requests(
            emulate_with_allreduce(self.inner.begin(gradients, workers, kernels), workers), answer
        )


def gaussian(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def heavy_tailed(seed: int, *shape: int) -> np.ndarray:
    """Student's t with 2 degrees of freedom: no variance."""
    return np.random.default_rng(seed).standard_t(2, size=shape).astype(np.float32)


def spikes(count: int) -> np.ndarray:
    """A bucket with so many elements that are not zero."""
    x = np.zeros(TILE, np.float32)
    x[np.arange(count) * 37] = np.arange(count, 0, -1)
    return x


UNLIKE_BUCKETS = {
    "gaussian": gaussian(0, TILE),
    "laplace": np.random.default_rng(1).laplace(size=TILE).astype(np.float32),
    "t": heavy_tailed(2, TILE),
    "90% zeros": gaussian(3, TILE) * (np.random.default_rng(3).random(TILE) < 0.1).astype(np.float32),
    "one spike": spikes(1),
    "two spikes": spikes(2),
    "five spikes": spikes(5),
    "ten spikes": spikes(10),
}
"""Buckets of distributions that have little in common: what a rotation makes alike."""


def buckets_of_all_sizes(seed: int) -> np.ndarray:
    """Elements that count as zero beside their bucket's largest, buckets that are, and what nearly overflows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, TILE)).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        x *= np.float32(2.0) ** rng.integers(-149, 0, x.shape).astype(np.float32)
        x *= np.float32([1, 2.0**-90, 2.0**-30, 1, 2.0**127, 1, 1, 1])[:, None]
    x[3:, :4] = [[0, 0, 0, 0], [3e38, -3e38, 3e38, 1], [1, -1, 1e-40, -1e-40], *[[1, 1, 1, 1]] * 2]
    return x.reshape(-1)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal, with NaN equal to NaN."""
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


def has_keras_3() -> bool:
    """Whether this environment has Keras 3, read without importing it."""
    try:
        return int(importlib.metadata.version("keras").partition(".")[0]) >= 3
    except importlib.metadata.PackageNotFoundError:
        return False
