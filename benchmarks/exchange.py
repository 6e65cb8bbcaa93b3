"""Times one exchange of a model's gradients through Horovod's optimizer or tape, for each compression.

    horovodrun -np 2 python benchmarks/exchange.py --model resnet50
    horovodrun -np 4 python benchmarks/exchange.py --methods fp16 global-qsgd-4 --json exchange.json
    horovodrun -np 2 python benchmarks/exchange.py --methods global-qsgd-4 --group-bytes 1 4 16 64
    horovodrun -np 2 python benchmarks/exchange.py --framework tensorflow

An exchange lasts from the start of the backward pass until the reduced gradients are there; `exchange_torch` and
`exchange_tensorflow` say how that is done. The pass computes nothing: the gradients are there already, the same random
values in every exchange. The first row of the table, without any exchange, is what the pass itself costs.

A round measures every method once, so that all of them see the same state of the machine, each time starting with
another one. The table shows medians over the rounds: the wall time (of the slowest worker), the CPU time of all threads
of a worker, Horovod's included (mean over the workers), and the ratio to fp16 within the same round. For PyTorch a
second, instrumented pass then splits the time of each of this package's methods.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import time
from typing import Any, Callable, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from horovod_quant import kernels
from horovod_quant.analysis.models import MODELS, elements
from horovod_quant.traffic import ring_allreduce_bytes

NOTHING, NONE, FP16, BINSGDM = "no exchange", "none", "fp16", "binsgdm"
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "qsgdinf": ("QSGD", {"norm": "max"}),
    "nuqsgd": ("NUQSGD", {}),
    "global-qsgd": ("GlobalQSGD", {}),
}
METHODS = [NONE, FP16, *(f"{scheme}-{bits}" for scheme in SCHEMES for bits in (8, 4, 2)), BINSGDM]

MIB = 2**20
WARM_UP = 3  # in the first exchange the workers agree on groups, in the second one Horovod learns their names
HOROVOD_CACHE = 1024
EXCHANGES = 3  # of a tensor, at most: two of a method's, and Horovod's
THREADS = "/proc/self/task"


class Measurement(NamedTuple):
    """One exchange on one worker: seconds, and numbers of events."""

    wall: float
    cpu: float  # of all threads
    horovod_cpu: float  # of Horovod's own
    system_cpu: float
    page_faults: float


class Variant(NamedTuple):
    """A method, and the group size for those that have groups."""

    method: str
    group_mib: float | None = None

    @property
    def exchanges(self) -> bool:
        return self.method != NOTHING

    @property
    def ours(self) -> bool:
        return self.method not in (NOTHING, NONE, FP16)

    @property
    def is_binsgdm(self) -> bool:
        return self.method == BINSGDM

    def label(self, several_sizes: bool) -> str:
        return f"{self.method}, {self.group_mib:g} MiB" if several_sizes and self.ours else self.method

    def compression(self, hvd: Any, hvq: Any, **options: Any) -> Any:
        """Horovod's, or this package's with further arguments."""
        if not self.ours:
            return getattr(hvd.Compression, self.method)
        assert self.group_mib is not None
        options["group_bytes"] = int(self.group_mib * MIB)
        if self.is_binsgdm:
            return hvq.BinSGDM(**options)
        scheme, _, bits = self.method.rpartition("-")
        kind, arguments = SCHEMES[scheme]
        return getattr(hvq, kind)(int(bits), **arguments, **options)

    def refusal(self, hvd: Any, hvq: Any) -> str | None:
        """Why the method cannot serve so many workers."""
        if not self.ours:
            return None
        try:
            self.compression(hvd, hvq).policy.check_workers(hvd.size())
        except ValueError as error:
            return str(error)
        return None


class Bench:
    """Initializes Horovod, and measures exchanges.

    Args:
        framework: the module `exchange_torch` or `exchange_tensorflow`.
    """

    def __init__(self, framework: Any) -> None:
        self._framework = framework
        threads = set(os.listdir(THREADS))
        framework.hvd.init()
        # Linux's clocks of the CPU time of the threads that Horovod has started.
        self._horovod_clocks = [~int(thread) << 3 | 6 for thread in set(os.listdir(THREADS)) - threads]

    def measured(self, trial: Any) -> Measurement:
        """One exchange."""
        trial.prepare()
        self._framework.barrier()
        before = resource.getrusage(resource.RUSAGE_SELF)
        horovod, cpu, begin = self._horovod_seconds(), time.process_time(), time.perf_counter()
        trial.run()
        wall = time.perf_counter() - begin
        cpu, horovod = time.process_time() - cpu, self._horovod_seconds() - horovod
        after = resource.getrusage(resource.RUSAGE_SELF)
        trial.clear()
        faults = after.ru_minflt - before.ru_minflt
        return Measurement(wall, cpu, horovod, after.ru_stime - before.ru_stime, float(faults))

    def _horovod_seconds(self) -> float:
        return sum(map(time.clock_gettime, self._horovod_clocks))

    def totals(self, trials: list[Any], rounds: int) -> np.ndarray:
        """Measurements of all workers, ``[worker, trial, round, field of Measurement]``."""
        found = np.zeros((len(trials), rounds, len(Measurement._fields)))
        progress = self.progress("totals", (rounds + WARM_UP) * len(trials))
        for number in range(-WARM_UP, rounds):
            for offset in range(len(trials)):
                index = (number + offset) % len(trials)
                measurement = self.measured(trials[index])
                if number >= 0:
                    found[index, number] = measurement
                progress.update()
        progress.close()
        return self._framework.allgather(found[None], "totals")

    def bytes_sent(self, trial: Any, elements: int) -> float:
        """By one worker in one exchange."""
        variant = trial.variant
        if not variant.ours:
            width = {NOTHING: 0, NONE: 4, FP16: 2}[variant.method]
            return ring_allreduce_bytes(width * elements, self._framework.hvd.size())
        before = trial.compression.stats().total.bytes_sent
        self.measured(trial)
        return trial.compression.stats().total.bytes_sent - before

    def split(self, variants: list[Variant], rounds: int, make: Callable[[Variant], Any]) -> np.ndarray:
        """Medians of milliseconds, ``[variant, phase, wall or CPU]``, means over the workers."""
        columns = self._framework.COLUMNS
        found = np.zeros((len(variants), rounds, len(columns), 2))
        with self._framework.instrumented() as stopwatch:
            trials = [make(variant) for variant in variants]
            progress = self.progress("split", (rounds + WARM_UP) * len(trials))
            for number in range(-WARM_UP, rounds):
                for index, trial in enumerate(trials):
                    stopwatch.restart()
                    whole = self.measured(trial)
                    if number >= 0:
                        found[index, number] = stopwatch.split(whole.wall, whole.cpu - whole.horovod_cpu)
                    progress.update()
            progress.close()
        found = self._framework.allgather(found[None], "phases")
        return 1e3 * np.median(found.mean(axis=0), axis=1)

    def progress(self, what: str, total: int) -> Any:
        disable = self._framework.hvd.rank() > 0
        return tqdm(desc=what, total=total, disable=disable, mininterval=2, ascii=True)


# ---- the command -------------------------------------------------------------------------------------------------


def results(trials: list[Any], totals: np.ndarray, several_sizes: bool) -> list[dict[str, Any]]:
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


def phases_table(found: list[dict[str, Any]], columns: list[str]) -> Table:
    table = Table(
        title="Milliseconds of the calling thread: wall / CPU",
        box=box.MARKDOWN,
        caption="wait: for this package's collectives",
    )
    table.add_column("method")
    for phase in columns:
        table.add_column(phase, justify="right")
    for result in found:
        if "phases" in result:
            pairs = [result["phases"][phase] for phase in columns]
            table.add_row(result["method"], *(f"{wall:.1f} / {cpu:.1f}" for wall, cpu in pairs))
    return table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a whole exchange of a model's gradients.")
    parser.add_argument("--framework", default="torch", choices=["torch", "tensorflow"])
    parser.add_argument("--model", default="resnet50", choices=MODELS, help="whose gradients")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD",
                        help=f"what to measure: {', '.join(METHODS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each method")
    parser.add_argument("--group-bytes", nargs="+", type=float, default=[16], metavar="MIB",
                        help="size of this package's groups in MiB; several are compared")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the results here too")
    torch = parser.add_argument_group("for PyTorch alone")
    torch.add_argument("--split-rounds", type=int, default=5, help="instrumented measurements; 0: none")
    torch.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True,
                       help="let exchanges start during the backward pass")  # fmt: skip
    torch.add_argument("--backward", type=float, default=0.0, metavar="SECONDS",
                       help="let the backward pass sleep for so long, as if an accelerator worked")  # fmt: skip
    tensorflow = parser.add_argument_group("for TensorFlow alone")
    tensorflow.add_argument("--groups", type=int, metavar="NUMBER",
                            help="let Horovod reduce the gradients in so many groups")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.framework == "torch" and arguments.groups:
        parser.error("--groups is for TensorFlow")
    if arguments.framework == "tensorflow":
        arguments.split_rounds = 0
        if arguments.backward or not arguments.overlap:
            parser.error("--backward and --no-overlap are for PyTorch")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    # The other one must not be imported: Horovod's two libraries disturb each other in one process.
    framework = importlib.import_module(f"exchange_{arguments.framework}")
    hvd, hvq = framework.hvd, framework.hvq
    shapes = MODELS[arguments.model]
    variants = [Variant(NOTHING)]
    for method in arguments.methods:
        ours = Variant(method, 0).ours
        variants += [Variant(method, size) for size in arguments.group_bytes] if ours else [Variant(method)]

    # Many differently named exchanges in one process would push each other out of Horovod's cache.
    os.environ.setdefault(
        "HOROVOD_CACHE_CAPACITY", str(max(HOROVOD_CACHE, len(variants) * (EXCHANGES * len(shapes) + 100)))
    )
    framework.configure()
    bench = Bench(framework)
    if hvd.size() < 2:
        raise SystemExit("one worker exchanges nothing: horovodrun -np 2 python benchmarks/exchange.py")
    # horovodrun may cut its workers' output between any two bytes: no colours, and ASCII alone.
    console = Console(width=120, color_system=None, quiet=hvd.rank() > 0)
    refusals = {variant: variant.refusal(hvd, hvq) for variant in variants}
    for variant, refusal in refusals.items():
        if refusal:
            console.print(f"{variant.method} is left out: {refusal}")
    variants = [variant for variant in variants if not refusals[variant]]

    controller = "MPI" if os.environ.get("OMPI_COMM_WORLD_SIZE") else "Gloo"
    setting = {
        "framework": arguments.framework,
        "model": arguments.model,
        "elements": elements(shapes),
        "workers": hvd.size(),
        "controller": controller,
        "overlap": arguments.overlap,
        "backward_seconds": arguments.backward,
        "groups": arguments.groups,
        "kernels": kernels.describe(),
        "processor": platform.processor() or platform.machine(),
    }
    console.print(f"{setting['kernels']}; {setting['processor']}")
    generator = np.random.default_rng(hvd.rank())
    values = 0.01 * generator.standard_normal(elements(shapes), dtype=np.float32)
    gradients = framework.Gradients(shapes, values)

    def make(variant: Variant) -> Any:
        return framework.Trial(variant, gradients, arguments)

    trials = [make(variant) for variant in variants]
    totals = bench.totals(trials, arguments.rounds)
    found = results(trials, totals, len(arguments.group_bytes) > 1)
    for result, trial in zip(found, trials):
        result["bytes_sent"] = bench.bytes_sent(trial, elements(shapes))
    ours = [variant for variant in variants if variant.ours]
    if ours and arguments.split_rounds:
        phases = bench.split(ours, arguments.split_rounds, make)
        for variant, milliseconds in zip(ours, phases):
            result = found[variants.index(variant)]
            result["phases"] = {phase: pair.tolist() for phase, pair in zip(framework.COLUMNS, milliseconds)}

    title = f"{arguments.model} in {framework.NAME}, {hvd.size()} workers, {controller}"
    console.print(totals_table(title, found))
    if ours and arguments.split_rounds:
        console.print(phases_table(found, framework.COLUMNS))
    if arguments.json and hvd.rank() == 0:
        with open(arguments.json, "w") as file:
            json.dump({**setting, "results": found}, file, indent=1)
    hvd.shutdown()


if __name__ == "__main__":
    main()
