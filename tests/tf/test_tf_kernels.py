"""The TensorFlow kernels return the reference's bits: eager, in a function, in a TF1 graph, and compiled by XLA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from conformance.cases import BFLOAT16, KEY, Draw, Out  # noqa: E402
from conformance.exchanges import ON_DEVICES, exchanged, setting_of  # noqa: E402
from conformance.refusals import REFUSED, assert_refused  # noqa: E402
from conformance.suite import (  # noqa: E402
    Case,
    arrays_of,
    assert_all_same_bits,
    assert_conforms,
    assert_same_bits,
    compared_kernels,
    function_of,
    mapped,
    numbers,
)
from helpers import by_default, extended, gaussian, lockstep  # noqa: E402

from horovod_quant.kernels import keys, reference, trellis  # noqa: E402
from horovod_quant.kernels.keys import Key  # noqa: E402
from horovod_quant.kernels.layout import ROW, TILE, code_words  # noqa: E402
from horovod_quant.kernels.rotation import LEVELS  # noqa: E402
from horovod_quant.schemes.base import Allgather, Allreduce, BinaryState  # noqa: E402
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


@pytest.fixture(params=by_default(["function"], WAYS))
def way(request: pytest.FixtureRequest) -> Callable:
    """To run a computation in; a test with many cases names it among its parameters."""
    return WAYS[request.param]


def to_tensor(array: Any) -> Any:
    if isinstance(array, list):
        return [to_tensor(one) for one in array]
    if array.dtype == BFLOAT16:
        array = array.view(tf.bfloat16.as_numpy_dtype)
    return tf.constant(array)


def to_numpy(tensor: Any) -> np.ndarray:
    array = tensor.numpy()
    return array.view(BFLOAT16) if tensor.dtype == tf.bfloat16 else array


# ---- the suite


class TensorFlow:
    """The backend in one of its ways: a script's calls are one graph."""

    name = "tensorflow"
    kernels = [name for name in dir(kernels) if not name.startswith("_")]

    def __init__(self, way: Callable) -> None:
        self._way = way

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
        cases = list(cases)

        def graph(*tensors: Any) -> list[list[Any]]:
            given = iter(tensors)
            return [self._call(case, given) for case in cases]

        # Arguments, so that no compiler folds them.
        tensors = [to_tensor(array) for array in arrays_of([case.arguments for case in cases])]
        for case, results in zip(cases, self._way(graph)(*tensors)):
            found = [to_numpy(result) for result in results]
            if case.kernel == "binarize":
                assert_same_bits(case.after[1], found.pop(2), "momentum")
                assert_same_bits(case.after[2], found.pop(2), "scale")
            yield found, []

    def _call(self, case: Case, tensors: Iterator[Any]) -> list[Any]:
        decodes = case.kernel.split(".")[-1].startswith(("decode", "add_rotated", "scale"))
        arguments = mapped(
            case.arguments, lambda _: next(tensors), spec_of if decodes else none, kernels.RngKey
        )
        if case.kernel == "binarize":
            return list(kernels.binarized(*arguments[:6]))
        return arrays_of(function_of(kernels, case.kernel)(*arguments), tf.Tensor)


def spec_of(out: Out) -> Any:
    return tf.TensorSpec([out.elements], tf.bfloat16 if out.dtype == BFLOAT16 else out.dtype)


def none(out: Out) -> None:
    """Nothing is written to; see `test_arrays_that_do_not_fit_are_refused`."""


SCRIPTS = numbers("tensorflow")
IN_TURN = [
    case if (number + turn) % len(WAYS) == 0 and not hasattr(script, "marks") else extended(*case)
    for number, script in enumerate(SCRIPTS)
    for turn, way in enumerate(WAYS)
    for case in [(way, *(script.values if hasattr(script, "marks") else script))]
]


@pytest.mark.parametrize(("way", "topic", "number"), IN_TURN, indirect=["way"])
def test_kernels_conform(way: Callable, topic: str, number: int) -> None:
    assert_conforms(TensorFlow(way), topic, number)


def test_every_kernel_is_compared() -> None:
    shared = {"add_exponential", "empty", "key_of_word", "pack"}
    offered = {
        name for name in TensorFlow.kernels if name in dir(reference) and callable(getattr(kernels, name))
    }
    own = {
        name for name in offered if getattr(kernels, name).__module__.startswith("horovod_quant.tensorflow")
    }
    assert own - shared <= compared_kernels("tensorflow")


def test_arrays_that_do_not_fit_are_refused() -> None:
    assert_refused(kernels, REFUSED, "tensorflow", to_tensor, spec_of)


# ---- what graphs alone have


@pytest.mark.parametrize("size", [64, TILE])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("way", WAYS, indirect=True)
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
@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_scales_of_short_buckets(way: Callable, bits: int, trellis: bool) -> None:
    """A product that is not rounded before it is added changes some of the scales."""
    encode = way(lambda x, k0: kernels.encode_rotated(x, bits, Key(k0, 5), trellis=trellis)[1])
    for seed in range(60):
        x = gaussian(seed, TILE + 70)
        _, expected = reference.encode_rotated(x, bits, Key(seed, 5), trellis=trellis)
        found = encode(tf.constant(x), tf.constant(seed, tf.uint32))
        assert_same_bits(expected, found.numpy(), f"scales of {seed}")


@pytest.mark.parametrize("kind", ["function", "graph"])
def test_binarize_updates_variables_of_any_shape(kind: str) -> None:
    x, _, _, _ = Draw("binarize", 7).gradient(3000, np.float32)
    scale = np.abs(gaussian(1, 3000))
    momentum = scale * np.sign(gaussian(2, 3000)) * np.float32(0.3)
    expected_momentum, expected_scale = momentum.copy(), scale.copy()
    steps = []
    with np.errstate(all="ignore"):
        for step in range(2):
            key = Key(step, 5)
            steps.append(reference.binarize(x, expected_momentum, expected_scale, 0.9, key))

    graph = tf.Graph() if kind == "graph" else None
    with graph.as_default() if graph else contextlib.nullcontext():
        variables = [tf.Variable(array.reshape(30, 100)) for array in (momentum, scale)]
        way = eagerly if graph else WAYS[kind]
        binarize = way(lambda g, k0: kernels.binarize(g, *variables, 0.9, Key(k0, 5)))
        if graph:
            gradient = tf.compat.v1.placeholder(tf.float32, [3000])
            k0 = tf.compat.v1.placeholder(tf.uint32, [])
            words, broken = binarize(gradient, k0)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                actual = [
                    (session.run(words, {gradient: x, k0: 0}), steps[0][1]),  # the words alone
                    session.run((words, broken), {gradient: x, k0: 1}),
                ]
                left = session.run(variables)
        else:
            results = [binarize(tf.constant(x), tf.constant(step, tf.uint32)) for step in range(2)]
            actual = [(words.numpy(), broken.numpy()) for words, broken in results]
            left = [variable.numpy() for variable in variables]
    for (words, broken), (own_words, own_broken) in zip(steps, actual):
        assert_same_bits(words, own_words, "words")
        assert_same_bits(broken, own_broken, "broken")
    assert_same_bits(expected_momentum, left[0].reshape(-1), "momentum")
    assert_same_bits(expected_scale, left[1].reshape(-1), "scale")


KEYS: dict[str, Callable] = {
    "of both": lambda chain, step, worker: chain.key("worker", step, worker),
    "of a step": lambda chain, step, worker: chain.key("server", step),
    "of a step and an integer": lambda chain, step, worker: chain.key("worker", step, 2),
    "of a worker": lambda chain, step, worker: chain.key("worker", 7, worker),
    **{
        f"correlated {rank}": lambda chain, step, worker, rank=rank: chain.correlated("worker", step, rank, 5)
        for rank in range(5)
    },
}


@pytest.mark.parametrize("seed", [0, -1, 2**70 + 3])
def test_keys_of_tensors(way: Callable, seed: int) -> None:
    plain, chain = keys.RngKey(seed, "layer/weight"), kernels.RngKey(seed, "layer/weight")
    assert (chain.seed, chain.name) == (seed, "layer/weight")
    assert chain.key("worker", np.int64(5), np.int32(2)) == plain.key("worker", 5, 2)
    assert kernels.step_word(5).numpy().tolist() == [5]
    every = way(lambda *given: [tf.stack(key(chain, *given)) for key in KEYS.values()])
    of_word = way(lambda word: tf.stack(kernels.key_of_word(chain, "worker", word, 7)))
    rng = np.random.default_rng(3)
    for step in [0, 1, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**63 - 1, *rng.integers(0, 2**62, 20).tolist()]:
        worker = step % 1000
        expected = [list(key(plain, step, worker)) for key in KEYS.values()]
        given = tf.Variable(step, dtype=tf.int64), tf.constant(worker, tf.int64)
        assert [found.numpy().tolist() for found in every(*given)] == expected
        word = way(kernels.step_word)(given[0])
        assert_same_bits(reference.step_word(step), word.numpy(), "word")
        assert of_word(word).numpy().tolist() == list(plain.key("worker", step % 2**32, 7))


# ---- numbers known only when a graph runs


def test_factors_magnitudes_and_keys_as_tensors(way: Callable) -> None:
    x, norms, bucket_size, _ = Draw("uniform_sums", 1).gradient(1000, np.float32)
    words = np.random.default_rng(1).integers(-(2**31), 2**31, code_words(1000, 4)).astype(np.int32)

    def decode(
        backend: Any, out: Any, x: Any, norms: Any, words: Any, factor: Any, k0: Any, k1: Any
    ) -> list[Any]:
        return [
            backend.encode_uniform_sum(x, norms, bucket_size, 7, 4, Key(k0, k1), bucket_size),
            backend.decode_uniform_codes([words], [norms], bucket_size, 4, factor, out()),
            backend.decode_signs(words, factor, out()),
        ]

    # The last, subnormal in float32, is a tensor of float32 as well.
    spec = tf.TensorSpec([1000], tf.float32)
    run = way(lambda *tensors: decode(kernels, lambda: spec, *tensors))
    for factor in (*map(np.float64, (1 / 3, 1e-30, 1e300, 1e-41)), np.float32(1e-41)):
        with np.errstate(all="ignore"):
            expected = decode(
                reference, lambda: np.zeros(1000, np.float32), x, norms, words, float(factor), *KEY[:2]
            )
        given = (x, norms, words, factor, np.uint32(KEY.k0), np.uint32(KEY.k1))
        for one, other in zip(expected, run(*map(tf.constant, given))):
            assert_same_bits(one, other.numpy(), f"factor {factor}")


# ---- whole exchanges


def answers_of(requests: Sequence[Any], local_size: int) -> list[Any]:
    answers: list[Any] = [None] * len(requests)
    for ranks in simulator._members(requests[0].group, len(requests), local_size):
        for rank, answer in zip(ranks, performed([requests[rank] for rank in ranks])):
            answers[rank] = answer
    return answers


def performed(requests: Sequence[Any]) -> list[Any]:
    first, arrays = requests[0], [request.array for request in requests]
    if isinstance(first, Allreduce):
        combined = arrays[0]
        for array in arrays[1:]:
            combined = tf.maximum(combined, array) if first.op == "max" else combined + array
        return [combined] * len(requests)
    if isinstance(first, Allgather):
        return [arrays] * len(requests)
    pieces = [tf.split(request.array, request.splits) for request in requests]
    return [list(received) for received in zip(*pieces)]


TRACED = (
    "nuqsgd-inf-alltoall",
    "global-l2",
    "exponential-max",
    "eden",
    "binsgdm",
    "natural",
    "hierarchical-qsgd",
)
"""Exchanges that are traced by default; the others run eagerly, which takes less time."""


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (way, name) if way == ("function" if name in TRACED else "eager") else extended(way, name)
        for name in ON_DEVICES
        for way in WAYS
    ],
    indirect=["way"],
)
def test_whole_exchanges(way: Callable, name: str) -> None:
    """With a scheme's own numpy arrays among the tensors."""
    scheme, local_size, groups, states = setting_of(name)
    states = [[BinaryState(*map(variable_of, state[:2]), state.beta) for state in own] for own in states]

    def exchange(groups: Any, step: Any) -> list[Any]:
        found: list[Any] = []

        def answer(requests: Sequence[Any]) -> list[Any]:
            found.extend(request.array for request in requests)
            return answers_of(requests, local_size)

        steps = [step + rank for rank in range(len(groups))]
        decoded, *_ = lockstep(
            scheme, groups, states, local_size=local_size, steps=steps, kernels=kernels, answer=answer
        )
        outs = [tf.TensorSpec(x.shape, x.dtype) for x in groups[0]]
        return found + [decoded.write(i, 1 / len(groups), out) for i, out in enumerate(outs)]

    found = list(way(exchange)(to_tensor(groups), tf.constant(3, tf.int64)))
    found += [array.values() for own in states for state in own for array in state[:2]]
    expected = exchanged(name, reference, np.copy, np.copy, decoding=1)
    assert_all_same_bits(expected, [to_numpy(one) for one in found], name)


def variable_of(array: np.ndarray) -> FlatVariable:
    return FlatVariable(tf.Variable(array))
