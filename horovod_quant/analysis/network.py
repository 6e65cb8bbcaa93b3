"""Time of a collective: the alpha-beta model plus Horovod's software costs.

A message of b bytes takes ``latency + b / bandwidth``. In addition, processors copy, sum, and run TCP, and workers that
share cores wait for one another: always in a *lab* on one machine, hardly ever in a cluster. `Network` has the number
of cores per worker.

Units: seconds, bytes, bytes per second. 1 Gbit/s is 125e6 bytes per second.

Sources: Thakur, Rabenseifner and Gropp (2005), "Optimization of collective communication operations in MPICH", for
the ring algorithms; the software's numbers are this project's own measurements (docs/advise.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np

from horovod_quant.schemes.base import CROSS, LOCAL, Allgather, Allreduce, Alltoall, Request, require_choice
from horovod_quant.transports.traffic import sent_bytes

GLOO, MPI, NCCL = "gloo", "mpi", "nccl"
"""Controllers of Horovod."""

DDP = "ddp"
"""PyTorch's DistributedDataParallel over Gloo, without Horovod."""

MEASURED = (GLOO, MPI)
"""Controllers of the lab, for which there are calibrations."""

CONTROLLERS = (*MEASURED, NCCL, DDP)

MOST_WORKERS = 8192
"""Most workers in commands: the model takes up to a minute for this number."""

PAYLOAD_SHARE = 1448 / 1514
"""TCP payload's share of a full Ethernet frame (MTU 1,500), with timestamps."""

LOCAL_BANDWIDTH = 1e9
"""Bytes per second between two workers of a host, through the processor."""

LOCAL_LATENCY = 10e-6
"""Seconds of a message between two workers of a host."""

HALF_SUM_SECONDS = 1.1e-8
"""CPU seconds per float16 element that Horovod adds in software.

With 2 workers, ResNet-50 and Gloo fp16 takes a quarter of a second longer than none (docs/speed.md), for 12.8 million
additions on each worker by a thread that shares its core with one that spins.
"""


@dataclass(frozen=True)
class Software:
    """Costs of Horovod, transport and frontend in addition to the wire.

    The defaults are the rounded means of what `calibration.calibrate` found on two machines, from the lab's unshaped
    links; ``overhead`` and ``gradient`` are those of the faster one. Values for another machine come from
    ``horovod-quant bench`` on it.

    Args:
        overhead: seconds that Horovod adds to a collective: it looks for new ones every HOROVOD_CYCLE_TIME (1 ms), and
            the workers agree that all have it.
        gradient: CPU seconds of the frontend per gradient.
        copy: CPU seconds per byte of a collective's array, to copy it into Horovod's buffer and out of it.
        stream: CPU seconds per byte sent, for TCP on both sides and adding.
        half_sum: CPU seconds per float16 element that Horovod adds.
        kernels: relative time of kernels in a training step, 1 being that in a loop.
        contention: n threads on one core take ``n ** contention`` times the time of one: 1 is fair sharing; above 1,
            workers, which wait for the slowest of them, also wait for the scheduler.
        allreduce, allgather, alltoall: time of such a collective on the wire, relative to that of its bytes after
            `turns`.
        launch: host seconds per kernel launch on an accelerator, one for each group and stage.

    Raises:
        ValueError: a number is out of range.
    """

    overhead: float = 2e-3
    gradient: float = 2e-4
    copy: float = 1.3e-10
    stream: float = 5e-10
    half_sum: float = HALF_SUM_SECONDS
    kernels: float = 1.0
    contention: float = 1.15
    allreduce: float = 1.0
    allgather: float = 1.0
    alltoall: float = 1.0
    launch: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name}={getattr(self, field.name)!r}: use a number, 0 or more")


LAUNCH_SECONDS = 1.05e-4
"""Host seconds per kernel launch on a GPU: 90 to 120 us on an H100's host.

They do not depend on the size (docs/gpu.md), and are from before many gradients shared a launch."""

DDP_SOFTWARE = Software(
    overhead=5e-4,
    gradient=2.5e-4,
    copy=1.3e-10,
    stream=5.3e-10,
    half_sum=2.3e-9,
    kernels=0.8,
    contention=1.6,
)
"""DDP over Gloo, from the lab on one machine: it has no coordinator."""


def nccl_software(memory_bandwidth: float) -> Software:
    """Return the software costs with NCCL, which bypasses the CPU.

    Horovod's overhead and the frontend's work per gradient are those of the lab, launches those of an H100's host.

    Args:
        memory_bandwidth: bytes per second of an accelerator's memory: an array is read and written on its way into
            Horovod's buffer, and again on its way out.
    """
    return Software(copy=4 / memory_bandwidth, stream=0, half_sum=0, kernels=1, launch=LAUNCH_SECONDS)


def default_software(controller: str) -> Software:
    """Return the software costs measured in the lab with a controller."""
    return DDP_SOFTWARE if controller == DDP else Software()


@dataclass(frozen=True)
class Network:
    """Workers, the links between them, and the cores they run on.

    Args:
        hosts: number of hosts.
        workers_per_host: workers on each host; ranks are numbered host by host, as horovodrun does.
        bandwidth: bytes per second of a host's link, in each direction at the same time, including headers; inf for a
            link that is never the bottleneck.
        latency: seconds of a message between two hosts in addition to its bytes.
        local_bandwidth: bytes per second between two workers of one host. An assumption: Gloo over the loopback
            interface moves 0.6e9 (102 MB in 0.18 s, 2 workers on 2 cores), shared memory more.
        local_latency: seconds of a message between two workers of one host.
        cores_per_worker: CPU cores per worker; less than 1 where workers share cores, as all hosts of a lab do.
        controller: ``"gloo"``, ``"mpi"``, or ``"nccl"`` for gradients on accelerators; ``"ddp"`` without Horovod.
        software: costs of software.

    Raises:
        ValueError: a number is out of range.
    """

    hosts: int
    workers_per_host: int = 1
    bandwidth: float = 1.25e9
    latency: float = 50e-6
    local_bandwidth: float = LOCAL_BANDWIDTH
    local_latency: float = LOCAL_LATENCY
    cores_per_worker: float = 2.0
    controller: str = GLOO
    software: Software = Software()

    def __post_init__(self) -> None:
        for name in ("hosts", "workers_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: use 1 or more")
        for name in ("bandwidth", "local_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: use bytes per second, more than 0")
        for name in ("latency", "local_latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: use seconds, 0 or more")
        if not 0 < self.cores_per_worker < math.inf:
            raise ValueError(f"cores_per_worker={self.cores_per_worker!r}: use a number, more than 0")
        require_choice("controller", self.controller, CONTROLLERS)

    @property
    def workers(self) -> int:
        return self.hosts * self.workers_per_host

    def within(self, group: str) -> Network:
        """Return the network of a group of workers.

        A group is all workers, those of a host, or one per host. All groups of a kind communicate at the same time;
        groups between hosts share each host's link.
        """
        if group == LOCAL:
            return replace(self, hosts=1)
        if group == CROSS:
            return replace(self, workers_per_host=1, bandwidth=self.bandwidth / self.workers_per_host)
        return self

    def stretch(self, threads: int = 1) -> float:
        """Return the time of CPU work relative to an uncontended core.

        Args:
            threads: number of runnable threads of each worker.
        """
        return max(1.0, threads / self.cores_per_worker) ** self.software.contention

    @property
    def overlap(self) -> float:
        """Return the share of a worker's computing during which collectives continue.

        It is 1 with two cores per worker, one of them for Horovod's thread, and 0 where two workers share one.
        In the lab, 4 workers on 2 cores take the time of the wire and of all CPU work, and 2 workers less.
        """
        none, full = 0.5, 2.0
        return min(1.0, max(0.0, (self.cores_per_worker - none) / (full - none)))


def latency_seconds(request: Request, network: Network) -> float:
    """Return the seconds of latency of a collective.

    A ring allreduce has ``2 (n-1)`` messages, other collectives ``n-1``.

    The intra-node steps of a ring take the local latency under NCCL, where a host's workers are neighbours that do not
    wait for all others; under Gloo and MPI all wait for the slowest. For an allreduce NCCL takes a tree between hosts
    where that is faster: 2× its depth, and along a chain within the host (src/graph/tuning.cc of NCCL 2.8).
    """
    directions = 2 if isinstance(request, Allreduce) else 1
    if network.controller != NCCL:
        latency = network.latency if network.hosts > 1 else network.local_latency
        return directions * (network.workers - 1) * latency
    between, inside = network.hosts - 1, network.workers - network.hosts
    ring = directions * (between * network.latency + inside * network.local_latency)
    if directions == 1:
        return ring
    depth, chain = math.ceil(math.log2(network.hosts)), network.workers_per_host - 1
    return min(ring, directions * (depth * network.latency + chain * network.local_latency))


def turns(request: Request, network: Network) -> float:
    """Return a collective's slow-down where a link's two directions alternate.

    A receiver of Gloo announces that it is ready on the connection on which it sends data, after it has begun to do so
    (gloo/allgatherv.cc, gloo/alltoallv.cc: send, then recv; transport/tcp/pair.cc: one queue). Where two workers
    exchange large messages, the later announcement waits behind data, and the two directions alternate: in a gather of
    two workers, which add instead (`transports.pairwise_via_allreduce`), and in an alltoall for each pair. The
    slow-down of an alltoall shrinks as more pairs share the link. Rings of three and more, allreduces, and NCCL use
    both directions at once.

    Under DDP this package posts its receives before it sends.

    On Ethernet, Open MPI's default allreduce among more than two workers takes 2× the time that its bytes need; its
    gathers also take longer, but by less.
    """
    software, workers = network.software, network.workers
    factors = {Allreduce: software.allreduce, Allgather: software.allgather, Alltoall: software.alltoall}
    own = factors[type(request)]
    if network.controller in (NCCL, DDP):
        return own
    if isinstance(request, Allreduce):
        return own * (2.0 if network.controller == MPI and workers > 2 else 1.0)
    if network.controller == MPI:
        return own * 1.5
    if isinstance(request, Alltoall):
        return own * (1 + 2 / workers)
    return own * (2.0 if workers == 2 else 1.0)


def link_bytes(request: Request, network: Network) -> float:
    """Return the bytes a host sends to other hosts in a collective.

    In a ring every worker sends to the next one, so a host's link carries the bytes of one worker, however many there
    are on the host. In an alltoall, and among groups of one worker of each host, all workers of a host use its link.
    """
    inside, local = network.within(request.group), network.workers_per_host
    if inside.hosts == 1:
        return 0.0
    sent = float(sum(sent_bytes(request, inside.workers)))
    if request.group == CROSS:
        return local * sent
    if isinstance(request, Alltoall):
        return local * sent * (network.workers - local) / (network.workers - 1)
    return sent


def wire_seconds(request: Request, network: Network) -> float:
    """Return the seconds of a collective's bytes on the slowest hop."""
    inside = network.within(request.group)
    seconds = link_bytes(request, network) / (PAYLOAD_SHARE * network.bandwidth)
    if inside.workers_per_host > 1:
        sent = float(sum(sent_bytes(request, inside.workers)))
        if isinstance(request, Alltoall):
            sent *= (inside.workers_per_host - 1) / (inside.workers - 1)
        seconds = max(seconds, sent / inside.local_bandwidth)
    return turns(request, inside) * seconds


def collective_seconds(request: Request, network: Network, *, threads: int = 1, halves: float = 0.0) -> float:
    """Return the seconds of one collective, including Horovod's overhead.

    Args:
        request: the collective; its ``parts`` are the bytes that this worker contributes.
        network: the participants; for one worker there is the overhead alone.
        threads: runnable threads of each worker: 2 where Horovod waits by spinning.
        halves: float16 elements in the array, which Horovod adds in software.
    """
    wire = wire_seconds(request, network)
    network = network.within(request.group)
    workers, software = network.workers, network.software
    if workers == 1:
        return software.overhead
    stretch = network.stretch(threads)
    processor = stretch * (
        software.stream * sum(sent_bytes(request, workers))
        + software.half_sum * halves * (workers - 1) / workers
    )
    # Where cores are scarce, a sender's and a receiver's must both be free, as they are for the wire's share of time.
    idle = wire / (wire + processor) if wire else 0.0
    hidden = network.overlap + (1 - network.overlap) * idle**2
    return (
        software.overhead
        + latency_seconds(request, network)
        + stretch * software.copy * sum(request.parts)
        + wire
        + processor
        - hidden * min(wire, processor)
    )


def float32_allreduce(elements: float, element_bytes: int = 4) -> Allreduce:
    """Return the request of Horovod's own allreduce of some elements."""
    return Allreduce(np.empty(0, np.float32), "sum", [float(element_bytes * elements)])
