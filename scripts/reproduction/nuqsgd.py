"""NUQSGD (JMLR 2021): variance and loss compared with QSGD and QSGDinf."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

import matplotlib.pyplot as plt
from proofs import bounds

from reproduction import common, gradients, variance
from reproduction.common import Plot, Verdict

TITLE = "NUQSGD: nonuniform levels have less variance"
SCALE = "142,000 parameters, digits, 120 steps, 4 simulated workers"
CLAIM = (
    "With the same number of bits, the exponential levels of NUQSGD have less variance than the uniform ones of QSGD, "
    "so training reaches a lower loss. NUQSGD also matches QSGDinf, which has no such guarantee (Ramezani-Kebrya et "
    "al., JMLR 2021)."
)
METHOD = (
    "A convolutional network of 142,000 parameters is trained on scikit-learn's handwritten digits. *Variance*: during "
    "a float32 training, the native kernels round the gradients of one of 4 workers; the variance is `||Q(g) - g||² / "
    "||g||²`, where g is all gradients that are quantized. The exact expectation is in the next column. *Loss*: the "
    "training is repeated with each method, with 4 simulated workers, the same weights, images and steps, and two "
    "learning rates that are about equally good for float32. The mean loss is over all steps, the final loss over the "
    "last quarter. The paper's QSGD has the l2 norm, as has NUQSGD, and its QSGDinf the max "
    "norm. The authors ran 4 bits, with buckets of 8,192 and 1,024, which decide the verdicts; 3 bits are an extra."
)

METHODS = ("qsgd", "qsgdinf", "nuqsgd")
TITLES = {
    "none": "float32",
    "qsgd": "QSGD, l2 norm",
    "qsgdinf": "QSGD, max norm",
    "nuqsgd": "NUQSGD, l2 norm",
}
"""Names in tables and plots, with the norm of a bucket."""

BITS = 4  # of the authors; settings with other bits are extras
MATCH = 1.1  # what counts as equal
VARIANCE = "NUQSGD, experiments: the variance of gradients"


class Settings(NamedTuple):
    bits: tuple[int, ...]
    buckets: tuple[int, ...]
    seeds: tuple[int, ...]
    steps: int
    measure_every: int


SIZES = {
    "full": Settings((3, 4), (1024, 8192), (0, 1, 2), gradients.STEPS, 6),
    "tiny": Settings((4,), (1024,), (0, 1), 6, 3),
}
WORKERS = 4
RATES = ("0.1", "0.2")
SMALLER, LARGER = RATES

BROKEN = 10.0
"""Loss of a diverging training: random guesses have 2.3."""


def study(settings: Settings) -> dict[str, Any]:
    cells = [(bits, bucket) for bits in settings.bits for bucket in settings.buckets]
    steps = list(range(0, settings.steps, settings.measure_every))
    variances: dict[str, list[list[float]]] = {
        _key(m, *cell): [[] for _ in settings.seeds] for m in METHODS for cell in cells
    }
    exact: dict[str, list[list[float]]] = {key: [[] for _ in settings.seeds] for key in variances}
    trained: dict[str, dict[str, list[gradients.Training]]] = {
        rate: {key: [] for key in ("none", *variances)} for rate in RATES
    }

    for run, seed in enumerate(common.progress(settings.seeds, "nuqsgd: seeds")):

        def watch(step: int, own: list, run: int = run, seed: int = seed) -> None:
            if step % settings.measure_every:
                return
            for method in METHODS:
                for cell in cells:
                    scheme, key = _scheme(method, *cell), _key(method, *cell)
                    variances[key][run].append(variance.measured(scheme, own, seed=1000 * seed + step))
                    exact[key][run].append(variance.expected(scheme, own))

        for rate in RATES:
            options: dict[str, Any] = {
                "workers": WORKERS, "steps": settings.steps, "learning_rate": float(rate)
            }  # fmt: skip
            seen = watch if rate == SMALLER else None
            trained[rate]["none"].append(gradients.train(None, seed=seed, watch=seen, **options))
            for method in METHODS:
                for cell in cells:
                    done = gradients.train(_scheme(method, *cell), seed=seed, **options)
                    trained[rate][_key(method, *cell)].append(done)
    return {
        "cells": cells,
        "steps": steps,
        "seeds": list(settings.seeds),
        "variances": variances,
        "expected": exact,
        "trainings": {
            rate: {key: [run._asdict() for run in runs] for key, runs in by_key.items()}
            for rate, by_key in trained.items()
        },
    }


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    cells = [tuple(cell) for cell in figures["cells"]]
    steps = [
        [value for runs in figures[name].values() for run in runs for value in run]
        for name in ("variances", "expected")
    ]
    rounds_well, deviation = common.as_expected(*steps)
    bounded = [
        max(max(run) for run in figures["expected"][_key(method, *cell)]) <= _bound(method, *cell)
        for method in ("qsgd", "nuqsgd")
        for cell in cells
    ]

    def compared(
        statement: str,
        ratios: Callable[[str, str], Sequence[float]],
        other: str,
        limit: float,
        source: str = common.OURS,
    ) -> Verdict:
        """Compare NUQSGD with another method; only the bits of the authors decide."""
        values = {cell: ratios(_key("nuqsgd", *cell), _key(other, *cell)) for cell in cells}
        held = all(common.mean(own) <= limit for cell, own in values.items() if cell[0] == BITS)
        return Verdict(
            statement, held, _evidence({cell: common.ratio(own) for cell, own in values.items()}), source
        )

    def variances(key: str, other: str) -> list[float]:
        runs, others = figures["variances"][key], figures["variances"][other]
        return [common.mean(run) / common.mean(run_) for run, run_ in zip(runs, others)]

    def mean_losses(key: str, other: str) -> list[float]:
        return common.loss_ratios(_losses(figures, SMALLER, key), _losses(figures, SMALLER, other))

    def final_losses(key: str, other: str) -> list[float]:
        return common.loss_ratios(
            _losses(figures, SMALLER, key), _losses(figures, SMALLER, other), common.final_losses
        )

    return [
        Verdict(
            "The variances are as expected, and stay below their bounds for QSGD and NUQSGD",
            rounds_well and all(bounded),
            f"{sum(bounded)} of {len(bounded)} settings, at every step and seed; "
            f"the variance of the kernels is off by {deviation}",
            "NUQSGD, theorem on the variance; QSGD, Lemma 3.1",
        ),
        compared("NUQSGD has less variance than QSGD with the l2 norm", variances, "qsgd", 1, VARIANCE),
        compared(
            f"NUQSGD's variance is at most {MATCH} times QSGDinf's", variances, "qsgdinf", MATCH, VARIANCE
        ),
        compared(
            f"NUQSGD's mean loss is at most {MATCH} times QSGDinf's (learning rate {SMALLER})",
            mean_losses,
            "qsgdinf",
            MATCH,
            "NUQSGD, abstract: “matches and exceeds the empirical performance of the QSGDinf heuristic”",
        ),
        compared(
            f"NUQSGD converges faster than QSGD with the l2 norm: a lower mean loss (learning rate {SMALLER})",
            mean_losses,
            "qsgd",
            1,
        ),
        compared(
            f"NUQSGD ends at a lower loss than QSGD with the l2 norm (learning rate {SMALLER})",
            final_losses,
            "qsgd",
            1,
        ),
        _larger_rate(figures, "qsgd"),
        _larger_rate(figures, "qsgdinf"),
    ]


def _evidence(values: dict[tuple[int, int], str]) -> str:
    """Join the evidence of all settings.

    Settings with other bits are marked as extras.
    """
    ordered = sorted(values.items(), key=lambda item: item[0][0] != BITS)
    return "; ".join(
        f"{'' if cell[0] == BITS else 'extra: '}{own} at {_cell(*cell)}" for cell, own in ordered
    )


def _larger_rate(figures: dict[str, Any], other: str) -> Verdict:
    """Compare losses at the larger learning rate, seed by seed.

    The reason is that diverged trainings have no mean.
    """
    won = {}
    for cell in map(tuple, figures["cells"]):
        ours, theirs = (
            common.mean_losses(_losses(figures, LARGER, _key(method, *cell))) for method in ("nuqsgd", other)
        )
        limit = 1 if other == "qsgd" else MATCH
        won[cell] = sum(a < b if limit == 1 else a <= limit * b < math.inf for a, b in zip(ours, theirs))
    seeds = len(figures["seeds"])
    claim = "a lower mean loss than" if other == "qsgd" else f"a mean loss at most {MATCH} times that of"
    return Verdict(
        f"With learning rate {LARGER} NUQSGD has {claim} {TITLES[other]}, for most seeds",
        all(2 * count > seeds for cell, count in won.items() if cell[0] == BITS),
        _evidence({cell: f"{count} of {seeds}" for cell, count in won.items()}),
    )


def in_short(figures: dict[str, Any]) -> str:
    best, plain = _best_final_loss(figures)
    return (
        f"The task is too easy for a verdict on losses: the final float32 loss is {plain / best:.1f} times that of the "
        "best quantized training."
    )


def _best_final_loss(figures: dict[str, Any]) -> tuple[float, float]:
    """Return the lowest final loss of quantized trainings, and the float32 loss."""
    ends = {
        key: common.mean(common.final_losses(_losses(figures, SMALLER, key)))
        for key in figures["trainings"][SMALLER]
    }
    return min(loss for key, loss in ends.items() if key != "none"), ends["none"]


def tables(figures: dict[str, Any]) -> str:
    variances, trainings = [], []
    for cell in figures["cells"]:
        for method in METHODS:
            key = _key(method, *cell)
            bound = _bound(method, *cell)
            title = f"{_cell(*cell)}: {TITLES[method]}{'' if cell[0] == BITS else ' (extra)'}"
            variances.append(
                (
                    title,
                    common.spread([common.mean(run) for run in figures["variances"][key]]),
                    f"{common.mean(map(common.mean, figures['expected'][key])):.3g}",
                    f"{bound:.3g}" if bound else "none",
                )
            )
            trainings.append((title, *_training_columns(figures, key)))
    trainings.append(("float32", *_training_columns(figures, "none")))
    header = ("", *common.TRAINING_HEADER, f"mean loss of each seed, learning rate {LARGER}")
    best, plain = _best_final_loss(figures)
    return "\n\n".join(
        (common.table(("", "variance", "expected", "bound"), variances), common.table(header, trainings))
    ) + (
        f"\n\nThe final loss is {plain:.2g} with float32, and {best:.2g} with the best quantized training: the network "
        "has memorized the training images, so the order of the final losses says nothing about the methods."
    )


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    _draw_variances(figures, folder / "nuqsgd-variance.png")
    for rate in RATES:
        _draw_losses(figures, rate, folder / f"nuqsgd-loss-{rate}.png")
    return [
        Plot(
            "nuqsgd-variance.png",
            "Variance during training: mean and range of the seeds; dashed: the bounds of QSGD and NUQSGD.",
        ),
        Plot(
            "nuqsgd-loss-0.1.png",
            f"Training loss with learning rate {SMALLER}, mean of the seeds and of the last 10 steps.",
        ),
        Plot(
            "nuqsgd-loss-0.2.png",
            f"The same with learning rate {LARGER}; a curve ends where its training diverged.",
        ),
    ]


def _draw_variances(figures: dict[str, Any], path: Path) -> None:
    figure, panels = _panels(figures)
    for cell, axes in zip(figures["cells"], panels):
        for method in METHODS:
            by_step = list(zip(*figures["variances"][_key(method, *cell)]))
            color = common.COLORS[method]
            axes.plot(figures["steps"], [common.mean(s) for s in by_step], color=color, label=TITLES[method])
            axes.fill_between(
                figures["steps"], [min(s) for s in by_step], [max(s) for s in by_step], color=color, alpha=0.2
            )
            bound = _bound(method, *cell)
            if bound:
                axes.axhline(
                    bound, color=color, linestyle="--", linewidth=1, label=f"{TITLES[method]}, bound"
                )
        axes.set(yscale="log", ylabel="||Q(g) − g||² / ||g||²")
    common.finish(figure, panels, path)


def _draw_losses(figures: dict[str, Any], rate: str, path: Path) -> None:
    figure, panels = _panels(figures)
    for cell, axes in zip(figures["cells"], panels):
        for method in ("none", *METHODS):
            key = method if method == "none" else _key(method, *cell)
            common.plot_loss(axes, _losses(figures, rate, key), method, TITLES[method])
        axes.set(yscale="log", ylabel="training loss, nats")
    bottom = min((loss for axes in panels for line in axes.lines for loss in line.get_ydata()), default=1.0)
    for axes in panels:
        axes.set_ylim(bottom / 1.5, BROKEN)
        for line in axes.lines:
            _say_that_it_breaks_down(axes, line)
    common.finish(figure, panels, path)


def _say_that_it_breaks_down(axes: Any, line: Any) -> None:
    """Annotate the point where a curve leaves the panel."""
    above = next((step for step, loss in zip(*line.get_data()) if loss > BROKEN), None)
    if above is not None:
        axes.annotate(
            f"diverges\nat step {above:g}", (above, BROKEN), (above + 3, BROKEN / 1.2), color=line.get_color(),
            fontsize="small", verticalalignment="top",
        )  # fmt: skip


def _panels(figures: dict[str, Any]) -> tuple[Any, list[Any]]:
    count = len(figures["cells"])
    columns = min(2, count)
    figure, grid = plt.subplots(
        -(-count // columns),
        columns,
        figsize=(9, 6),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    panels = list(grid.flat)
    for cell, axes in zip(figures["cells"], panels):
        axes.set_title(_cell(*cell))
    for axes in grid[-1]:
        axes.set_xlabel("step")
    return figure, panels


def _key(method: str, bits: int, bucket: int) -> str:
    return f"{method}-{bits}/{bucket}"


def _cell(bits: int, bucket: int) -> str:
    return f"{bits} bits, buckets of {bucket:,}"


def _scheme(method: str, bits: int, bucket: int) -> Any:
    return common.scheme(f"{method}-{bits}", bucket_size=bucket)


def _bound(method: str, bits: int, bucket: int) -> float | None:
    """Return the bound on the relative variance; None for the max norm."""
    if method == "qsgd":
        return bounds.qsgd_variance_factor(bucket, 2 ** (bits - 1) - 1)
    if method == "nuqsgd":
        return bounds.nuqsgd_variance_factor(bucket, 2 ** (bits - 1) - 2)
    return None


def _losses(figures: dict[str, Any], rate: str, key: str) -> list[list[float | None]]:
    return [run["losses"] for run in figures["trainings"][rate][key]]


def _training_columns(figures: dict[str, Any], key: str) -> tuple[str, ...]:
    accuracies = [run["accuracy"] for run in figures["trainings"][SMALLER][key]]
    larger = common.mean_losses(_losses(figures, LARGER, key))
    return (
        *common.training_columns(_losses(figures, SMALLER, key), accuracies),
        ", ".join("diverged" if math.isinf(loss) else f"{loss:.2g}" for loss in larger),
    )
