"""What the studies share: verdicts, results on disk, numbers with their spread, tables, plots.

The module of a claim has:

- ``TITLE``, ``CLAIM`` (the paper's, in one sentence) and ``METHOD`` (how it is tested), all of them Markdown;
- ``SIZES``: settings by name: ``"full"``, and ``"tiny"``, which takes seconds and tests the machinery alone;
- ``study(settings)``: the measurement. Returns figures that JSON can hold, without NaN or infinity;
- ``verdicts(figures)``: what they say about the claim, computed from nothing else;
- ``tables(figures)``: the figures as Markdown;
- ``draw(figures, folder)``: the plots, written to PNG files in the folder;
- ``in_short(figures)``, if there is more to say in the page's summary than how many verdicts hold: a sentence or two;
- ``SOURCE``, if all its verdicts that name no source have the same one;
- where parts of the study can be run alone, ``PARTS``, their names. Settings have ``only``, None or some of them, and
  verdicts, tables and plots are of what figures there are.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, NamedTuple

import matplotlib

matplotlib.use("Agg")  # no display

import matplotlib.pyplot as plt
import numpy as np
from tqdm import tqdm

from horovod_quant import kernels, simulator
from horovod_quant.frontends import methods
from horovod_quant.schemes.base import Scheme
from reproduction import running

# A claim's name is that of its module, with hyphens.
CLAIMS = (
    "nuqsgd",
    "nuqsgd-gradients",
    "global-qsgd",
    "rotated-sum",
    "qsgd",
    "qsvrg",
    "binsgdm",
    "transformer",
    "eden",
    "limits",
)

PAGES = {
    "qsgd": ("QSGD", ("qsgd", "qsvrg")),
    "nuqsgd": ("NUQSGD", ("nuqsgd", "nuqsgd-gradients", "nuqsgd-training")),
    "global-qsgd": ("Global-QSGD", ("global-qsgd", "by-workers", "rotated-sum")),
    "binsgdm": ("BinSGDM", ("binsgdm", "binsgdm-tuning", "emulated")),
    "eden": ("EDEN", ("eden",)),
    "limits": ("Errors and their limits", ("limits",)),
    "training": (
        "Training a transformer",
        ("transformer", "transformer-gpu", "bytes-count", "seconds", "rivals", "more-workers"),
    ),
}
"""Pages of the evidence: a file name without its suffix, a title, and the claims on the page."""

REPLACED = {"seconds": "bytes-count"}
"""Claims that leave the pages as soon as there is a verdict on another."""

# Tested only where they are named: most machines lack what they need, or nobody has tested them yet. Their
# modules also have ``problem(size)``: why the claim cannot be tested here, or None.
ON_DEMAND = (
    "transformer-gpu",
    "seconds",
    "nuqsgd-training",
    "rivals",
    "binsgdm-tuning",
    "emulated",
    "by-workers",
    "more-workers",
    "bytes-count",
)
WITH_PARTS = (
    "eden, binsgdm-tuning, by-workers, bytes-count, emulated, more-workers, nuqsgd-training, rivals, seconds"
)

# One colour a method, whatever its bits: legible on white, and to most of the colour-blind (Okabe and Ito).
COLORS = {
    "none": "black",
    "fp16": "#999999",
    "qsgd": "#0072B2",
    "qsgdinf": "#56B4E9",
    "nuqsgd": "#CC79A7",
    "global-qsgd": "#009E73",
    "global-qsgd-l2": "#E69F00",
    "global-qsgd-exp": "#7F5FA8",
    "global-qsgd-rotated": "#882255",
    "eden": "#8C6D1F",
    "eden-trellis": "#A50F15",
    "binsgdm": "#D55E00",
    "powersgd": "#555555",
}

TITLES = {
    "none": "float32",
    "fp16": "float16",
    "qsgd": "QSGD",
    "qsgdinf": "QSGDinf",
    "nuqsgd": "NUQSGD",
    "global-qsgd": "Global-QSGD",
    "global-qsgd-l2": "Global-QSGD, l2 norm",
    "global-qsgd-exp": "Global-QSGD, exponential",
    "global-qsgd-rotated": "Global-QSGD, rotated",
    "eden": "EDEN",
    "eden-trellis": "EDEN with a trellis",
    "binsgdm": "BinSGDM",
}


OURS = "our reading"  # of a paper that does not say so, or not in such words
PACKAGE = "this package's claim"


class Verdict(NamedTuple):
    """What the figures say about one part of a claim.

    Attributes:
        statement: that part, as a sentence that can be true or false.
        holds: whether the figures agree.
        evidence: the figures that decided.
        source: where the paper says so, `OURS` or `PACKAGE`; by default the module's ``SOURCE``, or `OURS`.
    """

    statement: str
    holds: bool
    evidence: str
    source: str = ""


class Plot(NamedTuple):
    """A PNG file in the folder of the results, and what it shows."""

    file: str
    caption: str


def module_of(claim: str) -> Any:
    return importlib.import_module("reproduction." + claim.replace("-", "_"))


def verdicts_of(claim: str, figures: dict[str, Any]) -> list[Verdict]:
    """A claim's verdicts, each with its source."""
    module = module_of(claim)
    default = getattr(module, "SOURCE", OURS)
    return [verdict._replace(source=verdict.source or default) for verdict in module.verdicts(figures)]


# ---- results on disk ---------------------------------------------------------------------------------------------


def run_study(claim: str, size: str, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs a claim's study; returns its figures with what one has to know to repeat them.

    Args:
        only: names of the module's ``PARTS`` to run; beside them the figures have what is kept of the others.
    """
    module = module_of(claim)
    settings = module.SIZES[size]
    if only is not None:
        settings = settings._replace(only=tuple(only))
    begin, cpu_begin = time.monotonic(), cpu_seconds()
    figures = module.study(settings)
    return {
        "claim": claim,
        "size": size,
        **({} if only is None else {"only": list(only)}),
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(cpu_seconds() - cpu_begin, 1),
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "kernels": kernels.describe(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "figures": figures,
    }


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def processor() -> str:
    """The processor's name, or the architecture where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def save(result: dict[str, Any], path: Path) -> None:
    """Writes a result whole or not at all: a file that exists is one that can be skipped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """A result that was saved, or None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def earlier(claim: str, settings: Any) -> dict[str, Any]:
    """The figures of a claim's saved result, where only some parts are run and the rest was measured alike; else none.

    What is kept of single runs stays on the machine that ran them. A result does not, and parts may be added to it
    elsewhere.

    Args:
        settings: of the study that asks.
    """
    result = load(running.KEPT.with_name(f"{claim}.json"))
    if result is None or settings.only is None:
        return {}
    same = module_of(claim).SIZES[result["size"]] == settings._replace(only=None)
    return result["figures"] if same else {}


# ---- numbers -----------------------------------------------------------------------------------------------------


def scheme(name: str, **changes: Any) -> Any:
    """The scheme of a method by the name that it had in version 0.1.0, with other arguments for some.

    The results have these names: trainings of then are compared with each other.
    """
    found: Any = methods.parse(name, version=1, workers=4).scheme()
    return replace(found, **changes)


def exchanged(scheme: Scheme, own: np.ndarray, seed: int) -> tuple[simulator.Result, np.ndarray] | None:
    """A simulated exchange, and what its average is off; None where the bits do not hold the sum.

    Args:
        scheme: of the workers.
        own: their gradients, a row each.
        seed: of the rounding.
    """
    try:
        scheme.check_workers(len(own))
    except ValueError:
        return None
    done = simulator.run(scheme, list(own), seed=seed)
    return done, done.decoded[0][0] - own.mean(axis=0, dtype=np.float64)


def kind(method: str) -> str:
    """A method's name without its bits: ``"nuqsgd"`` of ``"nuqsgd-4"``."""
    head, _, tail = method.rpartition("-")
    return head if tail.isdigit() else method


def title(method: str) -> str:
    """A method's name for readers: ``"NUQSGD, 4 bits"``."""
    bits = method.rpartition("-")[2]
    return TITLES[kind(method)] + (f", {width(int(bits))}" if bits.isdigit() else "")


def width(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of a sample; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard deviation, for a table."""
    average = mean(values)
    if math.isinf(average):
        return "broke down"
    if average == 0 or len(values) < 2:
        return f"{average:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(average))))
    return f"{average:.{decimals}f} ± {deviation(values):.{decimals}f}"


def ratio(values: Sequence[float]) -> str:
    """Mean ratio and its standard error, for a verdict."""
    if math.isinf(max(values)):
        return "broke down"
    return f"{mean(values):.2f} ± {standard_error(values):.2f}"


def as_expected(measured: Sequence[float], expected: Sequence[float]) -> tuple[bool, str]:
    """Whether measured values are the expected ones on average, within 1% and three standard errors; how far off."""
    ratios = [a / b for a, b in zip(measured, expected) if b]
    off = mean(ratios) - 1
    return abs(off) <= 0.01 + 3 * standard_error(ratios), f"{off:+.2%} on average"


class Slope(NamedTuple):
    """Exponent of a power law, and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2f}"


def fit_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Least squares of log y against log x.

    Args:
        x, y: positive, at least 3 points.

    Returns:
        The exponent, and its standard error from the residuals (it does not know of errors that neighbours share).
    """
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    centred = log_x - log_x.mean()
    slope = float(centred @ log_y / (centred @ centred))
    residuals = log_y - log_y.mean() - slope * centred
    variance = float(residuals @ residuals) / (len(log_x) - 2)
    return Slope(slope, math.sqrt(variance / float(centred @ centred)))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 for a single value."""
    return deviation(values) / math.sqrt(len(values))


def mean_losses(runs: Sequence[Sequence[float | None]]) -> list[float]:
    """For each run the mean loss of all steps; infinite where the training broke down."""
    return [math.inf if None in run else mean(run) for run in runs]  # type: ignore[arg-type]


def final_losses(runs: Sequence[Sequence[float | None]]) -> list[float]:
    """For each run the mean loss of the last quarter of its steps; infinite where the training broke down."""
    return mean_losses([run[-max(1, len(run) // 4) :] for run in runs])


def loss_ratios(runs: Any, others: Any, of: Callable = mean_losses) -> list[float]:
    """For each seed the loss of one method by another's; infinite where the first broke down."""
    return [a / b if math.isfinite(a) else math.inf for a, b in zip(of(runs), of(others))]


def progress(items: Sequence[Any], description: str) -> Iterator[Any]:
    """Iterates with a bar, where somebody looks."""
    return iter(tqdm(items, desc=description, leave=False, disable=None))


# ---- Markdown and plots ------------------------------------------------------------------------------------------


def link(heading: str, page: str = "") -> str:
    """A Markdown link to a section, of another page if its path is given."""
    anchor = "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")
    return f"[{heading}]({page}#{anchor})"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; columns after the first are aligned to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


TRAINING_HEADER = ("mean loss", "final loss", "test accuracy, %")


def training_columns(
    runs: Sequence[Sequence[float | None]], accuracies: Sequence[float]
) -> tuple[str, str, str]:
    """The columns of `TRAINING_HEADER`, from the losses and accuracies of one method's runs."""
    return spread(mean_losses(runs)), spread(final_losses(runs)), spread([100 * a for a in accuracies])


def save_plot(figure: Any, path: Path) -> None:
    """Writes a PNG file with the date and version left out, so that the same figures give the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def plot_loss(axes: Any, runs: Sequence[Sequence[float | None]], method: str, **style: Any) -> None:
    """Draws the mean of the runs, and of the last 10 steps; only as far as every run got."""
    steps = [mean(step) for step in zip(*runs) if None not in step]
    smooth = [mean(steps[max(0, i - 9) : i + 1]) for i in range(len(steps))]
    axes.plot(smooth, **{"color": COLORS[kind(method)], "label": title(method), "linewidth": 1.4, **style})


def finish(figure: Any, panels: Sequence[Any], path: Path) -> None:
    """Adds grids, and one legend for all panels below them; writes the file."""
    labels: dict[str, Any] = {}
    for axes in panels:
        axes.grid(alpha=0.25)
        handles, names = axes.get_legend_handles_labels()
        labels.update(zip(names, handles))
    figure.legend(
        labels.values(),
        labels.keys(),
        loc="outside lower center",
        ncols=min(3, len(labels)),
        fontsize="small",
    )
    save_plot(figure, path)
