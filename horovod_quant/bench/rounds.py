"""Measures exchanges, round after round."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.bench.enough import is_enough
from horovod_quant.bench.gradients import ExactAverage
from horovod_quant.bench.network import Counter
from horovod_quant.frontends.methods import NONE

WARM_UP = 3
"""In the first exchange the workers agree on groups, in the second one Horovod learns their names."""

HOROVOD_CACHE = 1024
EXCHANGES = 3  # of a tensor, at most: two of a method's, and Horovod's
THREADS = "/proc/self/task"


class Measurement(NamedTuple):
    """One exchange on one worker: seconds, and numbers of events."""

    wall: float
    cpu: float  # of all threads
    horovod_cpu: float  # of Horovod's own
    system_cpu: float
    page_faults: float
    interface: (
        float  # bytes sent by the worker's host, on its first worker; nan on others, and where unreadable
    )


class Found(NamedTuple):
    """What was measured; the lists have an entry for each trial.

    Attributes:
        rounds: for each finished round ``[trial, worker, field of Measurement]``.
        bytes_sent: in one exchange, counted, mean of the workers.
        nmses: squared errors of the averages by their squares; None where the result is no average.
    """

    rounds: list[np.ndarray]
    bytes_sent: list[float]
    nmses: list[float | None]

    def field(self, name: str) -> np.ndarray:
        """``[round, trial, worker]``"""
        index = Measurement._fields.index(name)
        return np.array([each[:, :, index] for each in self.rounds])


class Bench:
    """Initializes Horovod, and measures exchanges.

    Args:
        framework: the module `horovod_quant.bench.torch_trial` or `tensorflow_trial`.
        names: how many names Horovod shall be able to remember.
    """

    def __init__(self, framework: Any, names: int) -> None:
        # Differently named exchanges would push each other out of Horovod's cache.
        os.environ.setdefault("HOROVOD_CACHE_CAPACITY", str(max(HOROVOD_CACHE, names)))
        self._framework = framework
        framework.configure()
        threads = set(os.listdir(THREADS))
        framework.hvd.init()
        # Linux's clocks of the CPU time of the threads that Horovod has started.
        self._horovod_clocks = [~int(thread) << 3 | 6 for thread in set(os.listdir(THREADS)) - threads]
        self.rank, self.size = framework.hvd.rank(), framework.hvd.size()
        self._leads = framework.hvd.local_rank() == 0
        places = self.gather([framework.hvd.local_rank(), framework.hvd.local_size()])
        self.hosts = int(np.count_nonzero(places[:, 0] == 0))
        self.workers_per_host = int(places[:, 1].max())
        own = socket.gethostname()
        peers = [host for host in self.gather_texts(own) if host != own]
        self.counter = Counter((peers or [own]) if self.hosts > 1 else [])

    def gather(self, row: Sequence[float]) -> np.ndarray:
        """Everybody's, ``[worker, ...]``."""
        return self._framework.allgather(np.array([row], np.float64), f"bench.{len(row)}")

    def gather_texts(self, text: str) -> list[str]:
        """Everybody's, in rank order; without line breaks."""
        line = np.frombuffer(" ".join(text.split()).encode() + b"\n", np.uint8).copy()
        return self._framework.allgather(line, "bench.texts").tobytes().decode().splitlines()

    def measured(self, trial: Any) -> np.ndarray:
        """One exchange, ``[worker, field of Measurement]``."""
        trial.prepare()
        measurement = self._measurement(trial)
        trial.clear()
        return self.gather(measurement)

    def inspected(self, trial: Any, exact: ExactAverage) -> tuple[float, float | None]:
        """One exchange: bytes sent by a worker, and the average's nmse."""
        before = trial.bytes_sent()
        trial.prepare(keep=True)
        self._measurement(trial)
        squares = exact.squares(trial.averages()) if trial.has_average else (0.0, 1.0)
        trial.clear()
        sent, error, size = np.split(self.gather([trial.bytes_sent() - before, *squares]), 3, axis=1)
        return float(sent.mean()), float(error.sum() / size.sum()) if trial.has_average else None

    def _measurement(self, trial: Any) -> Measurement:
        self._framework.barrier()
        sent = self._counted()
        self._framework.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        horovod, cpu, begin = self._horovod_seconds(), time.process_time(), time.perf_counter()
        trial.run()
        wall = time.perf_counter() - begin
        cpu, horovod = time.process_time() - cpu, self._horovod_seconds() - horovod
        after = resource.getrusage(resource.RUSAGE_SELF)
        self._framework.barrier()
        sent = self._counted() - sent
        faults, system = after.ru_minflt - before.ru_minflt, after.ru_stime - before.ru_stime
        return Measurement(wall, cpu, horovod, system, float(faults), sent)

    def _counted(self) -> float:
        counted = self.counter.bytes_sent() if self._leads else None
        return float("nan") if counted is None else counted

    def _horovod_seconds(self) -> float:
        return sum(map(time.clock_gettime, self._horovod_clocks))

    def run(
        self,
        trials: Sequence[Any],
        rounds: int | None,
        exact: ExactAverage,
        found: Found,
        finished: Callable[[], None],
    ) -> None:
        """Fills ``found``. A round measures every trial once, each round beginning with another one.

        Args:
            rounds: their number; None to stop when `is_enough` returns True.
            finished: called after each round.
        """
        for trial in trials:
            for _ in range(trial.warm_up - 1):
                self.measured(trial)
            sent, nmse = self.inspected(trial, exact)
            found.bytes_sent.append(sent)
            found.nmses.append(nmse)
        reference = next((i for i, trial in enumerate(trials) if trial.variant.label == NONE), 0)
        for number in itertools.count() if rounds is None else range(rounds):
            measured: dict[int, np.ndarray] = {}
            for offset in range(len(trials)):
                index = (number + offset) % len(trials)
                measured[index] = self.measured(trials[index])
            found.rounds.append(np.array([measured[index] for index in range(len(trials))]))
            finished()
            if rounds is None and is_enough(found.field("wall").max(axis=2), reference):
                break
