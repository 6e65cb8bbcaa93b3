"""Train as `eden_worker` does, also between hosts, and record step times.

    horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 python seconds_worker.py --lines FILE --compression eden

A line of JSON with step, seconds and the loss of worker 0 goes to FILE every `--every` steps. Other options are those
of eden_worker.py. Only the time of the steps counts.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import eden_worker
import horovod.torch as hvd
import numpy as np
import torch.distributed as dist
from eden_worker import training


class Timed(training.Record):
    """Record of a training with the seconds until the end of each step."""

    lines: Path
    every: int

    def __enter__(self) -> Timed:
        self._times: list[float] = []
        if hvd.rank() == 0:
            self.lines.write_text("")
        super().__enter__()
        return self

    def step(self, loss: float) -> None:
        super().step(loss)
        self._times.append(time.perf_counter() - self._begin)
        if hvd.rank() == 0 and len(self._times) % self.every == 0:
            line = {"step": len(self._times), "seconds": round(self._times[-1], 4), "loss": round(loss, 4)}
            with self.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def figures(self, quality: Mapping[str, float], weights: Sequence[np.ndarray]) -> dict[str, Any]:
        return {**super().figures(quality, weights), "times": self._times}


connect_one_host = eden_worker.connect


def connect() -> None:
    """Create PyTorch's process group of the workers, on any hosts."""
    if hvd.local_size() == hvd.size():
        connect_one_host()
        return
    own, store = socket.gethostbyname(socket.gethostname()), None
    if hvd.rank() == 0:
        store = dist.TCPStore(own, 0, hvd.size(), is_master=True, wait_for_workers=False)
    address, port = hvd.broadcast_object((own, store.port if store else 0), root_rank=0)
    if store is None:
        store = dist.TCPStore(address, port, hvd.size(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # horovodrun would take a prefix of its own options, such as --log, for that option.
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10)
    own, sys.argv[1:] = parser.parse_known_args()
    Timed.lines, Timed.every = own.lines, own.every
    training.Record = Timed
    eden_worker.connect = connect
    eden_worker.main()


if __name__ == "__main__":
    main()
