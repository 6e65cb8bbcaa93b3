"""Correlated rounding: each worker's law is what it was, and the error of the sum is smaller."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle

import numpy as np
import pytest
from helpers import assert_unbiased, gaussian, heavy_tailed, simulate

from horovod_quant import simulator
from horovod_quant.frontends.methods import parse
from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes import EDEN, NUQSGD, QSGD, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Gradient, Scheme, Workers, worker_key

COPIES = 4000
SIZES = (2, 3, 4, 5, 8)


# ---- one worker


def values() -> np.ndarray:
    return np.concatenate([gaussian(3, 28), np.float32([1, -1, 0.0, -0.0])])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("levels", ["uniform", "exponential"])
def test_each_workers_roundings_are_to_neighbouring_levels_without_bias(levels: str, size: int) -> None:
    """Two values and a mean are the whole law of one rounding; elements draw different bits, as they did."""
    x = values()
    norm = reference.bucket_maxima(x, 32)
    samples, norms = np.tile(x, COPIES), np.repeat(norm, COPIES)
    exact = x.astype(np.float64) / float(norm[0])
    for rank in range(size):
        key = RngKey(1, "w").correlated("worker", 5, rank, size)
        if levels == "uniform":
            found = reference.round_uniform(samples, norms, 32, 7, key).reshape(-1, 32) / 7.0
            slack = 2.0**-22
        else:
            digits = reference.round_exponential(samples, norms, 32, 4, key)
            found = reference.exponential_values(digits, 4).reshape(-1, 32)
            slack = 2.0**-23
        for column, value in zip(found.T, exact):
            low, high = column.min(), column.max()
            assert low == high == value or (low <= value <= high and set(column) == {low, high})
        assert_unbiased(found, exact, 0.5, slack)


def test_a_single_worker_draws_as_ever() -> None:
    gradient = gaussian(0, 3000)
    for scheme in (QSGD(4), NUQSGD(4), GlobalQSGD(8), GlobalQSGD(4, levels="exponential")):
        found, expected = (
            simulate(dataclasses.replace(scheme, rounding=rounding), [gradient]).decoded[0][0]
            for rounding in ("correlated", "independent")
        )
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("scheme", "digest"),
    [
        (QSGD(4, "l2", 1024), "e5313fad81536a48"),
        (QSGD(3, "max", 1024, exchange="alltoall"), "15af875014ccd262"),
        (NUQSGD(4, coding="elias"), "f55c406c1ea4c8e8"),
        (GlobalQSGD(8), "55812108fe8bf1b5"),
        (GlobalQSGD(4, levels="exponential"), "7f0d0bda602ce2f5"),
    ],
    ids=str,
)
def test_independent_rounding_has_the_bits_from_before_there_was_another(scheme: Scheme, digest: str) -> None:
    gradients = [np.random.default_rng(i).standard_normal(3000).astype(np.float32) for i in range(3)]
    independent = dataclasses.replace(scheme, rounding="independent")
    decoded = simulate(independent, gradients, seed=5, step=2).decoded[0][0]
    assert hashlib.blake2b(decoded.tobytes(), digest_size=8).hexdigest() == digest


@pytest.mark.parametrize(
    ("scheme", "three", "four"),
    [
        (QSGD(), "0ef5dd8f7d194893", "c379b5f38541bfc7"),
        (NUQSGD(), "d1f82916330c7f55", "5fe9d0e62548597b"),
        (GlobalQSGD(), "1e761e9cd3a18695", "7150e2d54a4edcb2"),
        (GlobalQSGD(levels="exponential"), "36d9ad1ba190c340", "2d555148e2adc0dc"),
        (GlobalQSGD(rotate=True), "c4d3cb95210d58a6", "f7fd02116d8e4efc"),
        (EDEN(server_bits=3), "ab5ba73547f2852e", "89edbe3b8ba9a558"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value),
)
def test_the_default_bits_stay_what_they_are(scheme: Scheme, three: str, four: str) -> None:
    for workers, digest in ((3, three), (4, four)):
        gradients = [
            np.random.default_rng(i).standard_normal(3000).astype(np.float32) for i in range(workers)
        ]
        decoded = simulate(scheme, gradients, seed=5, step=2).decoded[0][0]
        assert hashlib.blake2b(decoded.tobytes(), digest_size=8).hexdigest() == digest


# ---- the sum


def error_left(scheme: Scheme, gradients: list[np.ndarray], **arguments: int) -> float:
    """Error with correlated rounding by that with independent rounding, of many thousand elements."""
    inner = scheme.inner if isinstance(scheme, Hierarchical) else scheme

    def error(rounding: str) -> float:
        changed: Scheme = dataclasses.replace(inner, rounding=rounding)
        changed = Hierarchical(changed) if isinstance(scheme, Hierarchical) else changed
        return float(
            np.mean([simulator.run(changed, gradients, seed=seed, **arguments).nmse for seed in range(2)])
        )

    return error("correlated") / error("independent")


WANTED = {"global-qsgd-8": GlobalQSGD(8), "qsgd-4-allgather": QSGD(4, "max", exchange="allgather")}


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("scheme", WANTED.values(), ids=WANTED)
def test_error_is_halved_where_gradients_differ_and_1_by_n_of_it_is_left_where_they_are_equal(
    scheme: Scheme, size: int
) -> None:
    assert error_left(scheme, [gaussian(rank, 2**16) for rank in range(size)]) < 0.55
    # Most elements are small beside a step: little more than the larger of two can be rounded up.
    assert error_left(scheme, [heavy_tailed(rank, 2**16) for rank in range(size)]) < 0.85
    assert error_left(scheme, [gaussian(0, 2**16)] * size) < 1.5 / size


@pytest.mark.parametrize("size", [3, 5, 7])
def test_odd_numbers_of_workers_gain(size: int) -> None:
    scheme = QSGD(4, "max", exchange="allgather")
    assert error_left(scheme, [gaussian(rank, 2**16) for rank in range(size)]) < 0.55
    assert error_left(scheme, [gaussian(0, 2**16)] * size) < 0.42


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_exponential_levels_gain_at_any_correlation(norm: str, size: int) -> None:
    """By mirroring: without it workers of different signs would lose what those of equal signs gain."""
    common = gaussian(100, 2**16)
    for weight, most in ((0.0, 0.8), (0.7, 0.72), (1.0, 0.57)):
        gradients = [
            np.float32(weight) * common + np.float32((1 - weight**2) ** 0.5) * gaussian(rank, 2**16)
            for rank in range(size)
        ]
        assert error_left(NUQSGD(4, norm), gradients) < most, weight
    opposite = [common * np.float32((-1) ** rank) for rank in range(size)]
    if size % 2 == 0:  # the average is 0, and so is the sum of a pair's roundings
        decoded = simulate(NUQSGD(4, norm), opposite).decoded[0][0]
        assert np.abs(decoded).max() < 1e-6


@pytest.mark.parametrize(
    "scheme", [QSGD(4, "max", exchange="alltoall"), GlobalQSGD(4, levels="exponential")], ids=str
)
def test_where_a_server_rounds_again_the_first_rounding_gains(scheme: Scheme) -> None:
    assert error_left(scheme, [gaussian(rank, 2**16) for rank in range(4)]) < 0.9


def test_in_a_hierarchy_the_nodes_draw_jointly() -> None:
    gradients = [gaussian(rank, 2**16) for rank in range(6)]
    assert error_left(Hierarchical(GlobalQSGD(8)), gradients, local_size=3) < 0.55
    # Workers of a node have equal gradients: the nodes' are those of two workers alone.
    pair = [gaussian(rank, 3000) for rank in range(2)]
    nodes = simulate(Hierarchical(GlobalQSGD(8)), [pair[0]] * 2 + [pair[1]] * 2, local_size=2).decoded[0][0]
    assert np.array_equal(nodes, simulate(GlobalQSGD(8), pair).decoded[0][0])


@pytest.mark.parametrize("scheme", [GlobalQSGD(8), QSGD(4, "max"), NUQSGD(4)], ids=str)
def test_averages_stay_unbiased_when_workers_come_and_go(scheme: Scheme) -> None:
    """Of each number of workers, and where some of them add zeros, as those that have joined."""
    scheme = dataclasses.replace(scheme, bucket_size=64)
    for size, present in ((2, 1), (3, 3), (4, 3), (5, 5), (7, 4)):
        workers = [gaussian(rank, 64) if rank < present else np.zeros(64, np.float32) for rank in range(size)]
        decoded = simulate(scheme, [np.tile(g, COPIES) for g in workers]).decoded[0][0].reshape(COPIES, -1)
        largest = max(float(np.linalg.norm(g)) for g in workers)
        mean = np.mean(np.array(workers, np.float64), axis=0)
        assert_unbiased(decoded, mean, 2 * largest, largest * 2.0**-22)


@pytest.mark.parametrize("kind", [QSGD, NUQSGD, GlobalQSGD])
def test_another_rounding_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="^rounding='shared': use one of 'correlated', 'independent'"):
        kind(4, rounding="shared")


@pytest.mark.parametrize("kind", [QSGD, NUQSGD, GlobalQSGD])
def test_the_former_word_is_accepted_with_a_warning(kind: type) -> None:
    with pytest.warns(DeprecationWarning, match="rounding='joint' is now rounding='correlated'"):
        scheme = kind(4, rounding="joint")
    assert scheme == kind(4)
    assert str(scheme) == str(kind(4))  # which workers compare
    former = kind(4)
    object.__setattr__(former, "rounding", "joint")
    assert pickle.loads(pickle.dumps(former)) == scheme


def test_former_words_of_formulas_and_methods() -> None:
    with pytest.warns(FutureWarning, match="'qsgd-4-joint-l2' is now called"):
        assert parse("qsgd-4-joint-l2").scheme() == QSGD(4, "l2")
    gradient = Gradient(np.ones(4, np.float32), RngKey(0, "w"))
    with pytest.warns(DeprecationWarning, match="'joint'"):
        former = worker_key(gradient, Workers(1, 2), "joint")
    assert former == worker_key(gradient, Workers(1, 2), "correlated")
