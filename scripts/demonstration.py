"""Train examples/torch_digits.py with some methods; show accuracy against bytes.

scripts/demo starts it. Prints a row of the table as soon as it is known, and draws loss.png (loss against bytes sent)
again after each row; writes it and figures.json to the folder --output.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from horovod_quant.frontends import former_names

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "torch_digits.py"
NAME_WIDTH, ROW_HEIGHT = 0.0125, 0.065  # of a letter and of a name, in parts of the plot
TIME_LIMIT = 900  # seconds per configuration: generous, since a loaded machine is not a failure


class Configuration(NamedTuple):
    """One row of the table.

    Attributes:
        key: its name in --only.
        title: its name in the table and the plot.
        options: arguments of the example.
        baseline: key of the float32 training with the same optimizer; for BinSGDM, with Adam.
        style: of its line in the plot. One colour per method.
    """

    key: str
    title: str
    options: str
    baseline: str | None
    style: dict[str, Any]


# Methods that send the same number of bytes lie on top of each other in the plot: the later ones are thinner.
CONFIGURATIONS = (
    Configuration("sgd", "float32, SGD", "", None, {"color": "black"}),
    Configuration(
        "fp16", "float16, SGD", "--compression fp16", "sgd", {"color": "#BBBBBB", "linewidth": 4.5}
    ),
    Configuration(
        "qsgd-4",
        "QSGD(bits=4)",
        "--compression qsgd --bits 4",
        "sgd",
        {"color": "#F0E442", "linewidth": 7},
    ),
    Configuration(
        "nuqsgd-4",
        "NUQSGD(bits=4)",
        "--compression nuqsgd --bits 4",
        "sgd",
        {"color": "#CC79A7", "linewidth": 4},
    ),
    Configuration(
        "global-qsgd-8",
        "GlobalQSGD(bits=8)",
        "--compression global-qsgd --bits 8",
        "sgd",
        {"color": "#009E73"},
    ),
    Configuration(
        "global-qsgd-4",
        "GlobalQSGD(bits=4)",
        "--compression global-qsgd --bits 4",
        "sgd",
        {"color": "#009E73", "linestyle": "--"},
    ),
    Configuration(
        "eden-3", "EDEN(bits=3)", "--compression eden --bits 3", "sgd", {"color": "#0072B2", "linewidth": 3}
    ),
    Configuration(
        "eden-2",
        "EDEN(bits=2)",
        "--compression eden --bits 2",
        "sgd",
        {"color": "#0072B2", "linestyle": "--"},
    ),
    Configuration("adam", "float32, Adam", "--optimizer adam", None, {"color": "black", "linestyle": "--"}),
    Configuration("binsgdm", "BinSGDM()", "--compression binsgdm", "adam", {"color": "#D55E00"}),
)


FIRST = ("sgd", "fp16", "global-qsgd-8", "eden-3", "binsgdm")
"""Configurations that are trained first, in this order; without --all, alone."""

SEEDS, SEEDS_OF_ALL = [0, 1], [0, 1, 2]

COLUMNS = {"gradients": 20, "accuracy": 9, "range": 10, "gap": 6, "bytes/step": 11, "ratio": 6, "time": 7}
"""Columns of the table and their widths."""

CAPTION = """accuracy: mean on 450 test images. gap: to float32, in percentage points
(BinSGDM: to Adam). bytes/step: sent by one worker. ratio: float32 bytes to
these. time: of one training."""


class Result(NamedTuple):
    """Results of the trainings of one configuration.

    A list has one entry for each seed, but for ``bytes_sent``.
    """

    accuracies: list[float]
    bytes_per_step: float
    ratio: float
    seconds: list[float]
    losses: list[list[float]]  # of each step
    bytes_sent: list[float]  # by one worker until the end of each step

    @property
    def accuracy(self) -> float:
        return statistics.mean(self.accuracies)


class TrainingFailed(Exception):
    """The example failed; the message has the end of its output."""


def main() -> int:
    args = parse_arguments()
    console = Console()
    chosen = choose(args)
    begin = time.monotonic()
    results: dict[str, Result] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    picture = args.output / "loss.png"
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        console.print(heading(args), line(list(COLUMNS)), sep="\n", highlight=False)
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(chosen))
            for done, configuration in enumerate(chosen, 1):
                progress.update(task, description=configuration.title)
                results[configuration.key] = train(configuration, args)
                console.print(line(row(configuration, results)), highlight=False)
                progress.advance(task)
                draw(chosen[:done], results, args, picture)
    except TrainingFailed as error:
        print(f"demonstration: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"demonstration: cannot write to {args.output}: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - begin
    (args.output / "figures.json").write_text(json.dumps(figures(chosen, results, args, seconds), indent=1))
    console.print(CAPTION, highlight=False)
    console.print(f"{seconds:.0f} s in all. Loss against bytes sent: {picture}", soft_wrap=True)
    if len(chosen) < len(CONFIGURATIONS) and not args.only:
        console.print("scripts/demo --all trains with the other methods, too.")
    return 0


def choose(args: argparse.Namespace) -> list[Configuration]:
    """Return the configurations to train, in order."""
    first = sorted((c for c in CONFIGURATIONS if c.key in FIRST), key=lambda c: FIRST.index(c.key))
    every = [*first, *(c for c in CONFIGURATIONS if c.key not in FIRST)]
    if args.only:
        return [c for c in every if c.key in args.only]
    return every if args.all else first


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="demonstration", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add(
        "--seeds",
        type=int,
        nargs="+",
        metavar="SEED",
        help="train once with each of these seeds (0 1; with --all 0 1 2)",
    )
    add("--workers", type=int, default=4, help="number of workers (4)")
    add("--mpi", action="store_true", help="use MPI instead of Gloo")
    keys = [configuration.key for configuration in CONFIGURATIONS]
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help=f"every method, not only {', '.join(FIRST)}")
    which.add_argument(
        "--only", nargs="+", choices=keys, metavar="NAME", help="only some of " + ", ".join(keys)
    )
    add("--epochs", type=int, help="default: that of the example")
    add("--output", type=Path, default=Path("demonstration"), help="folder to write to (demonstration)")
    return parser


def parse_arguments() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: use at least 1")
    args.seeds = args.seeds or (SEEDS_OF_ALL if args.all else SEEDS)
    return args


def train(configuration: Configuration, args: argparse.Namespace) -> Result:
    """Launch the example once, for all seeds.

    Raises:
        TrainingFailed: it ended with an error.
    """
    launcher = Path(sys.executable).with_name("horovodrun")
    command = [str(launcher), "-np", str(args.workers), "--mpi" if args.mpi else "--gloo"]
    if args.mpi:  # more workers than cores: one that waits leaves its core to the others
        command.append("--mpi-args=--mca mpi_yield_when_idle 1")
    command += [sys.executable, str(EXAMPLE), *configuration.options.split(), "--quiet"]
    command += ["--seed", *map(str, args.seeds)]
    if args.epochs is not None:
        command += ["--epochs", str(args.epochs)]
    # horovodrun imports TensorFlow, which would log about itself each time.
    environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        try:
            done = subprocess.run(
                [*command, "--json", str(file)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIME_LIMIT,
            )
        except FileNotFoundError:
            raise TrainingFailed(f"there is no {launcher}: run scripts/setup") from None
        except subprocess.TimeoutExpired as error:
            shown = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout
            raise failure(configuration, command, f"did not end within {TIME_LIMIT} s", shown or "") from None
        if done.returncode != 0 or not file.exists():
            raise failure(configuration, command, f"ended with exit status {done.returncode}", done.stdout)
        runs = json.loads(file.read_text())["runs"]
    sent = runs[0]["bytes_per_step"]
    return Result(
        accuracies=[run["accuracy"] for run in runs],
        bytes_per_step=sent,
        ratio=runs[0]["float32_bytes_per_step"] / sent if sent else 1.0,
        seconds=[run["seconds"] for run in runs],
        losses=[run["losses"] for run in runs],
        bytes_sent=runs[0]["bytes_sent"],
    )


def failure(configuration: Configuration, command: Sequence[str], what: str, output: str) -> TrainingFailed:
    """Make an exception that quotes the workers' last lines.

    And few of horovodrun, whose traceback says only that a worker failed.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    workers = [line for line in lines if re.match(r"\[[\d,]+\]<std(out|err)>", line)]
    launcher = [line for line in lines if line not in workers]
    tail = (
        "\n".join("    " + line for line in workers[-20:] + launcher[-3 if workers else -20 :])
        or "    (nothing)"
    )
    return TrainingFailed(f"{configuration.title}: {' '.join(command)}\n{what}. It printed last:\n{tail}")


def heading(args: argparse.Namespace) -> str:
    controller, seeds = "MPI" if args.mpi else "Gloo", counted(len(args.seeds), "seed")
    return f"Handwritten digits, {counted(args.workers, 'worker')}, {controller}, {seeds}"


def line(cells: Sequence[str]) -> str:
    """Return a line of the table; 80 columns are enough."""
    widths = list(COLUMNS.values())
    return " ".join(
        [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:]))]
    )


def row(configuration: Configuration, results: dict[str, Result]) -> list[str]:
    """Return a configuration's cells, in the order of `COLUMNS`."""
    result = results[configuration.key]
    difference = difference_to_baseline(configuration, results)
    return [
        configuration.title,
        f"{result.accuracy:.2%}",
        f"{100 * min(result.accuracies):.1f}-{100 * max(result.accuracies):.1f}",
        "" if difference is None else f"{100 * difference:+.2f}",
        f"{result.bytes_per_step:,.0f}",
        f"{result.ratio:.1f}",
        f"{statistics.mean(result.seconds):.1f} s",
    ]


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def difference_to_baseline(configuration: Configuration, results: dict[str, Result]) -> float | None:
    if configuration.baseline not in results:
        return None
    return results[configuration.key].accuracy - results[configuration.baseline].accuracy


def draw(
    chosen: Sequence[Configuration], results: dict[str, Result], args: argparse.Namespace, path: Path
) -> None:
    """Plot the training loss against bytes sent.

    The loss is a mean over the seeds and over the last 10 steps.
    """
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for configuration in chosen:
        result = results[configuration.key]
        if not result.bytes_sent[-1]:
            continue  # a single worker sends nothing
        losses = [statistics.mean(step) for step in zip(*result.losses)]
        smooth = [statistics.mean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        megabytes = [sent / 1e6 for sent in result.bytes_sent]
        axes.plot(megabytes, smooth, label=configuration.title, **{"linewidth": 1.6, **configuration.style})
    axes.set(xscale="log", yscale="log", xlabel="MB sent per worker", ylabel="training loss")
    axes.set_title(
        f"Handwritten digits, {counted(args.workers, 'worker')}, mean of {counted(len(args.seeds), 'seed')}"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(which="both", alpha=0.25)
    label_ends(axes)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def label_ends(axes: Any) -> None:
    """Write each curve's name under its end.

    Makes room for the rows of names that this takes.
    """
    lines = sorted(axes.lines, key=lambda line: line.get_xdata()[-1])
    left, right = np.log(axes.get_xlim())
    rows: list[float] = []  # where the last name of each ends, in parts of the width
    placed = []
    for line in lines:
        width = NAME_WIDTH * len(line.get_label())
        end = (np.log(line.get_xdata()[-1]) - left) / (right - left)
        begin = min(max(end - width / 2, 0.01), 0.99 - width)
        row = next((row for row, taken in enumerate(rows) if taken < begin), len(rows))
        rows[row : row + 1] = [begin + width]
        placed.append((line, begin + width / 2, row))
    bottom, top = axes.get_ylim()
    band = ROW_HEIGHT * (len(rows) + 0.5)
    axes.set_ylim(top * (bottom / top) ** (1 / (1 - band)), top)
    for line, middle, row in placed:
        x, y = (values[-1] for values in line.get_data())
        axes.annotate(
            line.get_label(), (x, y), (middle, band - ROW_HEIGHT * (row + 1)), textcoords="axes fraction",
            horizontalalignment="center", fontsize="small", zorder=3 + len(rows) - row,
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.8, "alpha": 0.7},
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": line.get_color()},
        )  # fmt: skip


def figures(
    chosen: Sequence[Configuration], results: dict[str, Result], args: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    """Return what the table and the plot show, for programs."""
    rows = []
    for configuration in chosen:
        result = results[configuration.key]
        rows.append(
            {
                "name": configuration.key,
                "title": configuration.title,
                "options": configuration.options,
                "accuracy": result.accuracy,
                "baseline": configuration.baseline,
                "difference_to_baseline": difference_to_baseline(configuration, results),
                **result._asdict(),
            }
        )
    controller = "mpi" if args.mpi else "gloo"
    return {
        "version": former_names.VERSION,
        "workers": args.workers,
        "controller": controller,
        "seeds": args.seeds,
        "seconds": seconds,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
