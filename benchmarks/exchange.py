"""Times one exchange of a model's gradients through ``hvd.DistributedOptimizer``, for each compression.

    horovodrun -np 2 python benchmarks/exchange.py --model resnet50
    horovodrun -np 4 python benchmarks/exchange.py --methods fp16 global-qsgd-4 --json exchange.json
    horovodrun -np 2 python benchmarks/exchange.py --methods global-qsgd-4 --group-bytes 1 4 16 64

An exchange lasts from the start of the backward pass to the end of ``optimizer.synchronize()``. The backward pass
visits the parameters in reverse order, as a model's would, but computes nothing: the gradients are there already,
filled with the same random values before every exchange, outside the measurement. The first row of the table, without
any exchange, is what the pass itself costs.

A round measures every method once, so that all of them see the same state of the machine, each time starting with
another one. The table shows medians over the rounds: the wall time (of the slowest worker), the CPU time of all threads
of a worker, Horovod's included (mean over the workers), and the ratio to fp16 within the same round. A second,
instrumented pass then splits the time of each of this package's methods.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple
from unittest.mock import patch

import horovod.torch as hvd
import horovod.torch.optimizer as horovod_optimizer
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from shapes import MODELS, Shapes, elements
from tqdm import tqdm

import horovod_quant.torch as hvq
from horovod_quant import kernels
from horovod_quant.torch import exchange
from horovod_quant.traffic import ring_allreduce_bytes

NOTHING, NONE, FP16, BINSGDM = "no exchange", "none", "fp16", "binsgdm"
SCHEMES = {
    "qsgdinf": functools.partial(hvq.QSGD, norm="max"),
    "nuqsgd": hvq.NUQSGD,
    "global-qsgd": hvq.GlobalQSGD,
}
METHODS = [NONE, FP16, *(f"{scheme}-{bits}" for scheme in SCHEMES for bits in (8, 4, 2)), BINSGDM]

MIB = 2**20
WARM_UP = 3  # in the first exchange the workers agree on groups, in the second one Horovod learns their names
HOROVOD_CACHE = 1024

PHASES = {
    "norms": ["bucket_maxima", "bucket_square_sums", "norms_of_square_sums"],
    "quantize": ["encode_uniform_sum", "encode_uniform_codes", "encode_exponential", "binarize", "vote"],
    "decode": ["decode_uniform_sum", "decode_uniform_codes", "decode_exponential", "decode_signs"],
}
LAUNCH, WAIT, HOROVOD_WAIT, REST = "launch", "wait", "wait (Horovod)", "rest"
LAUNCHES = ["allreduce_async_", "allgather_async", "alltoall_async"]
COLUMNS = ["norms", "quantize", LAUNCH, WAIT, HOROVOD_WAIT, "decode", REST]


class Measurement(NamedTuple):
    """One exchange on one worker: seconds, and numbers of events."""

    wall: float
    cpu: float  # of all threads
    horovod_cpu: float  # of all but the one that calls Horovod
    system_cpu: float
    page_faults: float


class Variant(NamedTuple):
    """A method, and the group size for those that have groups."""

    method: str
    group_mib: float | None = None

    @property
    def ours(self) -> bool:
        return self.method not in (NOTHING, NONE, FP16)

    def label(self, several_sizes: bool) -> str:
        return f"{self.method}, {self.group_mib:g} MiB" if several_sizes and self.ours else self.method

    def compression(self, overlap: bool) -> Any:
        if self.method in (NONE, FP16):
            return getattr(hvd.Compression, self.method)
        assert self.group_mib is not None
        common: dict[str, Any] = {"group_bytes": int(self.group_mib * MIB), "overlap": overlap}
        if self.method == BINSGDM:
            return hvq.BinSGDM(**common)
        scheme, _, bits = self.method.rpartition("-")
        return SCHEMES[scheme](int(bits), **common)

    def refusal(self, size: int) -> str | None:
        """Why the method cannot serve so many workers."""
        if not self.ours:
            return None
        try:
            self.compression(False).policy.check_workers(size)
        except ValueError as error:
            return str(error)
        return None


# ---- one exchange ------------------------------------------------------------------------------------------------


class Visit(torch.autograd.Function):
    """Passes a number through. On the way back it touches a parameter, whose gradient stays as it is."""

    @staticmethod
    def forward(ctx: Any, number: torch.Tensor, parameter: torch.Tensor, until: Callable[[], float]) -> Any:
        ctx.until = until
        return number.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        left = ctx.until() - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return gradient, None, None


class Gradients:
    """The gradients' values and the memory that they are exchanged in, which all methods share."""

    def __init__(self, shapes: Shapes) -> None:
        generator = torch.Generator().manual_seed(hvd.rank())
        self.shapes = shapes
        self.values = 0.01 * torch.randn(elements(shapes), generator=generator)
        self._sizes = list(map(prod, shapes.values()))
        # Apart, as they would be in a training run.
        self._memory = [torch.empty(shape) for shape in shapes.values()]

    def give(self, parameters: list[torch.nn.Parameter]) -> None:
        for parameter, memory, values in zip(parameters, self._memory, self.values.split(self._sizes)):
            memory.view(-1).copy_(values)
            parameter.grad = memory.detach()  # another tensor on the same memory: Horovod may replace it


class Trial:
    """A model and its optimizer, ready to exchange gradients with one method."""

    def __init__(self, variant: Variant, gradients: Gradients, overlap: bool, backward: float) -> None:
        self.variant = variant
        self._gradients = gradients
        self._backward = backward
        self._begin = 0.0
        self.parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in gradients.shapes.values()]
        self._optimizer = self.compression = None
        if variant.method != NOTHING:
            self.compression = variant.compression(overlap)
            plain = (hvq.optim.BinSGDM if variant.method == BINSGDM else torch.optim.SGD)(
                self.parameters, lr=0.1
            )
            # Other names for each variant: the same name with another shape would be a miss in Horovod's cache.
            names = [f"{variant.label(True)}: {name}" for name in gradients.shapes]
            self._optimizer = hvd.DistributedOptimizer(
                plain, named_parameters=list(zip(names, self.parameters)), compression=self.compression
            )

    def exchange(self) -> Measurement:
        self._gradients.give(self.parameters)
        loss = self._forward()
        hvd.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        cpu, thread, self._begin = time.process_time(), time.thread_time(), time.perf_counter()
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.synchronize()
        wall = time.perf_counter() - self._begin
        thread, cpu = time.thread_time() - thread, time.process_time() - cpu
        after = resource.getrusage(resource.RUSAGE_SELF)
        for parameter in self.parameters:
            parameter.grad = None
        faults = after.ru_minflt - before.ru_minflt
        return Measurement(wall, cpu, cpu - thread, after.ru_stime - before.ru_stime, float(faults))

    def _forward(self) -> torch.Tensor:
        """Layer i's part of the backward pass ends when its share of the pass's time is over."""
        loss, left, total = torch.zeros((), requires_grad=True), 0, elements(self._gradients.shapes)
        for parameter in self.parameters:
            loss = Visit.apply(loss, parameter, functools.partial(self._deadline, 1 - left / total))
            left += parameter.numel()
        return loss

    def _deadline(self, share: float) -> float:
        return self._begin + share * self._backward if self._backward else 0.0

    def bytes_sent(self) -> float:
        """By one worker, so far; for Horovod's own methods, in one exchange."""
        if self.variant.ours:
            return self.compression.stats().total.bytes_sent
        width = {NOTHING: 0, NONE: 4, FP16: 2}[self.variant.method]
        return ring_allreduce_bytes(width * elements(self._gradients.shapes), hvd.size())

    def bytes_of_one_exchange(self) -> float:
        before = self.bytes_sent()
        self.exchange()
        return self.bytes_sent() - (before if self.variant.ours else 0)


def measure(trials: list[Trial], rounds: int) -> np.ndarray:
    """Measurements of all workers, ``[worker, trial, round, field of Measurement]``."""
    found = np.zeros((len(trials), rounds, len(Measurement._fields)))
    progress = progress_bar("totals", (rounds + WARM_UP) * len(trials))
    for number in range(-WARM_UP, rounds):
        for offset in range(len(trials)):
            index = (number + offset) % len(trials)
            measurement = trials[index].exchange()
            if number >= 0:
                found[index, number] = measurement
            progress.update()
    progress.close()
    return from_all_workers(found, "totals")


def progress_bar(what: str, total: int) -> Any:
    return tqdm(desc=what, total=total, disable=hvd.rank() > 0, mininterval=2, ascii=True)


def from_all_workers(array: np.ndarray, name: str) -> np.ndarray:
    return hvd.allgather(torch.from_numpy(array)[None], name=f"measurements of {name}").numpy()


# ---- where the time goes -----------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up wall and CPU seconds of the calling thread, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, np.ndarray] = {}

    def restart(self) -> None:
        self.seconds = {phase: np.zeros(2) for phase in COLUMNS}

    def timed(self, phase: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            begin = np.array([time.perf_counter(), time.thread_time()])
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[phase] += [time.perf_counter(), time.thread_time()] - begin

        return wrapper


@contextmanager
def instrumented(stopwatch: Stopwatch) -> Iterator[None]:
    """Compressors that start to work in here have their kernels and Horovod's operations timed."""
    backend = SimpleNamespace(**vars(kernels.get()))
    for phase, names in PHASES.items():
        for name in names:
            setattr(backend, name, stopwatch.timed(phase, getattr(backend, name)))
    patches = [
        patch.object(kernels, "get", lambda name="auto": backend),
        patch.object(exchange, "_collect", stopwatch.timed(WAIT, exchange._collect)),
        patch.object(
            horovod_optimizer, "synchronize", stopwatch.timed(HOROVOD_WAIT, horovod_optimizer.synchronize)
        ),
    ]
    for owner in (hvd, horovod_optimizer):
        for name in set(LAUNCHES) & set(vars(owner)):
            patches.append(patch.object(owner, name, stopwatch.timed(LAUNCH, getattr(owner, name))))
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def split(variants: list[Variant], rounds: int, make: Callable[[Variant], Trial]) -> np.ndarray:
    """Medians of milliseconds, ``[variant, phase, wall or CPU]``, means over the workers."""
    stopwatch = Stopwatch()
    found = np.zeros((len(variants), rounds, len(COLUMNS), 2))
    with instrumented(stopwatch):
        trials = [make(variant) for variant in variants]
        progress = progress_bar("split", (rounds + WARM_UP) * len(trials))
        for number in range(-WARM_UP, rounds):
            for index, trial in enumerate(trials):
                stopwatch.restart()
                whole = trial.exchange()
                accounted = sum(stopwatch.seconds.values())
                thread = whole.cpu - whole.horovod_cpu
                stopwatch.seconds[REST] = np.array([whole.wall - accounted[0], thread - accounted[1]])
                if number >= 0:
                    found[index, number] = [stopwatch.seconds[phase] for phase in COLUMNS]
                progress.update()
        progress.close()
    return 1e3 * np.median(from_all_workers(found, "phases").mean(axis=0), axis=1)


# ---- the command -------------------------------------------------------------------------------------------------


def results(trials: list[Trial], totals: np.ndarray, several_sizes: bool) -> list[dict[str, Any]]:
    by_field = dict(zip(Measurement._fields, np.moveaxis(totals, -1, 0)))  # each [worker, trial, round]
    wall, cpu = by_field["wall"].max(axis=0), by_field["cpu"].mean(axis=0)
    methods = [trial.variant.method for trial in trials]

    def times_fp16(seconds: np.ndarray, index: int) -> float | None:
        if FP16 not in methods:
            return None
        return float(np.median(seconds[index] / seconds[methods.index(FP16)]))

    def milliseconds(field: str, index: int) -> float:
        return 1e3 * float(np.median(by_field[field].mean(axis=0)[index]))

    return [
        {
            "method": trial.variant.label(several_sizes),
            "group_bytes": int(trial.variant.group_mib * MIB) if trial.variant.group_mib else None,
            "wall_milliseconds": 1e3 * float(np.median(wall[index])),
            "wall_times_fp16": times_fp16(wall, index),
            "cpu_milliseconds": milliseconds("cpu", index),
            "cpu_times_fp16": times_fp16(cpu, index),
            "horovod_cpu_milliseconds": milliseconds("horovod_cpu", index),
            "system_cpu_milliseconds": milliseconds("system_cpu", index),
            "page_faults": float(np.median(by_field["page_faults"].mean(axis=0)[index])),
            "bytes_sent": trial.bytes_of_one_exchange(),
        }
        for index, trial in enumerate(trials)
    ]


def shown(number: float | None, digits: int = 1) -> str:
    return "" if number is None else f"{number:,.{digits}f}"


def totals_table(title: str, found: list[dict[str, Any]]) -> Table:
    table = Table(
        title=title,
        box=box.MARKDOWN,
        caption="CPU: of all threads of a worker; Horovod: its own threads' part",
    )
    table.add_column("method")
    for column in ("wall ms", "x fp16", "CPU ms", "x fp16", "Horovod", "system", "page faults", "MB sent"):
        table.add_column(column, justify="right")
    for result in found:
        table.add_row(
            result["method"],
            shown(result["wall_milliseconds"]),
            shown(result["wall_times_fp16"], 2),
            shown(result["cpu_milliseconds"]),
            shown(result["cpu_times_fp16"], 2),
            shown(result["horovod_cpu_milliseconds"]),
            shown(result["system_cpu_milliseconds"]),
            shown(result["page_faults"], 0),
            shown(1e-6 * result["bytes_sent"]),
        )
    return table


def phases_table(found: list[dict[str, Any]]) -> Table:
    table = Table(
        title="Milliseconds of the calling thread: wall / CPU",
        box=box.MARKDOWN,
        caption="wait: for this package's collectives",
    )
    table.add_column("method")
    for phase in COLUMNS:
        table.add_column(phase, justify="right")
    for result in found:
        if "phases" in result:
            pairs = [result["phases"][phase] for phase in COLUMNS]
            table.add_row(result["method"], *(f"{wall:.1f} / {cpu:.1f}" for wall, cpu in pairs))
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a whole exchange of a model's gradients.")
    parser.add_argument("--model", default="resnet50", choices=MODELS, help="whose gradients")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD",
                        help=f"what to measure: {', '.join(METHODS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each method")
    parser.add_argument("--split-rounds", type=int, default=5, help="instrumented ones; 0: none")
    parser.add_argument("--group-bytes", nargs="+", type=float, default=[16], metavar="MIB",
                        help="size of this package's groups in MiB; several are compared")  # fmt: skip
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True,
                        help="let exchanges start during the backward pass")  # fmt: skip
    parser.add_argument("--backward", type=float, default=0.0, metavar="SECONDS",
                        help="let the backward pass sleep for so long, as if an accelerator worked")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    shapes = MODELS[arguments.model]
    variants = [Variant(NOTHING)]
    for method in arguments.methods:
        ours = Variant(method, 0).ours
        variants += [Variant(method, size) for size in arguments.group_bytes] if ours else [Variant(method)]

    # Many differently named exchanges in one process would push each other out of Horovod's cache.
    os.environ.setdefault(
        "HOROVOD_CACHE_CAPACITY", str(max(HOROVOD_CACHE, len(variants) * (len(shapes) + 100)))
    )
    torch.set_num_threads(1)
    hvd.init()
    if hvd.size() < 2:
        raise SystemExit("one worker exchanges nothing: horovodrun -np 2 python benchmarks/exchange.py")
    # horovodrun may cut its workers' output between any two bytes: no colours, and ASCII alone.
    console = Console(width=120, color_system=None, quiet=hvd.rank() > 0)
    for variant in variants:
        if variant.refusal(hvd.size()):
            console.print(f"{variant.method} is left out: {variant.refusal(hvd.size())}")
    variants = [variant for variant in variants if not variant.refusal(hvd.size())]

    controller = "MPI" if os.environ.get("OMPI_COMM_WORLD_SIZE") else "Gloo"
    setting = {
        "model": arguments.model,
        "elements": elements(shapes),
        "workers": hvd.size(),
        "controller": controller,
        "overlap": arguments.overlap,
        "backward_seconds": arguments.backward,
        "kernels": kernels.describe(),
        "processor": platform.processor() or platform.machine(),
    }
    console.print(f"{setting['kernels']}; {setting['processor']}")
    gradients = Gradients(shapes)
    several_sizes = len(arguments.group_bytes) > 1

    def make(variant: Variant) -> Trial:
        return Trial(variant, gradients, arguments.overlap, arguments.backward)

    trials = [make(variant) for variant in variants]
    totals = measure(trials, arguments.rounds)
    found = results(trials, totals, several_sizes)
    ours = [variant for variant in variants if variant.ours]
    if ours and arguments.split_rounds:
        phases = split(ours, arguments.split_rounds, make)
        for variant, milliseconds in zip(ours, phases):
            result = found[variants.index(variant)]
            result["phases"] = {phase: pair.tolist() for phase, pair in zip(COLUMNS, milliseconds)}

    console.print(totals_table(f"{arguments.model}, {hvd.size()} workers, {controller}", found))
    if ours and arguments.split_rounds:
        console.print(phases_table(found))
    if arguments.json and hvd.rank() == 0:
        with open(arguments.json, "w") as file:
            json.dump({**setting, "results": found}, file, indent=1)
    hvd.shutdown()


if __name__ == "__main__":
    main()
