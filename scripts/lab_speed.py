"""Write the tables of docs/speed.md, and check the aims.

From the JSON files of `scripts/lab-speed`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pages import insert

NONE = "none"
CONTROLLERS = {"gloo": "Gloo", "mpi": "MPI"}
FAST, SLOW, UNLIMITED = "1gbit", "100mbit", "none"
"""Rates of the links, as in the files' names."""

MARKS = {FAST: "table", SLOW: "slow"}
"""Marks of the tables in the page, by rate."""

AS_FAST = 0.97
"""Speed-up from which two methods count as equally fast."""

SLOWEST_UNSHAPED = 1.1
"""Largest allowed ratio of a method's time to none, without a limit."""


class Aim(NamedTuple):
    """The target of a method at a rate.

    Attributes:
        method: its name.
        rate: of the links.
        times: speed-up over none, by controller.
        rivals: methods that it must be faster than: this package's with the same controller, DDP's with Gloo.
    """

    method: str
    rate: str
    times: dict[str, float]
    rivals: tuple[str, ...]


def _alike(times: float) -> dict[str, float]:
    return dict.fromkeys(CONTROLLERS, times)


AIMS = (
    Aim("global-qsgd-8", FAST, _alike(3.3), ("powersgd-1",)),
    Aim("global-qsgd-4", FAST, _alike(5.0), ("powersgd-1",)),
    Aim("binsgdm", FAST, _alike(7.0), ("powersgd-1",)),
    Aim("eden-3", FAST, _alike(3.0), ()),
    Aim("eden-2", FAST, _alike(3.0), ()),
    Aim("eden-3", SLOW, {"gloo": 5.0, "mpi": 6.0}, ("global-qsgd-4", "powersgd-2")),
    Aim("eden-2", SLOW, {"gloo": 7.0, "mpi": 9.0}, ("global-qsgd-4", "powersgd-2")),
)


class Run:
    """Measurements with one controller and rate: seconds of rounds, by method."""

    def __init__(self, path: Path) -> None:
        self.walls = {
            result["method"]: result["wall_seconds"] for result in json.loads(path.read_text())["results"]
        }

    @property
    def methods(self) -> list[str]:
        return [method for method in self.walls if method != "no exchange"]

    def seconds(self, method: str) -> float:
        return statistics.median(self.walls[method])

    def times(self, method: str, other: str = NONE) -> float:
        """Return the speed-up over another method: the median of rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.walls[method], self.walls[other]))


class Results:
    """All runs of the script.

    Attributes:
        runs: by controller and rate.
        ddp: by rate, of PyTorch's DistributedDataParallel, measured without Horovod.
        backward, backward_ddp: of Horovod and DDP beside a backward pass.
        avx2: by controller, with AVX2 alone.
        load: of the machine before the measurements.
    """

    def __init__(self, folder: Path) -> None:
        self.runs = {
            (controller, rate): Run(folder / f"{controller}-{rate}.json")
            for controller in CONTROLLERS
            for rate in (FAST, SLOW, UNLIMITED)
        }
        self.ddp = {rate: Run(folder / f"ddp-{rate}.json") for rate in (FAST, SLOW)}
        self.avx2 = {controller: Run(folder / f"avx2-{controller}-{FAST}.json") for controller in CONTROLLERS}
        self.load = (folder / "load").read_text().strip()
        self.backward, self.backward_ddp = (
            Run(folder / f"{name}-{FAST}.json") for name in ("backward", "backward-ddp")
        )


def table(results: Results, rate: str, also: str | None = None) -> str:
    """Return a table of methods at a rate, and at another one."""
    heads = [f"{name}, ms | speed-up" for name in CONTROLLERS.values()]
    if also is not None:
        heads += [f"{name} without limit, ms" for name in CONTROLLERS.values()]
    columns = (2 if also is None else 3) * len(CONTROLLERS)
    lines = ["| method | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * columns]
    for method in results.runs["gloo", rate].methods:
        cells = []
        for controller in CONTROLLERS:
            run = results.runs[controller, rate]
            cells += [milliseconds(run, method), f"{run.times(method):.2f}"]
        if also is not None:
            cells += [milliseconds(results.runs[controller, also], method) for controller in CONTROLLERS]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    ddp, baseline = results.ddp[rate], results.runs["gloo", rate].seconds(NONE)
    for method in ddp.methods:
        cells = [milliseconds(ddp, method), f"{baseline / ddp.seconds(method):.2f}", *[""] * (columns - 2)]
        lines.append(f"| {ddp_name(method)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def both_table(results: Results) -> str:
    """Return a table of methods under Horovod and DDP."""
    lines = ["| method | Horovod, ms | DDP, ms |", "| --- | ---: | ---: |"]
    for method in results.backward_ddp.methods:
        horovods = milliseconds(results.backward, method) if method in results.backward.walls else ""
        lines.append(f"| {method} | {horovods} | {milliseconds(results.backward_ddp, method)} |")
    return "\n".join(lines)


def avx2_table(results: Results) -> str:
    """Return a table of methods with AVX2 alone."""
    heads = " | ".join(f"{name}, ms | speed-up" for name in CONTROLLERS.values())
    lines = [f"| method | {heads} |", "| --- |" + " ---: | ---: |" * len(CONTROLLERS)]
    for method in results.avx2["gloo"].methods:
        cells = [f"{milliseconds(run, method)} | {run.times(method):.2f}" for run in results.avx2.values()]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ddp_name(method: str) -> str:
    """Return a DDP method's name in tables of Horovod's."""
    return "ddp" if method == NONE else f"ddp-{method}"


def milliseconds(run: Run, method: str) -> str:
    return f"{1e3 * run.seconds(method):,.0f}"


def verdicts(results: Results) -> Iterator[tuple[bool, str]]:
    for aim in AIMS:
        for controller, target in aim.times.items():
            run = results.runs[controller, aim.rate]
            which = f"{aim.method} with {CONTROLLERS[controller]} at {aim.rate}"
            times = run.times(aim.method)
            yield times >= target, f"{which}: speed-up {times:.2f} over none (target: {target:g})"
            for rival in aim.rivals:
                seconds = (run if rival in run.walls else results.ddp[aim.rate]).seconds(rival)
                ahead = seconds / run.seconds(aim.method)
                named = rival if rival in run.walls else ddp_name(rival)
                yield ahead > 1, f"{which}: speed-up {ahead:.2f} over {named}"
    for method in results.backward.methods:
        if method not in (NONE, "fp16"):
            seconds = results.backward_ddp.seconds(method)
            for rival, run in ((method, results.backward), ("powersgd-1", results.backward_ddp)):
                ahead = run.seconds(rival) / seconds
                other = f"{rival} under Horovod" if rival == method else ddp_name(rival)
                yield ahead >= AS_FAST, f"{method} under DDP: speed-up {ahead:.2f} over {other}"
    for controller, name in CONTROLLERS.items():
        run = results.runs[controller, UNLIMITED]
        for method in run.methods:
            if method not in (NONE, "fp16"):
                slower = 1 / run.times(method)
                yield (
                    slower <= SLOWEST_UNSHAPED,
                    f"{method} with {name}, no limit: {slower:.2f} of the time of none",
                )


def write(page: str, results: Results) -> str:
    """Return the page with its tables replaced."""
    tables = {MARKS[rate]: table(results, rate, UNLIMITED if rate == FAST else None) for rate in MARKS}
    tables.update(avx2=avx2_table(results), both=both_table(results))
    for mark, text in tables.items():
        load = f"Load of the machine before the measurements: {results.load}."
        page = insert(page, mark, "lab-speed", f"{text}\n\n{load}")
    return page


def main(folder: Path, page: Path) -> int:
    results = Results(folder)
    page.write_text(write(page.read_text(), results))
    validated = list(verdicts(results))
    for reached, text in validated:
        print(f"{'reached' if reached else 'MISSED '} {text}")
    return 0 if all(reached for reached, _ in validated) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
