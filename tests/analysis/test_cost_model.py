"""The performance model: against numbers computed by hand, what the simulator sends, and what must hold at any rate."""

from __future__ import annotations

import dataclasses

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from modelling import FREE, KERNELS, LAYERS, METHODS, SPEEDS, cost, total, wires

from horovod_quant.analysis.cost_model import CONTROL_BYTES, FP16, NONE, group_work
from horovod_quant.analysis.groups import ddp_buckets
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, Speed
from horovod_quant.analysis.models import MODELS
from horovod_quant.analysis.network import CONTROLLERS, DDP, Network
from horovod_quant.schemes import NUQSGD, QSGD, BinSGDM, GlobalQSGD, Hierarchical
from horovod_quant.schemes.base import LOCAL, Allreduce

# ---- exchanges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "megabytes"),
    [(NONE, 102.2), (FP16, 51.1), (QSGD(4, "max", 1024), 13.0), (NUQSGD(4), 13.0), (GlobalQSGD(8), 25.7),
     (GlobalQSGD(4), 13.0), (BinSGDM(), 3.3)],
)  # fmt: skip
def test_bytes_are_those_that_the_readme_has_measured(method, megabytes: float) -> None:
    found = cost(method, MODELS["resnet50"], wires(2), FREE)
    assert round(1e-6 * found.bytes_sent, 1) == megabytes


def test_none_by_hand() -> None:
    network = wires(2, latency=1e-3, overhead=2e-3)
    found = cost(NONE, LAYERS, network)
    assert (found.kernels, found.bytes_sent) == (0.0, 2**25)
    assert found.network == found.exposed == pytest.approx(2**25 / 1e9 + 2e-3 + 2e-3)


def test_fp16_by_hand() -> None:
    network = wires(2, half_sum=2e-8)
    found = cost(FP16, {"only": (10**6,)}, network)
    assert found.kernels == pytest.approx(2e-3)
    assert found.network == pytest.approx(2e-8 * 10**6 / 2)  # the wire takes 2 ms of it
    assert found.exposed == pytest.approx(total(found))


def test_global_qsgd_by_hand() -> None:
    """One group: norms, their allreduce, encoding, the words' allreduce, the control tensor's in between, decoding."""
    network = wires(2, overhead=1e-3)
    found = cost(GlobalQSGD(8), {"only": (2**20,)}, network)
    assert found.kernels == pytest.approx(3 * 2**20 * 1e-9)
    assert found.bytes_sent == 4 * 1024 + 2**20 + CONTROL_BYTES
    assert found.network == pytest.approx(3e-3 + found.bytes_sent / 1e9)
    # Encoding (1.05 ms) goes on beside the control tensor's allreduce (1.00 ms).
    assert total(found) - found.exposed == pytest.approx(1e-3 + CONTROL_BYTES / 1e9)


def test_small_gradients_travel_as_they_are() -> None:
    found = cost(GlobalQSGD(8), {"bias": (1023,), "scale": (10,)}, wires(2))
    assert (found.kernels, found.bytes_sent) == (0.0, 4 * 1033)


@pytest.mark.parametrize("method", [NONE, FP16, *METHODS.values()], ids=str)
def test_one_worker_sends_nothing_but_still_computes(method) -> None:
    found = cost(method, LAYERS, wires(1))
    assert (found.bytes_sent, found.network) == (0.0, 0.0)
    assert found.exposed == pytest.approx(found.kernels)
    assert (found.kernels > 0) == (method != NONE)


def test_a_fast_network_leaves_the_kernels() -> None:
    network = wires(2, payload=1e18)
    for scheme in METHODS.values():
        found = cost(scheme, LAYERS, network)
        assert found.exposed == pytest.approx(found.kernels)


def test_what_a_long_backward_pass_leaves_by_hand() -> None:
    """Two groups, of 4.2 million elements each: a kernel of one takes 4.2 ms, its words' allreduce as long.

    The second group is complete when the pass ends, and the first one's words are with everybody. Left are the second
    one's norms; its encoding; its words, beside decoding the first; its decoding.
    """
    network = wires(2)
    scheme = GlobalQSGD(8)
    options = {"backward": 10.0, "group_bytes": 2**24}
    kernel = 2**22 * 1e-9
    elsewhere = cost(scheme, LAYERS, network, accelerator=True, **options)
    assert elsewhere.exposed == pytest.approx(4 * kernel, rel=1e-3)
    on_this_core = cost(scheme, LAYERS, network, SPEEDS, **options)
    # The first one's norms and its encoding delay the pass.
    assert on_this_core.exposed == pytest.approx(6 * kernel, rel=1e-3)
    assert total(cost(scheme, LAYERS, network, group_bytes=2**24)) == pytest.approx(8 * kernel, rel=1e-2)


def test_without_compression_a_long_backward_pass_hides_all_but_the_last_gradient() -> None:
    found, with_overhead = (
        cost(NONE, LAYERS, wires(2, overhead=overhead), backward=10.0) for overhead in (0.0, 1e-3)
    )
    assert with_overhead.network - found.network == pytest.approx(1e-3 * len(LAYERS)), "each by itself"
    assert found.exposed == pytest.approx(2**22 / 1e9)


def test_too_few_bits_are_an_error() -> None:
    with pytest.raises(ValueError, match="4 workers need bits >= 4"):
        cost(GlobalQSGD(2), LAYERS, wires(4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"method": "bf16"}, "method='bf16'"), ({"method": NONE, "backward": -1.0}, "backward=-1.0")],
)
def test_what_is_no_exchange_is_an_error(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(shapes=LAYERS, network=wires(2), **arguments)


# ---- DDP


def test_none_under_ddp_by_hand() -> None:
    """The first layer fills the first bucket; the other seven are not enough to fill two more."""
    network = wires(2, latency=1e-3, overhead=2e-3, controller=DDP)
    found = cost(NONE, LAYERS, network)
    assert [len(bucket) for bucket in ddp_buckets(LAYERS)] == [1, 7]
    assert (found.kernels, found.bytes_sent) == (0.0, 2**25)
    assert found.exposed == pytest.approx(2**25 / 1e9 + 2 * 2e-3 + 2 * 2e-3)


def test_one_bucket_after_another_by_hand() -> None:
    """Under DDP there are no control tensors, and small gradients of a bucket are averaged together."""
    network = wires(2, overhead=1e-3, controller=DDP)
    found = cost(GlobalQSGD(8), {"bias": (10,), "only": (2**20,)}, network)
    assert found.kernels == pytest.approx(3 * 2**20 * 1e-9)
    assert found.bytes_sent == 4 * 1024 + 2**20 + 4 * 10
    assert found.exposed == pytest.approx(found.kernels + 3e-3 + found.bytes_sent / 1e9)
    assert cost(FP16, {"bias": (10,)}, network).bytes_sent == 2 * 10


def test_ddp_hides_what_a_long_backward_pass_leaves_time_for() -> None:
    """Left is the last bucket's, which is complete with the last gradient."""
    network = wires(2, controller=DDP)
    last = 7 * 2**20
    elsewhere = cost(NONE, LAYERS, network, backward=10.0, accelerator=True)
    assert elsewhere.exposed == pytest.approx(4 * last / 1e9)
    on_this_core = cost(FP16, LAYERS, network, backward=10.0)
    # Casting the first bucket delays the pass.
    assert on_this_core.exposed == pytest.approx(2 * 2**20 * 1e-9 + last * (2e-9 + 2e-9))


# ---- what holds for all numbers --------------------------------------------------------------------------------------

NETWORKS = st.builds(
    Network,
    hosts=st.integers(1, 9),
    workers_per_host=st.integers(1, 4),
    bandwidth=st.floats(1e6, 1e11),
    latency=st.floats(0, 1e-3),
    local_bandwidth=st.floats(1e8, 1e11),
    cores_per_worker=st.floats(0.1, 4.0),
    controller=st.sampled_from(CONTROLLERS),
)
ANY_METHOD = st.sampled_from([NONE, FP16, *METHODS.values()])
MODEL = st.lists(st.integers(1, 200_000), min_size=1, max_size=12).map(
    lambda sizes: {f"p{i}": (size,) for i, size in enumerate(sizes)}
)
FEW = examples(40)


@FEW
@given(ANY_METHOD, MODEL, NETWORKS, st.floats(0, 1), st.booleans())
def test_what_is_exposed_is_never_more_than_the_whole_exchange(
    method, shapes, network, backward, accelerator
) -> None:
    options = {"backward": backward, "accelerator": accelerator, "group_bytes": 2**18}
    found = cost(method, shapes, network, **options)
    assert -1e-12 <= found.exposed <= total(found) + 1e-9
    assert found.bytes_sent >= 0
    assert total(found) - found.exposed >= -1e-9


@FEW
@given(st.sampled_from(list(METHODS.values())), MODEL, NETWORKS, st.floats(0, 1), st.floats(1, 100))
def test_a_faster_network_never_makes_a_compressed_exchange_longer(
    method, shapes, network, backward, times
) -> None:
    faster = dataclasses.replace(
        network,
        bandwidth=network.bandwidth * times,
        local_bandwidth=network.local_bandwidth * times,
        latency=network.latency / times,
    )
    before, after = (
        cost(method, shapes, each, backward=backward, group_bytes=2**18).exposed for each in (network, faster)
    )
    assert after <= before + 1e-9


@FEW
@given(ANY_METHOD, MODEL, NETWORKS, st.floats(1, 100))
def test_slower_kernels_never_make_an_exchange_shorter(method, shapes, network, times) -> None:
    slower = KernelSpeeds(
        {key: Speed(times * first, times * more) for key, (first, more) in KERNELS.items()},
        (times * SPEEDS.half[0], times * SPEEDS.half[1]),
    )
    before, after = (cost(method, shapes, network, each, group_bytes=2**18) for each in (SPEEDS, slower))
    assert after.exposed >= before.exposed - 1e-9
    assert after.kernels >= before.kernels


# ---- processors, MPI, hierarchy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [NONE, FP16, *METHODS.values()], ids=str)
def test_shared_cores_make_an_exchange_longer(method) -> None:
    seconds = [
        cost(method, LAYERS, Network(2, bandwidth=1e9, cores_per_worker=cores)).exposed
        for cores in (2.0, 1.0, 0.5, 0.25)
    ]
    assert seconds == sorted(seconds)
    assert seconds[3] > 1.5 * seconds[0]


def test_without_spare_cores_kernels_and_network_take_turns() -> None:
    """Two groups: what computing one could hide of the other's network time is lost."""
    shared = dataclasses.replace(wires(2), cores_per_worker=0.5)  # contention 1: kernels take twice as long
    found = cost(GlobalQSGD(8), LAYERS, shared, group_bytes=2**24)
    assert found.exposed == pytest.approx(total(found), rel=1e-3)
    assert found.kernels == pytest.approx(2 * cost(GlobalQSGD(8), LAYERS, wires(2)).kernels)


def test_under_mpi_integers_are_summed_by_two_alltoalls() -> None:
    networks = [wires(4, controller=controller) for controller in ("gloo", "mpi")]
    gloo, mpi = (len(group_work(GlobalQSGD(8), [2**20], network).stages) for network in networks)
    assert mpi == gloo + 1
    of_gloo, of_mpi = (cost(GlobalQSGD(8), LAYERS, network).bytes_sent for network in networks)
    assert of_mpi == of_gloo


@pytest.mark.parametrize("method", [QSGD(4), QSGD(4, exchange="alltoall"), BinSGDM()], ids=str)
def test_under_gloo_two_workers_swap_by_a_sum(method) -> None:
    """Which takes the time of the bytes; a gather and an alltoall of two would take twice as long."""
    network = wires(2, payload=1e6)
    found = cost(method, LAYERS, network, FREE, group_bytes=2**30)
    assert found.exposed == pytest.approx(found.bytes_sent / 1e6)
    for pair in (network, dataclasses.replace(network, hosts=4, workers_per_host=2)):
        scheme = method if pair is network else Hierarchical(method)
        stages = group_work(scheme, [2**20], pair).stages
        pairs = [request for _, request in stages if pair is network or request.group == LOCAL]
        assert pairs
        assert all(isinstance(request, Allreduce) for request in pairs)


def test_bytes_between_hosts_of_a_hierarchical_exchange() -> None:
    """shared/ALGORITHMS.md: 2 (H-1)/H * d/8 a host for BinSGDM, for any number of workers; and control tensors."""
    found = cost(Hierarchical(BinSGDM()), LAYERS, wires(4, 8))
    elements = 8 * 2**20
    control_tensors = 2 * 31 / 32 * CONTROL_BYTES * len(LAYERS)
    assert found.host_bytes == pytest.approx(2 * 3 / 4 * elements / 8 + control_tensors, rel=0.01)
