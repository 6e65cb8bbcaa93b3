"""Whole training steps between the hosts of a lab: time and bytes."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from reproduction import running

WORKER = Path(__file__).with_name("steps_worker.py")
MODEL = running.EXAMPLES / "torch_char_transformer.py"

WIDE = {"layers": 4, "width": 384, "heads": 6, "context": 64}
NARROW = {"layers": 1, "width": 32, "heads": 2, "context": 16}

# Tensors that Horovod's response cache holds, of all methods together.
VARIABLES = {"HOROVOD_CACHE_CAPACITY": "8192"}


class Settings(NamedTuple):
    """Settings of a measurement.

    Attributes:
        hosts, per_host: hosts of the lab, and workers on each.
        rate: of the links, as scripts/lab takes it.
        methods: names of `horovod_quant.frontends.methods`, or of `steps_worker`.
        model: arguments of the transformer of the example.
        sequences: per worker and step.
        rounds, warm_up: number of measured and unmeasured rounds, each with a trial of every method.
        steps: per trial.
        min_elements: smaller gradients are not compressed.
        cycle_time: HOROVOD_CYCLE_TIME in milliseconds; None for its default.
        version: of the names of methods.
        cores: that all hosts share; None for all.
        isa: the instruction set of kernels and of PyTorch; None for the best.
    """

    hosts: int
    per_host: int
    rate: str
    methods: tuple[str, ...]
    model: dict[str, int]
    sequences: int = 1
    rounds: int = 5
    warm_up: int = 3
    steps: int = 1
    min_elements: int = 1024
    cycle_time: int | None = None
    version: int = running.NAMES
    cores: int | None = None
    isa: str | None = None


def measure(settings: Settings) -> dict[str, Any]:
    """Train with all methods in rounds, in one run.

    Returns:
        ``elements`` of the model, ``workers``, and ``results`` by method: ``seconds`` per step of the slowest worker,
        one value per round; ``link_bytes`` per step that left a host by its link (mean of the hosts), likewise;
        ``sent_bytes`` per step and worker, as counted by the package, or by the formula of a ring.

    Raises:
        running.RunFailed: a worker or the lab failed.
    """
    name = f"steps-{settings.hosts}x{settings.per_host}-{settings.rate}-"
    name += running.key(settings, [WORKER, MODEL])
    if running.kept(name) is None:
        variables = dict(VARIABLES)
        if settings.cycle_time is not None:
            variables["HOROVOD_CYCLE_TIME"] = str(settings.cycle_time)
        if settings.isa is not None:
            variables.update(HOROVOD_QUANT_ISA=settings.isa, ATEN_CPU_CAPABILITY=settings.isa)
        with (
            on_cores(settings.cores),
            running.lab(settings.hosts, settings.rate) as lab,
            tempfile.TemporaryDirectory() as folder,
        ):
            file = Path(folder) / "figures.json"
            command = [sys.executable, str(WORKER), json.dumps(settings._asdict()), str(file)]
            lab.horovodrun(command, settings.per_host, variables)
            running.keep(name, json.loads(file.read_text()))
    return running.kept(name)


@contextmanager
def on_cores(count: int | None) -> Iterator[None]:
    """Bind this process, and its child processes, to some of its cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def seconds(figures: dict[str, Any], method: str) -> float:
    """Return the seconds per step, median of the rounds."""
    return statistics.median(figures["results"][method]["seconds"])


def speed_up(figures: dict[str, Any], method: str, over: str = "none") -> float:
    """Return the speed-up of a method over another.

    It is the median of the ratios within rounds.
    """
    own, other = (figures["results"][name]["seconds"] for name in (method, over))
    return statistics.median(b / a for a, b in zip(own, other))


def link_bytes(figures: dict[str, Any], method: str) -> float:
    """Return the bytes per step that leave a host.

    They are the median of the rounds.
    """
    return statistics.median(figures["results"][method]["link_bytes"])
