"""Measurement of step communication in rounds."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.bench.enough import is_enough
from horovod_quant.bench.gradients import ExactAverage
from horovod_quant.bench.network import Counter
from horovod_quant.frontends.methods import NONE

WARM_UP = 3
"""Number of unmeasured runs: workers agree on groups, then Horovod caches their names."""

HOROVOD_CACHE = 1024
EXCHANGES = 3  # maximum collectives of a tensor: two of a method, and one of Horovod
THREADS = "/proc/self/task"


class Measurement(NamedTuple):
    """Measurements of one run on one worker: seconds, and numbers of events."""

    wall: float
    cpu: float  # CPU time of all threads
    horovod_cpu: float  # CPU time of Horovod's threads
    system_cpu: float
    page_faults: float
    interface: (
        float  # bytes sent by the worker's host, on its first worker; nan on others, and where unreadable
    )


class Found(NamedTuple):
    """Measured results; the lists have an entry for each trial.

    Attributes:
        rounds: for each finished round ``[trial, worker, field of Measurement]``.
        bytes_sent: counted bytes of one run, mean over the workers.
        nmses: the nmse of the averages; None where the result is no average.
    """

    rounds: list[np.ndarray]
    bytes_sent: list[float]
    nmses: list[float | None]

    def field(self, name: str) -> np.ndarray:
        """Return a field of all measurements, ``[round, trial, worker]``."""
        index = Measurement._fields.index(name)
        return np.array([each[:, :, index] for each in self.rounds])


def fewest_cores(workers: Iterable[tuple[str, Iterable[Any]]]) -> int:
    """Return the number of cores that a host's workers share.

    It is the fewest of any host. A launcher may bind each worker to other cores.

    Args:
        workers: each worker's host and cores.
    """
    by_host: dict[str, set[Any]] = {}
    for host, cores in workers:
        by_host.setdefault(host, set()).update(cores)
    return min(map(len, by_host.values()))


class Bench:
    """Measurement of step communication; initializes Horovod.

    Args:
        framework: the module `horovod_quant.bench.torch_trial` or `tensorflow_trial`.
        names: number of names for which Horovod's response cache needs room.
    """

    def __init__(self, framework: Any, names: int) -> None:
        # Collectives with different names would evict each other from Horovod's cache.
        os.environ.setdefault("HOROVOD_CACHE_CAPACITY", str(max(HOROVOD_CACHE, names)))
        self._framework = framework
        framework.configure()
        threads = set(os.listdir(THREADS))
        framework.workers.init()
        # Linux's clocks of the CPU time of the threads that Horovod has started.
        self._horovod_clocks = [~int(thread) << 3 | 6 for thread in set(os.listdir(THREADS)) - threads]
        self.rank, self.size = framework.workers.rank(), framework.workers.size()
        self._leads = framework.workers.local_rank() == 0
        places = self.gather([framework.workers.local_rank(), framework.workers.local_size()])
        self.hosts = int(np.count_nonzero(places[:, 0] == 0))
        self.workers_per_host = int(places[:, 1].max())
        own, usable = socket.gethostname(), sorted(os.sched_getaffinity(0))
        texts = self.gather_texts(f"{own} {','.join(map(str, usable))}")
        workers = [text.rpartition(" ") for text in texts]
        peers = [host for host, _, _ in workers if host != own]
        self.cores = fewest_cores((host, cores.split(",")) for host, _, cores in workers)
        self.counter = Counter((peers or [own]) if self.hosts > 1 else [])

    def gather(self, row: Sequence[float]) -> np.ndarray:
        """Gather a row of each worker, ``[worker, ...]``."""
        return self._framework.allgather(np.array([row], np.float64), f"bench.{len(row)}")

    def gather_texts(self, text: str) -> list[str]:
        """Gather a text without line breaks of each worker, in rank order."""
        line = np.frombuffer(" ".join(text.split()).encode() + b"\n", np.uint8).copy()
        return self._framework.allgather(line, "bench.texts").tobytes().decode().splitlines()

    def measured(self, trial: Any) -> np.ndarray:
        """Measure one run of a trial, ``[worker, field of Measurement]``."""
        trial.prepare()
        measurement = self._measurement(trial)
        trial.clear()
        return self.gather(measurement)

    def inspected(self, trial: Any, exact: ExactAverage) -> tuple[float, float | None]:
        """Run a trial once.

        Return the bytes sent by a worker, and the average's nmse.
        """
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
        """Measure all trials in rounds, and fill ``found``.

        A round measures every trial once, each round beginning with another one.

        Args:
            trials: the trials.
            rounds: number of rounds; None to stop by `is_enough`.
            exact: the exact average.
            found: the results, which are extended.
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
