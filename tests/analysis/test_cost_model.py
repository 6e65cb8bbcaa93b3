"""The performance model: against numbers computed by hand, what the simulator sends, and what must hold at any rate."""

from __future__ import annotations

import dataclasses
import inspect
import math

import numpy as np
import pytest
from helpers import SCHEMES, used_states
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_quant import simulator
from horovod_quant.analysis import groups
from horovod_quant.analysis.cost_model import (
    CARRIER_BYTES,
    FP16,
    NONE,
    KernelSpeeds,
    Network,
    Speed,
    Step,
    break_even_bandwidth,
    collective_seconds,
    exchange_cost,
    float32_allreduce,
    measure_kernels,
    speed_up,
    step_seconds,
)
from horovod_quant.analysis.models import MODELS, elements
from horovod_quant.analysis.work import Call, work_of
from horovod_quant.frontend import BaseCompressor
from horovod_quant.schemes import NUQSGD, QSGD, BinSGDM, GlobalQSGD
from horovod_quant.schemes.base import Allgather, Allreduce, Alltoall
from horovod_quant.traffic import sent_bytes

METHODS = {
    "global-qsgd": GlobalQSGD(8),
    "exponential": GlobalQSGD(4, levels="exponential"),
    "qsgd": QSGD(4),
    "nuqsgd": NUQSGD(4, norm="max"),
    "binsgdm": BinSGDM(),
}
FIXED = [name for name, scheme in SCHEMES.items() if getattr(scheme, "coding", "fixed") == "fixed"]

# Round numbers: every kernel takes 1 ns an element, decoding and voting 0.5 ns more for each further worker.
KERNELS = {
    (kernel, bits): Speed(1e-9, 5e-10 if kernel in ("decode_uniform_codes", "decode_exponential", "vote") else 0)
    for kernel in (
        "bucket_maxima", "bucket_square_sums", "encode_uniform_sum", "encode_uniform_codes", "encode_exponential",
        "binarize", "vote", "decode_uniform_sum", "decode_uniform_codes", "decode_exponential", "decode_signs",
    )
    for bits in range(17)
}  # fmt: skip
SPEEDS = KernelSpeeds(KERNELS, half=(1e-9, 1e-9), half_sum=2e-8)
FREE = KernelSpeeds({key: Speed(0.0) for key in KERNELS}, half=(0.0, 0.0), half_sum=0.0)

QUIET = {"latency": 0.0, "local_latency": 0.0, "overhead": 0.0}
LAYERS = {f"layer{i}": (1024, 1024) for i in range(8)}  # 2^20 elements and 4 MiB each


def request(kind: type, payload: float):
    return kind(np.empty(0, np.float32), *{Allreduce: ["sum"], Alltoall: [[]]}.get(kind, []), [payload])


# ---- collectives ----------------------------------------------------------------------------------------------------


def test_a_ring_allreduce_by_hand() -> None:
    network = Network(4, bandwidth=125e6, latency=1e-3, overhead=5e-3)
    # 2 * 3/4 of 1e8 bytes at 1 Gbit/s, 6 messages.
    assert collective_seconds(request(Allreduce, 1e8), network) == pytest.approx(1.2 + 6e-3 + 5e-3)


def test_an_allgather_by_hand() -> None:
    network = Network(4, bandwidth=125e6, latency=1e-3, overhead=5e-3)
    assert collective_seconds(request(Allgather, 1e7), network) == pytest.approx(3 * 0.08 + 3e-3 + 5e-3)


def test_an_alltoall_by_hand() -> None:
    network = Network(4, bandwidth=125e6, latency=1e-3, overhead=5e-3)
    assert collective_seconds(request(Alltoall, 1e8), network) == pytest.approx(0.6 + 3e-3 + 5e-3)


def test_the_wire_limit_measured_in_the_lab() -> None:
    """shared/LAB.md: ResNet-50 in float32 among 4 hosts at 1 Gbit/s takes the wire 1.23 s."""
    network = Network(4, bandwidth=125e6, **QUIET)
    assert collective_seconds(float32_allreduce(25_557_032), network) == pytest.approx(1.23, abs=0.005)


def test_workers_of_a_host_share_its_link_in_an_alltoall_but_not_in_a_ring() -> None:
    alone = Network(2, bandwidth=1e8, local_bandwidth=1e12, **QUIET)
    together = dataclasses.replace(alone, workers_per_host=4)
    ring = [collective_seconds(request(Allreduce, 1e8), network) for network in (alone, together)]
    assert ring == pytest.approx([2 * 1 / 2, 2 * 7 / 8])
    # 4 workers with 1e8 bytes each, half of which belong to the other host.
    alltoall = [collective_seconds(request(Alltoall, 1e8), network) for network in (alone, together)]
    assert alltoall == pytest.approx([0.5, 4 * 0.5])


def test_on_one_host_the_local_link_counts() -> None:
    network = Network(1, 4, bandwidth=1.0, latency=1e9, local_bandwidth=1e9, local_latency=1e-3, overhead=0.0)
    assert collective_seconds(request(Allreduce, 1e9), network) == pytest.approx(1.5 + 6e-3)
    assert collective_seconds(request(Alltoall, 1e9), network) == pytest.approx(0.75 + 3e-3)


@pytest.mark.parametrize("kind", [Allreduce, Allgather, Alltoall])
def test_one_worker_sends_nothing(kind: type) -> None:
    network = Network(1, bandwidth=1.0, latency=1.0, overhead=0.25)
    assert collective_seconds(request(kind, 1e9), network) == 0.25


@pytest.mark.parametrize(
    "wrong",
    [{"hosts": 0}, {"workers_per_host": 0}, {"bandwidth": 0.0}, {"latency": -1.0}, {"overhead": math.inf},
     {"local_bandwidth": math.nan}],
)  # fmt: skip
def test_networks_that_cannot_be_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Network(**{"hosts": 2, **wrong})


# ---- bytes and kernel calls come from the schemes --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", FIXED)
def test_bytes_are_those_of_the_simulator(name: str, size: int) -> None:
    lengths = [3000, 1, 0, 1024, 5000]
    gradients = [[np.ones(length, np.float32) for length in lengths] for _ in range(size)]
    states = [used_states(own) for own in gradients]
    simulated = simulator.run(SCHEMES[name], gradients, states=states)
    found: dict[str, float] = {}
    for _, asked in work_of(SCHEMES[name], lengths, size).stages:
        kind = type(asked).__name__.lower()
        found[kind] = found.get(kind, 0.0) + sum(sent_bytes(asked, size))
    assert found == pytest.approx(simulated.bytes_sent)


@pytest.mark.parametrize("coding", ["elias", "elias-omega"])
def test_elias_coding_sends_no_more_than_the_model_says(coding: str) -> None:
    scheme = QSGD(4, coding=coding)
    gradients = [np.random.default_rng(rank).standard_normal(50_000) for rank in range(3)]
    modelled = sum(sum(sent_bytes(asked, 3)) for _, asked in work_of(scheme, [50_000], 3).stages)
    assert simulator.run(scheme, gradients).bytes_sent["allgather"] <= modelled + 2 * 8


def test_kernel_calls_are_those_of_the_scheme() -> None:
    stages, decode = work_of(GlobalQSGD(8), [3000, 2000], 4)
    assert [calls for calls, _ in stages] == [
        [Call("bucket_maxima", 0, 5000)],
        [Call("encode_uniform_sum", 8, 5000)],
    ]
    assert decode == [Call("decode_uniform_sum", 8, 5000)]
    stages, decode = work_of(BinSGDM(), [4 * 1024], 4)
    assert [calls for calls, _ in stages] == [[Call("binarize", 0, 4096)], [Call("vote", 0, 1024, 4)]]
    assert decode == [Call("decode_signs", 0, 4096)]


def test_phases_by_hand() -> None:
    assert SPEEDS.phases(GlobalQSGD(8), 4) == pytest.approx((1e-9, 1e-9, 1e-9))
    assert SPEEDS.phases(QSGD(4), 4) == pytest.approx((1e-9, 1e-9, 2.5e-9))  # decodes four workers' codes
    assert SPEEDS.phases(BinSGDM(), 4) == pytest.approx((0, 1e-9 + 2.5e-9 / 4, 1e-9))  # votes for a quarter


def test_a_kernel_that_was_not_measured_is_named() -> None:
    with pytest.raises(KeyError, match="encode_uniform_sum with 8 bits has not been measured"):
        KernelSpeeds({("bucket_maxima", 0): Speed(1e-9)}).phases(GlobalQSGD(8), 2)


@pytest.mark.parametrize("backend", ["auto", "numpy"])
def test_measured_kernels_serve_every_scheme(backend: str) -> None:
    speeds = measure_kernels(METHODS.values(), elements=2**16, seconds=0.1, kernels=backend)
    for scheme in METHODS.values():
        for workers in (1, 2, 7):
            norms, encode, decode = speeds.phases(scheme, workers)
            assert norms >= 0
            assert 0 < encode < 1e-6
            assert 0 < decode < 1e-6 * workers
    assert min(speeds.half) > 0


def test_measuring_takes_whole_tiles_for_four_workers() -> None:
    with pytest.raises(ValueError, match="elements=1000: use a multiple of 4096"):
        measure_kernels([BinSGDM()], elements=1000)


# ---- exchanges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "megabytes"),
    [(NONE, 102.2), (FP16, 51.1), (QSGD(4, norm="max"), 13.0), (NUQSGD(4), 13.0), (GlobalQSGD(8), 25.7),
     (GlobalQSGD(4), 13.0), (BinSGDM(), 3.3)],
)  # fmt: skip
def test_bytes_are_those_that_the_readme_has_measured(method, megabytes: float) -> None:
    cost = exchange_cost(method, MODELS["resnet50"], Network(2), FREE)
    assert round(1e-6 * cost.bytes_sent, 1) == megabytes


def test_none_by_hand() -> None:
    network = Network(2, bandwidth=1e9, latency=1e-3, overhead=2e-3)
    cost = exchange_cost(NONE, LAYERS, network, SPEEDS)
    assert (cost.kernels, cost.collectives, cost.bytes_sent) == (0.0, 1, 2**25)
    assert cost.network == cost.exposed == pytest.approx(2**25 / 1e9 + 2e-3 + 2e-3)


def test_fp16_by_hand() -> None:
    network = Network(2, bandwidth=1e9, **QUIET)
    cost = exchange_cost(FP16, {"only": (10**6,)}, network, SPEEDS)
    assert (cost.encode, cost.decode) == pytest.approx((1e-3, 1e-3))
    assert cost.network == pytest.approx(2e-3 + 2e-8 * 10**6 / 2)
    assert cost.exposed == pytest.approx(cost.total)


def test_global_qsgd_by_hand() -> None:
    """One group: norms, their allreduce, encoding, the words' allreduce, the carrier's in between, decoding."""
    network = Network(2, bandwidth=1e9, latency=0.0, overhead=1e-3)
    cost = exchange_cost(GlobalQSGD(8), {"only": (2**20,)}, network, SPEEDS)
    assert (cost.norms, cost.encode, cost.decode) == pytest.approx((2**20 * 1e-9,) * 3)
    assert cost.bytes_sent == 4 * 1024 + 2**20 + CARRIER_BYTES
    assert cost.collectives == 3
    assert cost.network == pytest.approx(3e-3 + cost.bytes_sent / 1e9)
    # Encoding (1.05 ms) goes on beside the carrier's allreduce (1.00 ms).
    assert cost.hidden == pytest.approx(1e-3 + CARRIER_BYTES / 1e9)


def test_small_gradients_travel_as_they_are() -> None:
    cost = exchange_cost(GlobalQSGD(8), {"bias": (1023,), "scale": (10,)}, Network(2), SPEEDS)
    assert (cost.kernels, cost.bytes_sent, cost.collectives) == (0.0, 4 * 1033, 1)


@pytest.mark.parametrize("method", [NONE, FP16, *METHODS.values()], ids=str)
def test_one_worker_sends_nothing_but_still_computes(method) -> None:
    cost = exchange_cost(method, LAYERS, Network(1, overhead=0.0), SPEEDS)
    assert (cost.bytes_sent, cost.network) == (0.0, 0.0)
    assert cost.exposed == pytest.approx(cost.kernels)
    assert (cost.kernels > 0) == (method != NONE)


def test_a_fast_network_leaves_the_kernels() -> None:
    network = Network(2, bandwidth=1e18, **QUIET)
    for scheme in METHODS.values():
        cost = exchange_cost(scheme, LAYERS, network, SPEEDS)
        assert cost.exposed == pytest.approx(cost.kernels)


def test_what_a_long_backward_pass_leaves_by_hand() -> None:
    """Two groups, of 4.2 million elements each: a kernel of one takes 4.2 ms, its words' allreduce as long.

    The second group is complete when the pass ends. Left are its norms; encoding the first (whose norms are there) and
    the second, beside the first one's words; the second one's words, beside decoding the first; decoding the second.
    """
    network = Network(2, bandwidth=1e9, **QUIET)
    scheme = GlobalQSGD(8)
    options = {"backward": 10.0, "group_bytes": 2**24}
    kernel = 2**22 * 1e-9
    elsewhere = exchange_cost(scheme, LAYERS, network, SPEEDS, accelerator=True, **options)
    assert elsewhere.exposed == pytest.approx(5 * kernel, rel=1e-3)
    on_this_core = exchange_cost(scheme, LAYERS, network, SPEEDS, **options)
    assert on_this_core.exposed == pytest.approx(6 * kernel, rel=1e-3)  # the first one's norms delay the pass
    assert exchange_cost(scheme, LAYERS, network, SPEEDS, group_bytes=2**24).total == pytest.approx(
        8 * kernel, rel=1e-2
    )


def test_without_compression_a_long_backward_pass_hides_all_but_the_last_gradient() -> None:
    network = Network(2, bandwidth=1e9, **QUIET)
    cost = exchange_cost(NONE, LAYERS, network, SPEEDS, backward=10.0)
    assert cost.collectives == len(LAYERS)
    assert cost.exposed == pytest.approx(2**22 / 1e9)


def test_too_few_bits_are_an_error() -> None:
    with pytest.raises(ValueError, match="4 workers need bits >= 4"):
        exchange_cost(GlobalQSGD(2), LAYERS, Network(4), SPEEDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"method": "bf16"}, "method='bf16'"), ({"method": NONE, "backward": -1.0}, "backward=-1.0")],
)
def test_what_is_no_exchange_is_an_error(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        exchange_cost(shapes=LAYERS, network=Network(2), speeds=SPEEDS, **arguments)


# ---- what holds for all numbers --------------------------------------------------------------------------------------

NETWORKS = st.builds(
    Network,
    hosts=st.integers(1, 9),
    workers_per_host=st.integers(1, 4),
    bandwidth=st.floats(1e6, 1e11),
    latency=st.floats(0, 1e-3),
    local_bandwidth=st.floats(1e8, 1e11),
    overhead=st.floats(0, 1e-2),
)
ANY_METHOD = st.sampled_from([NONE, FP16, *METHODS.values()])
MODEL = st.lists(st.integers(1, 200_000), min_size=1, max_size=12).map(
    lambda sizes: {f"p{i}": (size,) for i, size in enumerate(sizes)}
)
FEW = settings(max_examples=40)


@FEW
@given(ANY_METHOD, MODEL, NETWORKS, st.floats(0, 1), st.booleans())
def test_what_is_exposed_is_never_more_than_the_whole_exchange(
    method, shapes, network, backward, accelerator
) -> None:
    options = {"backward": backward, "accelerator": accelerator, "group_bytes": 2**18}
    cost = exchange_cost(method, shapes, network, SPEEDS, **options)
    assert -1e-12 <= cost.exposed <= cost.total + 1e-9
    assert cost.bytes_sent >= 0
    assert cost.hidden >= -1e-9


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
        overhead=network.overhead / times,
    )
    before, after = (
        exchange_cost(method, shapes, each, SPEEDS, backward=backward, group_bytes=2**18).exposed
        for each in (network, faster)
    )
    assert after <= before + 1e-9


@FEW
@given(ANY_METHOD, MODEL, NETWORKS, st.floats(1, 100))
def test_slower_kernels_never_make_an_exchange_shorter(method, shapes, network, times) -> None:
    slower = KernelSpeeds(
        {key: Speed(times * first, times * more) for key, (first, more) in KERNELS.items()},
        (times * SPEEDS.half[0], times * SPEEDS.half[1]),
        times * SPEEDS.half_sum,
    )
    before, after = (
        exchange_cost(method, shapes, network, each, group_bytes=2**18) for each in (SPEEDS, slower)
    )
    assert after.exposed >= before.exposed - 1e-9
    assert after.kernels >= before.kernels


@FEW
@given(st.sampled_from([Allreduce, Allgather, Alltoall]), st.floats(1, 1e9), st.integers(1, 30))
def test_more_hosts_never_make_a_collective_shorter(kind, payload, hosts) -> None:
    fewer, more = (
        collective_seconds(request(kind, payload), Network(number, bandwidth=1e8))
        for number in (hosts, hosts + 1)
    )
    assert more >= fewer


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_a_step_by_hand() -> None:
    network = Network(2, bandwidth=1e9, **QUIET)
    shapes, step = {"only": (10**6,)}, Step(0.1)
    assert step_seconds(NONE, shapes, network, SPEEDS, step) == pytest.approx(0.104)
    scheme = GlobalQSGD(8)
    seconds = step_seconds(scheme, shapes, network, SPEEDS, step)
    assert speed_up(scheme, shapes, network, SPEEDS, step) == pytest.approx(0.104 / seconds)
    assert speed_up(NONE, shapes, network, SPEEDS, step) == 1


def test_the_break_even_bandwidth_by_hand() -> None:
    """Of 8e6 elements: none sends 3.2e7 bytes, QSGD 4.0e6 + 3.2e4 for 32e6 ns of kernels and its carrier."""
    network, shapes, step = Network(2, **QUIET), {"only": (8_192_000,)}, Step(0.0)
    scheme = QSGD(4)
    kernels = 8_192_000 * (1 + 1 + 1.5) * 1e-9
    sent = 8_192_000 // 2 + 4 * 8000 + CARRIER_BYTES
    expected = (4 * 8_192_000 - sent) / kernels
    found = break_even_bandwidth(scheme, shapes, network, SPEEDS, step)
    assert found == pytest.approx(expected, rel=0.01)
    below, above = (dataclasses.replace(network, bandwidth=factor * found) for factor in (0.9, 1.1))
    assert speed_up(scheme, shapes, below, SPEEDS, step) > 1 > speed_up(scheme, shapes, above, SPEEDS, step)


def test_free_kernels_always_pay_and_more_bytes_never() -> None:
    shapes, step = {"only": (10**7,)}, Step(0.0)
    assert break_even_bandwidth(GlobalQSGD(8), shapes, Network(4), SPEEDS, step, than=FP16) == math.inf
    # Among 64 workers an allgather of 8 bits an element sends 63 bytes where float32 sends 7.9.
    assert break_even_bandwidth(QSGD(8), shapes, Network(64), SPEEDS, step) == 0
    assert break_even_bandwidth(NONE, shapes, Network(4), SPEEDS, step) == 0


def test_steps_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="backward=2.0"):
        Step(1.0, 2.0)


# ---- groups and names ------------------------------------------------------------------------------------------------


def test_defaults_are_the_compressors_own() -> None:
    parameters = inspect.signature(BaseCompressor).parameters
    assert groups.GROUP_BYTES == parameters["group_bytes"].default
    assert groups.MIN_ELEMENTS == parameters["min_elements"].default


@pytest.mark.parametrize("group_bytes", [1, 2**20, groups.GROUP_BYTES])
@pytest.mark.parametrize("model", MODELS)
def test_groups_are_those_of_the_torch_frontend(model: str, group_bytes: int) -> None:
    schedule = pytest.importorskip("horovod_quant.torch.schedule")
    shapes = MODELS[model]
    own = schedule.Schedule(None, None, group_bytes, True, len(shapes), None)
    scheme = GlobalQSGD(8)

    class Waiting:
        def __init__(self, name: str) -> None:
            self.name, self.scheme, self.bytes = name, scheme, 4 * math.prod(shapes[name])

    compressed = set(groups.compressed_names(scheme, shapes))
    placed = [(Waiting(name), 0) for name in reversed(shapes) if name in compressed]
    assert groups.torch_groups(scheme, shapes, group_bytes) == own._cut(placed)


def test_names_by_hand() -> None:
    shapes = MODELS["resnet50"]
    large = [name for name, shape in shapes.items() if math.prod(shape) >= 1024]
    assert groups.torch_cache_names(None, shapes) == groups.tensorflow_cache_names(None, shapes) == 161
    # Groups of 32 MiB: four of 102 MB; two allreduces each; and the one that agrees on an order.
    assert groups.torch_cache_names(GlobalQSGD(8), shapes) == 161 + 2 * 4 + 1
    assert groups.tensorflow_cache_names(GlobalQSGD(8), shapes) == 161 + 2 * len(large)
    assert groups.torch_cache_names(GlobalQSGD(8), {"bias": (10,)}) == 1
    assert elements(shapes) > 0
