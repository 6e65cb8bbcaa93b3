"""Compare the performance model with the lab; write tables of docs/model.md.

1. ``horovod-quant bench`` runs in `scripts/lab`, with 2 and 4 hosts, on links of each rate: one JSON file per cell, in
   a folder, so that an interrupted check continues where it stopped.
2. The model is calibrated on the cells with unshaped links alone, and predicts all others. Open MPI uses different
   algorithms for different numbers of workers, which the model does not know: there each number of hosts is calibrated
   separately, and also with its cell at 1gbit.
3. Tables in docs/model.md, between markers, and everything as JSON.

The exit status is 1 if fewer than 9 of 10 predictions are within 20% of what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import kept_speeds
from pages import insert, load_before

from horovod_quant import kernels
from horovod_quant.analysis.calibration import Observation, calibrate, observe, predict, read_bench
from horovod_quant.analysis.kernel_speeds import KernelSpeeds, measure_kernels
from horovod_quant.analysis.network import DDP, MPI, Network, Software
from horovod_quant.analysis.units import parse_rate, show_seconds
from horovod_quant.bench.command import processor
from horovod_quant.frontends import methods

ROOT = Path(__file__).resolve().parent.parent
LAB = [str(ROOT / "scripts" / "lab")]
LAB_NAME = {"LAB": "checkmodel", "VENV": sys.prefix}
PAGE = ROOT / "docs" / "model.md"

MODEL = "resnet50"
HOSTS = (2, 4)
CHOSEN = ["none", "fp16", "global-qsgd-8", "global-qsgd-4", "global-qsgd-2-exponential", "qsgd-8", "qsgd-4", "qsgd-2",
          "qsgd-4-alltoall", "nuqsgd-8", "nuqsgd-4", "nuqsgd-2", "eden-3", "eden-2", "binsgdm"]  # fmt: skip


def _of_each_family() -> list[str]:
    """Return the chosen methods, and one of each further family.

    Of a further family of the registry it is the one with 4 bits, or the fewest above.
    """
    families = {methods.parse(name).family for name in CHOSEN}
    further = (family for family in methods.every_family() if family[0].family not in families)
    return CHOSEN + [
        next((each for each in members if each.arguments.get("bits", 4) >= 4), members[-1]).name
        for members in further
    ]


METHODS = _of_each_family()
CONTROLLERS = {"gloo": "Gloo", MPI: "MPI", DDP: "DDP"}
UNSHAPED = "none"
ROUNDS = {UNSHAPED: 9, "1gbit": 7, "100mbit": 3}

LATENCY = 1e-4
"""Seconds one way: a round trip takes 0.2 ms (docs/lab.md)."""

WITHIN, SHARE = 0.20, 0.9

CELL_SECONDS = 1200

# Many ranks on few cores: without it ranks that wait busily in MPI slow down those that compute.
ENVIRONMENT = ["OMPI_MCA_mpi_yield_when_idle=1", "TF_CPP_MIN_LOG_LEVEL=3"]


class Cell(NamedTuple):
    controller: str
    hosts: int
    rate: str

    @property
    def name(self) -> str:
        return f"{self.controller}-{self.hosts}-{self.rate}"

    @property
    def calibrates(self) -> bool:
        return self.rate == UNSHAPED or (self.controller == MPI and self.rate == "1gbit")

    @property
    def fit(self) -> str:
        """The name of the fit; cells that share it are calibrated together."""
        return f"{self.hosts} hosts" if self.controller == MPI else ""


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(cells: list[Cell], folder: Path, again: bool) -> None:
    """Measure the cells that have no result yet."""
    missing = [cell for cell in cells if again or not (folder / f"{cell.name}.json").exists()]
    if not missing:
        return
    load = folder / f"{missing[0].controller}.load"
    if again or not load.exists():
        load.write_text(f"{os.getloadavg()[0]:.2f} ({processor()})\n")
    with lab(max(cell.hosts for cell in missing)):
        for cell in missing:
            begin = time.monotonic()
            say(f"{cell.name}: measuring")
            bench(cell, folder)
            say(f"{cell.name}: measured in {time.monotonic() - begin:.0f} s")


@contextmanager
def lab(hosts: int) -> Iterator[None]:
    command("up", str(hosts), UNSHAPED)
    try:
        yield
    finally:
        command("down")


def command(*arguments: str) -> None:
    done = subprocess.run(
        [*LAB, *arguments], env={**os.environ, **LAB_NAME}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"scripts/lab {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def bench(cell: Cell, folder: Path) -> None:
    """Run ``horovod-quant bench`` on links with the cell's rate from the start.

    A connection remembers a faster link that it had: after a warm-up on unshaped links two hosts' allreduces over Open
    MPI took 50% longer at 1 Gbit/s.
    """
    command("rate", cell.rate)
    final, partial = folder / f"{cell.name}.json", folder / f"{cell.name}.partial.json"
    partial.unlink(missing_ok=True)
    log = folder / f"{cell.name}.log"
    with open(log, "w") as output:
        processes = [
            subprocess.Popen(
                [*LAB, "exec", host, *run],
                env={**os.environ, **LAB_NAME}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for host, run in launches(cell, partial)
        ]  # fmt: skip
        try:
            status = max(process.wait(CELL_SECONDS) for process in processes)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{cell.name} took longer than {CELL_SECONDS} s; see {log}") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if status or not partial.exists():
        raise SystemExit(f"{cell.name} failed ({status}); see {log}")
    if json.loads(partial.read_text())["interrupted"]:
        raise SystemExit(f"{cell.name} was interrupted; see {log}")
    check_rate(cell, partial, log)
    partial.rename(final)


def launches(cell: Cell, file: Path) -> list[tuple[str, list[str]]]:
    """Return the commands that start a cell's workers, each with its host."""
    names = [f"host{number}" for number in range(1, cell.hosts + 1)]
    benchmark = [
        "horovod-quant", "bench", "--model", MODEL, "--methods", *methods_of(cell.controller),
        "--rounds", str(ROUNDS[cell.rate]), "--json", str(file),
    ]  # fmt: skip
    if cell.controller != DDP:
        hosts = ",".join(f"{name}:1" for name in names)
        run = ["horovodrun", f"--{cell.controller}", "-np", str(cell.hosts), "-H", hosts]
        return [("host1", ["env", *ENVIRONMENT, *run, *benchmark, "--framework", "torch"])]
    run = [
        "env",
        "OMP_NUM_THREADS=1",
        "torchrun",
        "--nnodes",
        str(cell.hosts),
        "--master-addr",
        "host1",
        "--no-python",
    ]
    return [
        (name, [*run, "--node-rank", str(rank), *benchmark, "--transport", DDP])
        for rank, name in enumerate(names)
    ]


def methods_of(controller: str) -> list[str]:
    """Return the methods to measure.

    DDP has none that belong to an optimizer.
    """
    return [name for name in METHODS if controller != DDP or methods.parse(name).own_optimizer is None]


def check_rate(cell: Cell, path: Path, log: Path) -> None:
    """Fail if a method was faster than its links.

    The rate was not in force then.
    """
    for result in json.loads(path.read_text())["results"]:
        limit = result["bytes_sent"] / parse_rate(cell.rate)
        if statistics.median(result["wall_seconds"]) < limit:
            raise SystemExit(f"{cell.name}: {result['method']} was faster than its links; see {log}")


# ---- predicting -----------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Seconds of a step's communication, measured and predicted."""

    cell: Cell
    method: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= WITHIN


def compare(
    cells: list[Cell], folder: Path, speeds: KernelSpeeds
) -> tuple[dict[str, Software], list[Comparison]]:
    """Calibrate each fit with some cells; predict all."""
    observed: dict[Cell, Observation] = {}
    for cell in cells:
        measured = read_bench(folder / f"{cell.name}.json")
        observed[cell] = observe(measured, Network(1, 1, parse_rate(cell.rate), LATENCY), one_machine=True)
    fitted = {
        fit: calibrate([observed[cell] for cell in cells if cell.calibrates and cell.fit == fit], speeds)
        for fit in dict.fromkeys(cell.fit for cell in cells)
    }
    found = []
    for cell, observation in observed.items():
        predicted = predict(observation, speeds, fitted[cell.fit])
        found += [
            Comparison(cell, name, seconds, predicted[name])
            for name, seconds in observation.bench.measured.items()
        ]
    return fitted, found


def kernel_speeds(folder: Path, controller: str, again: bool) -> KernelSpeeds:
    """Return the kernels' speeds, measured once and kept with the controller's cells."""
    path = folder / f"{controller}-kernels.json"
    if again or not path.exists():
        schemes = [methods.parse(name).scheme() for name in METHODS]
        speeds = measure_kernels([scheme for scheme in schemes if scheme is not None], seconds=5.0)
        path.write_text(json.dumps(kept_speeds.as_json(speeds), indent=1) + "\n")
    return kept_speeds.from_json(json.loads(path.read_text()))


# ---- the page -------------------------------------------------------------------------------------------------------


def table(cells: list[Cell], found: list[Comparison]) -> str:
    """Return a table of methods and cells.

    An entry has the measured time, the predicted time and their difference.
    """
    by_method = {(comparison.cell, comparison.method): comparison for comparison in found}
    lines = [
        "| | " + " | ".join(f"{cell.hosts} hosts, {cell.rate}" for cell in cells) + " |",
        "| --- |" + " --- |" * len(cells),
    ]
    for name in METHODS:
        entries = []
        for cell in cells:
            comparison = by_method.get((cell, name))
            if comparison is None:
                entries.append("impossible")
                continue
            mark = "" if comparison.within else " (!)"
            entries.append(
                f"{show_seconds(comparison.measured)}, {show_seconds(comparison.predicted)} "
                f"({100 * comparison.error:+.0f}%){mark}"
            )
        lines.append(f"| {name} | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def section(
    controller: str, cells: list[Cell], fitted: dict[str, Software], found: list[Comparison], summary: str
) -> str:
    predicted = [cell for cell in cells if not cell.calibrates]
    calibrating = [cell for cell in cells if cell.calibrates]
    parameters = [
        f"Fitted{fit and f' with {fit}'}: "
        + ", ".join(f"{name} {value:.3g}" for name, value in vars(software).items())
        + "."
        for fit, software in fitted.items()
    ]
    return "\n\n".join(
        [
            f"{CONTROLLERS[controller]}: measured, predicted (difference). {summary}",
            table(predicted, found),
            "The cells that calibrated it, and what the model gives for them:",
            table(calibrating, found),
            " ".join([*parameters, f"{machine()}."]),
        ]
    )


def machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores for all hosts, {kernels.describe()}"


# ---- the command ----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"check-model: {text}", flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare the performance model with the lab.")
    parser.add_argument("--controller", choices=CONTROLLERS, default="gloo")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "check-model", help="folder of the measurements"
    )
    parser.add_argument(
        "--rates",
        nargs="+",
        choices=ROUNDS,
        default=list(ROUNDS),
        help="rates of the links; one of them is none",
    )
    parser.add_argument("--again", action="store_true", help="measure all cells again")
    parser.add_argument(
        "--tables-only",
        action="store_true",
        help="measure nothing; write the tables from the cells that exist",
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write the tables to")
    return parser


def main() -> int:
    arguments = make_parser().parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    cells = [Cell(arguments.controller, hosts, rate) for rate in arguments.rates for hosts in HOSTS]
    if not arguments.tables_only:
        measure(cells, folder, arguments.again)
    speeds = kernel_speeds(folder, arguments.controller, arguments.again)
    fitted, found = compare(cells, folder, speeds)
    predictions = [comparison for comparison in found if not comparison.cell.calibrates]
    good = sum(comparison.within for comparison in predictions)
    summary = (
        f"{good} of {len(predictions)} predictions ({100 * good / len(predictions):.0f}%) are within {WITHIN:.0%} of "
        f"what was measured."
    )
    text = section(arguments.controller, cells, fitted, found, summary)
    text += f" {load_before(folder / f'{arguments.controller}.load')}"
    arguments.page.write_text(insert(arguments.page.read_text(), arguments.controller, "check-model", text))
    written = {
        "controller": arguments.controller,
        "kernels": kernels.describe(),
        "software": {fit: vars(software) for fit, software in fitted.items()},
        "within": good,
        "predictions": len(predictions),
        "cells": [
            {**item.cell._asdict(), "calibrates": item.cell.calibrates, "method": item.method,
             "measured_seconds": item.measured, "predicted_seconds": item.predicted, "error": item.error}
            for item in found
        ],
    }  # fmt: skip
    path = folder / f"{arguments.controller}-predictions.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    say(f"{summary} {arguments.page} and {path} are written")
    for comparison in predictions:
        if not comparison.within:
            say(f"  {comparison.cell.name}, {comparison.method}: measured {show_seconds(comparison.measured)}, "
                f"predicted {show_seconds(comparison.predicted)}")  # fmt: skip
    return int(good < SHARE * len(predictions))


if __name__ == "__main__":
    raise SystemExit(main())
