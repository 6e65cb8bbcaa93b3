from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import LENGTHS, assert_mean, gaussian, heavy_tailed, same_bits, simulate
from proofs import bounds

from horovod_quant import simulator
from horovod_quant.codecs import elias
from horovod_quant.codecs.elias import open_body
from horovod_quant.kernels.entropy import MAX_COUNT, CorruptPayloadError
from horovod_quant.kernels.layout import TILE
from horovod_quant.schemes import NUQSGD, QSGD
from horovod_quant.schemes.base import ragged_payload, split_ragged

COPIES = 1500
VECTORS = {
    "gaussian": gaussian(0, 480),
    "heavy-tailed": heavy_tailed(1, 480),
    "equal": np.full(480, 0.7, np.float32),
    "spike": (np.arange(480) == 100) + np.float32(1e-3),
}


def squared_errors(scheme: QSGD | NUQSGD, v: np.ndarray) -> np.ndarray:
    """``||Q(v) - v||^2`` of independent quantizations of one bucket."""
    decoded = simulate(scheme, [np.tile(v, COPIES)]).decoded[0][0].reshape(COPIES, -1)
    return ((decoded.astype(np.float64) - v) ** 2).sum(axis=1)


def float32_errors(scale: float) -> float:
    """Squared errors of float32's own roundings in a bucket, where a vector lies on the levels."""
    return 480 * (scale * 2.0**-22) ** 2


@pytest.mark.parametrize("v", VECTORS.values(), ids=VECTORS)
@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 10])
def test_variance_is_the_exact_one_and_below_its_bound(v: np.ndarray, norm: str, bits: int) -> None:
    s = 2 ** (bits - 1) - 1
    errors = squared_errors(QSGD(bits, norm, 480), v)
    scale = float(np.linalg.norm(v.astype(np.float64)) if norm == "l2" else np.abs(v).max())
    exact = bounds.uniform_rounding_variance(v.astype(np.float64), scale, s)
    assert_mean(errors, exact, float32_errors(scale))
    factor = bounds.qsgd_dense_variance_factor(480, s)
    if norm == "l2":
        factor = min(factor, bounds.qsgd_variance_factor(480, s))
    # A mean above the bound by 6 standard errors only if the exact variance is at the bound.
    assert errors.mean() <= factor * scale**2 * (1 + 6 / math.sqrt(COPIES))


@pytest.mark.parametrize("norm", ["l2", "max"])
def test_error_of_an_average_falls_with_the_number_of_workers(norm: str) -> None:
    # Independent roundings of the same gradient: the variance of the mean of n is 1/n of one's.
    # 1,500 buckets, 6 standard errors.
    v = VECTORS["gaussian"]
    scheme = QSGD(3, norm, 480, exchange="allgather", rounding="independent")
    scale = np.linalg.norm(v) if norm == "l2" else np.abs(v).max()
    one = bounds.uniform_rounding_variance(v.astype(np.float64), float(scale), 3)
    for size in (2, 5):
        decoded = simulate(scheme, [np.tile(v, COPIES)] * size).decoded[0][0].reshape(COPIES, -1)
        assert_mean(((decoded.astype(np.float64) - v) ** 2).sum(axis=1), one / size)


@pytest.mark.parametrize("bits", [2, 3, 4, 9, 16])
def test_ternary_and_up_send_sign_and_magnitude(bits: int) -> None:
    # One bucket whose elements are on levels: they come back exactly whatever is drawn.
    s = 2 ** (bits - 1) - 1
    levels = np.unique(np.linspace(-s, s, 30).round())
    decoded = simulate(QSGD(bits, "max", 32), [levels]).decoded[0][0]
    np.testing.assert_allclose(decoded, levels, rtol=3e-7)


CODED = [
    *(QSGD(bits, "l2", 96) for bits in (2, 3, 4, 8, 12, 16)),
    QSGD(4, "max", 96),
    *(NUQSGD(bits, "l2", 96) for bits in (2, 4, 8)),
    NUQSGD(4, "max", 96),
]


@pytest.mark.parametrize("coding", ["elias", "elias-omega"])
@pytest.mark.parametrize("scheme", CODED, ids=str)
def test_elias_coding_decodes_to_the_same_bits_as_fixed_width(scheme: QSGD | NUQSGD, coding: str) -> None:
    coded = type(scheme)(scheme.bits, scheme.norm, scheme.bucket_size, coding)
    groups = [
        [heavy_tailed(10 * worker + i, d) for i, d in enumerate((*LENGTHS, 3000))] for worker in range(3)
    ]
    groups[0][-1][:96] = 0
    groups[1][-1][200] = np.nan
    groups[2][-1][500] = np.inf
    fixed, elias = simulate(scheme, groups), simulate(coded, groups)
    for own, other in zip(fixed.decoded, elias.decoded):
        assert all(map(same_bits, own, other))


@pytest.mark.parametrize("kernels", ["numpy", "native"])
@pytest.mark.parametrize("coding", ["elias", "elias-omega"])
@pytest.mark.parametrize(
    "scheme", [QSGD(2), QSGD(8, "max"), NUQSGD(3)], ids=str
)  # 8 bits are sent as they are
def test_a_tensor_of_several_elias_streams_decodes_to_the_same_bits(
    scheme: QSGD | NUQSGD, coding: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elias, "STREAM_ELEMENTS", 2048)
    coded = type(scheme)(scheme.bits, scheme.norm, coding=coding)
    groups = [
        [heavy_tailed(10 * worker + i, d) for i, d in enumerate((0, 2047, 2048, 7000))] for worker in range(3)
    ]
    fixed, coded_result = (simulator.run(method, groups, kernels=kernels) for method in (scheme, coded))
    for own, other in zip(fixed.decoded, coded_result.decoded):
        assert all(map(same_bits, own, other))


def test_the_streams_of_the_largest_tensors_are_ones_that_elias_coding_can_count() -> None:
    assert elias.STREAM_ELEMENTS % TILE == 0
    for elements in (MAX_COUNT + 1, 2**31):
        bounds_of_streams = elias.stream_bounds(elements)
        assert bounds_of_streams[0][0] == 0
        assert bounds_of_streams[-1][1] == elements
        assert all(own[1] == other[0] for own, other in zip(bounds_of_streams, bounds_of_streams[1:]))
        assert max(stop - start for start, stop in bounds_of_streams) <= MAX_COUNT


def test_elias_coding_is_shorter_where_levels_are_rarely_used() -> None:
    gradient = gaussian(0, 1 << 15)
    sent = {
        coding: simulate(QSGD(4, "l2", 1024, coding), [gradient] * 2).bytes_sent["allgather"]
        for coding in ("fixed", "elias", "elias-omega")
    }
    assert sent["elias"] < 0.5 * sent["fixed"]
    assert sent["elias-omega"] < 0.5 * sent["fixed"]


# ---- payloads that were damaged


def test_ragged_payloads_are_taken_apart() -> None:
    bodies = [np.arange(n, dtype=np.uint8) for n in (0, 1, 9, 300)]
    buffer = np.concatenate([ragged_payload(body) for body in bodies])
    assert list(map(len, split_ragged(buffer))) == [0, 1, 9, 300]
    assert all(map(same_bits, split_ragged(buffer), bodies))
    assert split_ragged(buffer[:0]) == []


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 14])
def test_a_truncated_gathered_buffer_is_refused(kept: int) -> None:
    buffer = ragged_payload(np.arange(7, dtype=np.uint8))
    with pytest.raises(ValueError, match="corrupt payload from worker 0"):
        split_ragged(buffer[:kept])
    with pytest.raises(ValueError, match="corrupt payload from worker 1"):
        split_ragged(np.concatenate([buffer, buffer[:kept]]))


@pytest.mark.parametrize("length", [-1, -(2**63), 8, 2**40, 2**63 - 1])
def test_an_impossible_length_is_refused(length: int) -> None:
    buffer = ragged_payload(np.zeros(7, np.uint8))
    buffer[:8] = np.array([length], "<i8").view(np.uint8)
    with pytest.raises(ValueError, match=f"a length of {length} at byte 0"):
        split_ragged(buffer)


def body_of(lengths: list, norms: list, streams: bytes) -> np.ndarray:
    parts = [np.array(lengths, "<i8").view(np.uint8), np.array(norms, np.float32).view(np.uint8)]
    return np.concatenate([*parts, np.frombuffer(streams, np.uint8)])


def test_a_body_holds_norms_and_a_stream_for_each_tensor() -> None:
    norms, streams = open_body(body_of([2, 0, 3], [1.5, -2.0], b"abcde"), 2, 3)
    assert norms.tolist() == [1.5, -2.0]
    assert [stream.tobytes() for stream in streams] == [b"ab", b"", b"cde"]


@pytest.mark.parametrize(
    ("body", "norm_count"),
    [
        (body_of([2, 3], [1.0], b"abcde")[:19], 1),
        (body_of([2, 3], [1.0], b"abcd"), 1),
        (body_of([2, 3], [1.0], b"abcdef"), 1),
        (body_of([-1, 6], [1.0], b"abcde"), 1),
        (body_of([2, 3], [1.0], b"abcde"), 2),
        (body_of([], [], b""), 0),
    ],
)
def test_a_damaged_body_is_refused(body: np.ndarray, norm_count: int) -> None:
    with pytest.raises(CorruptPayloadError, match="corrupt payload"):
        open_body(body, norm_count, 2)


def damaged(rng: np.random.Generator, payload: np.ndarray, trial: int) -> np.ndarray:
    """The payload with changed bytes, cut, lengthened, without a stretch; or as many random bytes."""
    low, high = np.sort(rng.integers(0, len(payload) + 1, 2))
    kind = trial % 5
    if kind == 0:
        payload = payload.copy()
        payload[rng.integers(0, len(payload), 2)] = rng.choice(np.array([0, 1, 127, 128, 255], np.uint8), 2)
        return payload
    if kind == 1:
        return payload[:high]
    if kind == 2:
        return np.concatenate([payload, payload[low:high]])
    if kind == 3:
        return np.concatenate([payload[:low], payload[high:]])
    return rng.integers(0, 256, high).astype(np.uint8)


def error_of(parse: Callable, *arguments: Any) -> tuple[Any, ValueError | None]:
    """What ``parse`` returns or the ValueError that it raises; any other error is one of the test's."""
    try:
        return parse(*arguments), None
    except ValueError as error:
        return None, error


def test_a_fuzzed_gathered_buffer_is_taken_apart_or_refused() -> None:
    rng = np.random.default_rng(8)
    refused = 0
    for trial in range(2000):
        bodies = [rng.integers(0, 256, rng.integers(0, 20)).astype(np.uint8) for _ in range(3)]
        buffer = damaged(rng, np.concatenate([ragged_payload(body) for body in bodies]), trial)
        found, error = error_of(split_ragged, buffer)
        if error is None:
            assert sum(8 + len(body) for body in found) == len(buffer)
        else:
            assert str(error).startswith("corrupt payload from worker")
            refused += 1
    assert 1000 < refused < 1950


def test_a_fuzzed_body_is_opened_or_refused() -> None:
    rng = np.random.default_rng(9)
    refused = 0
    for trial in range(2000):
        norm_count, count = int(rng.integers(0, 5)), int(rng.integers(1, 4))
        lengths = rng.integers(0, 9, count).tolist()
        body = body_of(lengths, rng.standard_normal(norm_count).tolist(), bytes(sum(lengths)))
        body = damaged(rng, body, trial)
        opened, error = error_of(open_body, body, norm_count, count)
        if error is None:
            norms, streams = opened
            assert [len(norms), len(streams)] == [norm_count, count]
            assert 8 * len(streams) + 4 * len(norms) + sum(map(len, streams)) == len(body)
        else:
            assert isinstance(error, CorruptPayloadError)
            refused += 1
    assert 1000 < refused < 1950


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 0}, "bits=0: use an integer from 2 to 16"),
        ({"bits": 1}, "bits=1: use an integer from 2 to 16"),
        ({"bits": 17}, "bits=17: use an integer from 2 to 16"),
        ({"bits": True}, "bits=True: use an integer from 2 to 16"),
        ({"bits": 4.0}, "bits=4.0: use an integer from 2 to 16"),
        ({"bits": "4"}, "bits='4': use an integer from 2 to 16"),
        ({"bits": None}, "bits=None: use an integer from 2 to 16"),
        ({"norm": "inf"}, "norm='inf': use one of 'l2', 'max'"),
        ({"coding": "huffman"}, "coding='huffman': use one of 'fixed', 'elias', 'elias-omega'"),
        ({"coding": None}, "coding=None: use one of"),
        ({"bucket_size": 100}, "bucket_size=100: use a multiple of 32, for example 1024"),
        ({"bucket_size": 0}, "bucket_size=0: use a multiple of 32"),
        ({"bucket_size": -32}, "bucket_size=-32: use a multiple of 32"),
        ({"bucket_size": 64.0}, "bucket_size=64.0: use a multiple of 32"),
        ({"bucket_size": True}, "bucket_size=True: use a multiple of 32"),
    ],
)
def test_bad_arguments_are_named_with_what_would_work(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        QSGD(**arguments)


def test_numpys_integers_are_integers() -> None:
    scheme = QSGD(np.int64(4), bucket_size=np.uint16(64))
    assert scheme == QSGD(4, bucket_size=64)
    gradient = gaussian(0, 100)
    assert same_bits(
        simulate(scheme, [gradient]).decoded[0][0],
        simulate(QSGD(4, bucket_size=64), [gradient]).decoded[0][0],
    )


# ---- through an alltoall


def test_exchange_auto_is_an_allgather_for_few_workers_and_an_alltoall_for_many() -> None:
    for size in (1, 2, 4, 5, 64):
        gradients = [gaussian(worker, 3000) for worker in range(size)]
        found, expected = (
            simulate(scheme, gradients)
            for scheme in (QSGD(), QSGD(4, exchange="allgather" if size <= 4 else "alltoall"))
        )
        assert found.bytes_sent == expected.bytes_sent
        assert same_bits(found.decoded[0][0], expected.decoded[0][0])


def test_exchange_auto_with_elias_coding_stays_with_an_allgather() -> None:
    result = simulate(
        QSGD(4, coding="elias", exchange="auto"), [gaussian(worker, 3000) for worker in range(6)]
    )
    assert list(result.bytes_sent) == ["allgather"]
    with pytest.raises(ValueError, match="coding='elias': an alltoall needs pieces of known length"):
        QSGD(4, coding="elias", exchange="alltoall")


def test_through_an_unknown_collective_is_refused() -> None:
    with pytest.raises(ValueError, match="exchange='ring': use one of 'allgather', 'alltoall', 'auto'"):
        QSGD(4, exchange="ring")


def test_through_an_alltoall_the_second_rounding_is_the_servers() -> None:
    """The variance is that of the workers' roundings, averaged, and that of rounding the average."""
    gradients = [np.tile(gaussian(worker, 64), 2000) for worker in range(4)]
    mean = np.mean(gradients, axis=0)
    again = simulate(QSGD(4, bucket_size=64), [mean]).nmse
    for rounding in ("correlated", "independent"):
        errors = {
            exchange: simulate(QSGD(4, bucket_size=64, exchange=exchange, rounding=rounding), gradients).nmse
            for exchange in ("allgather", "alltoall")
        }
        assert errors["alltoall"] == pytest.approx(errors["allgather"] + again, rel=0.25)
