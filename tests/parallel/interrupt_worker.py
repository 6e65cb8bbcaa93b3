"""Raises from a signal handler in the middle of what a backward pass exchanges, and goes on with ``synchronize()``.

    horovodrun -np 2 python interrupt_worker.py FOLDER

Prints the error that ends the step on each worker, and RECOVERED when another one was right after Horovod was
initialized again, as ``hvd.elastic.run`` does it.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path
from types import FrameType

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from misuse_worker import PATIENCE
from reinit_worker import meet

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
    folder, rank = Path(sys.argv[1]), hvd.rank()
    (folder / f"0.{rank}").unlink(missing_ok=True)  # of another attempt
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), compression=hvq.EDEN()
    )
    saved = optimizer.state_dict()
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
    signal.setitimer(signal.ITIMER_REAL, 0)
    hvd.shutdown()
    meet(folder, 0, rank, 2)
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    hvd.init()
    faulthandler.cancel_dump_traceback_later()
    optimizer.load_state_dict(saved)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer.zero_grad()
    model(torch.ones(8, 256)).pow(2).mean().backward()
    exact = [parameter.grad.clone() for parameter in model.parameters()]  # on all workers the same
    optimizer.synchronize()
    for own, parameter in zip(exact, model.parameters()):
        assert torch.linalg.norm(parameter.grad - own) < 0.5 * torch.linalg.norm(own)
    print("RECOVERED", flush=True)


if __name__ == "__main__":
    main()
