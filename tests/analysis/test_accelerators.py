"""Kernels of accelerators, links by name, and NCCL: by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from modelling import LAYERS, METHODS, SPEEDS, wires

from horovod_quant.analysis.accelerators import ATTAINED, SHARES, MemoryBound, on_accelerators, traffic
from horovod_quant.analysis.advice import choice_of, refusal_of
from horovod_quant.analysis.cost_model import FP16, NONE, Setting, exchange_cost
from horovod_quant.analysis.fabrics import ACCELERATORS, INSIDE_HOST
from horovod_quant.analysis.network import (
    GLOO,
    NCCL,
    Network,
    float32_allreduce,
    latency_seconds,
    nccl_software,
)
from horovod_quant.analysis.work import KERNELS, Call
from horovod_quant.frontends.methods import parse
from horovod_quant.schemes import Hierarchical


def test_a_kernel_takes_what_its_bytes_take() -> None:
    speeds = MemoryBound(1e12)
    per_byte = 1 / (ATTAINED * 1e12)
    calls = {
        Call("bucket_maxima", 0, 10**6): 4,
        Call("encode_uniform_sum", 8, 10**6): 5,
        Call("decode_uniform_codes", 4, 10**6, arrays=6): 4 + 6 / 2,
        Call("vote", 0, 10**6, arrays=8): (1 + 8) / 8,
        Call("unheard-of", 0, 10**6): 8,
    }
    for call, moved in calls.items():
        share = SHARES.get(call.kernel, ATTAINED) / ATTAINED
        assert speeds.seconds([call]) == pytest.approx(moved * 1e6 * per_byte / share), call
    assert set(SHARES) <= set(KERNELS)
    assert speeds.half == pytest.approx((6 * per_byte, 6 * per_byte))
    assert all(sum(each or 0 for each in traffic(kernel)) > 0 for kernel in KERNELS)


def test_every_name_has_its_source_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/advise.md").read_text()
    page = page.partition("## Links and accelerators")[2].partition("\n## ")[0]
    for name in (*INSIDE_HOST, *ACCELERATORS):
        assert f"`{name}`" in page, name


def test_nccl_takes_the_faster_of_ring_and_tree() -> None:
    few, many = (Network(hosts, 4, latency=1e-5, local_latency=1e-6, controller=NCCL) for hosts in (2, 64))
    request = float32_allreduce(1)
    assert latency_seconds(request, few) == pytest.approx(2 * (1 * 1e-5 + 3 * 1e-6))
    assert latency_seconds(request, many) == pytest.approx(2 * (6 * 1e-5 + 3 * 1e-6))
    ring = Network(64, 4, latency=1e-5, local_latency=1e-6, controller=GLOO)
    assert latency_seconds(request, ring) == pytest.approx(2 * 255 * 1e-5)


def test_with_nccl_no_processor_moves_bytes() -> None:
    """Four workers, links of 1 GB/s: an allreduce takes its bytes, and the copies in the GPU's memory."""
    software = nccl_software(1e12)
    network = wires(4, controller=NCCL, software=software)
    none, half = (
        exchange_cost(method, Setting(LAYERS, network, MemoryBound(1e12))) for method in (NONE, FP16)
    )
    elements = 8 * 2**20
    wire = 1.5 * 4 * elements / 1e9
    assert none.network == pytest.approx(wire + software.overhead + 4 * 4 * elements / 1e12)
    assert half.kernels == pytest.approx(2 * 6 * elements / (ATTAINED * 1e12))
    assert half.network < 0.6 * none.network


@pytest.mark.parametrize("hierarchical", [False, True])
def test_what_needs_the_hosts_memory_is_refused(hierarchical: bool) -> None:
    network = Network(2, 4)
    where, on_host = on_accelerators(LAYERS, network, 1e12), Setting(LAYERS, network, SPEEDS)
    for name, reason in (
        ("global-qsgd-8-rotate", "rotate=True needs the gradients in the host's memory"),
        ("qsgd-4-elias-allgather", "coding='elias' needs the gradients in the host's memory"),
        ("eden-3-trellis", "the time of the trellis on a GPU is not known"),
        ("eden-3", ""),
    ):
        choice = choice_of(parse(name), hierarchical=hierarchical)
        assert (refusal_of(choice, where) or "").startswith(reason)
        assert (refusal_of(choice, where) is None) == (not reason)
        assert refusal_of(choice, on_host) is None


@pytest.mark.parametrize("scheme", METHODS.values(), ids=str)
def test_every_scheme_can_be_modelled_on_accelerators(scheme) -> None:
    network = Network(2, 4, controller=NCCL, software=nccl_software(9e11))
    for each in (scheme, Hierarchical(scheme)):
        found = exchange_cost(
            each, Setting(LAYERS, network, MemoryBound(9e11)), backward=0.1, accelerator=True
        )
        assert 0 < found.exposed < math.inf
