"""Where the time of an exchange through PyTorch goes, for this package's methods: for `exchange`."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable
from unittest.mock import patch

import horovod.torch as hvd
import horovod.torch.optimizer as horovod_optimizer
import numpy as np

from horovod_quant import kernels
from horovod_quant.bench.rounds import WARM_UP, Bench, Measurement
from horovod_quant.kernels.segments import segment_kernels
from horovod_quant.torch import exchange

PHASES = {
    "norms": ["norms"],
    "quantize": ["encode_codes", "encode_sums", "encode_rotated", "binarize", "vote"],
    "decode": ["decode_codes", "decode_sums", "decode_rotated", "decode_signs"],
}
"""Methods of `horovod_quant.kernels.segments.SegmentKernels`; norms that codes need are computed with them."""

LAUNCH, WAIT, HOROVOD_WAIT, REST = "launch", "wait", "wait (Horovod)", "rest"
LAUNCHES = ["allreduce_async_", "allgather_async", "alltoall_async"]
COLUMNS = ["norms", "quantize", LAUNCH, WAIT, HOROVOD_WAIT, "decode", REST]


class Stopwatch:
    """Adds up wall and CPU seconds of the calling thread, by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}  # no arrays, whose arithmetic would be part of the rest

    def restart(self) -> None:
        self._seconds = {phase: [0.0, 0.0] for phase in COLUMNS}

    def timed(self, phase: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                spent = self._seconds[phase]
                spent[0] += time.perf_counter() - begin
                spent[1] += time.thread_time() - cpu_begin

        return wrapper

    def split(self, wall: float, cpu: float) -> list[np.ndarray]:
        """Seconds of the phases, whose sum is the whole."""
        found = np.array([self._seconds[phase] for phase in COLUMNS])
        found[COLUMNS.index(REST)] = [wall, cpu] - found.sum(axis=0)
        return list(found)


@contextmanager
def instrumented() -> Iterator[Stopwatch]:
    """Compressors that start to work in here have their kernels and Horovod's operations timed."""
    stopwatch = Stopwatch()
    kind = type(segment_kernels(kernels.get()))
    patches = [
        *(
            patch.object(kind, name, stopwatch.timed(phase, getattr(kind, name)))
            for phase, names in PHASES.items()
            for name in names
        ),
        patch.object(exchange, "collect", stopwatch.timed(WAIT, exchange.collect)),
        patch.object(
            horovod_optimizer, "synchronize", stopwatch.timed(HOROVOD_WAIT, horovod_optimizer.synchronize)
        ),
    ]
    for owner in (hvd, horovod_optimizer):
        for name in set(LAUNCHES) & set(vars(owner)):
            patches.append(patch.object(owner, name, stopwatch.timed(LAUNCH, getattr(owner, name))))
    for each in patches:
        each.start()
    try:
        yield stopwatch
    finally:
        for each in patches:
            each.stop()


def split(bench: Bench, make_trials: list[Callable[[], Any]], rounds: int) -> np.ndarray:
    """Medians of milliseconds, ``[trial, phase, wall or CPU]``, means over the workers."""
    found = np.zeros((len(make_trials), rounds, len(COLUMNS), 2))
    with instrumented() as stopwatch:
        trials = [make() for make in make_trials]
        for number in range(-WARM_UP, rounds):
            for index, trial in enumerate(trials):
                stopwatch.restart()
                whole = Measurement(*bench.measured(trial)[bench.rank])
                if number >= 0:
                    found[index, number] = stopwatch.split(whole.wall, whole.cpu - whole.horovod_cpu)
    everybody = bench.gather(found.ravel().tolist()).reshape(bench.size, *found.shape)
    return 1e3 * np.median(everybody.mean(axis=0), axis=1)
