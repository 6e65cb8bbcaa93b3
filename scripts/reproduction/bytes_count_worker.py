"""Train with several methods in rounds, and time each step. Run by `bytes_count`.

    horovodrun -np 4 -H host1:1,host2:1,host3:1,host4:1 python bytes_count_worker.py SETTINGS FILE

SETTINGS is the JSON of `bytes_count.launch`; the figures go to FILE. Methods whose names begin with ``ddp`` are hooks
of DistributedDataParallel, from PyTorch or this package; the others run under Horovod. The methods of one launch are
all of one kind, since the threads of the other library would slow them down.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import eden_worker
import horovod.torch as hvd
import numpy as np
import torch
import torch.distributed as dist
from eden_worker import example, load_text
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_quant.torch as hvq
from horovod_quant import kernels
from horovod_quant.bench import ddp_trial, torch_model, torch_trial
from horovod_quant.frontends import methods

ALONE, AUTO, DDP, POWERSGD = "alone", "auto", "ddp", "powersgd-"
BACKWARD = 2 / 3
"""Share of the backward pass in compute that a sleep replaces."""


class Sleeping(torch.nn.Module):
    """Model that sleeps where an accelerator would compute; its gradients are given."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], computing: float) -> None:
        super().__init__()
        self._forward = (1 - BACKWARD) * computing
        self.visited = torch_model.Model(shapes, BACKWARD * computing)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        time.sleep(self._forward)
        self.visited.begin = time.perf_counter()
        return self.visited(torch.zeros((), requires_grad=True))


class Trial:
    """Training of a model with one method.

    Args:
        name: of the method, `ALONE` or `AUTO`; beginning with `DDP` for a hook.
        settings: see the module.
        workers: Horovod, or the process group with its interface.
        data: the text.
        gradients: of a model that sleeps.
    """

    def __init__(self, name: str, settings: dict[str, Any], workers: Any, data: Any, gradients: Any) -> None:
        self._given = gradients
        self._context, self._sequences = settings["model"]["context"], settings["batch"] // workers.size()
        self._text = torch.from_numpy(data.training)
        self._sampling = torch.Generator().manual_seed(workers.rank())  # seed 0, as in the example
        torch.manual_seed(0)
        model: Any = example.CharTransformer(**settings["model"])
        if gradients is not None:
            model = Sleeping(gradients.shapes, settings["computing"])
        self._parameters = list(model.parameters())
        loss = model if gradients is not None else eden_worker.Loss(model)
        method = name[len(DDP) + 1 :] or methods.NONE if is_ddp(name) else name
        rate = settings["lr"]["binsgdm" if method == methods.BINSGDM else "adam"]
        if method == methods.BINSGDM:
            optimizer: Any = hvq.optim.BinSGDM(self._parameters, lr=rate, beta=0.9)
        else:
            optimizer = torch.optim.Adam(self._parameters, lr=rate, betas=(0.9, 0.98))
        if gradients is None:  # see `simulated`, whose losses these are
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        self._compression: Any = None
        self._synchronize = lambda: None
        if method == ALONE:
            pass
        elif is_ddp(name):
            loss = with_hook(loss, method, optimizer)
        else:
            self._compression = hvq.Auto() if name == AUTO else methods.parse(method).compression(hvd, hvq)
            # Names per method: the same name with another shape would be a miss in Horovod's response cache.
            named = [(f"{name}: {key}", parameter) for key, parameter in model.named_parameters()]
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=named, compression=self._compression
            )
            self._synchronize = optimizer.synchronize
        steps = settings["steps"] * (2 if method == methods.BINSGDM else 1)
        self._rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: example.schedule(min(1.0, (step + 1) / steps))
        )
        self._optimizer, self._loss = optimizer, loss

    def prepare(self) -> None:
        """Do the part of a step that is not measured."""
        if self._given is not None:
            self._optimizer.zero_grad()  # it makes no step
            self._given.give(self._parameters)
        starts = torch.randint(len(self._text) - self._context, (self._sequences,), generator=self._sampling)
        self._windows = example.windows_at(self._text, starts, self._context)

    def step(self) -> float:
        if self._given is not None:
            self._loss(self._windows).backward()
            self._synchronize()
            return 0.0
        self._optimizer.zero_grad()
        loss = self._loss(self._windows)
        loss.backward()
        self._optimizer.step()
        self._rate.step()
        return loss.item()

    def chosen(self) -> str | None:
        """Return the report of `AUTO`, or None."""
        return str(self._compression.report()) if isinstance(self._compression, hvq.Auto) else None


def with_hook(loss: torch.nn.Module, method: str, optimizer: Any) -> DistributedDataParallel:
    buckets: dict[str, Any] = {"bucket_cap_mb": 1000} if method.startswith(POWERSGD) else {}
    ddp = DistributedDataParallel(loss, gradient_as_bucket_view=True, **buckets)
    if method.startswith(POWERSGD):
        state = powerSGD_hook.PowerSGDState(
            None, int(method[len(POWERSGD) :]), start_powerSGD_iter=ddp_trial.START_POWERSGD
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method in ddp_trial.HOOKS:
        hook = ddp_trial.HOOKS[method]
        if hook is not None:
            ddp.register_comm_hook(None, hook)
    else:
        own = optimizer if method == methods.BINSGDM else None
        hvq.ddp.register(ddp, methods.parse(method).compression(None, hvq), own)
    return ddp


def is_ddp(name: str) -> bool:
    return name.partition("-")[0] == DDP


def turn(trial: Trial, steps: int, door: Any) -> list[tuple[float, float]]:
    """Run a trial; return seconds (maximum) and loss (mean) of each step."""
    door.barrier()
    own = []
    for _ in range(steps):
        trial.prepare()
        begin = time.perf_counter()
        loss = trial.step()
        own.append((time.perf_counter() - begin, loss))
    workers = door.allgather(np.array([own]), "figures")
    return list(zip(workers[:, :, 0].max(axis=0).tolist(), workers[:, :, 1].mean(axis=0).tolist()))


def random_gradients(settings: dict[str, Any], rank: int) -> Any:
    """Return random gradients with the shapes of the transformer."""
    model = example.CharTransformer(**settings["model"])
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    rng = np.random.default_rng(rank)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes.values()]
    return torch_model.Gradients(shapes, values)


def connect(file: Path) -> None:
    """Create PyTorch's process group of workers that horovodrun has started, without Horovod."""
    rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)


def main() -> None:
    settings, file = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    door: Any = ddp_trial if is_ddp(settings["methods"][0]) else torch_trial
    workers: Any = hvd
    if door is ddp_trial:
        connect(file.with_name("store"))
        workers = ddp_trial.workers
    else:
        hvd.init()
    data = load_text()
    gradients = random_gradients(settings, workers.rank()) if settings["computing"] else None
    trials = {name: Trial(name, settings, workers, data, gradients) for name in settings["methods"]}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in trials}
    order = list(trials)
    for number in range(-settings["warm_up"], settings["rounds"]):
        # A round has a trial of every method, so that all see the same state of the machine; the first one rotates.
        first = number % len(order)
        for name in order[first:] + order[:first]:
            measured = turn(trials[name], settings["turn"], door)
            if number >= 0:
                found[name] += measured
    if workers.rank() == 0:
        figures = {
            "kernels": kernels.describe(),
            "torch": torch.backends.cpu.get_cpu_capability(),
            "chosen": {name: trial.chosen() for name, trial in trials.items() if trial.chosen()},
            "seconds": {name: [round(seconds, 5) for seconds, _ in own] for name, own in found.items()},
            "losses": {name: [round(loss, 4) for _, loss in own] for name, own in found.items()},
        }
        file.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
