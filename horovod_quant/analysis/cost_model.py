"""Performance model of step communication: its cost and its hidden part.

The hidden part overlaps with the backward pass. Step communication consists of kernels (`kernel_speeds`) and
collectives (`network`). What each worker computes and sends comes from the schemes themselves (`work`), and which
gradients travel together from the PyTorch frontend's rules (`groups`).

Units: seconds, bytes, bytes per second; elements where a name has the word.

Not modelled: what Elias coding saves and costs, congestion in switches, and links or workers of different speeds.
TensorFlow has no groups; ``group_bytes=1``, which makes each gradient a group, is closest to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Union

from horovod_quant.analysis.groups import GROUP_BYTES, compressed_names, ddp_buckets, torch_groups
from horovod_quant.analysis.kernel_speeds import KernelSpeeds
from horovod_quant.analysis.models import Shapes
from horovod_quant.analysis.network import (
    DDP,
    GLOO,
    MPI,
    Network,
    collective_seconds,
    float32_allreduce,
    link_bytes,
)
from horovod_quant.analysis.work import Call, Work, work_of
from horovod_quant.frontends.methods import FP16 as FP16
from horovod_quant.frontends.methods import NONE as NONE
from horovod_quant.reductions.agreement import SIGNS
from horovod_quant.schemes.base import Allreduce, Alltoall, Request, Scheme, Workers
from horovod_quant.schemes.hierarchical import Hierarchical
from horovod_quant.transports.pairwise_via_allreduce import as_sum, is_swapped
from horovod_quant.transports.split_sums import INTEGERS, is_faster
from horovod_quant.transports.traffic import sent_bytes

Method = Union[Scheme, str]
"""One of this package's schemes, or Horovod's own compression: ``"none"`` or ``"fp16"``."""

FUSION_BYTES = 128 * 2**20
"""Default HOROVOD_FUSION_THRESHOLD: most bytes sent at once (Horovod 0.28.1)."""

CONTROL_BYTES = 4 * (1 + SIGNS)
"""Bytes of the control tensor that Horovod reduces for a compressed gradient."""

SPINNING = 2
"""Runnable threads of a worker while Horovod waits for an allreduce: one works, one polls.

This package's reductions sleep while they wait."""


@dataclass(frozen=True)
class Cost:
    """Cost of step communication of all gradients for one worker.

    Attributes:
        kernels: seconds in kernels (casts, for fp16), including contention for cores.
        frontend: seconds of the frontend's work per gradient, and of kernel launches.
        network: seconds of all collectives, including Horovod's overhead.
        exposed: seconds by which step communication makes the step longer.
        bytes_sent: bytes sent by one worker on average, including control tensors and gradients that are too small.
        host_bytes: bytes that a host sends to other hosts.
    """

    kernels: float
    frontend: float
    network: float
    exposed: float
    bytes_sent: float
    host_bytes: float


class Setting(NamedTuple):
    """Model, network and kernels of step communication.

    Args:
        shapes: shapes of the gradients, float32, in the order of registration.
        network: workers and links.
        speeds: speeds of the kernels of all methods of interest.
        group_bytes: the compressor's argument.
    """

    shapes: Shapes
    network: Network
    speeds: KernelSpeeds
    group_bytes: int = GROUP_BYTES

    def with_network(self, **changes: Any) -> Setting:
        """Return the setting with changes of the network."""
        return self._replace(network=replace(self.network, **changes))


def exchange_cost(
    method: Method, setting: Setting, *, backward: float = 0.0, accelerator: bool = False
) -> Cost:
    """Return the modelled cost of step communication of all gradients.

    The backward pass visits the parameters in reverse order of registration, each for a time proportional to its
    elements. A group's first collective starts when its last gradient is ready; each further one starts after the
    previous one has ended, when another gradient arrives or the pass is over. Results are decoded after the pass.
    Collectives run one after another. Without compression, Horovod sends whatever is waiting when it has finished the
    last, up to 128 MiB at once. Under DDP one thread takes bucket after bucket, each to its end, decoding included.

    Args:
        method: a scheme, ``"none"`` or ``"fp16"``.
        setting: model, network, kernels.
        backward: seconds of the backward pass that step communication may overlap with; 0 for ``overlap=False``.
        accelerator: whether the backward pass runs elsewhere while this host's cores run kernels. Otherwise a kernel
            makes the pass longer by its own time.

    Raises:
        ValueError: ``method`` is none or does not work with these workers, or ``backward`` is negative.
        KeyError: ``speeds`` lacks a kernel of the method.
    """
    if not 0 <= backward < math.inf:
        raise ValueError(f"backward={backward!r}: use seconds, 0 or more")
    arrivals = _arrivals(setting.shapes, backward)
    if not isinstance(method, Scheme) and method not in (NONE, FP16):
        raise ValueError(f"method={method!r}: use a scheme, {NONE!r} or {FP16!r}")
    if setting.network.controller == DDP:
        return _by_hook(method, setting, accelerator, arrivals)
    clock = _Clock(accelerator, setting.network.overlap)
    if isinstance(method, Scheme):
        return _quantized(method, setting, clock, arrivals)
    return _plain(method == FP16, setting, clock, arrivals)


def workers_of(scheme: Scheme, network: Network) -> Workers:
    """Return the scheme's workers.

    Hosts are its nodes only for a hierarchical reduction.
    """
    local_size = network.workers_per_host if isinstance(scheme, Hierarchical) else 1
    return Workers(0, network.workers, local_size=local_size)


class _Clock:
    """Clock of one worker's thread and of its successive collectives.

    Args:
        accelerator: whether the backward pass computes elsewhere.
        overlap: share of the thread's computing during which collectives go on.
    """

    def __init__(self, accelerator: bool, overlap: float) -> None:
        self.now = 0.0
        self.network_busy = 0.0
        self._accelerator = accelerator
        self._overlap = overlap
        self._arrived = 0.0
        self._free = 0.0  # when the launched collectives would be done without delays
        self._held_up = 0.0

    @property
    def network_free(self) -> float:
        return self._free + self._held_up

    def arrive(self, moment: float) -> None:
        """Advance the backward pass to ``moment``, its time without interruptions."""
        if self._accelerator:
            self.now = max(self.now, moment)
        else:
            self.compute(moment - self._arrived)
        self._arrived = moment

    def compute(self, seconds: float) -> None:
        """Advance by the thread's computing, which may delay running collectives."""
        left = max(self.network_free - self.now, 0.0)
        going_on = min(seconds, left / self._overlap if self._overlap else math.inf) if left else 0.0
        self._held_up += (1 - self._overlap) * going_on
        self.now += seconds

    def launch(self, seconds: float, start: float | None = None) -> float:
        """Start a collective, and return its handle for `wait`."""
        start = max(self.now, self.network_free) if start is None else start
        self._free = start + seconds - self._held_up
        self.network_busy += seconds
        return self._free

    def has_ended(self, ticket: float) -> bool:
        return ticket + self._held_up <= self.now

    def wait(self, ticket: float) -> None:
        self.now = max(self.now, ticket + self._held_up)


def _arrivals(shapes: Shapes, backward: float) -> dict[str, float]:
    total = sum(map(prod, shapes.values()))
    done, moments = 0, {}
    for name in reversed(shapes):
        done += prod(shapes[name])
        moments[name] = backward * done / total if total else backward
    return moments


def _quantized(scheme: Scheme, setting: Setting, clock: _Clock, arrivals: dict[str, float]) -> Cost:
    """Model `horovod_quant.torch.buckets`, with the progress thread's work on the caller's core."""
    shapes, network, speeds = setting.shapes, setting.network, setting.speeds
    stretch = network.stretch()
    kernel_stretch = stretch * network.software.kernels
    launch = stretch * network.software.launch
    # One half in `compress`, the other in `decompress`.
    frontend = stretch * network.software.gradient / 2
    groups = torch_groups(scheme, shapes, setting.group_bytes)
    works = [group_work(scheme, [prod(shapes[name]) for name in names], network) for names in groups]
    stage = [0] * len(groups)  # collectives that each group has launched
    tickets = [0.0] * len(groups)

    unfinished: deque[int] = deque()  # in the order of their latest collectives' launches

    def advance(index: int) -> None:
        calls, request = works[index].stages[stage[index]]
        clock.compute(launch + kernel_stretch * speeds.seconds(calls))
        tickets[index] = clock.launch(collective_seconds(request, network))
        stage[index] += 1
        if stage[index] < len(works[index].stages):
            unfinished.append(index)

    completes = {names[-1]: index for index, names in enumerate(groups)}
    in_groups = {name for names in groups for name in names}
    compressed = [name for name in arrivals if name in in_groups]
    # Horovod reduces small gradients unchanged, and control tensors instead of the others.
    small_elements = sum(map(prod, shapes.values())) - sum(prod(shapes[name]) for name in compressed)
    rest = float32_allreduce(small_elements + CONTROL_BYTES // 4 * len(compressed))
    rest_ticket = 0.0
    for name in compressed:
        clock.arrive(arrivals[name])
        clock.compute(frontend)
        if name == compressed[-1]:  # Horovod launches it in parts, most of them earlier
            rest_ticket = clock.launch(collective_seconds(rest, network))
        if name in completes:
            advance(completes[name])
        while unfinished and clock.has_ended(tickets[unfinished[0]]):
            advance(unfinished.popleft())
    clock.arrive(max(arrivals.values(), default=0.0))
    small = len(shapes) - len(compressed)
    clock.compute(frontend * small)
    if shapes and not compressed:
        rest_ticket = clock.launch(collective_seconds(rest, network))
    while unfinished:
        clock.wait(tickets[unfinished[0]])
        advance(unfinished.popleft())
    if shapes:
        clock.wait(rest_ticket)
    clock.compute(frontend * small)
    for index, work in enumerate(works):
        clock.wait(tickets[index])
        clock.compute(launch + frontend * len(groups[index]) + kernel_stretch * speeds.seconds(work.decode))

    return Cost(
        kernel_stretch * speeds.seconds(call for work in works for call in work.calls),
        frontend=2 * frontend * len(shapes) + launch * sum(len(work.stages) + 1 for work in works),
        network=clock.network_busy,
        exposed=clock.now - max(arrivals.values(), default=0.0),
        **_bytes([*(request for work in works for _, request in work.stages), rest], network),
    )


def group_work(scheme: Scheme, lengths: Sequence[int], network: Network) -> Work:
    """Return a worker's part of a group's reduction on this network.

    MPI sums integers by two alltoalls, and Gloo sums what two workers gather.
    """
    workers = workers_of(scheme, network)
    work = work_of(scheme, tuple(lengths), workers.size, workers.local_size)
    stages: list[tuple[list[Call], Request]] = []
    for calls, request in work.stages:
        if network.controller == MPI and _is_split(request, lengths, workers):
            half = Alltoall(request.array, (), request.parts, request.group)
            stages += [(calls, half), ([], half)]
        elif network.controller == GLOO and is_swapped(request, workers):
            stages.append((calls, as_sum(request, request.array)))
        else:
            stages.append((calls, request))
    return Work(stages, work.decode)


def _is_split(request: Request, lengths: Sequence[int], workers: Workers) -> bool:
    adding = workers.size_of(request.group)
    own_bytes = 4 * sum(lengths) * adding // workers.size
    is_sum = isinstance(request, Allreduce) and request.array.dtype == INTEGERS
    return is_sum and is_faster(adding, own_bytes)


def _plain(half: bool, setting: Setting, clock: _Clock, arrivals: dict[str, float]) -> Cost:
    """Model Horovod's allreduces without a scheme, which fuse all waiting gradients."""
    shapes, network = setting.shapes, setting.network
    element_bytes = 2 if half else 4
    to_half, from_half = (network.stretch() * cast if half else 0.0 for cast in setting.speeds.half)
    waiting: list[tuple[float, int]] = []  # moment, elements
    for name in reversed(shapes):
        clock.arrive(arrivals[name])
        clock.compute(to_half * prod(shapes[name]))
        waiting.append((clock.now, prod(shapes[name])))
    requests = []
    while waiting:
        start = max(clock.network_free, waiting[0][0])
        together, elements = 0, 0
        for moment, count in waiting:
            if moment > start or (together and element_bytes * (elements + count) > FUSION_BYTES):
                break
            together, elements = together + 1, elements + count
        request = float32_allreduce(elements, element_bytes)
        halves = elements if half else 0.0
        ticket = clock.launch(
            collective_seconds(request, network, threads=SPINNING, halves=halves), start=start
        )
        requests.append(request)
        del waiting[:together]
    total = sum(map(prod, shapes.values()))
    if shapes:
        clock.wait(ticket)
    clock.compute(from_half * total)
    return Cost(
        kernels=(to_half + from_half) * total,
        frontend=0.0,
        network=clock.network_busy,
        exposed=clock.now - max(arrivals.values(), default=0.0),
        **_bytes(requests, network),
    )


def _by_hook(method: Method, setting: Setting, accelerator: bool, arrivals: dict[str, float]) -> Cost:
    """Model DDP's step communication with a hook: one bucket after another."""
    shapes, network = setting.shapes, setting.network
    free = computing = in_network = 0.0  # when the hook's thread is free, and what it has spent
    requests: list[Request] = []
    for names in ddp_buckets(shapes):
        seconds, sent = _bucket_work(method, setting, names)
        halves = sum(prod(shapes[name]) for name in names) if method == FP16 else 0.0
        collectives = sum(collective_seconds(request, network, halves=halves) for request in sent)
        ready = arrivals[names[-1]] + (0.0 if accelerator else computing)
        free = max(free, ready) + seconds + collectives
        computing, in_network = computing + seconds, in_network + collectives
        requests += sent
    return Cost(
        kernels=computing,
        frontend=0.0,
        network=in_network,
        exposed=max(free - max(arrivals.values(), default=0.0), 0.0 if accelerator else computing),
        **_bytes(requests, network),
    )


def _bucket_work(method: Method, setting: Setting, names: Sequence[str]) -> tuple[float, list[Request]]:
    """Return the seconds of computing for one DDP bucket, and its collectives."""
    shapes, speeds, network = setting.shapes, setting.speeds, setting.network
    lengths = {name: prod(shapes[name]) for name in names}
    if not isinstance(method, Scheme):
        casts = sum(speeds.half) if method == FP16 else 0.0
        request = float32_allreduce(sum(lengths.values()), 2 if method == FP16 else 4)
        return network.stretch() * casts * sum(lengths.values()), [request]
    compressed = compressed_names(method, {name: shapes[name] for name in names})
    seconds, requests = network.software.gradient * len(names), []
    if compressed:
        work = group_work(method, [lengths[name] for name in compressed], network)
        seconds += network.software.kernels * speeds.seconds(work.calls)
        requests += [request for _, request in work.stages]
    if len(compressed) < len(names):
        requests.append(float32_allreduce(sum(lengths.values()) - sum(lengths[name] for name in compressed)))
    return network.stretch() * seconds, requests


def _bytes(requests: Sequence[Request], network: Network) -> dict[str, float]:
    sent = (sum(sent_bytes(request, network.within(request.group).workers)) for request in requests)
    return {
        "bytes_sent": float(sum(sent)),
        "host_bytes": float(sum(link_bytes(request, network) for request in requests)),
    }
