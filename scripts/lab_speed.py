"""Write the tables of docs/speed.md, and check the aims.

From the files of `scripts/lab-speed`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from pages import insert, load_before

NONE = "none"
CONTROLLERS = {"gloo": "Gloo", "mpi": "MPI"}
RATES = FAST, SLOW, UNLIMITED = "1gbit", "100mbit", "none"
"""Rates of the links, as in the files' names."""

MEMCPY = "memcpy"
ISAS = {"avx2": "AVX2", "avx512": "AVX-512"}
GRADIENTS = 1_000
"""Number of small gradients, the default of `--many-small`."""

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
    """Measurements of one launch.

    Attributes:
        results: entries of the JSON, by method.
        walls: seconds of rounds, by method.
    """

    def __init__(self, path: Path) -> None:
        self.results = {result["method"]: result for result in json.loads(path.read_text())["results"]}
        self.walls = {method: result["wall_seconds"] for method, result in self.results.items()}

    @property
    def methods(self) -> list[str]:
        return [method for method in self.walls if method != "no exchange"]

    def seconds(self, method: str, field: str = "wall_seconds") -> float:
        return statistics.median(self.results[method][field])

    def times(self, method: str, field: str = "wall_seconds") -> float:
        """Return the speed-up over none: the median of rounds' ratios."""
        own, nones = self.results[method][field], self.results[NONE][field]
        return statistics.median(b / a for a, b in zip(own, nones))


class Results:
    """All runs between four hosts with default arguments.

    Attributes:
        runs: by controller and rate.
        ddp: by rate, of PyTorch's DistributedDataParallel, measured without Horovod.
        backward, backward_ddp: of Horovod and DDP beside a backward pass.
        avx2: by controller, with AVX2 alone.
    """

    def __init__(self, folder: Path) -> None:
        self.runs = {
            (controller, rate): Run(folder / f"{controller}-{rate}.json")
            for controller in CONTROLLERS
            for rate in RATES
        }
        self.ddp = {rate: Run(folder / f"ddp-{rate}.json") for rate in (FAST, SLOW)}
        self.avx2 = {controller: Run(folder / f"avx2-{controller}-{FAST}.json") for controller in CONTROLLERS}
        self.backward, self.backward_ddp = (
            Run(folder / f"{name}-{FAST}.json") for name in ("backward", "backward-ddp")
        )


def grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is text, and the others numbers."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def speed_ups(runs: dict[str, Run], also: dict[str, Run] | None = None, ddp: Run | None = None) -> str:
    """Return a table of methods, by controller.

    Args:
        runs: with each controller.
        also: with each controller, without a limit: times alone.
        ddp: of PyTorch's DDP, in rows of their own.
    """
    names = [CONTROLLERS[controller] for controller in runs]
    columns = ["method", *(column for name in names for column in (f"{name}, ms", "speed-up"))]
    if also is not None:
        columns += [f"{name} without limit, ms" for name in names]
    rows = []
    for method in runs["gloo"].methods:
        row = [method]
        for run in runs.values():
            row += [milliseconds(run, method), f"{run.times(method):.2f}"]
        rows.append(row + [milliseconds(run, method) for run in (also or {}).values()])
    for method in ddp.methods if ddp is not None else ():
        speed_up = runs["gloo"].seconds(NONE) / ddp.seconds(method)
        row = [ddp_name(method), milliseconds(ddp, method), f"{speed_up:.2f}"]
        rows.append(row + [""] * (len(columns) - len(row)))
    return grid(columns, rows)


def hosts_table(results: Results, rate: str, also: str | None = None) -> str:
    """Return a table of methods at one or two rates, and DDP's."""
    at = {rate: {controller: results.runs[controller, rate] for controller in CONTROLLERS} for rate in RATES}
    return speed_ups(at[rate], at[also] if also else None, results.ddp[rate])


def both_table(results: Results) -> str:
    """Return a table of methods under Horovod and DDP."""
    horovod, ddp = results.backward, results.backward_ddp
    return grid(
        ("method", "Horovod, ms", "DDP, ms"),
        (
            (
                method,
                milliseconds(horovod, method) if method in horovod.walls else "",
                milliseconds(ddp, method),
            )
            for method in ddp.methods
        ),
    )


def aims_list(results: Results) -> str:
    """Return the number of aims, and those that are missed."""
    found = list(verdicts(results))
    missed = [f"- {text}" for reached, text in found if not reached]
    return "\n".join([f"{len(found) - len(missed)} of {len(found)} are reached.", "", *missed]).rstrip()


def groups_table(folder: Path) -> str:
    """Return a table of methods and sizes of groups."""
    rows, sizes = [], []
    for controller, name in CONTROLLERS.items():
        run = Run(folder / f"groups-{controller}-{FAST}.json")
        found: dict[str, dict[str, str]] = {}
        for label in run.methods:
            method, _, size = label.partition(", ")
            found.setdefault(method, {})[size] = milliseconds(run, label)
            if size and size not in sizes:
                sizes.append(size)
        rows += [
            [f"{method}, {name}", *(by_size.get(size, "") for size in sizes)] if "" not in by_size
            else [f"{method}, {name}", by_size[""], *[""] * (len(sizes) - 1)]
            for method, by_size in found.items()
        ]  # fmt: skip
    return grid(["method", *sizes], rows)


def variants_table(folder: Path) -> str:
    """Return a table of EDEN's variants and instruction sets."""
    best, avx2 = (Run(folder / f"variants{isa}-{FAST}.json") for isa in ("", "-avx2"))
    return grid(
        ("method", "AVX-512, ms", "AVX2, ms"),
        ((method, milliseconds(best, method), milliseconds(avx2, method)) for method in best.methods),
    )


def alltoalls_table(folder: Path) -> str:
    """Return a table of ways to send data between all pairs."""
    found = json.loads((folder / f"alltoalls-{SLOW}.json").read_text())
    one = found["seconds"]["one call"]
    return grid(
        ("way", "ms", "relative to one call", "relative to the transfer time of its bytes"),
        (
            (
                way,
                f"{1e3 * statistics.median(own):,.0f}",
                f"{statistics.median(a / b for a, b in zip(own, one)):.2f}",
                f"{statistics.median(own) * found['rate'] / found['sent']:.2f}",
            )
            for way, own in found["seconds"].items()
        ),
    )


def machine_table(folder: Path, name: str) -> str:
    """Return a table of workers on one machine."""
    run = Run(folder / f"{name}.json")
    return grid(
        ("method", "wall time, ms", "CPU time per worker, ms", "CPU relative to none", "MB sent"),
        (
            (
                method,
                milliseconds(run, method),
                milliseconds(run, method, "cpu_seconds"),
                f"{1 / run.times(method, field='cpu_seconds'):.2f}",
                f"{run.results[method]['bytes_sent'] / 1e6:,.1f}",
            )
            for method in run.methods
        ),
    )


def small_table(folder: Path) -> str:
    """Return a table of microseconds per small gradient."""
    rows = []
    for controller, name in CONTROLLERS.items():
        run = Run(folder / f"small-{controller}.json")
        for method in run.methods:
            row = [f"{method}, {name}"]
            for field in ("hook_cpu_seconds", "finish_cpu_seconds"):
                row.append(microseconds(run, method, field))
            for field in ("cpu_seconds", "wall_seconds"):
                row += [microseconds(run, method, field), f"{1 / run.times(method, field=field):.2f}"]
            rows.append(row)
    return grid(
        ("method", "in hooks", "in `synchronize`", "CPU, all threads", "relative to none", "wall time",
         "relative to none"),
        rows,
    )  # fmt: skip


def small_ddp_table(folder: Path) -> str:
    """Return a table of the time of many small gradients under DDP."""
    run = Run(folder / "small-ddp.json")
    return grid(
        ("method", "ms", "relative to none"),
        ((method, milliseconds(run, method), f"{1 / run.times(method):.2f}") for method in run.methods),
    )


def kernels_table(folder: Path) -> str:
    """Return a table of the kernels' times, in multiples of memcpy's."""
    results = json.loads((folder / "kernels.json").read_text())["results"]
    isas, sizes, names = (
        list(dict.fromkeys(result[field] for result in results))
        for field in ("instruction_set", "size", "kernel")
    )
    found = {(result["kernel"], result["size"], result["instruction_set"]): result for result in results}
    columns = [(size, isa) for size in sizes for isa in isas]

    def cell(result: dict[str, Any]) -> str:
        target = "" if result["target"] is None else f" ({result['target']:g})"
        return f"{result['times_memcpy']:.2f}{target}"

    return grid(
        ["kernel", *(f"{size}, {ISAS.get(isa, isa)}" for size, isa in columns)],
        [
            [MEMCPY, *(f"{found[(MEMCPY, *column)]['milliseconds']:.2f} ms" for column in columns)],
            *(
                [name, *(cell(found[(name, *column)]) for column in columns)]
                for name in names
                if name != MEMCPY
            ),
        ],
    )


Table = Callable[[Path], str]
TABLES: dict[str, dict[str, Table]] = {
    "hosts": {
        "table": lambda folder: hosts_table(Results(folder), FAST, UNLIMITED),
        "slow": lambda folder: hosts_table(Results(folder), SLOW),
        "avx2": lambda folder: speed_ups(Results(folder).avx2),
        "both": lambda folder: both_table(Results(folder)),
        "aims": lambda folder: aims_list(Results(folder)),
    },
    "groups": {"groups": groups_table},
    "variants": {"variants": variants_table},
    "alltoalls": {"alltoalls": alltoalls_table},
    "machine": {
        "torch": lambda folder: machine_table(folder, "machine"),
        "tensorflow": lambda folder: machine_table(folder, "machine-tensorflow"),
        "small": small_table,
        "small-ddp": small_ddp_table,
    },
    "kernels": {"kernels": kernels_table},
}
"""Tables of each part, by their marks in the page."""


def ddp_name(method: str) -> str:
    """Return a DDP method's name in tables of Horovod's."""
    return "ddp" if method == NONE else f"ddp-{method}"


def milliseconds(run: Run, method: str, field: str = "wall_seconds") -> str:
    return f"{1e3 * run.seconds(method, field):,.0f}"


def microseconds(run: Run, method: str, field: str) -> str:
    return f"{1e6 * run.seconds(method, field) / GRADIENTS:.1f}"


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


def write(page: str, folder: Path) -> str:
    """Return the page with the tables of all measured parts replaced."""
    for part, tables in TABLES.items():
        before = folder / f"{part}.load"
        if before.exists():
            for mark, make in tables.items():
                page = insert(page, mark, "lab-speed", f"{make(folder)}\n\n{load_before(before)}")
    return page


def main(folder: Path, page: Path) -> int:
    page.write_text(write(page.read_text(), folder))
    if not (folder / "hosts.load").exists():
        return 0
    validated = list(verdicts(Results(folder)))
    for reached, text in validated:
        print(f"{'reached' if reached else 'MISSED '} {text}")
    return 0 if all(reached for reached, _ in validated) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
