"""A sum of two workers' arrays gives the bits of a gather, and sends the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers import SCHEMES, owned_states, same_bits

from horovod_quant import simulator
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    Exchange,
    Gradient,
    Scheme,
    Workers,
    map_requests,
)
from horovod_quant.transports.pairwise_via_allreduce import (
    as_sum,
    collectives_of_pairwise,
    is_swapped,
    pairwise_via_allreduce,
)

LENGTHS = (5000, 1, 0, 1024)


class Swapping(Scheme):
    """Another scheme, with swaps; keeps what the first worker asks for, as its ``collectives`` would tell it."""

    def __init__(self, inner: Scheme) -> None:
        self.inner = inner
        self.asked: list[Collective] = []

    def for_workers(self, workers: Workers) -> Scheme:
        self.inner = self.inner.for_workers(workers)
        return self

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        def answer(request: Any) -> Any:
            if not workers.rank:
                kind = type(request), str(request.array.dtype), getattr(request, "op", ""), request.group
                self.asked.append(Collective(*kind))
            return (yield request)

        return map_requests(
            pairwise_via_allreduce(self.inner.begin(gradients, workers, kernels), workers), answer
        )


def states(scheme: Scheme, gradients: list[list[np.ndarray]], local_size: int) -> list[list[Any]]:
    size = len(gradients)
    everybody = [Workers(rank, size, local_size=local_size) for rank in range(size)]
    return [
        owned_states(scheme.for_workers(workers), own, workers) for own, workers in zip(gradients, everybody)
    ]


@pytest.mark.parametrize(("size", "local_size"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("name", SCHEMES)
def test_same_bits_and_bytes(name: str, size: int, local_size: int) -> None:
    scheme = SCHEMES[name] if local_size == 1 else Hierarchical(SCHEMES[name])
    random = np.random.default_rng(size)
    gradients = [[random.standard_normal(n).astype(np.float32) for n in LENGTHS] for _ in range(size)]
    gradients[0][0][7], gradients[-1][0][2000] = np.nan, -np.inf

    swapping = Swapping(scheme)
    with np.errstate(invalid="ignore"):
        plain, swapped = (
            simulator.run(
                each, gradients, seed=3, states=states(scheme, gradients, local_size), local_size=local_size
            )
            for each in (scheme, swapping)
        )
    for expected, own in zip(plain.decoded, swapped.decoded):
        assert all(map(same_bits, own, expected))
    assert sum(swapped.bytes_sent.values()) == pytest.approx(sum(plain.bytes_sent.values()))

    workers = Workers(0, size, local_size=local_size)
    expected_collectives = collectives_of_pairwise(swapping.inner.collectives, workers)
    assert swapping.asked == [collective._replace(swap=False) for collective in expected_collectives]
    gathers = [c for c in swapping.asked if c.request in (Allgather, Alltoall) and c.dtype != "uint8"]
    assert all(workers.size_of(collective.group) != 2 for collective in gathers)


@pytest.mark.parametrize("inside", ["float16", 8])
def test_what_travels_inside_a_node_is_swapped_if_it_is_words(inside: Any) -> None:
    gradients = [np.random.default_rng(rank).standard_normal(5001).astype(np.float32) for rank in range(4)]
    scheme = Hierarchical(SCHEMES["qsgd"], inside)
    swapping = Swapping(scheme)
    plain, swapped = (simulator.run(each, gradients, local_size=2) for each in (scheme, swapping))
    assert all(same_bits(a[0], b[0]) for a, b in zip(plain.decoded, swapped.decoded))
    assert (swapping.asked[0].request is Allreduce) == (inside == 8)


def test_a_swap_needs_all_workers() -> None:
    pair = Workers(0, 2)
    for collective in collectives_of_pairwise(SCHEMES["qsgd-alltoall"].collectives, pair):
        assert collective.request is Allreduce
        assert collective.needs_all_workers
    assert not any(collective.needs_all_workers for collective in SCHEMES["global-max"].collectives)


def swapped(requests: Sequence[Any]) -> list[Any]:
    """The answers of two workers to a gather of theirs; by transports that add in place, and in other memory."""

    def exchange(request: Any) -> Any:
        return (yield request)

    exchanges = [
        pairwise_via_allreduce(exchange(request), Workers(rank, 2)) for rank, request in enumerate(requests)
    ]
    sums = [next(exchange) for exchange in exchanges]
    assert all(isinstance(own, Allreduce) for own in sums)
    with np.errstate(over="ignore"):
        total = sums[0].array + sums[1].array
    sums[0].array[:] = total
    answers = []
    for own, answer in zip(exchanges, (sums[0].array, total)):
        total.flags.writeable = False
        with pytest.raises(StopIteration) as stop:
            own.send(answer)
        answers.append(stop.value.value)
    return answers


@pytest.mark.parametrize("lengths", [(5, 5), (3, 8), (8, 3), (0, 2), (0, 0)])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_all_bits_arrive(dtype: str, lengths: tuple[int, int]) -> None:
    random = np.random.default_rng(sum(lengths))
    own, other = (random.integers(-(2**31), 2**31, n, np.int32) for n in lengths)
    for array in (own, other):  # the largest sums, of which some do not fit
        array[:2] = np.iinfo(np.int32).min
        array[2:3] = -1
    arrays = [own.view(dtype), other.view(dtype)]

    gathered = swapped([Allgather(array, [4.0 * len(array)], lengths) for array in arrays])
    for answer in gathered:
        assert all(map(same_bits, answer, arrays))

    both = [np.concatenate([array, array[::-1]]) for array in arrays]
    if lengths[0] == lengths[1]:
        splits = [lengths[0]] * 2
        exchanged = swapped([Alltoall(array, splits, [4.0 * len(array)]) for array in both])
        for rank, answer in enumerate(exchanged):
            pieces = [array[rank * lengths[0] : (rank + 1) * lengths[0]] for array in both]
            assert all(map(same_bits, answer, pieces))


def test_an_alltoall_of_unequal_pieces() -> None:
    arrays = [np.arange(10, dtype=np.int32), -np.arange(10, dtype=np.int32)]
    answers = swapped([Alltoall(array, [3, 7], [40.0]) for array in arrays])
    assert all(map(same_bits, answers[0], [array[:3] for array in arrays]))
    assert all(map(same_bits, answers[1], [array[3:] for array in arrays]))


def test_another_length_than_promised_is_an_error() -> None:
    def exchange() -> Any:
        return (yield Allgather(np.zeros(4, np.int32), [16.0]))

    own = pairwise_via_allreduce(exchange(), Workers(1, 2))
    next(own)
    with pytest.raises(ValueError, match="an allreduce returned 5 elements where 4 were expected"):
        own.send(np.zeros(5, np.int32))


def test_only_pairs_and_words_of_known_number_are_swapped() -> None:
    words, payload = np.zeros(8, np.int32), np.zeros(8, np.uint8)
    assert is_swapped(Allgather(words, [32.0]), Workers(0, 2))
    assert not is_swapped(Allgather(words, [32.0]), Workers(0, 3))
    assert not is_swapped(Allgather(words, [32.0]), Workers(0, 1))
    assert not is_swapped(Allgather(payload, [8.0], ragged=True), Workers(0, 2))
    assert not is_swapped(Allreduce(words, "sum", [32.0]), Workers(0, 2))
    assert as_sum(Alltoall(words, [4, 4], [32.0]), words[:4]).parts == [16.0]
