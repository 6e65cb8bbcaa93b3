"""Like `bytes_count_worker`, but with the CPU time of a worker's process in place of a step's time."""

from __future__ import annotations

import time
from typing import Any

import bytes_count_worker
import numpy as np


def turn(trial: Any, steps: int, door: Any) -> list[tuple[float, float]]:
    """Run a trial; return the mean CPU seconds of a worker, and 0, for each step."""
    door.barrier()
    own = []
    for _ in range(steps):
        trial.prepare()
        begin = time.process_time()
        trial.step()
        own.append(time.process_time() - begin)
    return [(seconds, 0.0) for seconds in door.allgather(np.array([own]), "figures").mean(axis=0).tolist()]


if __name__ == "__main__":
    bytes_count_worker.turn = turn
    bytes_count_worker.main()
