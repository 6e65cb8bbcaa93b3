"""Measure what communication on a GPU costs the host, without a GPU.

Counts launches and uploads of tables, and times Python. The gradients of a model go through whole steps, group by
group: encoding, collectives and decoding. Triton's interpreter replaces the GPU, and a launcher that does nothing
replaces Triton's, so that everything is made except what the GPU does. Collectives are simulated. The times lack what
only a GPU has: streams, events, copies, and CUDA's part of a launch.

    python benchmarks/gpu_host.py
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from horovod_quant.analysis.models import MODELS  # noqa: E402
from horovod_quant.frontends import methods  # noqa: E402
from horovod_quant.frontends.arguments import GROUP_BYTES  # noqa: E402
from horovod_quant.kernels.keys import RngKey  # noqa: E402
from horovod_quant.kernels.triton import (  # noqa: E402
    arguments,
    arrays,
    functions,
    launching,
    rotated,
    staging,
)
from horovod_quant.schemes.base import (  # noqa: E402
    Allgather,
    Allreduce,
    BinaryState,
    Gradient,
    Scheme,
    Workers,
    split_points,
)
from horovod_quant.torch.device import DeviceMemory  # noqa: E402

METHODS = ("global-qsgd-8", "qsgd-4", "eden-3", "binsgdm")
SIZES = (1, 2)
COLUMNS = {
    "launches": "launches",
    "uploads": "uploads",
    "us_a_gradient": "us per gradient",
    "us_a_launch": "us per launch",
    "milliseconds": "ms",
}


class Counter:
    """A launcher that replaces Triton's and counts.

    Attributes:
        launches: of kernels.
        uploads: of tables to the GPU.
    """

    def __init__(self) -> None:
        self.launches = self.uploads = 0
        for module in (arrays, functions, rotated):
            for kernel in vars(module).values():
                if isinstance(kernel, launching.Kernel):
                    kernel.function = self
        for module, name in ((arguments, "on_device"), (launching, "on_device"), (staging, "upload")):
            setattr(module, name, self._counted(getattr(module, name)))

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        self.launches += 1

    def _counted(self, upload: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            self.uploads += 1
            return upload(*arguments)

        return counted

    def reset(self) -> None:
        self.launches = self.uploads = 0


class Group:
    """Gradients of one worker that share their collectives."""

    def __init__(
        self, scheme: Scheme, shapes: dict[str, tuple[int, ...]], workers: Workers, memory: DeviceMemory
    ) -> None:
        self._scheme, self._workers, self._memory = scheme.for_workers(workers), workers, memory
        self._tensors = [torch.empty(shape) for shape in shapes.values()]
        self._chains = [RngKey(0, name) for name in shapes]
        self._states = [
            [torch.empty(tensor.shape) for _ in range(2)] if scheme.own_optimizer else None
            for tensor in self._tensors
        ]
        self._taken: list[Any] = [None] * len(self._tensors)

    def begin(self, step: int) -> Any:
        memory, gradients = self._memory, []
        for i, (tensor, chain, state) in enumerate(zip(self._tensors, self._chains, self._states)):
            self._taken[i] = memory.taken(tensor, self._taken[i])
            gradient = Gradient(self._taken[i], chain, step)
            if state is not None:
                momentum, scale = (memory.taken(each, None) for each in state)
                gradient.state = BinaryState(momentum, scale, 0.9)
            gradients.append(gradient)
        memory.catch_up()
        return memory.resumed(memory.begun(self._scheme, gradients, self._workers), False)

    def finish(self, decoded: Any) -> None:
        memory = self._memory
        destinations = list(map(memory.destination_of, self._tensors, self._taken))
        with memory.working():
            factor = 1.0 / int(decoded.active)
            memory.decode(decoded, range(len(destinations)), factor, destinations)
        memory.hand_over()


def answers_to(requests: Sequence[Any]) -> list[Any]:
    """Return arrays of the right sizes, without adding anything."""
    first, size = requests[0], len(requests)
    if isinstance(first, Allreduce):
        return [first.array] * size
    if isinstance(first, Allgather):
        return [[request.array for request in requests]] * size
    at = split_points(first.splits)
    return [[request.array[at[i] : at[i + 1]] for request in requests] for i in range(size)]


def exchange(groups: Sequence[Group], step: int) -> None:
    """Run one step of a group, of all workers."""
    running = [group.begin(step) for group in groups]
    answers: list[Any] = [None] * len(groups)
    while True:
        requests, results = [], []
        for each, answer in zip(running, answers):
            try:
                requests.append(each.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            break
        if isinstance(requests[0], Allreduce) and requests[0].op == "sum":
            for request in requests:
                request.array[-1:] = 1  # where the workers are counted
        answers = answers_to(requests)
    for group, result in zip(groups, results):
        group.finish(result)


def cut(shapes: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
    """Group gradients as PyTorch's frontend does, in a backward pass's order."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    room = GROUP_BYTES
    for name, shape in reversed(shapes.items()):
        needed = 4 * prod(shape)
        if groups[-1] and needed > room:
            groups.append({})
            room = GROUP_BYTES
        groups[-1][name] = shape
        room -= needed
    return groups


def measure(method: str, model: str, size: int, rounds: int, counter: Counter) -> dict[str, Any]:
    """Return one worker's least CPU time for all gradients among the rounds."""
    scheme, shapes = methods.parse(method).scheme(), MODELS[model]
    memories = [DeviceMemory(torch.device("cpu"), takes_tensors=True) for _ in range(size)]
    cuts = cut(shapes)
    groups = [
        [Group(scheme, part, Workers(rank, size), memories[rank]) for rank in range(size)] for part in cuts
    ]
    seconds = []
    for step in range(rounds + 2):
        counter.reset()
        begin = time.thread_time()
        for group in groups:
            exchange(group, step)
        seconds.append(time.thread_time() - begin)
    launches, uploads, least = counter.launches // size, counter.uploads // size, min(seconds[2:]) / size
    return {
        "model": model,
        "gradients": len(shapes),
        "groups": len(groups),
        "method": method,
        "workers": size,
        "launches": launches,
        "uploads": uploads,
        "us_a_gradient": 1e6 * least / len(shapes),
        "us_a_launch": 1e6 * least / launches,
        "milliseconds": 1e3 * least,
    }


def table_of(results: Sequence[dict[str, Any]]) -> Table:
    first = results[0]
    table = Table(
        title=f"{first['model']}: {first['gradients']} gradients in {first['groups']} groups, one step of one worker",
        box=box.MARKDOWN,
    )  # fmt: skip
    table.add_column("method", no_wrap=True)
    for title in ("workers", *COLUMNS.values()):
        table.add_column(title, justify="right")
    for result in results:
        cells = [result[name] for name in ("workers", *COLUMNS)]
        table.add_row(
            result["method"], *(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
        )
    return table


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["resnet50", "bert-base"])
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--workers", nargs="+", type=int, default=SIZES, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (5); the least time counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


def main() -> None:
    arguments = make_parser().parse_args()

    torch.set_num_threads(1)
    console, counter, results = Console(), Counter(), []
    with torch.no_grad(), np.errstate(all="ignore"):
        for model in arguments.models:
            measured = [
                measure(method, model, size, arguments.rounds, counter)
                for method in arguments.methods
                for size in arguments.workers
            ]
            console.print(table_of(measured))
            results += measured
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
