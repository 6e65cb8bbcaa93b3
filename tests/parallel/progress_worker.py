"""Strains the progress thread: what scripts do to a process while exchanges are under way.

    horovodrun -np 2 python progress_worker.py FOLDER CASE

Prints FINISHED when every step was right; the cases that end early print nothing more.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from misuse_worker import PATIENCE
from reinit_worker import meet

import horovod_quant.torch as hvq
from horovod_quant.transports.progress import PROGRESS

STATUS = 7
"""Of a worker that leaves on purpose."""


class Stop(Exception):
    pass


class Training:
    """A model whose gradients are the same on all workers, so that each knows the average."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.number = number
        self.model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(5)))
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.01),
            [(f"{number}.{name}", p) for name, p in self.model.named_parameters()],
            compression=hvq.EDEN(bits=4, group_bytes=30_000),
        )
        self.saved = self.optimizer.state_dict()
        # Two threads draw from one generator.
        hvd.broadcast_parameters(
            {f"{number}.{name}": value for name, value in self.model.state_dict().items()}, root_rank=0
        )

    def backward(self, step: int, layers: int = 5) -> None:
        """Of the last layers alone, if there are fewer."""
        x = torch.ones(8, 64) * (1 + (step + self.number) % 5)
        with torch.no_grad():
            for layer in self.model[: 5 - layers]:
                x = layer(x)
        self.model[5 - layers :](x).pow(2).mean().backward()

    def step(self, step: int, choose: random.Random) -> None:
        """A whole backward pass, or part of one, or one that an exception ends."""
        self.optimizer.zero_grad()
        kind = choose.choice(["whole", "whole", "part", "stopped", "none"])
        if kind == "stopped":
            hook = self.model[choose.randrange(5)].weight.register_hook(_stop)
            try:
                self.backward(step)
            except Stop:
                pass
            hook.remove()
        elif kind != "none":
            self.backward(step, 5 if kind == "whole" else choose.randrange(1, 5))
        if choose.random() < 0.3:
            time.sleep(choose.uniform(0, 0.01))
        self.optimizer.synchronize()
        for p in self.model.parameters():
            assert p.grad is not None
            assert torch.isfinite(p.grad).all()
            assert kind != "none" or not p.grad.any()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()

    def exact_step(self) -> None:
        self.optimizer.zero_grad()
        self.backward(0)
        gradients = torch.autograd.grad(
            self.model(torch.ones(8, 64) * (1 + self.number % 5)).pow(2).mean(), list(self.model.parameters())
        )
        self.optimizer.synchronize()
        for own, p in zip(gradients, self.model.parameters()):
            assert torch.linalg.norm(p.grad - own) < 0.3 * torch.linalg.norm(own)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def _stop(gradient: torch.Tensor) -> None:
    raise Stop


def random_steps(number: int, steps: int = 30) -> None:
    """All workers draw the same."""
    training, choose = Training(number), random.Random(f"steps {number}")
    for step in range(steps):
        training.step(step, choose)
        if step % 5 == 0:
            training.exact_step()


def two_threads() -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            random_steps(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def forks() -> None:
    """In the middle of a step; the child constructs a compressor, and leaves as Python does."""
    training = Training(1)
    for step in range(5):
        training.optimizer.zero_grad()
        training.backward(step)
        child = os.fork()
        if child == 0:
            hvq.EDEN()
            sys.stdout.flush()
            os._exit(0)
        training.optimizer.step()
        assert os.waitpid(child, 0)[1] == 0
        training.exact_step()


def again(folder: Path) -> None:
    """Horovod ends in the middle of a step, and is initialized again."""
    training = Training(1)
    training.exact_step()
    training.optimizer.zero_grad()
    training.backward(1)
    rank = hvd.rank()
    (folder / f"0.{rank}").unlink(missing_ok=True)  # of another attempt
    hvd.shutdown()
    meet(folder, 0, rank, 2)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    hvd.init()
    faulthandler.cancel_dump_traceback_later()
    training.optimizer.load_state_dict(training.saved)
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    for _ in range(3):
        training.exact_step()


def leaves(case: str) -> None:
    """In the middle of a step, with the other worker's part of it missing: nothing is answered any more."""
    training = Training(1)
    training.exact_step()
    training.optimizer.zero_grad()
    if hvd.rank() == 0:
        training.backward(1)
        if case == "exit":
            sys.exit(STATUS)
        elif case == "raise":
            raise Stop
    else:
        time.sleep(1.0)


def without_a_compressor(folder: Path) -> None:
    """On one worker alone: an unnamed operation is called otherwise there, and the other one logs why it waits."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("horovod_quant").addHandler(handler)
    PROGRESS.long = 0.3
    if hvd.rank() == 0:
        hvq.EDEN()
    hvd.allreduce_async(torch.ones(1))
    limit = time.monotonic() + PATIENCE
    while hvd.rank() == 0 and not heard and time.monotonic() < limit:
        time.sleep(0.01)
    assert hvd.rank() or "unnamed operation noname.horovod_quant.0.0" in heard[0], heard
    meet(folder, 0, hvd.rank(), 2)
    print("FINISHED", flush=True)
    os._exit(0)  # Horovod has operations under way that never end


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    folder, case = Path(sys.argv[1]), sys.argv[2]
    cases: dict[str, Any] = {
        "steps": lambda: random_steps(0, 60),
        "threads": two_threads,
        "fork": forks,
        "again": lambda: again(folder),
        "unnamed": lambda: without_a_compressor(folder),
    }
    cases.get(case, lambda: leaves(case))()
    if case in cases:
        hvd.barrier()
    print("FINISHED", flush=True)


if __name__ == "__main__":
    main()
