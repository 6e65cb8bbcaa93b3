"""Measurement of kernel speeds on this machine, in a second or two.

Units: CPU seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple

import numpy as np

from horovod_quant import kernels
from horovod_quant.analysis.work import UNTIMED, Call, Watched, describe_call, resolved, run_alone, work_of
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.schemes.hierarchical import Hierarchical

ELEMENTS = 2**20
"""Elements of the measured gradient: 4 MB, more than most caches hold for long."""


class Speed(NamedTuple):
    """Seconds per element with one worker's array, and per further worker."""

    first: float
    more: float = 0.0

    def seconds(self, elements: float, arrays: int) -> float:
        return elements * (self.first + (arrays - 1) * self.more)


@dataclass(frozen=True)
class KernelSpeeds:
    """Speeds of kernels and casts on one core of a machine.

    Attributes:
        kernels: speeds by a kernel's name and bits (0 where it has none).
        half: seconds per element of a cast to float16, and back.
    """

    kernels: Mapping[tuple[str, int], Speed]
    half: tuple[float, float] = (5e-10, 5e-10)

    def seconds(self, calls: Iterable[Call]) -> float:
        """Return the seconds of successive kernel calls.

        Raises:
            KeyError: a kernel has not been measured.
        """
        return sum(self._speed(call).seconds(call.elements, call.arrays) for call in calls)

    def _speed(self, call: Call) -> Speed:
        if (call.kernel, call.bits) in self.kernels:
            return self.kernels[call.kernel, call.bits]
        measured = [bits for kernel, bits in self.kernels if kernel == call.kernel]
        if not measured:
            raise KeyError(f"{call.kernel} has not been measured: give measure_kernels() its scheme")
        # A scheme whose bits depend on the number of workers was measured with few workers.
        nearest = min(measured, key=lambda bits: abs(bits - call.bits))
        return self.kernels[call.kernel, nearest]


def measure_kernels(schemes: Iterable[Scheme], *, seconds: float) -> KernelSpeeds:
    """Measure the kernels of some schemes on one core of this machine.

    Each scheme's reduction is run on real arrays, with one worker and with four (hierarchical: four hosts of four, and
    a single one) that all use the same arrays. CPU time is measured for every kernel, so other processes do not count;
    results are medians over the repetitions.

    Args:
        schemes: schemes whose kernels to measure; those whose kernels others have too are left out.
        seconds: rough total time to spend; every kernel is measured at least once.
    """
    schemes = _sufficient(schemes)
    backend = kernels.get()
    stopwatch = _Stopwatch(backend)
    values = np.random.default_rng(0).standard_normal(ELEMENTS, np.float32)
    for scheme in schemes:
        share = seconds / len(schemes)
        # The first call loads the library and touches the memory.
        _run(scheme, values, Workers(0, 1), backend)
        begin, rounds = time.perf_counter(), 0
        while not rounds or (rounds < 9 and time.perf_counter() - begin < share):
            for workers in _measured(scheme):
                _run(scheme, values, workers, stopwatch.kernels)
            rounds += 1
    to_half = _cpu_seconds(lambda: values.astype(np.float16)) / ELEMENTS
    half = values.astype(np.float16)
    from_half = _cpu_seconds(lambda: half.astype(np.float32)) / ELEMENTS
    return KernelSpeeds(stopwatch.speeds(), (to_half, from_half))


def _sufficient(schemes: Iterable[Scheme]) -> list[Scheme]:
    """Return fewer schemes that use every kernel and width of all."""
    kept: list[Scheme] = []
    known: set[tuple[str, int]] = set()
    for scheme in dict.fromkeys(schemes):
        found = set()
        for workers in _measured(scheme):
            with suppress(ValueError):  # too many for the scheme, which is not run then
                work = work_of(scheme, (ELEMENTS,), workers.size, workers.local_size)
                found |= {(call.kernel, call.bits) for call in work.calls}
        if not found or not found <= known:
            kept.append(scheme)
            known |= found
    return kept


def _measured(scheme: Scheme) -> list[Workers]:
    """Return the workers among which a scheme's kernels are measured."""
    if not isinstance(scheme, Hierarchical):
        return [Workers(0, 1), Workers(0, 4)]
    # With many hosts averages may return within a host in float32, as they do on a single one.
    return [Workers(0, 1), Workers(0, 16, local_size=4), Workers(0, 4, local_size=4)]


def _run(scheme: Scheme, values: np.ndarray, workers: Workers, kernels: Any) -> None:
    """Run one worker's part of a reduction of equal gradients.

    Do nothing if there are too many workers for the scheme.
    """
    try:
        scheme = resolved(scheme, workers)
    except ValueError:
        return
    for _ in run_alone(scheme, [values], workers, kernels, np.zeros_like, np.resize):
        pass


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
        self._seconds: dict[tuple[str, int, int], list[float]] = {}
        self.kernels = Watched(backend, self._timed)

    def _timed(self, name: str, kernel: Callable) -> Callable:
        if name in UNTIMED:
            return kernel

        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.thread_time()
            result = kernel(*arguments, **named)
            seconds = time.thread_time() - begin
            call, _ = describe_call(name, arguments, named)
            if call.elements:
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
