"""Raises from a signal handler at random moments of backward passes and of ``synchronize()``, and goes on.

    horovodrun -np 2 python interrupt_worker.py pass|synchronize

Prints HIT for each exception, and WENT ON when every later step was right and parameters were always equal on all
workers. As with Horovod alone, a script that was interrupted in a backward pass calls ``synchronize()``, which is exact
for the gradients there are.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from types import FrameType

import horovod.torch as hvd
import torch

import horovod_quant.torch as hvq

STEPS = 80
LATEST = {"pass": 3e-3, "synchronize": 3e-4}
"""Seconds to the exception, at most."""


class Preempted(Exception):
    pass


def _is_horovods(module: str) -> bool:
    return (
        module.startswith("horovod.") or module == "horovod_quant.torch.unnamed"
    )  # which calls its inner functions


class Alarm:
    """Raises once, some time after `arm`, and not after `disarm`: a signal may be under way when its timer stops."""

    def __init__(self) -> None:
        self._is_armed = False
        signal.signal(signal.SIGALRM, self._raise_in_this_package)

    def arm(self, seconds: float) -> None:
        self._is_armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def disarm(self) -> None:
        self._is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _raise_in_this_package(self, number: int, frame: FrameType | None) -> None:
        """Not between Horovod's own lines, where Horovod alone may lose an operation: later then."""
        if self._is_armed:
            _raise_in_this_package(frame)
            signal.setitimer(signal.ITIMER_REAL, 5e-5)


def _raise_in_this_package(inside: FrameType | None) -> None:
    while inside is not None and not _is_horovods(module := inside.f_globals.get("__name__", "")):
        if module.startswith("horovod_quant."):
            raise Preempted("please save")
        inside = inside.f_back


def main() -> None:
    hvd.init()
    where, choose = sys.argv[1], random.Random(hvd.rank() + int(os.environ.get("SEED", "0")))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(6)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        model.named_parameters(),
        compression=hvq.EDEN(bits=4, group_bytes=100_000),
    )
    alarm = Alarm()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(8, 128) * (step % 8 + 1)).pow(2).mean()
        exact = torch.autograd.grad(
            loss, list(model.parameters()), retain_graph=True
        )  # the same on all workers
        interrupted = step % 2 == 1
        try:
            if interrupted and where == "pass":
                alarm.arm(choose.uniform(1e-4, LATEST[where]))
            loss.backward()
            if interrupted and where == "synchronize":
                alarm.arm(choose.uniform(1e-5, LATEST[where]))
            optimizer.synchronize()
        except Preempted:
            print("HIT", flush=True)
            alarm.disarm()
            optimizer.synchronize()
        alarm.disarm()
        if not interrupted or where == "synchronize":
            for own, parameter in zip(exact, model.parameters()):
                assert torch.linalg.norm(parameter.grad - own) < 0.3 * torch.linalg.norm(own), f"step {step}"
        with optimizer.skip_synchronize():
            optimizer.step()
        sums = torch.tensor([[float(parameter.detach().sum()) for parameter in model.parameters()]])
        everyone = hvd.allgather(sums, name="sums")
        assert torch.equal(everyone[0], everyone[-1]), f"step {step}: the workers' parameters differ"
    hvd.barrier()
    print("WENT ON", flush=True)


if __name__ == "__main__":
    main()
