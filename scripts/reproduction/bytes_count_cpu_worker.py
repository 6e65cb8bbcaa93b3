"""Measure CPU time, also by threads, where `bytes_count_worker` measures time."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import bytes_count_worker
import numpy as np

threads: dict[str, list[list[float]]] = {}
"""CPU seconds per step by method: of the script's thread, and of other threads of Python, which are this package's."""


def of_threads() -> np.ndarray:
    """Return CPU seconds of the main thread, and of Python's others."""
    own = [thread.native_id for thread in threading.enumerate()]
    spent = {
        number: int(Path(f"/proc/self/task/{number}/schedstat").read_text().split()[0]) for number in own
    }
    script = spent.pop(threading.main_thread().native_id)
    return np.array([script, sum(spent.values())]) / 1e9


def cpu_seconds(trial: Any, steps: int, door: Any) -> list[tuple[float, float]]:
    """Run a trial; return mean CPU seconds, and 0, of each step."""
    door.barrier()
    own, by_thread = [], np.zeros(2)
    for _ in range(steps):
        trial.prepare()
        before, begin = of_threads(), time.process_time()
        trial.step()
        own.append(time.process_time() - begin)
        by_thread += of_threads() - before
    everyones = door.allgather(np.array([[*own, *(by_thread / steps)]]), "figures").mean(axis=0).tolist()
    threads.setdefault(trial.name, []).append(everyones[steps:])
    return [(seconds, 0.0) for seconds in everyones[:steps]]


class Trial(bytes_count_worker.Trial):
    """A trial that knows its method."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name = name
        super().__init__(name, *arguments)


if __name__ == "__main__":
    bytes_count_worker.turn, bytes_count_worker.Trial = cpu_seconds, Trial  # type: ignore[misc]
    bytes_count_worker.main()
    if os.environ["HOROVOD_RANK"] == "0":
        file = Path(sys.argv[2])
        found = {name: np.median(np.array(each), axis=0).tolist() for name, each in threads.items()}
        file.write_text(json.dumps({**json.loads(file.read_text()), "threads": found}))
