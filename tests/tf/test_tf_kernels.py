"""The TensorFlow kernels return the reference's bits: eager, in a function, in a TF1 graph, and compiled by XLA."""

from __future__ import annotations

from typing import Callable

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from conformance import suite  # noqa: E402
from conformance.refusals import assert_refused  # noqa: E402
from conformance.suite import Draw, assert_same_bits, numbers  # noqa: E402
from conformance.tensorflow_backend import WAYS, TensorFlow  # noqa: E402
from helpers import extended, gaussian  # noqa: E402

from horovod_quant.kernels import keys, reference, trellis  # noqa: E402
from horovod_quant.kernels.keys import Key  # noqa: E402
from horovod_quant.kernels.layout import ROW, TILE  # noqa: E402
from horovod_quant.kernels.rotation import LEVELS  # noqa: E402
from horovod_quant.tensorflow import kernels  # noqa: E402
from horovod_quant.tensorflow.trellis import trellis_codes  # noqa: E402

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
