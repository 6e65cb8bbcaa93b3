"""Run of the benchmark on each worker."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Callable, NamedTuple

import numpy as np

from horovod_quant import kernels
from horovod_quant.analysis.models import Shapes, elements
from horovod_quant.analysis.units import show_seconds
from horovod_quant.bench import choosing, report
from horovod_quant.bench.gradients import ExactAverage, gradient
from horovod_quant.bench.memory import free_bytes, memory_problem
from horovod_quant.bench.rounds import EXCHANGES, Bench, Found
from horovod_quant.bench.variants import DDP, Options, Variant
from horovod_quant.cli.launch_context import HOROVOD, TORCHRUN, find_launch_context
from horovod_quant.cli.problem import Problem, check_file, check_plot, give_up_output, write_line

LAUNCHERS = ("horovodrun -np 2", "torchrun --nproc-per-node 2 --no-python")
"""Example launchers of two workers with Horovod and with DDP."""

HEAD_START = 5.0
"""Seconds that other workers wait before they print a problem: the launcher ends them if rank 0 has it too."""

EVERY = 1.0
"""Minimum seconds between rounds that are printed and saved."""


class Plan(NamedTuple):
    """Settings of a benchmark and its output files.

    Attributes:
        framework: ``"torch"`` or ``"tensorflow"``, under Horovod, or ``"ddp"``.
        model: name of the model; None for other shapes.
        shapes: shapes of the gradients.
        variants: methods with settings to compare.
        options: how the gradients are reduced.
        rounds: measurements of each variant; None to stop when they suffice (`horovod_quant.bench.enough`).
        seed: seed of the random gradients.
        json, plot: files to write, if any.
        problem: a problem on this worker, which other workers may not have.
    """

    framework: str
    model: str | None
    shapes: Shapes
    variants: Sequence[Variant]
    options: Options
    rounds: int | None
    seed: int
    json: str | None = None
    plot: str | None = None
    problem: str = ""


class Run:
    """Run of the benchmark on one worker.

    Args:
        plan: the same on all workers, except for ``problem``.
    """

    program = "horovod-quant bench"
    fewest_workers = 2

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.variants = list(plan.variants)
        self.found = Found([], [], [])
        self.setting: dict[str, Any] = {}
        self.framework: Any = None
        self.bench: Any = None
        self.gradients: Any = None
        self._saved = -EVERY
        self._first = launch_rank() == 0

    # ---- methods that benchmarks may override --------------------------------------------------------------------

    def make_trial(self, variant: Variant) -> Any:
        """Return a variant that is ready to reduce the gradients."""
        return self.framework.Trial(variant, self.gradients, self.plan.options)

    def make_gradients(self, values: list[np.ndarray]) -> Any:
        """Return the trials' container of the local gradients."""
        return self.framework.Gradients(self.plan.shapes, values)

    def refusal(self, variant: Variant) -> str | None:
        """Return why a variant cannot be measured here, or None."""
        return variant.refusal(self.bench.size)

    def more(self) -> None:
        """Take additional measurements after the rounds."""

    def results(self) -> list[dict[str, Any]]:
        """Return the results for JSON."""
        return report.results([variant.label for variant in self.variants], self.found)

    def tables(self, results: list[dict[str, Any]]) -> list[Any]:
        """Return the tables to print."""
        return [report.table(self.setting, results), report.caption(self.setting, results)]

    # ---- the run -------------------------------------------------------------------------------------------------

    def main(self) -> int:
        """Measure and report; return the exit status."""
        try:
            return self._whole()
        except Exception as error:
            if not is_loss(error):
                raise
            if self._first:
                self._complain(f"a worker is gone: {' '.join(str(error).split())}")
            sys.stdout.flush()
            os._exit(1)  # Horovod's threads may never end after a worker is gone

    def _whole(self) -> int:
        plan = self.plan
        try:
            self.framework = importlib.import_module(f"horovod_quant.bench.{plan.framework}_trial")
        except ImportError as error:
            is_ddp = plan.framework == DDP
            self._complain(
                f"--transport ddp: {error}" if is_ddp else f"--framework {plan.framework}: {error}"
            )
            return 1
        names = len(self.variants) * (EXCHANGES * len(plan.shapes) + 100)
        self.bench = Bench(self.framework, names)
        self._first = self.bench.rank == 0
        problem = self._agreed_problem()
        if problem:
            self.framework.workers.shutdown()
            # At a status other than 0 horovodrun ends all workers, perhaps before the first one has printed.
            return failure(self.program, problem) if self._first else 0
        self._leave_out()
        self.setting = self._setting()
        self._say(f"{self.setting['kernels']}; {self.setting['processor']}")
        rank, size = self.bench.rank, self.bench.size
        self.gradients = self.make_gradients(
            [gradient(shape, plan.seed, rank, index) for index, shape in enumerate(plan.shapes.values())]
        )
        trials = [self.make_trial(variant) for variant in self.variants]
        self.bench.run(
            trials, plan.rounds, ExactAverage(plan.shapes, plan.seed, rank, size), self.found, self._round
        )
        del trials
        self.more()
        status = self._report()
        self.framework.workers.shutdown()
        return status

    def _agreed_problem(self) -> str:
        """Return a problem of any worker, the same text on all.

        It is an empty text without problems.
        """
        if self.bench.size < self.fewest_workers:
            launcher = LAUNCHERS[self.plan.framework == DDP]
            return f"one worker sends nothing; start several: {launcher} {self.program} ..."
        digest = hashlib.sha256(repr(list(self.plan.shapes.items())).encode()).hexdigest()
        own = self.plan.problem or self._memory_problem()
        texts = [text.partition(" ") for text in self.bench.gather_texts(f"{digest} {own}")]
        for rank, (_, _, found) in enumerate(texts):
            if found:
                return found if rank == 0 else f"worker {rank}: {found}"
        other = next((rank for rank, (seen, _, _) in enumerate(texts) if seen != digest), None)
        return "" if other is None else "--shapes: the workers have read different shapes"

    def _memory_problem(self) -> str:
        """Return why the gradients do not fit into host memory, or ""."""
        plan, bench = self.plan, self.bench
        if plan.options.device != "cpu":
            return ""
        variants = [variant for variant in plan.variants if self.refusal(variant) is None]
        return memory_problem(plan.shapes, variants, bench.size, bench.workers_per_host, free_bytes())

    def _leave_out(self) -> None:
        """Drop the variants that cannot be measured here."""
        for variant in list(self.variants):
            refusal = self.refusal(variant)
            if refusal:
                self._say(f"{variant.label} is left out: {refusal}")
                self.variants.remove(variant)

    def _setting(self) -> dict[str, Any]:
        plan, bench = self.plan, self.bench
        return {
            "framework": plan.framework,
            "model": plan.model,
            "shapes": plan.shapes,
            "elements": elements(plan.shapes),
            "workers": bench.size,
            "hosts": bench.hosts,
            "workers_per_host": bench.workers_per_host,
            "controller": "mpi" if self.framework.workers.mpi_enabled() else "gloo",
            "kernels": kernels.describe(),
            "processor": processor(),
            "cores": bench.cores,
            "interface": bench.counter.names,
            "group_bytes": plan.variants[0].group_bytes,
            "seed": plan.seed,
            **plan.options._asdict(),
        }

    def _round(self) -> None:
        """Print and save the results so far.

        Ctrl-C may end this process at any time.
        """
        done, now = len(self.found.rounds), time.monotonic()
        if not self._first or (now < self._saved + EVERY and done != self.plan.rounds):
            return
        self._saved = now
        slowest = self.found.rounds[-1][:, :, 0].max(axis=1)  # the first field is wall
        shown = (f"{each.label} {show_seconds(wall)}" for each, wall in zip(self.variants, slowest))
        total = "" if self.plan.rounds is None else f" of {self.plan.rounds}"
        self._say(f"round {done}{total}: {', '.join(shown)}")
        if self.plan.json is not None:
            with suppress(OSError):  # reported at the end
                report.write_json(self.plan.json, {**self.setting, "interrupted": True}, self.results())

    def _report(self) -> int:
        if not self._first:
            return 0
        self.setting["interrupted"] = False
        results, plan, status = self.results(), self.plan, 0
        chosen = choosing.choose(self.variants, results)
        if chosen is not None:
            self.setting["recommended"], self.setting["code"] = chosen.method, chosen.code
        for argument, path, write in (
            ("--json", plan.json, report.write_json),
            ("", "", lambda path, setting, found: self._print(found, chosen)),
            ("--plot", plan.plot, report.plot),
        ):
            try:
                if path is not None:
                    write(path, self.setting, results)
            except OSError as error:
                if argument:
                    self._complain(f"{argument}: {error}")
                else:
                    give_up_output(self.program, error)
                status = 1
        return status

    def _print(self, results: list[dict[str, Any]], chosen: choosing.Chosen | None) -> None:
        console = report.console()
        for table in self.tables(results):
            console.print(table)
        if chosen is not None:
            console.print(*choosing.lines(chosen, self.plan.framework), sep="\n", soft_wrap=True)
        sys.stdout.flush()

    def _say(self, text: str) -> None:
        if self._first:
            write_line(text, sys.stdout)

    def _complain(self, text: str) -> None:
        write_line(f"{self.program}: {text}", sys.stderr)


def run_plan(make_plan: Callable[[], Plan], kind: type[Run] = Run) -> int:
    """Create the plan and run it; return the exit status.

    A problem of any worker ends all workers before Horovod has connected them.
    """
    rank = launch_rank()
    first = rank == 0
    try:
        plan = make_plan()
        if first and plan.problem:
            raise Problem(plan.problem)
        if first:
            check_output(plan.json, plan.plot)
    except Problem as problem:
        if first:
            return failure(kind.program, str(problem))
        time.sleep(HEAD_START)
        return failure(kind.program, f"worker {rank}: {problem}")
    return kind(plan).main()


def launch_rank() -> int:
    """Return the rank that the launcher gave, 0 without one."""
    return find_launch_context((*HOROVOD, TORCHRUN)).rank


def failure(program: str, problem: str) -> int:
    """Print a problem, and return the exit status."""
    write_line(f"{program}: error: {problem}", sys.stderr)
    return 2


def check_output(json: str | None, plot: str | None) -> None:
    """Raise `Problem` unless the results can be shown and the files written."""
    try:
        from rich import box, console, table  # noqa: F401
    except ImportError:
        raise Problem("rich is not installed: pip install rich") from None
    for argument, path, check in (("--json", json, check_file), ("--plot", plot, check_plot)):
        if path is not None:
            if os.path.exists(path) and not os.path.isfile(path):
                raise Problem(f"{argument}: {path} is not a file")
            check(argument, path)


def is_loss(error: Exception) -> bool:
    """True if another worker is gone."""
    texts = ("Horovod has been shut down", "gloo/transport")
    return type(error).__name__ == "HorovodInternalError" or any(text in str(error) for text in texts)


def processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
