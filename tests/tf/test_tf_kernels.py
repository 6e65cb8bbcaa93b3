"""The TensorFlow kernels return the reference's bits: eager, in a function, in a TF1 graph, and compiled by XLA."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from conformance import suite  # noqa: E402
from conformance.exchanges import ON_DEVICES, assert_exchanges_conform  # noqa: E402
from conformance.refusals import assert_refused  # noqa: E402
from conformance.suite import BFLOAT16, Draw, Out, assert_same_bits, numbers  # noqa: E402
from helpers import extended, gaussian  # noqa: E402

from horovod_quant.kernels import keys, reference, trellis  # noqa: E402
from horovod_quant.kernels.keys import Key  # noqa: E402
from horovod_quant.kernels.layout import ROW, TILE  # noqa: E402
from horovod_quant.kernels.rotation import LEVELS  # noqa: E402
from horovod_quant.schemes.base import Allgather, Allreduce  # noqa: E402
from horovod_quant.tensorflow import kernels  # noqa: E402
from horovod_quant.tensorflow.segments import FlatVariable  # noqa: E402
from horovod_quant.tensorflow.trellis import trellis_codes  # noqa: E402
from horovod_quant.transports import simulator  # noqa: E402


def eagerly(function: Callable) -> Callable:
    return function


WAYS = {
    "eager": eagerly,
    "function": tf.function(autograph=False),
    "xla": tf.function(autograph=False, jit_compile=True),
}


# ---- the suite


class TensorFlow(suite.Backend):
    """The backend in one of its ways: a script's calls are one graph.

    Args:
        way: its name.
        has_numbers: True if keys and factors are numbers in the graph, False if they are known only when it runs.
    """

    array_type = tf.Tensor

    def __init__(self, way: str = "eager", has_numbers: bool = True) -> None:
        super().__init__(kernels, way)
        self._has_numbers = has_numbers

    def array(self, x: np.ndarray) -> Any:
        return tf.constant(x.view(tf.bfloat16.as_numpy_dtype) if x.dtype == BFLOAT16 else x)

    def out(self, out: Out) -> Any:
        return tf.TensorSpec([out.elements], tf.bfloat16 if out.dtype == BFLOAT16 else out.dtype)

    def state(self, x: np.ndarray) -> Any:
        return FlatVariable(tf.Variable(x))

    def step(self, number: int) -> Any:
        return tf.constant(number, tf.int64)

    def numpy(self, array: Any) -> np.ndarray:
        array = array.values() if isinstance(array, FlatVariable) else array
        return array.numpy().view(BFLOAT16) if array.dtype == tf.bfloat16 else array.numpy()

    def argument(self, kernel: str, value: Any) -> Any:
        if isinstance(value, Out) and not decodes(kernel):
            return None
        return super().argument(kernel, value)

    def run(self, cases: Sequence[suite.Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        # Momentum and scale, of another shape than the gradient's.
        states = [
            [tf.Variable(x.reshape(-1, 1)) for x in case.arguments[1:3]] if case.kernel == "binarize" else []
            for case in cases
        ]
        inputs: list[Any] = []
        for kernel, arguments, *_ in cases:
            suite.mapped(arguments, lambda value, kernel=kernel: inputs.extend(self._inputs(kernel, value)))

        def graph(*tensors: Any) -> list[Any]:
            given = iter(tensors)
            return [self._result(case, own, given) for case, own in zip(cases, states)]

        results = WAYS[self.how](graph)(*map(self.array, inputs))
        for case, own, result in zip(cases, states, results):
            for variable, expected in zip(own, case.after[1:3]):
                assert_same_bits(expected, variable.numpy().reshape(-1), "momentum or scale")
            yield self.read(result), []

    def _inputs(self, kernel: str, value: Any) -> list[Any]:
        """Return what a graph gets as tensors, so that no compiler folds it."""
        if isinstance(value, np.ndarray):
            return [value]
        if isinstance(value, Key) and not self._has_numbers:
            return [np.uint32(value.k0), np.uint32(value.k1)]
        if isinstance(value, float) and decodes(kernel) and not self._has_numbers:
            return [np.float32(value) if np.float32(value) == value else np.float64(value)]
        return []

    def _result(self, case: suite.Case, states: Sequence[Any], tensors: Iterator[Any]) -> Any:
        def argument(value: Any) -> Any:
            given = [next(tensors) for _ in self._inputs(case.kernel, value)]
            if isinstance(value, Key):
                return Key(*given, *value[len(given) :])
            return given[0] if given else self.argument(case.kernel, value)

        arguments = suite.mapped(case.arguments, argument)
        if states:
            arguments = (arguments[0], *states, *arguments[3:])
        return suite.function_of(kernels, case.kernel)(*arguments)

    def computed(self, function: Callable[[Any], Sequence[Any]], arrays: Any) -> list[np.ndarray]:
        return list(map(self.numpy, WAYS[self.how](function)(suite.mapped(arrays, self.array))))

    def answers(self, requests: Sequence[Any], local_size: int) -> list[Any]:
        found: list[Any] = [None] * len(requests)
        for ranks in simulator._members(requests[0].group, len(requests), local_size):
            for rank, answer in zip(ranks, performed([requests[rank] for rank in ranks])):
                found[rank] = answer
        return found


def decodes(kernel: str) -> bool:
    """True if a kernel takes the form of its result; the others write into no buffer."""
    return kernel.split(".")[-1].startswith(("decode", "add_rotated", "scale"))


def performed(requests: Sequence[Any]) -> list[Any]:
    """Return the answers to the requests of a group's workers, all of one kind."""
    first, arrays = requests[0], [request.array for request in requests]
    if isinstance(first, Allreduce):
        combine = tf.maximum if first.op == "max" else tf.add
        return [functools.reduce(combine, arrays)] * len(requests)
    if isinstance(first, Allgather):
        return [arrays] * len(requests)
    pieces = [tf.split(request.array, request.splits) for request in requests]
    return [list(received) for received in zip(*pieces)]


ONE_WAY_EACH = [
    pytest.param(
        way, *case.values, marks=case.marks if (number + shift) % len(WAYS) == 0 else pytest.mark.extended
    )
    for number, case in enumerate(numbers("tensorflow"))
    for shift, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("way", "topic", "number"), ONE_WAY_EACH)
def test_kernels_conform(way: str, topic: str, number: int) -> None:
    suite.assert_conforms(TensorFlow(way, has_numbers=number % 2 == 0), topic, number)


def test_every_kernel_is_compared() -> None:
    helpers = ("binarized", "by_rows", "elementwise", "with_nonfinite")
    others = ("empty", "key_of_word", "pack")
    suite.assert_all_are_compared(TensorFlow(), r"horovod_quant\.tensorflow\..*", *helpers, *others)


def test_arguments_that_do_not_fit_are_refused() -> None:
    assert_refused(TensorFlow())


TRACED = "nuqsgd-inf-alltoall global-l2 exponential-max eden binsgdm natural hierarchical-qsgd".split()
"""Exchanges that are traced by default; the others run eagerly, which takes less time."""


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name) if way == ("function" if name in TRACED else "eager") else extended(way, name)
        for name in ON_DEVICES
        for way in WAYS
    ],
)
def test_whole_exchanges(way: str, name: str) -> None:
    assert_exchanges_conform(TensorFlow(way), name, decoding=1)


# ---- what graphs alone have


@pytest.mark.parametrize("size", [64, TILE])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_paths_whose_sums_are_all_but_equal(way: Callable, bits: int, size: int) -> None:
    """A product that is not rounded before it is added leads to another path in some of the lanes."""
    z, units = between_two_paths(bits, size)
    expected = trellis.trellis_codes(z, units, bits, LEVELS[bits]).reshape(-1)
    found = way(lambda z, units: tf.reshape(trellis_codes(z, units, bits, LEVELS[bits]), [-1]))(z, units)
    assert_same_bits(expected, found.numpy(), "paths")


def between_two_paths(bits: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates and units of buckets, in pairs: their last rows differ in a last digit, and so do all their paths."""
    pairs = 32
    units = np.linspace(5, 90, pairs, dtype=np.float32)
    low = gaussian(bits, pairs, size) * units[:, None]
    high = low.copy()
    low[:, -ROW:], high[:, -ROW:] = -units[:, None], units[:, None]

    def paths(z: np.ndarray) -> np.ndarray:
        return trellis.trellis_codes(z, units, bits, LEVELS[bits]).reshape(pairs, -1, ROW)

    path_of_low = paths(low)
    for _ in range(60):
        middle = low.copy()
        middle[:, -ROW:] = (low[:, -ROW:] + high[:, -ROW:]) / 2
        same = (paths(middle) == path_of_low).all(axis=1)
        low[:, -ROW:] = np.where(same, middle[:, -ROW:], low[:, -ROW:])
        high[:, -ROW:] = np.where(same, high[:, -ROW:], middle[:, -ROW:])
    return np.concatenate([low, high]), np.concatenate([units, units])


@pytest.mark.parametrize(("bits", "trellis"), [(1, False), extended(4, False), extended(2, True)])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_scales_of_short_buckets(way: Callable, bits: int, trellis: bool) -> None:
    """A product that is not rounded before it is added changes some of the scales."""
    encode = way(lambda x, k0: kernels.encode_rotated(x, bits, Key(k0, 5), trellis=trellis)[1])
    for seed in range(60):
        x = gaussian(seed, TILE + 70)
        _, expected = reference.encode_rotated(x, bits, Key(seed, 5), trellis=trellis)
        found = encode(tf.constant(x), tf.constant(seed, tf.uint32))
        assert_same_bits(expected, found.numpy(), f"scales of {seed}")


def test_binarize_in_a_graph_of_tensorflow_1() -> None:
    """Also the words alone update the variables."""
    x, _, _, _ = Draw("binarize", 7).gradient(3000, np.float32)
    scale = np.abs(gaussian(1, 3000))
    states = [scale * np.sign(gaussian(2, 3000)) * np.float32(0.3), scale]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [tf.Variable(array.reshape(30, 100)) for array in states]
        gradient, k0 = tf.compat.v1.placeholder(tf.float32, [3000]), tf.compat.v1.placeholder(tf.uint32, [])
        words, broken = kernels.binarize(gradient, *variables, 0.9, Key(k0, 5))
        session.run(tf.compat.v1.global_variables_initializer())
        for step, fetched in enumerate([(words,), (words, broken)]):
            with np.errstate(all="ignore"):
                expected = reference.binarize(x, *states, 0.9, Key(step, 5))
            found = session.run(fetched, {gradient: x, k0: step})
            suite.assert_all_same_bits(expected[: len(found)], found, f"step {step}")
        left = [array.reshape(-1) for array in session.run(variables)]
    suite.assert_all_same_bits(states, left, "momentum and scale")


def test_keys_of_numbers_and_of_variables() -> None:
    plain, chain = keys.RngKey(3, "layer/weight"), kernels.RngKey(3, "layer/weight")
    assert (chain.seed, chain.name) == (3, "layer/weight")
    assert chain.key("worker", np.int64(5), np.int32(2)) == plain.key("worker", 5, 2)
    step = tf.Variable(5, dtype=tf.int64)
    assert list(map(int, chain.key("worker", step, 2)[:2])) == list(plain.key("worker", 5, 2)[:2])
    for number in (5, step):
        assert kernels.step_word(number).numpy().tolist() == [5]
