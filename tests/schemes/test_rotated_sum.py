"""Global-QSGD with ``rotate=True``: its error, and what becomes of sums that leave their fields.

Buckets with the same content have signs and random bits of their own, so they are independent samples. Means are
compared by the bound of helpers.py (6e-11 a comparison) and within 6 standard errors (2e-9).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from helpers import (
    UNLIKE_BUCKETS,
    assert_unbiased,
    extended,
    gaussian,
    lockstep,
    same_bits,
    simulate,
)
from proofs import bounds

from horovod_quant import simulator
from horovod_quant.codecs.rotated_sum_steps import (
    SAMPLES,
    _tail_exponent,
    estimate_margin,
    rotated_sum_nmse,
    rotated_sum_step,
)
from horovod_quant.frontends.arguments import require_no_host
from horovod_quant.kernels import native
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.layout import TILE
from horovod_quant.reductions.rotated_sum import SHARED
from horovod_quant.schemes import GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Gradient, Workers

ROTATED = GlobalQSGD(8, rotate=True)
WORKERS = 4


def mean_of(gradients: list[np.ndarray]) -> np.ndarray:
    return np.mean(np.array(gradients, np.float64), axis=0)


def one_in_sixteen_alike(copies: int, workers: int = WORKERS) -> list[np.ndarray]:
    """Of 16 buckets that share an estimate the first is the same on all workers; the others have nothing in common.

    The estimate, (15 + n) / 16, is far below the first one's share, n.
    """
    own = [gaussian(rank, copies, 16, TILE) for rank in range(workers)]
    for each in own:
        each[:, 0] = gaussian(99, TILE)
    return [each.reshape(-1) for each in own]


def first_buckets(decoded: np.ndarray) -> np.ndarray:
    return decoded.reshape(-1, 16, TILE)[:, 0]


# ---- error


@pytest.mark.parametrize("rounding", ["correlated", "independent"])
@pytest.mark.parametrize(
    ("bits", "workers"),
    [
        (8, 1),
        (8, 2),
        (4, 2),
        (4, 4),
        (5, 3),
        (8, 16),
        (7, 40),
        extended(6, 64),
        extended(8, 256),
        extended(8, 1000),
    ],
)
def test_the_error_that_it_tells_is_that_of_gaussian_gradients(
    bits: int, workers: int, rounding: Any
) -> None:
    gradients = [gaussian(rank, 2 * SHARED) for rank in range(workers)]
    scheme = GlobalQSGD(bits, rounding=rounding, rotate=True)
    result = simulator.run(scheme, gradients)
    # An estimate by 256 coordinates has a standard deviation of 9%.
    assert result.nmse == pytest.approx(scheme.expected_nmse(workers, workers), rel=0.5)
    assert result.exchanged_again == 0


@pytest.mark.parametrize("bucket", UNLIKE_BUCKETS.values(), ids=UNLIKE_BUCKETS)
def test_error_is_the_same_for_every_distribution(bucket: np.ndarray) -> None:
    tiled = np.tile(bucket, 64)
    gradients = [np.random.default_rng(rank).permutation(tiled) for rank in range(WORKERS)]
    result = simulator.run(ROTATED, gradients)
    assert result.nmse < 1.5 * rotated_sum_nmse(8, WORKERS)
    assert result.exchanged_again == 0


def test_equal_gradients_have_an_error_that_does_not_grow_with_the_workers() -> None:
    gradient = gaussian(0, 2 * SHARED)
    for workers in (4, 16):
        error = simulator.run(ROTATED, [gradient] * workers).nmse
        # The step grows with the sum; of correlated roundings 1/6 is left, whatever n is.
        step = rotated_sum_step(8, workers)
        assert error == pytest.approx(step**2 / 6, rel=0.1)


@pytest.mark.parametrize("bits", [4, extended(5), 6, extended(7), 8])
@pytest.mark.parametrize("workers", [2, 1024])
def test_from_two_to_a_thousand_workers(bits: int, workers: int) -> None:
    scheme = GlobalQSGD(bits, rotate=True)
    gradients = [gaussian(rank, 2000) for rank in range(workers)]
    result = simulator.run(scheme, gradients)
    assert result.nmse < 3 * scheme.expected_nmse(workers, workers)
    assert all(same_bits(own[0], result.decoded[0][0]) for own in result.decoded)


def test_there_is_a_step_for_any_number_of_workers() -> None:
    for bits in (4, 8):
        steps = [rotated_sum_step(bits, workers) for workers in (1, 3, 100, 10_000, 10**7)]
        assert steps == sorted(steps)
        GlobalQSGD(bits, rotate=True).check_workers(10**7)


def test_it_serves_workers_for_whom_the_paper_leaves_one_level() -> None:
    gradients = [gaussian(rank, SHARED) for rank in range(64)]
    assert simulator.run(ROTATED, gradients).nmse < simulator.run(GlobalQSGD(8), gradients).nmse / 50


# ---- sums that leave their fields


@pytest.mark.parametrize("bits", [7, 8])
def test_a_sum_that_leaves_its_field_is_exchanged_again(bits: int) -> None:
    """Of equal gradients among others that have nothing in common some coordinate of each does so."""
    gradients = [np.concatenate([own, own[:500]]) for own in one_in_sixteen_alike(3, 16)]
    result = simulator.run(GlobalQSGD(bits, rotate=True), gradients)
    assert result.exchanged_again == 3
    assert all(same_bits(own[0], result.decoded[0][0]) for own in result.decoded)
    exact = mean_of(gradients).astype(np.float32)
    found = result.decoded[0][0]
    assert same_bits(first_buckets(found[: 3 * SHARED]), first_buckets(exact[: 3 * SHARED]))
    # 8 bytes an element, to be sent by each of a ring, and the words, the norms and samples, and a last bucket's.
    usual = simulator.run(GlobalQSGD(bits, rotate=True), [np.zeros_like(own) for own in gradients])
    more = result.bytes_sent["allreduce"] - usual.bytes_sent["allreduce"]
    assert more == 2 * 15 / 16 * 8 * 3 * TILE


def test_a_short_last_bucket_is_exchanged_again_in_its_length() -> None:
    gradients = [own[TILE : 16 * TILE + 40].copy() for own in one_in_sixteen_alike(2, 64)]
    result = simulator.run(ROTATED, gradients)
    assert result.exchanged_again == 1
    usual = simulator.run(ROTATED, [np.zeros_like(own) for own in gradients])
    more = result.bytes_sent["allreduce"] - usual.bytes_sent["allreduce"]
    assert more == 2 * 63 / 64 * 8 * 40
    exact = mean_of(gradients)[15 * TILE :]
    assert same_bits(result.decoded[5][0][15 * TILE :], exact.astype(np.float32))


def test_how_often_sums_leave_their_fields_is_as_computed() -> None:
    """With an estimate that is too small by a known factor, so that it happens often enough to count."""
    copies, share = 150, (15 + WORKERS) / 16 / WORKERS
    result = simulator.run(ROTATED, one_in_sixteen_alike(copies))
    z = math.sqrt(2 * _tail_exponent())
    estimates = np.random.default_rng(0).chisquare(SAMPLES, 4000) / SAMPLES
    fitting = z * np.sqrt(estimate_margin(SAMPLES) * share * estimates)
    tails = np.array([2 * NormalDist().cdf(-deviations) for deviations in fitting])
    expected = float((1 - (1 - tails) ** TILE).mean())
    assert 0.05 < expected < 0.95
    found = result.exchanged_again / copies
    assert abs(found - expected) < 0.25, (found, expected)  # 6 standard errors


def test_averages_are_unbiased_where_sums_leave_their_fields_often() -> None:
    copies = 150
    gradients = one_in_sixteen_alike(copies)
    result = simulator.run(ROTATED, gradients)
    again = result.exchanged_again / copies
    assert again > 0.05
    samples = first_buckets(result.decoded[0][0])
    exact = first_buckets(mean_of(gradients))[0]
    # The bound on the bias by Cauchy and Schwarz, element by element.
    error = rotated_sum_step(8, WORKERS) ** 2 * float((exact**2).mean()) / 12
    slack = math.sqrt(bounds.rotated_sum_bias(error, again))
    assert_unbiased(samples, exact, 20 * math.sqrt(error), slack)
    bias = (samples - exact).mean(axis=0)
    assert (bias**2).mean() < bounds.rotated_sum_bias(error, again) + 2 * error / copies


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_averages_are_unbiased(workers: int) -> None:
    scheme, copies = GlobalQSGD(6, rotate=True), 800
    buckets = [gaussian(rank, TILE) for rank in range(workers)]
    samples = simulator.run(scheme, [np.tile(bucket, copies) for bucket in buckets]).decoded[0][0]
    mean = mean_of(buckets)
    samples = samples.reshape(copies, TILE)
    assert_unbiased(samples, mean, float(np.linalg.norm(mean)), 1e-6)
    errors = samples - mean
    assert (errors.mean(axis=0) ** 2).sum() < 2 * (errors**2).sum(axis=1).mean() / copies


def test_a_word_that_arrives_damaged_is_found() -> None:
    """What is wrong with a sum changes its check, whatever the reason."""
    exchanges = [worker_exchange(rank) for rank in range(2)]
    known = answer([exchange.send(None) for exchange in exchanges])
    words = answer([exchange.send(known.copy()) for exchange in exchanges])
    words[5] ^= 1 << 20
    requests = [exchange.send(words.copy()) for exchange in exchanges]
    assert all(len(request.array) == TILE + 1 for request in requests)
    assert sum(requests[0].parts) == 8 * TILE


def worker_exchange(rank: int) -> Any:
    return ROTATED.begin([Gradient(gaussian(rank, 2 * TILE), RngKey(0, "w"))], Workers(rank, 2), native)


def answer(requests: list[Any]) -> np.ndarray:
    return np.add.reduce([request.array for request in requests], dtype=requests[0].array.dtype)


# ---- estimates


def test_buckets_of_zeros_do_not_count_in_an_estimate() -> None:
    """One bucket among zeros has 8 samples, and a step that is the larger: there is room for what they cannot tell."""
    gradients = [np.zeros(SHARED, np.float32) for _ in range(16)]
    for rank, own in enumerate(gradients):
        own[5 * TILE : 6 * TILE] = gaussian(rank, TILE)
    alone = simulator.run(ROTATED, gradients)
    assert alone.exchanged_again == 0
    error = alone.nmse
    assert 1 < error / rotated_sum_nmse(8, 16) < 25
    assert not np.delete(alone.decoded[0][0].reshape(16, TILE), 5, axis=0).any()


def test_energies_of_neighbours_may_differ_by_any_factor() -> None:
    scales = np.float32(10.0) ** np.linspace(-12, 12, 32, dtype=np.float32)
    gradients = [(gaussian(rank, 32, TILE) * scales[:, None]).reshape(-1) for rank in range(8)]
    result = simulator.run(ROTATED, gradients)
    assert result.exchanged_again == 0
    errors = ((result.decoded[0][0] - mean_of(gradients)) ** 2).reshape(32, TILE).sum(axis=1)
    norms = (mean_of(gradients) ** 2).reshape(32, TILE).sum(axis=1)
    assert (errors / norms).max() < 2 * rotated_sum_nmse(8, 8)


@pytest.mark.parametrize("factor", [2.0**100, 2.0**-90])
def test_huge_and_tiny_gradients_are_as_any_others(factor: float) -> None:
    gradients = [gaussian(rank, 3000) for rank in range(3)]
    usual = simulate(ROTATED, gradients).decoded[0][0]
    scaled = simulate(ROTATED, [own * np.float32(factor) for own in gradients]).decoded[0][0]
    assert same_bits(scaled, usual * np.float32(factor))


def test_norms_out_of_range_are_zeros_or_nan() -> None:
    tiny = np.zeros(2000, np.float32)
    tiny[5] = 2.0**-97
    assert not simulate(ROTATED, [tiny]).decoded[0][0].any()
    huge = np.full(2000, 3e38, np.float32)
    assert np.isnan(simulate(ROTATED, [huge, huge]).decoded[1][0]).all()


# ---- who takes part


def test_nodes_share_a_gradient_out_and_get_what_flat_workers_would() -> None:
    gradients = [np.tile(gaussian(rank, TILE), 40) for rank in range(4)]
    flat = simulator.run(ROTATED, gradients[:2])
    pairs = [gradients[rank // 2] for rank in range(4)]
    nested = simulator.run(Hierarchical(ROTATED), pairs, local_size=2)
    assert same_bits(nested.decoded[3][0], flat.decoded[0][0])


def test_a_worker_that_adds_zeros_takes_no_part_in_the_average() -> None:
    """As Horovod lets one do that has called ``hvd.join()``."""
    exchanges = [worker_exchange(rank) for rank in range(2)]
    received: Any = [None, None]
    while True:
        try:
            requests = [exchange.send(each) for exchange, each in zip(exchanges, received)]
        except StopIteration as stop:
            decoded = stop.value
            break
        received = [requests[0].array.copy()] * 2
    assert int(decoded.active) == 1
    out = decoded.write(0, 1.0, np.empty(2 * TILE, np.float32))
    assert ((out - gaussian(0, 2 * TILE)) ** 2).sum() < 2 * TILE * 1e-3


def test_other_results_of_a_group_are_left_alone() -> None:
    groups = [[each, gaussian(rank, 1000)] for rank, each in enumerate(one_in_sixteen_alike(2, 16))]
    finished = lockstep(ROTATED, groups)
    again = finished[0].exchanged_again
    assert again[0] > 0
    assert again[1] == 0


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotate": 1}, "rotate=1: use True or False"),
        ({"bits": 3, "rotate": True}, "bits=3: use an integer from 4 to 8"),
        ({"bits": 9, "rotate": True}, "bits=9: use an integer from 4 to 8"),
        ({"norm": "l2", "rotate": True}, "norm='l2': rotate=True works only with norm='max'; leave norm out"),
        (
            {"levels": "exponential", "rotate": True},
            "levels='exponential': rotate=True works only with levels='uniform'",
        ),
        (
            {"bucket_size": 1024, "rotate": True},
            "bucket_size=1024: rotate=True works only with bucket_size=16384",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        GlobalQSGD(**arguments)


def test_the_papers_scheme_is_the_default() -> None:
    assert GlobalQSGD() == GlobalQSGD(8, "max", "uniform", 1024, "correlated", False)
    assert ROTATED == GlobalQSGD(8, bucket_size=SHARED, rotate=True)
    with pytest.raises(ValueError, match="^rotate=True: GlobalQSGD then needs its arrays in host memory"):
        require_no_host(ROTATED, "triton")
    with pytest.raises(ValueError, match="use levels='exponential', or rotate=True"):
        GlobalQSGD(8).check_workers(100_000)
