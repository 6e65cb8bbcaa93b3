"""Trainings of the transformer with all workers in one process.

The arithmetic of the simulator averages gradients, bit-identical to real workers; each worker samples the text that it
would sample under Horovod. Sums in float16 and bfloat16 add the workers in the order of their ranks; a ring starts each
shard at another rank.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import horovod_quant.torch as hvq
from horovod_quant import simulator
from horovod_quant.frontends import methods
from horovod_quant.frontends.frontend import MIN_ELEMENTS
from horovod_quant.schemes import BinSGDM
from horovod_quant.schemes.base import BinaryState, Scheme, Workers
from horovod_quant.transports.traffic import ring_allreduce_bytes
from reproduction import common, running

NARROW = {"fp16": torch.float16, "ddp-fp16": torch.float16, "ddp-bf16": torch.bfloat16}
"""Methods that sum in 16 bits. DDP's hooks divide before they sum, Horovod after."""

PROGRAMS = (
    Path(__file__),
    *(running.EXAMPLES / name for name in ("torch_char_transformer.py", "python_text.py")),
)
BETA = 0.9  # of the BinSGDM optimizer, as in the example


class Job(NamedTuple):
    """Settings of a training, except for the seed.

    Attributes:
        claim: that the training belongs to.
        method: a name of `horovod_quant.frontends.methods`, or of `NARROW`.
        workers, batch: number of workers, and of sequences that they share in a step.
        model: arguments of the transformer of the example.
        steps, lr: number of steps, and learning rate after the warm-up.
    """

    claim: str
    method: str
    workers: int
    batch: int
    model: dict[str, int]
    steps: int
    lr: float

    def kept_as(self, seed: int) -> str:
        return f"{self.claim}-{self.method}-{self.workers}-seed-{seed}-{running.key(list(self), PROGRAMS)}"


def trainings(wanted: Iterable[tuple[Job, int]], processes: int | None = None) -> None:
    """Train each job with its seed unless cached; cache each.

    Args:
        wanted: jobs and seeds.
        processes: trainings at a time; None for the number of cores.
    """
    missing = {job.kept_as(seed): (job, seed) for job, seed in wanted}
    missing = {name: each for name, each in missing.items() if running.kept(name) is None}
    processes = min(len(missing), processes or len(os.sched_getaffinity(0)))
    if processes < 2:
        for name, each in missing.items():
            running.keep(name, train(*each))
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        names = {pool.submit(train, *each): name for name, each in missing.items()}
        for done in as_completed(names):
            running.keep(names[done], done.result())


def kept(job: Job, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the cached trainings of a job, in the order of the seeds."""
    return [run for run in (running.kept(job.kept_as(seed)) for seed in seeds) if run is not None]


def train(job: Job, seed: int) -> dict[str, Any]:
    """Train once.

    Returns:
        ``losses``, means over the workers, ``validation_loss``, and ``bytes_per_step`` of a worker.
    """
    example = running.import_example("torch_char_transformer")
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = example.CharTransformer(**job.model)
    named = dict(model.named_parameters())
    data = running.import_example("python_text").load_text()
    text, validation = (torch.from_numpy(part) for part in data)
    samplers = [torch.Generator().manual_seed(job.workers * seed + rank) for rank in range(job.workers)]
    average = Average(job.method, {name: each.numel() for name, each in named.items()}, job.workers, seed)
    optimizer: Any
    if average.binary:
        optimizer = hvq.optim.BinSGDM(model.parameters(), lr=job.lr, beta=BETA, seed=seed)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=job.lr, betas=(0.9, 0.98))
    # As `hvd.broadcast_optimizer_state` does, after which Adam's bias correction starts at the second step.
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: example.schedule((step + 1) / job.steps))
    losses, context = [], job.model["context"]
    for step in range(job.steps):
        own, gradients = [], []
        for sampler in samplers:
            starts = torch.randint(len(text) - context, (job.batch // job.workers,), generator=sampler)
            optimizer.zero_grad()
            loss = model.loss(example.windows_at(text, starts, context))
            loss.backward()
            own.append(loss.item())
            gradients.append({name: each.grad.numpy().reshape(-1) for name, each in named.items()})
        averages = average(gradients, step)
        for name, parameter in named.items():
            parameter.grad = torch.from_numpy(averages[name]).view_as(parameter)
            if average.binary and name in average.compressed:
                optimizer.mark_exchanged(parameter)
        optimizer.step()
        rate.step()
        losses.append(common.mean(own))
    return {
        "losses": losses,
        "validation_loss": validate(example, model, validation, context),
        "bytes_per_step": average.bytes_sent / job.steps,
    }


@torch.no_grad()
def validate(example: Any, model: Any, text: torch.Tensor, context: int) -> float:
    """Validate as the example does, with one worker."""
    starts = torch.linspace(0, len(text) - context - 1, example.VALIDATION_SEQUENCES).long()
    losses = [
        float(model.loss(example.windows_at(text, part, context))) * len(part) for part in starts.split(16)
    ]
    return sum(losses) / example.VALIDATION_SEQUENCES


class Average:
    """Average of the gradients of all workers with one method.

    Args:
        method: see `Job`.
        sizes: elements of each gradient, by name.
        workers: their number.
        seed: of the rounding.
    """

    def __init__(self, method: str, sizes: dict[str, int], workers: int, seed: int) -> None:
        self._narrow = NARROW.get(method)
        self._divide_first = method.startswith("ddp-")
        self._scheme: Scheme | None = None if self._narrow else methods.parse(method).scheme()
        self._workers, self._seed = workers, seed
        self.binary = isinstance(self._scheme, BinSGDM)
        large = [name for name, size in sizes.items() if size >= MIN_ELEMENTS]
        self.compressed = large if self._scheme is not None else []
        self._states = [
            [self._state(name, sizes[name], rank) for name in self.compressed] for rank in range(workers)
        ]
        self.bytes_sent = 0.0

    def _state(self, name: str, size: int, rank: int) -> BinaryState:
        assert self._scheme is not None
        start, stop = self._scheme.owned(name, size, Workers(rank, self._workers)) if self.binary else (0, 0)
        return BinaryState(*np.zeros((2, stop - start), np.float32), BETA)

    def __call__(self, everyone: Sequence[dict[str, np.ndarray]], step: int) -> dict[str, np.ndarray]:
        """Return the averages of the gradients of a step, by name."""
        found = {
            name: self._plain([own[name] for own in everyone])
            for name in everyone[0]
            if name not in self.compressed
        }
        if self._scheme is not None:
            done = simulator.run(
                self._scheme,
                [[own[name] for name in self.compressed] for own in everyone],
                names=self.compressed,
                seed=self._seed,
                step=step,
                states=self._states if self.binary else None,
            )
            found.update(zip(self.compressed, done.decoded[0]))
            self.bytes_sent += sum(done.bytes_sent.values())
        return found

    def _plain(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        element = 4 if self._narrow is None else 2
        self.bytes_sent += ring_allreduce_bytes(element * arrays[0].size, self._workers)
        tensors = [torch.from_numpy(array).to(self._narrow or torch.float32) for array in arrays]
        if self._divide_first:
            tensors = [tensor / self._workers for tensor in tensors]
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        return (total if self._divide_first else total / self._workers).float().numpy()
