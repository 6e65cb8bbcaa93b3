"""The performance model: how long a step takes with each method, and whether compressing pays.

An exchange is kernels (measured: `measure_kernels`) and collectives (the alpha-beta model: a message of b bytes takes
``latency + b / bandwidth``). What each worker computes and sends is asked of the schemes themselves (`work`), and
which gradients travel together of the rules of the PyTorch frontend (`groups`).

Units: seconds, bytes, bytes per second; elements where a name says so. 1 Gbit/s is 125e6 bytes per second.

What is left out: what Horovod itself computes (its copies and float32 or integer sums count as part of the bandwidth),
contention between workers' kernels and Horovod's threads for cores, the difference between TCP's and the wire's
bandwidth (a few percent), what Elias coding saves and costs, and hierarchical exchanges. TensorFlow has no groups;
``group_bytes=1``, a group for each gradient, comes closest.

Sources: Thakur, Rabenseifner and Gropp (2005), "Optimization of collective communication operations in MPICH", for
the ring algorithms; the measurements are this project's own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Union

import numpy as np

from horovod_quant import kernels as kernel_backends
from horovod_quant.analysis.groups import GROUP_BYTES, MIN_ELEMENTS, compressed_names, torch_groups
from horovod_quant.analysis.models import Shapes
from horovod_quant.analysis.work import DECODE, ENCODE, KERNELS, NORMS, Call, Work, describe_call, work_of
from horovod_quant.frontend import carrier_signs
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Alltoall,
    BinaryState,
    CustomAllreduce,
    Gradient,
    Request,
    Scheme,
    Workers,
    split_points,
)
from horovod_quant.traffic import sent_bytes

NONE, FP16 = "none", "fp16"

Method = Union[Scheme, str]
"""One of this package's schemes, or Horovod's own compression: ``"none"`` or ``"fp16"``."""

FUSION_BYTES = 128 * 2**20
"""Horovod's HOROVOD_FUSION_THRESHOLD by default: bytes that it sends at once at most (Horovod 0.28.1)."""

CARRIER_BYTES = 4 * (1 + len(carrier_signs("")))
"""Of the small float32 tensor that Horovod itself reduces in place of a compressed gradient."""

HALF_SUM_SECONDS = 2e-8
"""Seconds for each float16 element that Horovod adds in an allreduce: it does so in software, on one core.

From this project's README: ResNet-50, 2 workers, Gloo: fp16 takes 0.26 s longer than none, for 12.8 million additions
on each worker. The lab at 10 Gbit/s (0.53 s against 0.095 s) says the same or somewhat more. Another machine's own
value belongs in `KernelSpeeds.half_sum`.
"""


# ---- the network ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Workers and what joins them.

    Args:
        hosts: number of hosts.
        workers_per_host: on each; ranks are numbered host by host, as horovodrun does.
        bandwidth: bytes per second of a host's link, in each direction at the same time.
        latency: seconds that a message between two hosts takes besides its bytes.
        local_bandwidth: bytes per second between two workers of one host. An assumption: Gloo over the loopback
            interface moves 0.6e9 (README: 102 MB in 0.18 s, 2 workers on 2 cores), shared memory more.
        local_latency: seconds of a message between two workers of one host.
        overhead: seconds that Horovod adds to a collective: it looks for new ones every HOROVOD_CYCLE_TIME (1 ms), and
            the workers agree that all have it.

    Raises:
        ValueError: a number is out of range.
    """

    hosts: int
    workers_per_host: int = 1
    bandwidth: float = 1.25e9
    latency: float = 50e-6
    local_bandwidth: float = 1e9
    local_latency: float = 10e-6
    overhead: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("hosts", "workers_per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: use 1 or more")
        for name in ("bandwidth", "local_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: use bytes per second, more than 0")
        for name in ("latency", "local_latency", "overhead"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: use seconds, 0 or more")

    @property
    def workers(self) -> int:
        return self.hosts * self.workers_per_host


def messages(request: Request, workers: int) -> int:
    """Messages that follow one another in a collective: ``2 (n-1)`` in a ring allreduce, ``n-1`` in the others."""
    if not isinstance(request, (Allreduce, CustomAllreduce, Allgather, Alltoall)):
        raise TypeError(f"not a request: {request!r}")
    return (2 if isinstance(request, (Allreduce, CustomAllreduce)) else 1) * (workers - 1)


def collective_seconds(request: Request, network: Network) -> float:
    """Seconds of one collective, Horovod's overhead included; the overhead alone for one worker.

    In a ring every worker sends to the next one, so a host's link carries the bytes of one worker, however many there
    are on the host, and the slowest hop counts. In an alltoall all workers of a host use its link at the same time.

    Args:
        request: what a scheme asks for; its ``parts`` are the bytes that this worker contributes.
        network: who takes part.
    """
    workers, local = network.workers, network.workers_per_host
    if workers == 1:
        return network.overhead
    sent = float(sum(sent_bytes(request, workers)))
    crossing = network.hosts > 1
    if isinstance(request, Alltoall):
        outside = sent * (workers - local) / (workers - 1)
        transfer = max(local * outside / network.bandwidth, (sent - outside) / network.local_bandwidth)
    else:
        transfer = sent / network.bandwidth if crossing else 0.0
        if local > 1:
            transfer = max(transfer, sent / network.local_bandwidth)
    latency = network.latency if crossing else network.local_latency
    return network.overhead + messages(request, workers) * latency + transfer


def float32_allreduce(elements: float, element_bytes: int = 4) -> Allreduce:
    """The request for Horovod's own allreduce of so many elements."""
    return Allreduce(np.empty(0, np.float32), "sum", [float(element_bytes * elements)])


# ---- kernels --------------------------------------------------------------------------------------------------------


class Speed(NamedTuple):
    """Seconds for each element: with one worker's array, and for each further worker's."""

    first: float
    more: float = 0.0

    def seconds(self, elements: float, arrays: int) -> float:
        return elements * (self.first + (arrays - 1) * self.more)


class Phases(NamedTuple):
    """Seconds of kernels, by what they are for."""

    norms: float
    encode: float
    decode: float


@dataclass(frozen=True)
class KernelSpeeds:
    """How fast this package's kernels, and Horovod's casts, are on one core of some machine.

    Attributes:
        kernels: by the kernel's name and its bits (0 where it has none).
        half: a cast to float16, and back.
        half_sum: seconds for each float16 element that Horovod adds.
    """

    kernels: Mapping[tuple[str, int], Speed]
    half: tuple[float, float] = (5e-10, 5e-10)
    half_sum: float = HALF_SUM_SECONDS

    def seconds(self, calls: Iterable[Call]) -> float:
        """Seconds of kernel calls, one after another.

        Raises:
            KeyError: a kernel has not been measured with these bits.
        """
        return sum(self._speed(call).seconds(call.elements, call.arrays) for call in calls)

    def phases(self, scheme: Scheme, workers: int) -> Phases:
        """Seconds per element that a worker spends in each phase of an exchange.

        Args:
            scheme: of the exchange.
            workers: number of workers, whose codes are decoded or whose chunk is served.
        """
        elements = 2**20
        calls = _work(scheme, (elements,), workers).calls
        return Phases(*(seconds / elements for seconds in self.by_phase(calls)))

    def by_phase(self, calls: Sequence[Call]) -> Phases:
        """Seconds of kernel calls, by what they are for."""
        return Phases(
            *(self.seconds(call for call in calls if KERNELS[call.kernel] == phase)
              for phase in (NORMS, ENCODE, DECODE))
        )  # fmt: skip

    def _speed(self, call: Call) -> Speed:
        if (call.kernel, call.bits) not in self.kernels:
            raise KeyError(
                f"{call.kernel} with {call.bits} bits has not been measured: give measure_kernels() its scheme"
            )
        return self.kernels[call.kernel, call.bits]


def measure_kernels(
    schemes: Iterable[Scheme], *, elements: int = 2**20, seconds: float = 1.0, kernels: str = "auto"
) -> KernelSpeeds:
    """Measures the kernels that some schemes need, on one core of this machine.

    Each scheme's exchange is run with real arrays, with one worker and with four whose arrays are all this one's. The
    CPU time of every kernel is taken, so that other processes do not count; medians over the repetitions.

    Args:
        schemes: whose kernels to measure.
        elements: of the gradient; a multiple of 4,096. 2^20 is 4 MB: larger than what most caches hold for long.
        seconds: to spend in all, roughly; every kernel is measured at least once.
        kernels: the backend.

    Raises:
        ValueError: ``elements`` is no multiple of 4,096.
    """
    if elements < 4096 or elements % 4096:
        raise ValueError(f"elements={elements!r}: use a multiple of 4096")
    schemes = list(dict.fromkeys(schemes))
    stopwatch = _Stopwatch(kernel_backends.get(kernels))
    values = np.random.default_rng(0).standard_normal(elements, np.float32)
    for scheme in schemes:
        share = seconds / len(schemes)
        stopwatch.active = False
        _run_alone(
            scheme, values, 1, stopwatch.kernels
        )  # the first call loads the library and touches the memory
        stopwatch.active = True
        begin, rounds = time.perf_counter(), 0
        while not rounds or (rounds < 9 and time.perf_counter() - begin < share):
            for workers in (1, 4):
                _run_alone(scheme, values, workers, stopwatch.kernels)
            rounds += 1
    to_half = _cpu_seconds(lambda: values.astype(np.float16)) / elements
    half = values.astype(np.float16)
    from_half = _cpu_seconds(lambda: half.astype(np.float32)) / elements
    return KernelSpeeds(stopwatch.speeds(), (to_half, from_half))


def _run_alone(scheme: Scheme, values: np.ndarray, workers: int, kernels: Any) -> None:
    """One worker's part of an exchange in which all workers have the same gradient; nothing if they are too many."""
    try:
        scheme.check_workers(workers)
    except ValueError:
        return
    state = BinaryState(np.zeros_like(values), np.zeros_like(values), 0.9)
    gradient = Gradient(values, KeyChain(0, "measured"), 0, state)
    exchange = scheme.exchange([gradient], Workers(0, workers), kernels)
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as stop:
            stop.value.write(0, 1.0, np.zeros_like(values))
            return
        if isinstance(request, Allgather):
            answer = [request.array] * workers
        elif isinstance(request, Alltoall):
            answer = [request.array[: split_points(request.splits)[1]]] * workers
        else:
            answer = request.array


def _cpu_seconds(function: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        begin = time.thread_time()
        function()
        times.append(time.thread_time() - begin)
    return statistics.median(times)


class _Stopwatch:
    """A backend whose kernels are timed."""

    def __init__(self, backend: Any) -> None:
        self.active = True
        self._seconds: dict[tuple[str, int, int], list[float]] = {}
        timed = {name: self._timed(name, getattr(backend, name)) for name in KERNELS}
        self.kernels = SimpleNamespace(**{**vars(backend), **timed})

    def _timed(self, name: str, kernel: Callable) -> Callable:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.thread_time()
            result = kernel(*arguments, **named)
            seconds = time.thread_time() - begin
            if self.active:
                call, _ = describe_call(name, arguments, named)
                key = (call.kernel, call.bits, call.arrays)
                self._seconds.setdefault(key, []).append(seconds / call.elements)
            return result

        return run

    def speeds(self) -> dict[tuple[str, int], Speed]:
        found: dict[tuple[str, int], dict[int, float]] = {}
        for (kernel, bits, arrays), seconds in self._seconds.items():
            found.setdefault((kernel, bits), {})[arrays] = statistics.median(seconds)
        speeds = {}
        for key, by_arrays in found.items():
            fewest, most = min(by_arrays), max(by_arrays)
            more = (by_arrays[most] - by_arrays[fewest]) / (most - fewest) if most > fewest else 0.0
            more = max(more, 0.0)
            speeds[key] = Speed(max(by_arrays[fewest] - (fewest - 1) * more, 0.0), more)
        return speeds


_work = functools.lru_cache(maxsize=4096)(work_of)


# ---- an exchange ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """What one exchange of a model's gradients costs one worker.

    Attributes:
        norms, encode, decode: seconds of kernels (casts, for fp16).
        network: seconds of all collectives, Horovod's overhead included.
        exposed: seconds by which the exchange makes the step longer.
        bytes_sent: by one worker on average, carriers and gradients that are too small included.
        collectives: their number.
    """

    norms: float
    encode: float
    decode: float
    network: float
    exposed: float
    bytes_sent: float
    collectives: int

    @property
    def kernels(self) -> float:
        """Seconds of all kernels."""
        return self.norms + self.encode + self.decode

    @property
    def total(self) -> float:
        """Seconds of an exchange that nothing overlaps with."""
        return self.kernels + self.network

    @property
    def hidden(self) -> float:
        """Seconds that pass while the backward pass computes, or kernels and network work at the same time."""
        return self.total - self.exposed


def exchange_cost(
    method: Method,
    shapes: Shapes,
    network: Network,
    speeds: KernelSpeeds,
    *,
    backward: float = 0.0,
    accelerator: bool = False,
    group_bytes: int = GROUP_BYTES,
    min_elements: int = MIN_ELEMENTS,
) -> Cost:
    """Models one exchange of all gradients.

    The backward pass takes the parameters in the reverse order of their registration, each for a time in proportion to
    its elements. A group's first collective starts when its last gradient is there, and its next one when the next
    group is complete, or the pass over; results are decoded after the pass. Collectives run one after another. Without
    compression, Horovod sends whatever is waiting when it is done with the last, up to 128 MiB at once.

    Args:
        method: a scheme, ``"none"`` or ``"fp16"``.
        shapes: of the gradients, float32, in the order of registration.
        network: who takes part.
        speeds: of the kernels.
        backward: seconds of the backward pass that the exchange may overlap with; 0 for ``overlap=False``.
        accelerator: whether the backward pass runs elsewhere while this host's core runs kernels. Otherwise a kernel
            makes the pass longer by its own time.
        group_bytes: as the compressor's.
        min_elements: as the compressor's.

    Raises:
        ValueError: ``method`` is no method, cannot serve so many workers, or ``backward`` is negative.
        KeyError: ``speeds`` lack a kernel of the method.
    """
    if not 0 <= backward < math.inf:
        raise ValueError(f"backward={backward!r}: use seconds, 0 or more")
    arrivals = _arrivals(shapes, backward)
    clock = _Clock(accelerator)
    if isinstance(method, Scheme):
        method.check_workers(network.workers)
        return _quantized(method, shapes, network, speeds, clock, arrivals, group_bytes, min_elements)
    if method not in (NONE, FP16):
        raise ValueError(f"method={method!r}: use a scheme, {NONE!r} or {FP16!r}")
    return _plain(method == FP16, shapes, network, speeds, clock, arrivals)


class _Clock:
    """Time on one worker: its thread's, and that of the collectives, which follow one another."""

    def __init__(self, accelerator: bool) -> None:
        self.now = 0.0
        self.network_free = 0.0
        self.network_busy = 0.0
        self.collectives = 0
        self._accelerator = accelerator
        self._arrived = 0.0

    def arrive(self, moment: float) -> None:
        """The backward pass computes until what would be ``moment`` if nothing else happened."""
        if self._accelerator:
            self.now = max(self.now, moment)
        else:
            self.now += moment - self._arrived
        self._arrived = moment

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float) -> float:
        """Starts a collective; returns when it will be done."""
        self.network_free = max(self.now, self.network_free) + seconds
        self.network_busy += seconds
        self.collectives += 1
        return self.network_free

    def wait(self, until: float) -> None:
        self.now = max(self.now, until)


def _arrivals(shapes: Shapes, backward: float) -> dict[str, float]:
    total = sum(map(prod, shapes.values()))
    done, moments = 0, {}
    for name in reversed(shapes):
        done += prod(shapes[name])
        moments[name] = backward * done / total if total else backward
    return moments


def _quantized(
    scheme: Scheme,
    shapes: Shapes,
    network: Network,
    speeds: KernelSpeeds,
    clock: _Clock,
    arrivals: dict[str, float],
    group_bytes: int,
    min_elements: int,
) -> Cost:
    """The rules of `horovod_quant.torch.schedule`, from an optimizer's second step on."""
    groups = torch_groups(scheme, shapes, group_bytes, min_elements)
    works = [_work(scheme, tuple(prod(shapes[name]) for name in names), network.workers) for names in groups]
    stage = [0] * len(groups)  # collectives that each group has launched
    done = [0.0] * len(groups)

    def advance(index: int) -> None:
        clock.wait(done[index])
        calls, request = works[index].stages[stage[index]]
        clock.compute(speeds.seconds(calls))
        done[index] = clock.launch(collective_seconds(request, network))
        stage[index] += 1

    def unfinished(indices: Iterable[int]) -> list[int]:
        return [index for index in indices if stage[index] < len(works[index].stages)]

    for index, names in enumerate(groups):
        clock.arrive(max(arrivals[name] for name in names))
        advance(index)
        for earlier in unfinished(range(index)):
            advance(earlier)
    clock.arrive(max(arrivals.values(), default=0.0))
    rest = _rest(scheme, shapes, min_elements)
    rest_done = clock.launch(collective_seconds(rest, network)) if shapes else 0.0
    while unfinished(range(len(groups))):
        for index in unfinished(range(len(groups))):
            advance(index)
    clock.wait(rest_done)
    for index, work in enumerate(works):
        clock.wait(done[index])
        clock.compute(speeds.seconds(work.decode))

    norms, encode, decode = speeds.by_phase([call for work in works for call in work.calls])
    return Cost(
        norms,
        encode,
        decode,
        network=clock.network_busy,
        exposed=clock.now - max(arrivals.values(), default=0.0),
        bytes_sent=_bytes_sent([*_requests(works), rest], network.workers),
        collectives=clock.collectives,
    )


def _rest(scheme: Scheme, shapes: Shapes, min_elements: int) -> Allreduce:
    """What Horovod itself reduces besides: small gradients as they are, and the others' carriers."""
    compressed = compressed_names(scheme, shapes, min_elements)
    small = sum(map(prod, shapes.values())) - sum(prod(shapes[name]) for name in compressed)
    return float32_allreduce(small + CARRIER_BYTES // 4 * len(compressed))


def _plain(
    half: bool,
    shapes: Shapes,
    network: Network,
    speeds: KernelSpeeds,
    clock: _Clock,
    arrivals: dict[str, float],
) -> Cost:
    """Horovod's own exchange: what is waiting goes together."""
    element_bytes = 2 if half else 4
    to_half, from_half = speeds.half if half else (0.0, 0.0)
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
        seconds = collective_seconds(request, network)
        if half:
            seconds += speeds.half_sum * elements * (network.workers - 1) / network.workers
        clock.network_free = start + seconds
        clock.network_busy += seconds
        clock.collectives += 1
        requests.append(request)
        del waiting[:together]
    total = sum(map(prod, shapes.values()))
    clock.wait(clock.network_free)
    clock.compute(from_half * total)
    return Cost(
        norms=0.0,
        encode=to_half * total,
        decode=from_half * total,
        network=clock.network_busy,
        exposed=clock.now - max(arrivals.values(), default=0.0),
        bytes_sent=_bytes_sent(requests, network.workers),
        collectives=clock.collectives,
    )


def _requests(works: Sequence[Work]) -> list[Request]:
    return [request for work in works for _, request in work.stages]


def _bytes_sent(requests: Iterable[Request], workers: int) -> float:
    return float(sum(sum(sent_bytes(request, workers)) for request in requests))


# ---- a step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A training step on one worker without any exchange.

    Args:
        seconds: of the whole step.
        backward: seconds of it in which gradients become ready, so that an exchange can overlap.
        accelerator: whether the backward pass leaves this host's core free.

    Raises:
        ValueError: the backward pass is longer than the step, or negative.
    """

    seconds: float
    backward: float = 0.0
    accelerator: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.backward <= self.seconds < math.inf:
            raise ValueError(
                f"backward={self.backward!r}: use seconds from 0 to those of the step, {self.seconds!r}"
            )


def step_seconds(
    method: Method, shapes: Shapes, network: Network, speeds: KernelSpeeds, step: Step, **options: Any
) -> float:
    """Seconds of a training step with its exchange.

    Args:
        method, shapes, network, speeds: see `exchange_cost`.
        step: without the exchange.
        **options: ``group_bytes`` and ``min_elements``.
    """
    cost = exchange_cost(
        method, shapes, network, speeds, backward=step.backward, accelerator=step.accelerator, **options
    )
    return step.seconds + cost.exposed


def speed_up(
    method: Method,
    shapes: Shapes,
    network: Network,
    speeds: KernelSpeeds,
    step: Step,
    *,
    than: Method = NONE,
    **options: Any,
) -> float:
    """How many times as many steps a second as with another method."""
    return step_seconds(than, shapes, network, speeds, step, **options) / step_seconds(
        method, shapes, network, speeds, step, **options
    )


def break_even_bandwidth(
    method: Method,
    shapes: Shapes,
    network: Network,
    speeds: KernelSpeeds,
    step: Step,
    *,
    than: Method = NONE,
    **options: Any,
) -> float:
    """The bandwidth between hosts, in bytes per second, below which a method pays against another one.

    Args:
        method, shapes, speeds, step: see `step_seconds`.
        network: its ``bandwidth`` does not count.
        than: what the method is compared with.
        **options: ``group_bytes`` and ``min_elements``.

    Returns:
        0 if it never pays; inf if it pays with 1e15 bytes per second, as it does at every speed if the other method's
        kernels are the slower ones. On a single host bandwidth does not matter: one of the two.
    """

    def gain(bandwidth: float) -> float:
        changed = dataclasses.replace(network, bandwidth=bandwidth)
        other, own = (step_seconds(each, shapes, changed, speeds, step, **options) for each in (than, method))
        return other - own

    lowest, highest = 1e3, 1e15
    if gain(lowest) <= 0:
        return 0.0
    # The first bandwidth at which it no longer pays: gains need not fall evenly where much is hidden.
    low, high = lowest, lowest
    while gain(high) > 0:
        low, high = high, 2 * high
        if high > highest:
            return math.inf
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low
