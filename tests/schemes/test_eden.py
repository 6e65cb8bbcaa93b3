"""EDEN's exchanges: what they promise for every gradient, and what is chosen by itself.

Buckets with the same content have rotations of their own, so they are independent samples. Means are compared by the
bound of helpers.py (6e-11 a comparison) and within 6 standard errors (2e-9); slack besides is for coordinates that are
not quite Gaussian. ``||mean of errors||^2`` of COPIES samples without bias is ``1 / COPIES`` of one's, within 6 times
4%, the standard deviation of a sum of 1,024 squares; it must stay below twice that, which bounds the squared bias by
``1 / COPIES`` of an exchange's error.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from helpers import (
    UNLIKE_BUCKETS,
    assert_mean,
    assert_unbiased,
    extended,
    gaussian,
    lockstep,
    same_bits,
    simulate,
)
from proofs import bounds

from horovod_quant import simulator
from horovod_quant.codecs.rotated_codes import eden_nmse, eden_variance_factor
from horovod_quant.kernels import reference
from horovod_quant.kernels.keys import RngKey
from horovod_quant.kernels.layout import TILE, code_words
from horovod_quant.schemes import EDEN, Hierarchical
from horovod_quant.schemes.base import Allgather, Alltoall, Workers
from horovod_quant.schemes.eden_widths import IN_COMMON, balanced

COPIES = 400
every_width = pytest.mark.parametrize("bits", [1, 2, 3, 4])
with_and_without_trellis = pytest.mark.parametrize("trellis", [False, True])
every_bucket = pytest.mark.parametrize("bucket", UNLIKE_BUCKETS.values(), ids=UNLIKE_BUCKETS)


def shuffled(bucket: np.ndarray, workers: int) -> list[np.ndarray]:
    return [np.random.default_rng(rank).permutation(bucket) for rank in range(workers)]


def exchanged(scheme: Any, buckets: list[np.ndarray], **arguments: Any) -> np.ndarray:
    """What one worker decodes, a row for each copy of the buckets."""
    result = simulator.run(scheme, [np.tile(bucket, COPIES) for bucket in buckets], **arguments)
    return result.decoded[0][0].reshape(COPIES, TILE)


# ---- error


@every_width
@every_bucket
@pytest.mark.parametrize(("exchange", "workers"), [("allgather", 2), ("alltoall", 3)])
@with_and_without_trellis
def test_averages_are_unbiased(
    bucket: np.ndarray, bits: int, exchange: Any, workers: int, trellis: bool
) -> None:
    buckets = shuffled(bucket, workers)
    mean = np.mean(np.array(buckets, np.float64), axis=0)
    decoded = exchanged(EDEN(bits, exchange=exchange, trellis=trellis), buckets)
    largest = float(np.linalg.norm(bucket))
    assert_unbiased(decoded, mean, 8 * largest, 1e-6 * largest)
    errors = decoded - mean
    assert (errors.mean(axis=0) ** 2).sum() < 2 * (errors**2).sum(axis=1).mean() / COPIES


@every_width
@every_bucket
@pytest.mark.parametrize("workers", [1, 5, extended(16)])
@pytest.mark.parametrize("server_bits", [None, 4])
@with_and_without_trellis
def test_error_is_the_same_for_every_gradient_and_number_of_workers(
    bucket: np.ndarray, workers: int, bits: int, server_bits: Any, trellis: bool
) -> None:
    """That of each stage's ``D / (1 - D)``, see `bounds.eden_nmse`."""
    exchange: Any = "alltoall" if server_bits else "allgather"
    scheme = EDEN(bits, server_bits or "auto", exchange, trellis=trellis)
    buckets = shuffled(bucket, workers)
    mean = np.mean(np.array(buckets, np.float64), axis=0)
    errors = ((exchanged(scheme, buckets) - mean) ** 2).sum(axis=1) / (mean**2).sum()
    expected = eden_nmse(bits, server_bits, bounds.energy_ratio(buckets), trellis)
    assert_mean(errors, expected, 0.06 * expected)


@every_width
@pytest.mark.parametrize("workers", [2, 8])
def test_errors_of_equal_gradients_average_out(workers: int, bits: int) -> None:
    """Each worker has a rotation of its own; so has the server, whose error stays."""
    buckets = [gaussian(0, TILE)] * workers
    for server_bits in (None, 3):
        scheme = EDEN(bits, server_bits or "auto", "alltoall" if server_bits else "allgather")
        errors = ((exchanged(scheme, buckets) - buckets[0].astype(np.float64)) ** 2).sum(axis=1)
        expected = eden_nmse(bits, server_bits, 1 / workers) * float((buckets[0] ** 2).sum())
        assert_mean(errors, expected, 0.06 * expected)


def test_errors_of_nodes_average_out() -> None:
    """4 nodes of 2: it is the nodes' means that are rounded."""
    workers = [gaussian(rank, TILE) for rank in range(8)]
    nodes = [(workers[rank] + workers[rank + 1]) / 2 for rank in range(0, 8, 2)]
    mean = np.mean(np.array(workers, np.float64), axis=0)
    errors = ((exchanged(Hierarchical(EDEN(2)), workers, local_size=2) - mean) ** 2).sum(axis=1)
    expected = eden_nmse(2, 3, bounds.energy_ratio(nodes)) * float((mean**2).sum())
    assert_mean(errors, expected, 0.06 * expected)


@pytest.mark.parametrize("workers", [1, 2, 3, 12])
@pytest.mark.parametrize(
    "scheme",
    [
        EDEN(1),
        EDEN(3),
        EDEN(2, 4, "alltoall"),
        EDEN(4, exchange="allgather"),
        EDEN(nmse=0.2),
        EDEN(3, trellis=True),
        EDEN(nmse=0.2, trellis=True),
    ],
    ids=str,
)
def test_the_error_that_it_tells_is_that_of_gaussian_gradients(scheme: EDEN, workers: int) -> None:
    gradients = [gaussian(rank, 64 * TILE) for rank in range(workers)]
    told = scheme.expected_nmse(workers, workers)
    assert simulator.run(scheme, gradients).nmse == pytest.approx(told, rel=0.06)


# ---- keys


def test_steps_names_and_workers_have_rotations_of_their_own() -> None:
    gradient = gaussian(0, TILE)

    def found(rank: int, **arguments: Any) -> np.ndarray:
        """What is decoded where only one of the workers has a gradient."""
        own = [gradient if other == rank else np.zeros_like(gradient) for other in range(3)]
        return simulator.run(EDEN(3, exchange="allgather"), own, **arguments).decoded[0][0]

    results = [found(0), found(1), found(2), found(0, step=1), found(0, names=["other"]), found(0, seed=1)]
    errors = np.array([3 * result - gradient for result in results])
    assert np.abs(np.corrcoef(errors) - np.eye(len(errors))).max() < 6 / TILE**0.5


def test_the_server_has_a_rotation_of_its_own() -> None:
    """In the worker's it would find the levels again, and leave what has been rounded as it is."""
    gradient = gaussian(0, TILE)
    once, twice = (
        simulator.run(EDEN(3, exchange=exchange), [gradient]).decoded[0][0]
        for exchange in ("allgather", "alltoall")
    )
    error = ((twice - once) ** 2).sum() / (once**2).sum()
    assert error == pytest.approx(eden_variance_factor(3), rel=0.3)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "scheme",
    [EDEN(2, exchange="allgather"), EDEN(1, 3, "alltoall"), EDEN(3), EDEN(2, 3, trellis=True)],
    ids=["gathered", "served", "auto", "trellis"],
)
def test_signs_are_those_of_the_senders_counts(scheme: EDEN, workers: int) -> None:
    """A server's are those of the first worker's. Every average is what the kernels make of whole gradients."""
    steps = [9, 0, 10**6, 2**31 + 4, 9][:workers]
    lengths = (4 * TILE + 1, 0, 33, 2 * TILE)
    groups = [[gaussian(10 * rank + i, count) for i, count in enumerate(lengths)] for rank in range(workers)]
    chosen = scheme.widths(workers)
    finished = lockstep(scheme.for_workers(Workers(0, workers)), groups, steps=steps)
    for i, count in enumerate(lengths):
        chain = RngKey(0, str(i))
        keys = [chain.key("worker", step % 2**31, rank) for rank, step in enumerate(steps)]
        sent = [
            reference.encode_rotated(own[i], chosen.bits, key, trellis=chosen.trellis)
            for own, key in zip(groups, keys)
        ]
        expected, factor = np.empty(count, np.float32), 1.0 / workers
        reference.add_rotated(*zip(*sent), chosen.bits, keys, factor, expected, trellis=chosen.trellis)
        if chosen.exchange == "alltoall":
            key = chain.key("server", steps[0])
            served = reference.encode_rotated(expected, chosen.server_bits, key, trellis=chosen.trellis)
            reference.decode_rotated(*served, chosen.server_bits, key, 1.0, expected, trellis=chosen.trellis)
        for result in finished:
            assert same_bits(result.write(i, factor, np.empty(count, np.float32)), expected)


def test_the_place_in_the_tensor_selects_the_signs() -> None:
    """Equal buckets are decoded to different ones, whoever serves them, and alike where nodes share them out."""
    gradients = [np.tile(gaussian(rank, TILE), 6) for rank in range(4)]
    flat = simulator.run(EDEN(2, exchange="alltoall"), gradients[:2]).decoded[0][0].reshape(6, TILE)
    assert len({row.tobytes() for row in flat}) == 6
    pairs = [gradients[rank // 2] for rank in range(4)]
    nested = simulator.run(Hierarchical(EDEN(2, exchange="alltoall")), pairs, local_size=2).decoded[3][0]
    assert same_bits(nested, flat.reshape(-1))


# ---- values out of the ordinary


def test_a_bucket_below_the_smallest_magnitude_is_zero() -> None:
    """Above, the sum along the gradient is exact: the scale makes it so."""
    for elements in (1, 100, 1024):
        for scheme in (EDEN(1), EDEN(4)):
            gradient = np.zeros(elements, np.float32)
            gradient[elements // 2] = 2.0**-96
            decoded = simulate(scheme, [gradient]).decoded[0][0]
            assert decoded[elements // 2] == pytest.approx(2.0**-96, rel=1e-5)
            gradient *= np.float32(1 - 2.0**-20)
            assert not simulate(scheme, [gradient]).decoded[0][0].any()


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_huge_gradients_are_finite(exchange: Any) -> None:
    gradients = [np.float32(2.0**124) * np.sin(np.arange(3000) + i).astype(np.float32) for i in range(3)]
    gradients[0][5] = np.finfo(np.float32).max
    small = [np.ldexp(gradient, -140) for gradient in gradients]
    huge, usual = (
        simulator.run(EDEN(3, exchange=exchange), each).decoded[2][0] for each in (gradients, small)
    )
    assert same_bits(huge, np.ldexp(usual, 140))


@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
def test_what_leaves_float32_is_not_silently_something_else(exchange: Any) -> None:
    gradients = [np.full(1024, np.finfo(np.float32).max)] * 3
    for own in simulator.run(EDEN(1, exchange=exchange), gradients).decoded:
        assert not np.isfinite(own[0]).all()
        assert (exchange == "allgather") != np.isnan(own[0]).all()


# ---- bytes


@pytest.mark.parametrize("elements", [5 * TILE, 1025, 33, 1])
def test_bytes_are_those_of_steps_codes_and_scales(elements: int) -> None:
    gradients = [gaussian(rank, elements) for rank in range(4)]
    padded = {1: 32, 33: 64, 1025: 1024 + 32}.get(elements, elements)
    buckets = -(-elements // TILE)
    up, down = (4 * (code_words(padded, bits) + buckets) for bits in (2, 4))
    steps = 4 * min(buckets, 4)  # one for each server
    sent = simulator.run(EDEN(2, 4, "alltoall"), gradients).bytes_sent
    assert sent == {
        "alltoall": pytest.approx((up + steps) * 3 / 4),
        "allgather": pytest.approx((down + steps) * 3 / 4),
    }
    assert simulator.run(EDEN(2, exchange="allgather"), gradients).bytes_sent == {"allgather": 3 * (up + 4)}


# ---- what is chosen


def test_two_workers_gather_and_more_are_served() -> None:
    kinds = {
        workers: [each.request for each in EDEN().for_workers(Workers(0, workers)).collectives]
        for workers in (1, 2, 3, 50)
    }
    assert kinds[1] == kinds[2] == [Allgather]
    assert kinds[3] == kinds[50] == [Alltoall, Allgather]
    assert EDEN(2).for_workers(Workers(0, 20)) == EDEN(2, 3, "alltoall")
    assert EDEN(2, trellis=True).for_workers(Workers(0, 20)) == EDEN(2, 3, "alltoall", trellis=True)


@every_width
def test_the_servers_bits_grow_with_the_workers(bits: int) -> None:
    found = [balanced(bits, workers) for workers in range(1, 1000)]
    assert found == sorted(found)
    assert set(found[1:28]) == {min(bits + 1, 4)}
    assert found[199] == min(bits + 3 if bits == 1 else bits + 2, 4)
    for workers in (3, 12, 100):
        left = eden_nmse(bits, None, 1 / (1 + (workers - 1) * IN_COMMON))
        assert eden_nmse(found[workers - 1], None) <= left or found[workers - 1] == 4


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 30])
@pytest.mark.parametrize("nmse", [0.0096, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 2.0, 100])
@with_and_without_trellis
def test_a_promised_error_is_kept_with_the_fewest_bits(nmse: float, workers: int, trellis: bool) -> None:
    chosen = EDEN(nmse=nmse, trellis=trellis).widths(workers)
    assert chosen.nmse() <= nmse
    fewer = [
        (bits, server_bits, exchange)
        for bits in range(1, 5)
        for server_bits in range(1, 5)
        for exchange, sent in (("allgather", workers * bits), ("alltoall", bits + server_bits))
        if sent < chosen.bits_sent(workers)
    ]
    assert all(EDEN(*other, trellis=trellis).widths(workers).nmse() > nmse for other in fewer)
    found = EDEN(nmse=nmse, trellis=trellis).for_workers(Workers(0, workers))
    assert found == EDEN(*chosen[:3], trellis=trellis)


def test_of_equally_many_bits_the_server_has_more() -> None:
    assert EDEN(nmse=0.05).widths(4) == (3, 4, "alltoall", False)
    assert EDEN(nmse=0.06, trellis=True).widths(4) == (3, 3, "alltoall", True)


def test_arguments_with_which_it_cannot_work_are_refused() -> None:
    for arguments, message in [
        ({"bits": 5}, "bits=5: use an integer from 1 to 4"),
        ({"bits": 0}, "bits=0: use"),
        ({"bits": True}, "bits=True: use"),
        ({"server_bits": 5}, "server_bits=5: use an integer from 1 to 4"),
        ({"server_bits": "all"}, "server_bits='all': use 'auto', or an integer from 1 to 4"),
        ({"exchange": "ring"}, "exchange='ring': use one of 'allgather', 'alltoall', 'auto'"),
        ({"nmse": 0}, "nmse=0: use a positive number"),
        ({"nmse": "small"}, "nmse='small': use a positive number"),
        ({"nmse": 0.1, "bits": 3}, "nmse=0.1 chooses the bits; leave out either bits=3 or nmse"),
        ({"nmse": 0.1, "server_bits": 3}, "nmse=0.1 chooses the bits; leave out either server_bits=3"),
        ({"nmse": 0.009}, "nmse=0.009: exchange='auto' has at least 0.009592"),
        (
            {"nmse": 0.01, "exchange": "alltoall"},
            "at least 0.019276; an allgather has half of that; trellis=True has 30% less",
        ),
        (
            {"nmse": 0.01, "exchange": "alltoall", "trellis": True},
            "at least 0.013434; an allgather has half of that",
        ),
        ({"trellis": 1}, "trellis=1: use True or False"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            EDEN(**arguments)


def test_the_former_name_of_nmse_is_accepted_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"EDEN\(error=...\) is now EDEN\(nmse=...\)") as caught:
        assert EDEN(error=0.1) == EDEN(nmse=0.1)
    assert caught[0].filename == __file__
    hvq = pytest.importorskip("horovod_quant.torch")
    with pytest.warns(DeprecationWarning, match="EDEN"):
        assert repr(hvq.EDEN(error=0.1)) == repr(hvq.EDEN(nmse=0.1))
    with pytest.warns(DeprecationWarning, match="EDEN"):
        changed = hvq.EDEN(nmse=0.1, overrides={"head": {"error": 0.05}})
    assert changed.policy.scheme_for("head", 5000) == EDEN(nmse=0.05)
    with pytest.raises(TypeError, match="EDEN\\(\\) got 'error' and 'nmse', two names of one argument"):
        hvq.EDEN(error=0.1, nmse=0.1)


def test_defaults_and_numpys_integers() -> None:
    assert EDEN() == EDEN(3) == EDEN(np.int64(3))
    assert dataclasses.replace(EDEN(), bits=2) == EDEN(2)
    assert EDEN(nmse=0.1).levels_left(4, 4) is None
    assert EDEN(3).levels_left(4, 4) == 4
