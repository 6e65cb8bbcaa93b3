"""Raises from a signal handler in the middle of what a backward pass exchanges, and goes on with ``synchronize()``.

    horovodrun -np 2 python interrupt_worker.py

Prints the error that ends it on each worker.
"""

from __future__ import annotations

import signal
from types import FrameType

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

import horovod_quant.torch as hvq


class Preempted(Exception):
    pass


def raise_in_an_exchange(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_globals.get("__name__") == "horovod_quant.torch.exchange":
            raise Preempted("please save")
        frame = frame.f_back


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression=hvq.EDEN()
    )
    signal.signal(signal.SIGALRM, raise_in_an_exchange)
    try:
        while True:
            optimizer.zero_grad()
            loss = model(torch.ones(8, 256)).pow(2).mean()
            signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
            try:
                loss.backward()
            except Preempted:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
            optimizer.step()
    except HorovodInternalError as error:
        print(f"ENDED: {error}", flush=True)


if __name__ == "__main__":
    main()
