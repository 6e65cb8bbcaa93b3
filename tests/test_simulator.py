from __future__ import annotations

import numpy as np
import pytest
from helpers import SCHEMES, gaussian, same_bits, simulate

from horovod_quant import simulator
from horovod_quant.schemes import NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import Scheme

D = 96 * 1024  # whole tiles and whole words for every width below, and enough for 8 workers' chunks


# The cost table of ALGORITHMS.md, bytes sent by a worker, with the norms' part added and the words counted whole.


def ring(size: int, payload: float) -> float:
    return 2 * (size - 1) / size * payload


def flags(n: int) -> int:
    """Bytes: of each shard, a word for every 32 tiles."""
    tiles = D // 1024
    return 4 * sum(-(-(tiles * (rank + 1) // n - tiles * rank // n) // 32) for rank in range(n))


COSTS = {
    "qsgd": (
        QSGD(4, bucket_size=1024, exchange="allgather"),
        lambda n: {"allgather": (n - 1) * (4 * D / 8 + 4 * D / 1024)},
    ),
    "qsgd 9 bits": (
        QSGD(9, bucket_size=1024, exchange="allgather"),
        lambda n: {"allgather": (n - 1) * (9 * D / 8 + 4 * D / 1024)},
    ),
    "qsgd alltoall": (
        QSGD(4, bucket_size=1024, exchange="alltoall"),
        lambda n: dict.fromkeys(("alltoall", "allgather"), (n - 1) / n * (4 * D / 8 + 4 * D / 1024)),
    ),
    "nuqsgd": (
        NUQSGD(3, bucket_size=64, exchange="allgather"),
        lambda n: {"allgather": (n - 1) * (3 * D / 8 + 4 * D / 64)},
    ),
    "global": (GlobalQSGD(8), lambda n: {"allreduce": ring(n, 4 * D / 4 + 4 * D / 1024)}),
    "global 5 bits": (GlobalQSGD(5), lambda n: {"allreduce": ring(n, 4 * D / 6 + 4 * D / 1024)}),
    "global l2": (GlobalQSGD(8, "l2"), lambda n: {"allreduce": ring(n, 4 * D / 4 + 8 * D / 1024)}),
    "exponential": (
        GlobalQSGD(4, levels="exponential"),
        lambda n: {
            "allreduce": ring(n, 4 * D / 1024),
            "alltoall": (n - 1) / n * 4 * D / 8,
            "allgather": (n - 1) / n * 4 * D / 8,
        },
    ),
    "binsgdm": (
        BinSGDM(),
        lambda n: {
            "alltoall": (n - 1) / n * (D / 8 + flags(n)),
            "allgather": (n - 1) / n * (D / 8 + flags(n)),
        },
    ),
    "binsgdm, 3 bits down": (
        BinSGDM(server_bits=3),
        lambda n: {
            "alltoall": (n - 1) / n * (D / 8 + flags(n)),
            "allgather": (n - 1) / n * (3 * D / 8 + flags(n)),
        },
    ),
}


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize(("scheme", "cost"), COSTS.values(), ids=COSTS)
def test_bytes_sent_are_those_of_the_cost_table(scheme: Scheme, cost, size: int) -> None:
    result = simulate(scheme, [gaussian(worker, D) for worker in range(size)])
    assert result.bytes_sent == pytest.approx(cost(size), rel=1e-9)


def test_bytes_of_small_gradients_are_not_rounded_away() -> None:
    # One tile of signs and a word of flags, to and from one of 40 reducers.
    result = simulate(BinSGDM(), [gaussian(worker, 1000) for worker in range(40)])
    assert result.bytes_sent == pytest.approx({"alltoall": 39 / 40 * 132, "allgather": 39 / 40 * 132})


def test_error_is_relative_to_the_exact_sum() -> None:
    groups = [[gaussian(1, 500), gaussian(2, 70)], [gaussian(3, 500), gaussian(4, 70)]]
    result = simulate(GlobalQSGD(6), groups)
    squared = size = 0.0
    for i in range(2):
        exact = (groups[0][i].astype(np.float64) + groups[1][i]) / 2
        squared += ((result.decoded[0][i] - exact) ** 2).sum()
        size += (exact**2).sum()
    expected = squared / size
    assert result.nmse == pytest.approx(expected, rel=1e-12)
    assert result.nmse > 0


def test_error_is_zero_or_infinite_where_the_exact_sum_is_zero() -> None:
    assert simulate(GlobalQSGD(6), [np.zeros(50), np.zeros(50)]).nmse == 0
    opposite = gaussian(0, 500)
    assert simulate(GlobalQSGD(6, rounding="independent"), [opposite, -opposite]).nmse == np.inf
    assert simulate(GlobalQSGD(6), [opposite, -opposite]).nmse == 0  # a pair's errors cancel each other
    assert simulate(BinSGDM(), [np.zeros(50)]).nmse == np.inf


def test_factor_multiplies_the_sum_and_averages_by_default() -> None:
    gradients = [gaussian(worker, 500) for worker in range(4)]
    average = simulate(QSGD(4), gradients)
    total = simulate(QSGD(4), gradients, factor=1.0)
    assert same_bits(total.decoded[0][0], 4 * average.decoded[0][0])
    assert total.nmse == pytest.approx(average.nmse)


def test_a_worker_may_bring_one_array_or_a_list_of_any_shapes_and_types() -> None:
    gradients = [gaussian(worker, 6, 80) for worker in range(2)]
    flat = simulate(QSGD(4), [g.reshape(-1) for g in gradients]).decoded[0][0]
    for form in (
        gradients,
        [[g] for g in gradients],
        [(g,) for g in gradients],
        [g.astype(np.float64) for g in gradients],
        [np.asfortranarray(g) for g in gradients],
        [g.tolist() for g in [np.array([g]) for g in gradients]],
    ):
        assert same_bits(simulate(QSGD(4), form).decoded[0][0], flat)


def test_names_default_to_positions() -> None:
    gradients = [[gaussian(worker, 100), gaussian(worker + 5, 100)] for worker in range(2)]
    first = simulate(QSGD(4), gradients)
    second = simulate(QSGD(4), gradients, names=["0", "1"])
    assert all(map(same_bits, first.decoded[0], second.decoded[0]))
    assert not same_bits(first.decoded[0][0], simulate(QSGD(4), gradients, names=["1", "0"]).decoded[0][0])


@pytest.mark.parametrize(
    "gradients",
    [
        [],
        [np.zeros(4), np.zeros(5)],
        [np.zeros(4), np.zeros((2, 2))],
        [[np.zeros(4)], [np.zeros(4), np.zeros(4)]],
        [[np.zeros(4), np.zeros(5)], [np.zeros(5), np.zeros(4)]],
    ],
)
def test_workers_that_do_not_match_are_refused(gradients: list) -> None:
    with pytest.raises(
        ValueError, match="gradients: give those of at least one worker, with the same shapes"
    ):
        simulator.run(QSGD(4), gradients)


def test_an_unknown_backend_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use = "no such backend; use 'auto' or one of .*'numpy'"
    with pytest.raises(ValueError, match=f"^kernels='fortran': {use}"):
        simulator.run(QSGD(4), [np.zeros(4)], kernels="fortran")
    monkeypatch.setenv("HOROVOD_QUANT_KERNELS", "nativ")
    with pytest.raises(ValueError, match=f"^HOROVOD_QUANT_KERNELS=nativ: {use}"):
        simulator.run(QSGD(4), [np.zeros(4)])


@pytest.mark.parametrize(
    ("local_size", "message"),
    [
        (0, "^local_size=0: use an integer from 1"),
        (-2, "^local_size=-2: use an integer from 1"),
        (True, "^local_size=True: use an integer from 1"),
        (3, "4 workers cannot form nodes of 3"),
        (8, "4 workers cannot form nodes of 8"),
    ],
)
@pytest.mark.parametrize("scheme", [QSGD(4), Hierarchical(QSGD(4))], ids=str)
def test_workers_fill_whole_nodes(scheme: Scheme, local_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulator.run(scheme, [np.zeros(4)] * 4, local_size=local_size)


def test_an_empty_group_is_an_exchange_of_nothing() -> None:
    for scheme in SCHEMES.values():
        result = simulate(scheme, [[], []])
        assert result.decoded == [[], []]
        assert result.nmse == 0


def test_the_former_name_of_nmse_warns() -> None:
    result = simulate(GlobalQSGD(6), [np.ones(50), np.zeros(50)])
    with pytest.warns(DeprecationWarning, match=r"Result.error is now Result.nmse"):
        assert result.error == result.nmse
