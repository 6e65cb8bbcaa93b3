"""Functions that the studies share: verdicts, results on disk, statistics, tables, plots.

The module of a claim has:

- ``TITLE``, ``CLAIM`` (of the paper, in one sentence) and ``METHOD`` (of the test), all in Markdown;
- ``SIZES``: settings by name: ``"full"``, and ``"tiny"``, which takes seconds and only checks that the study runs;
- ``study(settings)``: the measurement. Returns figures that JSON can hold, without NaN or infinity;
- ``verdicts(figures)``: the verdicts on the claim, computed from the figures alone;
- ``tables(figures)``: the figures as Markdown;
- ``draw(figures, folder)``: the plots, written to PNG files in the folder;
- ``in_short(figures)``, optional: a sentence or two after the verdicts;
- ``SOURCE``, optional: the source of verdicts that name none;
- ``PARTS``, if parts of the study can run alone: their names. Settings then have ``only``, None or some of them, and
  verdicts, tables and plots use the figures that are available.
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
from horovod_quant.bench.command import processor
from horovod_quant.frontends import methods
from horovod_quant.schemes.base import Scheme, Workers
from reproduction import running

# The name of a claim is the name of its module, with hyphens.
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
    "limits": ("nmse and its limits", ("limits",)),
    "training": (
        "Training a transformer",
        ("transformer", "transformer-gpu", "machines", "bytes-count", "rivals", "more-workers"),
    ),
}
"""Pages of the evidence: file name without suffix, title, and claims on the page."""

# Tested only if named: most machines lack the requirements, or there is no result yet. Their modules may have
# ``problem(size)``: the reason why the claim cannot be tested here, or None.
ON_DEMAND = (
    "transformer-gpu",
    "nuqsgd-training",
    "rivals",
    "binsgdm-tuning",
    "emulated",
    "by-workers",
    "more-workers",
    "bytes-count",
    "machines",
)
WITH_PARTS = "eden, binsgdm-tuning, by-workers, bytes-count, emulated, more-workers, nuqsgd-training, rivals"

# One color per method and any bits: legible on white, and for most color-blind readers (Okabe and Ito).
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

FLOATS = {"none": "float32", "fp16": "float16"}
"""Titles of Horovod's own methods."""

OURS = "our reading"  # of a paper that does not state it, or not in these words
PACKAGE = "this package's claim"


class Verdict(NamedTuple):
    """Verdict on one part of a claim.

    Attributes:
        statement: that part, as a sentence that can be true or false.
        holds: True if the figures agree.
        evidence: the figures that decided.
        source: section of the paper, `OURS` or `PACKAGE`; by default the ``SOURCE`` of the module, or `OURS`.
    """

    statement: str
    holds: bool
    evidence: str
    source: str = ""


class Plot(NamedTuple):
    """PNG file in the folder of the results, and its caption."""

    file: str
    caption: str


def module_of(claim: str) -> Any:
    return importlib.import_module("reproduction." + claim.replace("-", "_"))


def verdicts_of(claim: str, figures: dict[str, Any]) -> list[Verdict]:
    """Return the verdicts on a claim, each with its source."""
    module = module_of(claim)
    default = getattr(module, "SOURCE", OURS)
    return [verdict._replace(source=verdict.source or default) for verdict in module.verdicts(figures)]


# ---- results on disk ---------------------------------------------------------------------------------------------


def run_study(claim: str, size: str, only: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the study of a claim and return its result.

    The result has the figures, the machine with its load before, and versions. ``version`` is that of the names of
    methods: ``NAMES`` of the module, or of `running`.

    Args:
        only: names of the module's ``PARTS`` to run; the figures of the other parts come from cached runs.
    """
    module = module_of(claim)
    settings = module.SIZES[size]
    if only is not None:
        settings = settings._replace(only=tuple(only))
    begin, cpu_begin, load = time.monotonic(), cpu_seconds(), os.getloadavg()[0]
    figures = module.study(settings)
    return {
        "claim": claim,
        "version": getattr(module, "NAMES", running.NAMES),
        "size": size,
        **({} if only is None else {"only": list(only)}),
        "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(cpu_seconds() - cpu_begin, 1),
        "machine": {
            "processor": processor(),
            "load": round(load, 2),
            "cores": len(os.sched_getaffinity(0)),
            "kernels": kernels.describe(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "figures": figures,
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and its finished children."""
    return sum(os.times()[:4])


def save(result: dict[str, Any], path: Path) -> None:
    """Write a result atomically: a claim whose file exists can be skipped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    partial.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """Return a saved result, or None."""
    return json.loads(path.read_text()) if path.exists() else None


def earlier(claim: str, settings: Any) -> dict[str, Any]:
    """Return saved figures to which this run adds parts, or none.

    There are none if all parts are run, or if the saved result has other settings. Cached runs stay on the machine that
    ran them; a result can be extended on another machine.

    Args:
        settings: of the current study.
    """
    result = load(running.KEPT.with_name(f"{claim}.json"))
    if result is None or settings.only is None:
        return {}
    same = module_of(claim).SIZES[result["size"]] == settings._replace(only=None)
    return result["figures"] if same else {}


def trainings_of(claim: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the trainings in the saved result of another claim.

    There are none if it trained with other options: a result of another size.
    """
    result = load(running.KEPT.with_name(f"{claim}.json"))
    if result is None or module_of(claim).SIZES[result["size"]].options != options:
        return {}
    return result["figures"]["trainings"]


# ---- numbers -----------------------------------------------------------------------------------------------------


def scheme(name: str, **changes: Any) -> Any:
    """Return the scheme of a method.

    Args:
        name: of the method, see `running.NAMES`.
        changes: arguments that replace the scheme's.
    """
    found: Any = methods.parse(name, version=running.NAMES, workers=4).scheme()
    return replace(found, **changes)


def exchanged(scheme: Scheme, own: np.ndarray, seed: int) -> tuple[simulator.Result, np.ndarray] | None:
    """Simulate a reduction; return its result and the deviation of the average.

    Args:
        scheme: of the workers.
        own: their gradients, one row each.
        seed: of the rounding.

    Returns:
        None if the bits do not hold the sum.
    """
    try:
        scheme.check_workers(len(own))
    except ValueError:
        return None
    done = simulator.run(scheme, list(own), seed=seed)
    return done, done.decoded[0][0] - own.mean(axis=0, dtype=np.float64)


def kind(method: str) -> str:
    """Return the name of a method without its bits: ``"nuqsgd"`` for ``"nuqsgd-4"``."""
    head, _, tail = method.rpartition("-")
    return head if tail.isdigit() else method


def title(method: str, *, version: int = running.NAMES, workers: Sequence[int] = (4,), **changes: Any) -> str:
    """Return a method as a script writes it: ``"QSGD(bits=4, norm='l2')"``.

    Arguments that change nothing with these numbers of workers are left out.

    Args:
        method: its name.
        version: of the name.
        workers: numbers in the result, the largest one last.
        changes: arguments that replace the method's.
    """
    found = methods.parse(method, version=version, workers=workers[-1])
    if found.scheme_class is None:
        return FLOATS[method]
    given = {**found.arguments, **changes}
    resolved = _resolved(found.scheme_class(**given), workers)
    for argument in [each for each in given if each != "bits"]:
        fewer = {name: value for name, value in given.items() if name != argument}
        if _resolved(found.scheme_class(**fewer), workers) == resolved:
            given = fewer
    return found._replace(arguments=given).code().removeprefix("hvq.")


def _resolved(scheme: Scheme, workers: Sequence[int]) -> list[Scheme]:
    return [scheme.for_workers(Workers(0, size)) for size in workers]


def width(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Format mean and standard deviation, for a table."""
    average = mean(values)
    if math.isinf(average):
        return "diverged"
    if average == 0 or len(values) < 2:
        return f"{average:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(average))))
    return f"{average:.{decimals}f} ± {deviation(values):.{decimals}f}"


def ratio(values: Sequence[float]) -> str:
    """Format the mean ratio and its standard error, for a verdict."""
    if math.isinf(max(values)):
        return "diverged"
    return f"{mean(values):.2f} ± {standard_error(values):.2f}"


def as_expected(measured: Sequence[float], expected: Sequence[float]) -> tuple[bool, str]:
    """Compare measured with expected values: equal on average, and the deviation.

    Equal is within 1% and three standard errors.
    """
    ratios = [a / b for a, b in zip(measured, expected) if b]
    off = mean(ratios) - 1
    return abs(off) <= 0.01 + 3 * standard_error(ratios), f"{off:+.2%} on average"


class Slope(NamedTuple):
    """Exponent of a power law and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2f}"


def fit_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Fit log y against log x by least squares.

    Args:
        x, y: positive, at least 3 points.

    Returns:
        The exponent, and its standard error from the residuals (as if these were independent).
    """
    log_x, log_y = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    centred = log_x - log_x.mean()
    slope = float(centred @ log_y / (centred @ centred))
    residuals = log_y - log_y.mean() - slope * centred
    variance = float(residuals @ residuals) / (len(log_x) - 2)
    return Slope(slope, math.sqrt(variance / float(centred @ centred)))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value."""
    return deviation(values) / math.sqrt(len(values))


def mean_losses(runs: Sequence[Sequence[float | None]]) -> list[float]:
    """Return the mean loss of each run; infinite if it diverged."""
    return [math.inf if None in run else mean(run) for run in runs]  # type: ignore[arg-type]


def final_losses(runs: Sequence[Sequence[float | None]]) -> list[float]:
    """Return each run's mean loss in its last quarter.

    It is infinite if the run diverged.
    """
    return mean_losses([run[-max(1, len(run) // 4) :] for run in runs])


def loss_ratios(runs: Any, others: Any, of: Callable = mean_losses) -> list[float]:
    """Return the ratio of two methods' losses per seed.

    It is infinite if the first diverged.
    """
    return [a / b if math.isfinite(a) else math.inf for a, b in zip(of(runs), of(others))]


def progress(items: Sequence[Any], description: str) -> Iterator[Any]:
    """Iterate with a progress bar if the output is a terminal."""
    return iter(tqdm(items, desc=description, leave=False, disable=None))


# ---- Markdown and plots ------------------------------------------------------------------------------------------


def link(claim: str, folder: str = "") -> str:
    """Return a Markdown link to the section of a claim.

    Args:
        folder: of the pages, relative to the page with the link, with a slash at its end.
    """
    heading = module_of(claim).TITLE
    page = next(name for name, (_, claims) in PAGES.items() if claim in claims)
    anchor = "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")
    return f"[{heading}]({folder}{page}.md#{anchor})"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; columns after the first are right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


TRAINING_HEADER = ("mean loss", "final loss", "test accuracy, %")


def training_columns(
    runs: Sequence[Sequence[float | None]], accuracies: Sequence[float]
) -> tuple[str, str, str]:
    """Return the columns of `TRAINING_HEADER` for the runs of one method."""
    return spread(mean_losses(runs)), spread(final_losses(runs)), spread([100 * a for a in accuracies])


def save_plot(figure: Any, path: Path) -> None:
    """Write a PNG file without a date or version.

    It depends on the figures alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def plot_loss(
    axes: Any, runs: Sequence[Sequence[float | None]], method: str, label: str, **style: Any
) -> None:
    """Draw the smoothed mean loss of runs, until one diverges.

    It is smoothed over 10 steps.
    """
    steps = [mean(step) for step in zip(*runs) if None not in step]
    smooth = [mean(steps[max(0, i - 9) : i + 1]) for i in range(len(steps))]
    axes.plot(smooth, **{"color": COLORS[kind(method)], "label": label, "linewidth": 1.4, **style})


def finish(figure: Any, panels: Sequence[Any], path: Path) -> None:
    """Add grids and one legend below all panels; write the file."""
    labels: dict[str, Any] = {}
    for axes in panels:
        axes.grid(alpha=0.25)
        handles, names = axes.get_legend_handles_labels()
        labels.update(zip(names, handles))
    for columns in range(min(3, len(labels)), 0, -1):
        legend = figure.legend(
            labels.values(), labels.keys(), loc="outside lower center", ncols=columns, fontsize="small"
        )
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    save_plot(figure, path)
