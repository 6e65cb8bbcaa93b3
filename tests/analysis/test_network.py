"""Collectives: against numbers computed by hand, and what must hold at any rate."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from modelling import wires

from horovod_quant.analysis.network import (
    GLOO,
    MPI,
    Network,
    Software,
    collective_seconds,
    float32_allreduce,
    link_bytes,
    turns,
)
from horovod_quant.schemes.base import ALL, CROSS, LOCAL, Allgather, Allreduce, Alltoall


def request(kind: type, payload: float, group: str = ALL):
    between = {Allreduce: ["sum"], Alltoall: [[]]}.get(kind, [])
    return kind(np.empty(0, np.float32), *between, [payload])._replace(group=group)


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_a_ring_allreduce_by_hand() -> None:
    network = wires(4, payload=125e6, latency=1e-3, overhead=5e-3)
    # 2 * 3/4 of 1e8 bytes at 1 Gbit/s, 6 messages.
    assert collective_seconds(request(Allreduce, 1e8), network) == pytest.approx(1.2 + 6e-3 + 5e-3)


def test_an_allgather_by_hand() -> None:
    network = wires(4, payload=125e6, latency=1e-3, overhead=5e-3)
    assert collective_seconds(request(Allgather, 1e7), network) == pytest.approx(3 * 0.08 + 3e-3 + 5e-3)


def test_an_alltoall_by_hand() -> None:
    """Its connections' directions take turns: with 4 workers it takes half as long again."""
    network = wires(4, payload=125e6, latency=1e-3, overhead=5e-3)
    assert collective_seconds(request(Alltoall, 1e8), network) == pytest.approx(1.5 * 0.6 + 3e-3 + 5e-3)


def test_the_wire_limit_measured_in_the_lab() -> None:
    """shared/LAB.md: ResNet-50 in float32 among 4 hosts at 1 Gbit/s takes the wire 1.23 s, without headers."""
    assert collective_seconds(float32_allreduce(25_557_032), wires(4, payload=125e6)) == pytest.approx(
        1.23, abs=0.005
    )


def test_workers_of_a_host_share_its_link_in_an_alltoall_but_not_in_a_ring() -> None:
    alone, together = (wires(2, local, payload=1e8, local_bandwidth=1e12) for local in (1, 4))
    ring = [collective_seconds(request(Allreduce, 1e8), network) for network in (alone, together)]
    assert ring == pytest.approx([2 * 1 / 2, 2 * 7 / 8])
    # 4 workers with 1e8 bytes each, half of which belong to the other host.
    alltoall = [
        collective_seconds(request(Alltoall, 1e8), network) / turns(request(Alltoall, 1e8), network)
        for network in (alone, together)
    ]
    assert alltoall == pytest.approx([0.5, 4 * 0.5])


def test_on_one_host_the_local_link_counts() -> None:
    network = wires(1, 4, payload=1.0, latency=1e9, local_bandwidth=1e9, local_latency=1e-3)
    assert collective_seconds(request(Allreduce, 1e9), network) == pytest.approx(1.5 + 6e-3)
    assert collective_seconds(request(Allgather, 1e9), network) == pytest.approx(3.0 + 3e-3)


def test_groups_of_a_hierarchical_exchange_by_hand() -> None:
    """4 hosts of 2: inside a host nothing crosses its link, between hosts its workers share it."""
    network = wires(4, 2, payload=1e9, latency=1e-3, local_bandwidth=2e9)
    inside, between = request(Allgather, 1e6, LOCAL), request(Allreduce, 1e6, CROSS)
    assert link_bytes(inside, network) == 0
    assert collective_seconds(inside, network) == pytest.approx(2 * 1e6 / 2e9)  # two workers take turns
    assert link_bytes(between, network) == pytest.approx(2 * 1.5e6)
    assert collective_seconds(between, network) == pytest.approx(3e-3 + 6e-3)


@pytest.mark.parametrize("kind", [Allreduce, Allgather, Alltoall])
def test_one_worker_sends_nothing(kind: type) -> None:
    network = wires(1, payload=1.0, latency=1.0, overhead=0.25)
    assert collective_seconds(request(kind, 1e9), network) == 0.25


def test_two_workers_take_turns_in_gathers_of_gloo() -> None:
    assert [turns(request(Allgather, 2**22), wires(hosts)) for hosts in (2, 3)] == [2.0, 1.0]
    assert turns(request(Allreduce, 2**22), wires(2)) == 1
    assert turns(request(Allreduce, 2**22), wires(4, controller=MPI)) == 2


# ---- processors -----------------------------------------------------------------------------------------------------


def test_threads_share_cores() -> None:
    network = dataclasses.replace(
        Network(2), cores_per_worker=1.0, software=dataclasses.replace(Software(), contention=1.0)
    )
    assert network.stretch() == 1
    assert network.stretch(2) == 2
    halved = dataclasses.replace(network, cores_per_worker=0.5)
    assert (halved.stretch(), halved.stretch(2)) == (2, 4)


def test_overlap_goes_from_nothing_to_all() -> None:
    overlaps = [
        dataclasses.replace(Network(2), cores_per_worker=cores).overlap for cores in (0.1, 0.5, 1, 2, 9)
    ]
    assert overlaps == pytest.approx([0, 0, 1 / 3, 1, 1])


def test_an_unlimited_link_leaves_the_processor() -> None:
    software = Software(overhead=1e-3, copy=1e-9, stream=2e-9)
    network = Network(2, bandwidth=math.inf, latency=0.0, software=software)
    assert collective_seconds(request(Allreduce, 1e6), network) == pytest.approx(1e-3 + 1e-3 + 2e-3)


def test_wire_and_processor_overlap_with_enough_cores() -> None:
    software = Software(overhead=0, copy=0, stream=2e-9)
    wide = dataclasses.replace(wires(2, payload=1e9), software=software)
    assert collective_seconds(request(Allreduce, 1e6), wide) == pytest.approx(2e-3)
    narrow = dataclasses.replace(
        wide, cores_per_worker=0.5, software=dataclasses.replace(software, contention=1.0)
    )
    assert 4e-3 < collective_seconds(request(Allreduce, 1e6), narrow) < 5e-3


# ---- what holds for all numbers --------------------------------------------------------------------------------------


@examples(40)
@given(st.sampled_from([Allreduce, Allgather]), st.floats(1, 1e9), st.integers(3, 30), st.floats(0.1, 4.0))
def test_more_hosts_never_make_a_ring_shorter(kind, payload, hosts, cores) -> None:
    fewer, more = (
        collective_seconds(request(kind, payload), Network(number, bandwidth=1e8, cores_per_worker=cores))
        for number in (hosts, hosts + 1)
    )
    assert more >= fewer


@examples(40)
@given(
    st.sampled_from([Allreduce, Allgather, Alltoall]),
    st.floats(1, 1e9),
    st.integers(2, 30),
    st.floats(0.1, 4.0),
    st.sampled_from([GLOO, MPI]),
)
def test_more_cores_never_make_a_collective_longer(kind, payload, hosts, cores, controller) -> None:
    fewer, more = (
        collective_seconds(
            request(kind, payload),
            Network(hosts, bandwidth=1e8, cores_per_worker=number, controller=controller),
        )
        for number in (cores, 1.5 * cores)
    )
    assert more <= fewer * (1 + 1e-9)


@pytest.mark.parametrize(
    "wrong",
    [{"hosts": 0}, {"workers_per_host": 0}, {"bandwidth": 0.0}, {"latency": -1.0}, {"local_bandwidth": math.nan},
     {"cores_per_worker": 0.0}, {"controller": "tcp"}],
)  # fmt: skip
def test_networks_that_cannot_be_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Network(**{"hosts": 2, **wrong})


def test_software_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="stream=-1"):
        Software(stream=-1.0)
