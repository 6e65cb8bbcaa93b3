"""QSGD (NeurIPS 2017): its variance-reduced variant QSVRG, and QSGD with delayed updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from horovod_quant import simulator
from reproduction import common
from reproduction.common import Plot, Verdict

TITLE = "QSGD with variance reduction, and with late updates"
SCALE = "logistic regression on 1,797 images, 12 to 36 epochs, 4 simulated workers"
CLAIM = (
    "QSGD extends to variance-reduced methods. With √n levels, QSVRG needs at most `(F + 2.8 n)(T + 1) + F n` bits per "
    "epoch of T steps, for n elements and floats of F bits. Its distance from the minimum of a strongly convex "
    "function is at most 0.9 to the power of the number of epochs. QSGD also converges under asynchrony (Alistarh et "
    "al., NeurIPS 2017)."
)
METHOD = (
    "Logistic regression with an l2 penalty of {penalty}: is the digit on one of scikit-learn's 1,797 images even? The "
    "input is {features:,} random Fourier features; the smoothness of the loss is {condition:.0f} times its strong "
    "convexity. There are {workers} simulated workers. Every quantized vector goes through `horovod_quant.simulator`, "
    "with the l2 norm of all its elements, {levels} levels (√n is {root}), Elias gamma codes and independent rounding. "
    "*QSVRG* is as in the paper: each worker quantizes `∇f_j(x) - ∇f_j(y) + ∇f(y)` for a random image j; y is the mean "
    "of the iterates in the last epoch, and its gradient is sent in float32. Step sizes are 1/({divisor} L) for QSVRG "
    "and for SVRG, which sends float32; they are 1/L for gradient descent, and fall as 1/t for SGD and QSGD. Bits are "
    "those that a worker broadcasts. *Late updates*: a parameter server applies the quantized gradient of one worker "
    "at a time, at a random one of the iterates up to D updates old; D = 0 is synchronous. This is repeated with the "
    "sigmoid loss, which is not convex."
)

FEATURES = 1024
PENALTY = 0.01
WORKERS = 4
QUANTIZED = "qsgd-6"
LEVELS = 31
STEP_DIVISOR = 2  # of QSVRG and SVRG: their step sizes are 1 / (2 L); with 3, 4 and 10 both are slower
LENGTH_BITS = 64  # header with the length of a payload, which the paper does not count
FLOAT_BITS = 32
RATE = 0.9  # per epoch, of the theorem in the paper
METHODS = {
    "qsvrg": "QSVRG", "svrg": "SVRG, float32", "descent": "gradient descent, float32", "qsgd": "QSGD",
    "sgd": "SGD, float32",
}  # fmt: skip
COLORS = {"qsvrg": "#0072B2", "svrg": "black", "descent": "#D55E00", "qsgd": "#56B4E9", "sgd": "#999999"}
LATE_COLORS = ("#009E73", "#E69F00", "#CC79A7", "#7F5FA8")
SIGMOID = "sigmoid"
LOSSES = {"logistic": "logistic loss", SIGMOID: "sigmoid loss"}
POINTS = 40  # at which delayed updates are evaluated
SECTION = "QSGD, section on quantized variance-reduced SGD"
ACCURACIES = (1e-2, 1e-4, 1e-6, 1e-8)
DECIDING = 1e-6
MATCH = 1.1  # what counts as equal


class Settings(NamedTuple):
    epochs: int  # of QSVRG and SVRG
    plain_epochs: int  # of the others
    epoch_steps: int  # T
    updates: int  # of the parameter server
    delays: tuple[int, ...]
    seeds: tuple[int, ...]
    late_seeds: tuple[int, ...]
    features: int


SIZES = {
    "full": Settings(12, 36, 130, 6000, (0, 8, 32, 128), (0, 1, 2), (0, 1, 2, 3, 4), FEATURES),
    "tiny": Settings(2, 2, 20, 40, (0, 8), (0,), (0,), 64),
}
METHOD = METHOD.format(
    penalty=PENALTY,
    features=FEATURES,
    condition=(0.25 + PENALTY) / PENALTY,
    workers=WORKERS,
    levels=LEVELS,
    root=math.isqrt(FEATURES),
    divisor=STEP_DIVISOR,
)


class Problem(NamedTuple):
    """Features with norms up to 1, and signs of their classes.

    Attributes:
        features: float64[m, n].
        signs: float64[m].
    """

    features: np.ndarray
    signs: np.ndarray

    @property
    def smoothness(self) -> float:
        return 0.25 * float(np.square(self.features).sum(axis=1).max()) + PENALTY

    def slopes(self, x: np.ndarray, rows: Any, loss: str = "logistic") -> np.ndarray:
        """Return the losses' derivatives by the products of features and x."""
        signs = self.signs[rows]
        wrong = 1 / (1 + np.exp(signs * (self.features[rows] @ x)))
        return -signs * wrong * (1 if loss == "logistic" else 1 - wrong)

    def gradient(self, x: np.ndarray, loss: str = "logistic") -> np.ndarray:
        slopes = self.slopes(x, slice(None), loss)
        return slopes @ self.features / len(self.signs) + PENALTY * x

    def value(self, x: np.ndarray) -> float:
        """Return the logistic loss."""
        margins = self.signs * (self.features @ x)
        return float(np.logaddexp(0, -margins).mean() + PENALTY / 2 * x @ x)


def make_problem(features: int) -> Problem:
    """Make random Fourier features of a Gaussian kernel, identical for every seed.

    Images are scaled to norm 1 before.
    """
    digits = load_digits()
    images = digits.data / np.linalg.norm(digits.data, axis=1, keepdims=True)
    rng = np.random.default_rng(0)
    directions = 3 * rng.standard_normal((images.shape[1], features))
    found = np.cos(images @ directions + rng.uniform(0, 2 * np.pi, features)) * math.sqrt(2 / features)
    return Problem(found / np.linalg.norm(found, axis=1).max(), np.where(digits.target % 2, -1.0, 1.0))


def minimum(problem: Problem) -> float:
    """Return the minimum of the logistic loss, by Newton's method."""
    x = np.zeros(problem.features.shape[1])
    for _ in range(12):
        slopes = np.abs(problem.slopes(x, slice(None)))
        weights = slopes * (1 - slopes) / len(slopes)
        hessian = (problem.features * weights[:, None]).T @ problem.features + PENALTY * np.eye(len(x))
        x -= np.linalg.solve(hessian, problem.gradient(x))
    return problem.value(x)


class Exchange:
    """Average over the workers, with a count of bits.

    It is in float32 or quantized. Counts the bits that one worker broadcasts.
    """

    def __init__(self, elements: int, quantized: bool, seed: int) -> None:
        self.bits = 0.0
        self.steps = 0
        self._seed = seed
        self._scheme = _scheme(elements, "elias") if quantized else None

    def average(self, own: np.ndarray) -> np.ndarray:
        self.steps += 1
        if self._scheme is None:
            self.bits += FLOAT_BITS * own.shape[1]
            return np.asarray(own.mean(axis=0))
        done = simulator.run(self._scheme, list(own), seed=self._seed, step=self.steps)
        self.bits += 8 * sum(done.bytes_sent.values()) / (len(own) - 1)  # an allgather: to all the others
        return done.decoded[0][0].astype(np.float64)


def _scheme(elements: int, coding: str) -> Any:
    """Return QSGD with the norm of all elements."""
    return common.scheme(QUANTIZED, bucket_size=elements, coding=coding, rounding="independent")


# ---- the study ---------------------------------------------------------------------------------------------------


def study(settings: Settings) -> dict[str, Any]:
    problem = make_problem(settings.features)
    lowest = minimum(problem)
    runs: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for seed in common.progress(settings.seeds, "qsvrg: seeds"):
        for method in METHODS:
            runs[method].append(_run(problem, method, settings, seed, lowest))
    late: dict[str, dict[str, list[list[float]]]] = {
        loss: {str(delay): [] for delay in settings.delays} for loss in LOSSES
    }
    for seed in common.progress(settings.late_seeds, "qsvrg: late updates"):
        for loss in LOSSES:
            for delay in settings.delays:
                late[loss][str(delay)].append(_late(problem, loss, delay, settings, seed, lowest))
    return {
        "elements": settings.features,
        "epoch_steps": settings.epoch_steps,
        "updates": _checkpoints(settings.updates),
        "start": problem.value(np.zeros(settings.features)) - lowest,
        "runs": runs,  # one entry per method and seed
        "late": late,  # one entry per loss, delay and seed
    }


def _run(problem: Problem, method: str, settings: Settings, seed: int, lowest: float) -> dict[str, Any]:
    """Return distance from the minimum, bits sent and reductions, after each epoch."""
    elements, reduced = problem.features.shape[1], method.endswith("svrg")
    exchange = Exchange(elements, method.startswith("q"), seed)
    epochs = _variance_reduced if reduced else _descent if method == "descent" else _plain
    found: dict[str, list[float]] = {"gaps": [], "bits": [], "exchanges": []}
    limit = settings.epochs if reduced else settings.plain_epochs
    for _, x in zip(range(limit), epochs(problem, exchange, settings.epoch_steps, seed)):
        found["gaps"].append(max(problem.value(x) - lowest, 0.0))
        found["bits"].append(exchange.bits)
        found["exchanges"].append(exchange.steps)
    return found


def _variance_reduced(problem: Problem, exchange: Exchange, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Iterate SVRG or QSVRG; yield the new snapshot after each epoch."""
    rng, count = np.random.default_rng(seed), len(problem.signs)
    rate = 1 / (STEP_DIVISOR * problem.smoothness)
    snapshot = np.zeros(problem.features.shape[1])
    while True:
        full = problem.gradient(snapshot)
        exchange.bits += FLOAT_BITS * len(full)
        x, total = snapshot, np.zeros_like(snapshot)
        for _ in range(steps):
            rows = rng.integers(count, size=WORKERS)
            slopes = problem.slopes(x, rows) - problem.slopes(snapshot, rows)
            own = slopes[:, None] * problem.features[rows] + PENALTY * (x - snapshot) + full
            x = x - rate * exchange.average(own)
            total += x
        snapshot = total / steps
        yield snapshot


def _plain(problem: Problem, exchange: Exchange, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Iterate SGD or QSGD: the iterate after each epoch."""
    rng, count = np.random.default_rng(seed), len(problem.signs)
    x, rates = np.zeros(problem.features.shape[1]), _falling(problem)
    while True:
        for _ in range(steps):
            rows = rng.integers(count, size=WORKERS)
            own = problem.slopes(x, rows)[:, None] * problem.features[rows] + PENALTY * x
            x = x - next(rates) * exchange.average(own)
        yield x


def _descent(problem: Problem, exchange: Exchange, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Iterate gradient descent; yield the iterate at regular intervals.

    An interval is a tenth of the steps of an epoch. Each of its steps uses all images.
    """
    x = np.zeros(problem.features.shape[1])
    while True:
        for _ in range(steps // 10):
            x = x - exchange.average(problem.gradient(x)[None]) / problem.smoothness
        yield x


def _falling(problem: Problem) -> Iterator[float]:
    """Iterate over falling step sizes.

    They start from 1 / (2 L), and fall as 2 / (PENALTY t).
    """
    first = 1 / (2 * problem.smoothness)
    return (first / (1 + first * PENALTY * step / 2) for step in itertools.count())


def _checkpoints(updates: int) -> list[int]:
    return list(range(updates // POINTS, updates + 1, updates // POINTS))


def _late(
    problem: Problem, loss: str, delay: int, settings: Settings, seed: int, lowest: float
) -> list[float]:
    """Run QSGD with updates up to ``delay`` old.

    Returns:
        Distances from the minimum; squared gradients for the sigmoid loss.
    """
    rng, count, size = np.random.default_rng(seed), len(problem.signs), delay + 1
    scheme, rates = _scheme(settings.features, "fixed"), _falling(problem)
    checkpoints = set(_checkpoints(settings.updates))
    recent = np.zeros((size, settings.features))
    found = []
    for update in range(settings.updates):
        row, age = rng.integers(count, size=1), int(rng.random() * min(size, update + 1))
        seen = recent[(update - age) % size]
        own = problem.slopes(seen, row, loss) * problem.features[row[0]] + PENALTY * seen
        (decoded,) = simulator.run(scheme, [own], seed=seed, step=update).decoded[0]
        x = recent[update % size] - next(rates) * decoded
        recent[(update + 1) % size] = x
        if update + 1 in checkpoints:
            squares = float(np.square(problem.gradient(x, loss)).sum())
            found.append(squares if loss == SIGMOID else problem.value(x) - lowest)
    return found


# ---- verdicts ----------------------------------------------------------------------------------------------------


def _power(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


def reached_at(run: dict[str, Any], accuracy: float, unit: str = "epochs") -> float | None:
    """Return the epochs, or bits, until a distance is reached.

    None if it never is. Interpolates the distance's logarithm linearly between two epochs; the first epoch counts
    whole.
    """
    gaps, place = run["gaps"], range(1, len(run["gaps"]) + 1) if unit == "epochs" else run[unit]
    for i, gap in enumerate(gaps):
        if gap <= accuracy:
            if not i or not gap:
                return float(place[i])
            share = math.log(gaps[i - 1] / accuracy) / math.log(gaps[i - 1] / gap)
            return place[i - 1] + share * (place[i] - place[i - 1])
    return None


def _mean_to(figures: dict[str, Any], method: str, accuracy: float, unit: str) -> float | None:
    """Return the mean of `reached_at` over the seeds.

    None if a seed never arrives.
    """
    found = [reached_at(run, accuracy, unit) for run in figures["runs"][method]]
    return None if None in found else common.mean(found)  # type: ignore[arg-type]


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    elements, steps, start = figures["elements"], figures["epoch_steps"], figures["start"]
    reduced = figures["runs"]["qsvrg"]
    worst = max(gap / start / RATE**epoch for run in reduced for epoch, gap in enumerate(run["gaps"], 1))
    factors = [(run["gaps"][-1] / start) ** (1 / len(run["gaps"])) for run in reduced]
    limit = (FLOAT_BITS + 2.8 * elements) * (steps + 1) + FLOAT_BITS * elements
    sent = [run["bits"][-1] / len(run["bits"]) - LENGTH_BITS * steps for run in reduced]
    reached = [accuracy for accuracy in ACCURACIES if _mean_to(figures, "svrg", accuracy, "epochs")]
    more = [
        (_mean_to(figures, "qsvrg", accuracy, "epochs") or math.inf) / _epochs(figures, "svrg", accuracy)
        for accuracy in reached
    ]
    return [
        Verdict(
            "QSVRG converges linearly: after every epoch p its distance from the minimum is at most "
            f"{RATE}^p of that at the start",
            worst <= 1,
            f"{common.spread(factors, 2)} of the distance is left after an epoch, "
            f"{max(run['gaps'][-1] for run in reduced):.1g} after {len(reduced[0]['gaps'])}",
            f"{SECTION}, its theorem",
        ),
        Verdict(
            f"QSVRG keeps the convergence of SVRG: it needs at most {MATCH}× the epochs to every accuracy",
            bool(more) and max(more) <= MATCH,
            ", ".join(f"{ratio:.2f}× to {_power(accuracy)}" for ratio, accuracy in zip(more, reached)),
            SECTION,
        ),
        Verdict(
            "An epoch of QSVRG needs at most (F + 2.8 n)(T + 1) + F n bits",
            max(sent) <= limit,
            f"{max(sent) / limit:.3f} of them, without the 8 bytes in which a payload states its length",
            f"{SECTION}, its theorem",
        ),
        *(_fewer_bits(figures, other) for other in ("svrg", "qsgd", "descent")),
        *(_late_verdict(figures, loss) for loss in LOSSES),
    ]


def _epochs(figures: dict[str, Any], method: str, accuracy: float) -> float:
    return _mean_to(figures, method, accuracy, "epochs") or math.inf


def _fewer_bits(figures: dict[str, Any], other: str) -> Verdict:
    ours, theirs = (_mean_to(figures, method, DECIDING, "bits") for method in ("qsvrg", other))
    runs = figures["runs"][other]
    if theirs is None:
        most = common.mean(run["bits"][-1] for run in runs)
        left = common.mean(run["gaps"][-1] for run in runs)
        evidence = f"{METHODS[other]} is still {left:.0e} away after {most / 1e6:.1f} Mbit" + (
            f"; QSVRG needs {ours / 1e6:.1f}" if ours else ""
        )
    else:
        evidence = f"{theirs / ours:.1f}× fewer" if ours else "QSVRG does not reach it"
    return Verdict(
        f"QSVRG gets within {_power(DECIDING)} of the minimum with fewer bits than {METHODS[other]}",
        ours is not None and (theirs is None or ours < theirs),
        evidence,
        f"{SECTION}, the discussion of its theorem" if other == "svrg" else common.OURS,
    )


def _ends(figures: dict[str, Any], loss: str, delay: str) -> list[float]:
    """Return the mean over the last quarter of the updates, per seed."""
    return common.final_losses(figures["late"][loss][delay])


def _late_verdict(figures: dict[str, Any], loss: str) -> Verdict:
    on_time, *late = figures["late"][loss]
    ratios = {
        delay: common.mean(_ends(figures, loss, delay)) / common.mean(_ends(figures, loss, on_time))
        for delay in late
    }
    what = "squared gradient" if loss == SIGMOID else "distance from the minimum"
    shown = "; ".join(f"{ratio:.2f}× with D = {delay}" for delay, ratio in ratios.items())
    return Verdict(
        f"QSGD converges with bounded delays as without ({LOSSES[loss]}): after the same number of updates the {what} "
        f"is at most {MATCH}× that without delays",
        max(ratios.values()) <= MATCH,
        shown,
        "QSGD, abstract: “under asynchrony”",
    )


def in_short(figures: dict[str, Any]) -> str:
    ours, theirs = (_mean_to(figures, method, DECIDING, "bits") for method in ("qsvrg", "svrg"))
    ratio = f"{theirs / ours:.1f}× fewer bits than SVRG" if ours and theirs else "no fewer bits than SVRG"
    return f"QSVRG gets within {_power(DECIDING)} of a minimum with {ratio}."


# ---- tables and plots --------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> str:
    rows = []
    for method, name in METHODS.items():
        row = [name]
        for accuracy in ACCURACIES:
            bits = _mean_to(figures, method, accuracy, "bits")
            row.append("not reached" if bits is None else f"{bits / 1e6:.2f}")
        runs = figures["runs"][method]
        row += [
            f"{common.mean(run['bits'][-1] for run in runs) / 1e6:.1f}",
            f"{common.mean(run['gaps'][-1] for run in runs):.1e}",
        ]
        rows.append(row)
    header = [
        "Mbit to a distance of",
        *map(_power, ACCURACIES),
        "Mbit in total",
        "distance at the end",
    ]
    delays = list(figures["late"]["logistic"])
    late = [
        [f"D = {delay}"] + [common.spread(_ends(figures, loss, delay)) for loss in LOSSES] for delay in delays
    ]
    return "\n\n".join(
        [
            common.table(header, rows),
            f"After {figures['updates'][-1]:,} updates, each up to D old (means of the last quarter):",
            common.table(
                ["", "logistic: distance from the minimum", "sigmoid: squared gradient"],
                late,
            ),
        ]
    )


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 4.4), layout="constrained")
    for method, name in METHODS.items():
        for place, run in enumerate(figures["runs"][method]):
            left.semilogy(
                [bits / 1e6 for bits in run["bits"]],
                run["gaps"],
                color=COLORS[method],
                linewidth=1.2,
                label=None if place else name,
            )
    left.set(
        xlabel="Mbit sent per worker", ylabel="distance from the minimum", title="convergence to the minimum"
    )
    left.set_ylim(bottom=1e-13)
    left.set_xlim(0, 1.05 * max(run["bits"][-1] for run in figures["runs"]["descent"]) / 1e6)
    for axes, loss in ((middle, "logistic"), (right, SIGMOID)):
        for (delay, runs), color in zip(figures["late"][loss].items(), LATE_COLORS):
            means = [common.mean(values) for values in zip(*runs)]
            axes.semilogy(figures["updates"], means, color=color, linewidth=1.2, label=f"QSGD, D = {delay}")
        axes.set(xlabel="updates", title=f"delayed updates: {LOSSES[loss]}")
    middle.set_ylabel("distance from the minimum")
    right.set_ylabel("squared gradient")
    common.finish(figure, [left, middle, right], folder / "qsvrg.png")
    return [
        Plot(
            "qsvrg.png",
            "Left: distance from the minimum by the bits that a worker has sent, each seed. Middle and right: with "
            "updates up to D old, mean of the seeds.",
        )
    ]
