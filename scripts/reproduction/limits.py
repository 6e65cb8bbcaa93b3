"""The nmse of each method, and the least of any unbiased code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from horovod_quant import simulator
from horovod_quant.codecs.rotated_codes import eden_variance_factor
from horovod_quant.frontends import methods
from horovod_quant.kernels.trellis import BRANCHES
from reproduction import common, variance
from reproduction.common import Plot, Verdict

TITLE = "How far each method is from the least nmse of its bits"
SCALE = "a million normally distributed elements, no training"
SOURCE = common.PACKAGE
CLAIM = (
    "At 3 and 4 bits a trellis closes at least a quarter of the distance, in bits, from EDEN to the least that an "
    "unbiased code needs for the same nmse."
)
METHOD = (
    "`nmse` is `||decoded - exact||² / ||exact||²`. A code that is unbiased and sends b bits for each element of a "
    "long normally distributed vector has an nmse of at least 1 / (4^b - 1) (the rate-distortion function, D = 4^-b; a "
    "decoder without bias has D / (1 - D)). No code that ignores the codes of other workers has less, and the rotation "
    "of EDEN makes every gradient look like such a vector. Each method quantizes {elements:,} normally distributed "
    "elements with {seeds} seeds: one rounding of the gradient of one worker; for GlobalQSGD the average of 4 or 16 "
    "workers whose gradients have nothing in common, since its integers share their bits with the sum, and whose "
    "rounding is correlated. Bits are those of the codes; scales add 0.03 for a bucket of 1,024, 0.13 for one of 256. "
    "*Bits to the limit* is b - log2(1 + 1 / nmse) / 2: the most that any other code can save at the same nmse. "
    "*Entropy*: b minus the entropy of the codes of the trellis given its state, the saving of a perfect entropy "
    "code for these codes. *Other levels*: its saving at equal nmse if the same trellis of four states had "
    "infinitely many equally spaced levels, which suit entropy codes; an estimate by simulation, which ignores that "
    "the number of bytes would differ between workers."
)

WIDTHS = (1, 2, 3, 4, 8)
ROWS = {
    "EDEN(bits=b)": ("eden-{}", 1),
    "EDEN(bits=b, trellis=True)": ("eden-{}-trellis", 1),
    "QSGD(bits=b)": ("qsgd-{}", 1),
    "GlobalQSGD(bits=b), 4 workers": ("global-qsgd-{}", 4),
    "GlobalQSGD(bits=b, rotate=True), 4 workers": ("global-qsgd-{}-rotate", 4),
    "GlobalQSGD(bits=b), 16 workers": ("global-qsgd-{}", 16),
    "GlobalQSGD(bits=b, rotate=True), 16 workers": ("global-qsgd-{}-rotate", 16),
}
"""Pattern of the name of a method, and number of workers."""

EDEN, TRELLIS = list(ROWS)[:2]
STATES = 4
QUARTER = 0.25
SPACINGS = tuple(2 ** (exponent / 4) for exponent in range(-12, 5))
"""Distances of equally spaced levels, in standard deviations."""

OTHERS = (
    "[DynamiQ](https://arxiv.org/abs/2602.08923) (2026) states 0.00096 to 0.0022 at 5 bits per element, for four "
    "trainings of language models on GPUs; the limit at 5 bits is {limit:.5f}, more than the least of these. The "
    "figures cannot be compared: its nmse is that of the whole multi-hop allreduce, in which partial sums are rounded "
    "again at each hop; its gradients are those of the models and not normally distributed, and a code with a width "
    "for each block gains from unequal blocks, which this limit ignores; and it rounds with correlation between "
    "workers, which can have a smaller nmse than codes that ignore each other. An alltoall of EDEN rounds "
    "twice: with 4 bits in both directions it has {twice:.4f}, with a trellis {twice_trellis:.4f}."
)
FEEDBACK = (
    "Error feedback, which adds the rounding error to the gradient of the next step, was tried with EDEN and Adam, "
    "at the workers, at the reducers, and at both: it was not better at 3, 2 or 1 bits. With 2 bits in both directions "
    "the transformer of 119,000 parameters ended at 1.681 with it and 1.659 without; with feedback at the reducers "
    "alone at 1.659 and 1.655 (1,000 steps, 4 workers, means of three seeds). This package has no code for it."
)


class Settings(NamedTuple):
    elements: int
    seeds: tuple[int, ...]


SIZES = {"full": Settings(2**20, (0, 1, 2)), "tiny": Settings(2**14, (0, 1))}
METHOD = METHOD.format(elements=SIZES["full"].elements, seeds=len(SIZES["full"].seeds))


def study(settings: Settings) -> dict[str, Any]:
    nmses: dict[str, dict[str, list[float]]] = {row: {} for row in ROWS}
    for row, (name, workers) in ROWS.items():
        for bits in WIDTHS:
            try:
                scheme: Any = methods.parse(name.format(bits)).scheme()
                scheme.check_workers(workers)
            except ValueError:
                continue
            nmses[row][str(bits)] = [measured(scheme, workers, settings.elements, s) for s in settings.seeds]
    return {
        "nmses": nmses,
        "entropies": {bits: trellis_entropy(int(bits), settings.elements) for bits in nmses[TRELLIS]},
        "spaced": [spaced(spacing, settings.elements) for spacing in SPACINGS],
    }


def measured(scheme: Any, workers: int, elements: int, seed: int) -> float:
    """Measure the nmse of the average of unrelated gradients."""
    gradients = normal(seed, (workers, elements))
    if workers == 1:
        return variance.measured(scheme, [gradients[0]], seed)
    return simulator.run(scheme, list(gradients), seed=seed).nmse


def normal(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def trellis_entropy(bits: int, elements: int) -> float:
    """Return the entropy of a trellis code given the two branches before."""
    from horovod_quant.kernels.rotation import LEVELS as FIRST
    from horovod_quant.kernels.trellis import trellis_codes

    z = normal(0, (elements // 1024, 1024))
    codes = trellis_codes(z, np.ones(len(z), np.float32), bits, FIRST[bits]).reshape(len(z), -1, 32)
    branches = codes & 1
    return conditional_entropy(codes[:, 2:], branches[:, 1:-1] + 2 * branches[:, :-2])


def conditional_entropy(symbols: np.ndarray, given: np.ndarray) -> float:
    """Return the entropy in bits of symbols, given other numbers."""
    _, places = np.unique(symbols, return_inverse=True)
    counts = np.zeros((given.max() + 1, places.max() + 1))
    np.add.at(counts, (given.ravel(), places.ravel()), 1)
    shares = counts[counts > 0] / (counts / counts.sum(axis=1, keepdims=True).clip(1))[counts > 0]
    return float(-(counts[counts > 0] * np.log2(counts[counts > 0] / shares)).sum() / counts.sum())


def spaced(spacing: float, elements: int) -> dict[str, float]:
    """Return nmse and entropy of the trellis with equally spaced levels.

    The entropy is in bits per element.
    """
    z = normal(1, (256, elements // 256)).astype(np.float64)  # sequences are rows of the first axis
    # Subset s has the levels (4 k + s - 1.5) of the spacing.
    offsets = np.arange(4) - 1.5
    sums = np.full((STATES, z.shape[1]), np.inf)
    sums[0] = 0
    levels, decisions = [], []
    for row in z:
        nearest = np.round((row / spacing - offsets[:, None]) / 4)
        points = 4 * nearest + offsets[:, None]
        distances = (row - spacing * points) ** 2
        pairs = [(sums[b] + distances[one], sums[b + 2] + distances[two]) for b, one, two in BRANCHES]
        levels.append(points)
        decisions.append(np.array([high < low for low, high in pairs]))
        sums = np.array([np.minimum(low, high) for low, high in pairs])
    lanes, state = np.arange(z.shape[1]), sums.argmin(axis=0)
    chosen, before = np.empty_like(z), np.empty(z.shape, int)
    subsets = np.array(BRANCHES)
    for number in range(len(z) - 1, -1, -1):
        late = decisions[number][state, lanes].astype(int)
        chosen[number] = levels[number][subsets[state, 1 + late], lanes]
        state = subsets[state, 0] + 2 * late
        before[number] = state
    inner = float((z * chosen).sum())
    nmse = float(np.square(z).sum() * np.square(chosen).sum()) / inner**2 - 1
    return {"bits": conditional_entropy(chosen, before), "nmse": nmse}


# ---- verdicts ----------------------------------------------------------------------------------------------------


def limit(bits: float) -> float:
    """Return the least nmse of an unbiased code with given bits."""
    return 1 / (4**bits - 1)


def bits_of(nmse: float) -> float:
    """Return the least bits of an unbiased code with an nmse."""
    return math.log2(1 + 1 / nmse) / 2


def gap(figures: dict[str, Any], row: str, bits: str) -> float:
    """Return a method's bits beyond the least for its nmse."""
    return int(bits) - bits_of(common.mean(figures["nmses"][row][bits]))


def saved_by_other_levels(figures: dict[str, Any], bits: str) -> float:
    """Return the bits that other levels save at the trellis nmse.

    Interpolates between two spacings, on the scale of the least bits.
    """
    known = sorted((bits_of(each["nmse"]), each["bits"]) for each in figures["spaced"])
    least = bits_of(common.mean(figures["nmses"][TRELLIS][bits]))
    return int(bits) - float(np.interp(least, *zip(*known)))


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    closed = {bits: 1 - gap(figures, TRELLIS, bits) / gap(figures, EDEN, bits) for bits in ("3", "4")}
    factors = {
        (row, bits): common.mean(own) / eden_variance_factor(int(bits), row == TRELLIS) - 1
        for row in (EDEN, TRELLIS)
        for bits, own in figures["nmses"][row].items()
    }
    furthest = max(factors.values(), key=abs)
    return [
        Verdict(
            "With 3 and 4 bits the trellis closes at least a quarter of the distance of EDEN to the limit",
            min(closed.values()) >= QUARTER,
            ", ".join(f"{bits} bits: {share:.0%}" for bits, share in closed.items()),
        ),
        Verdict(
            "One rounding of EDEN, with and without a trellis, has the nmse of its formula to within 2%",
            abs(furthest) <= 0.02,
            f"at most {furthest:+.1%} off",
        ),
    ]


def tables(figures: dict[str, Any]) -> str:
    rows = [["limit, 1 / (4^b - 1)", *(shown(limit(bits)) for bits in WIDTHS)]]
    for row, own in figures["nmses"].items():
        rows.append([row, *(shown(common.mean(own[str(b)])) if str(b) in own else "" for b in WIDTHS)])
    errors = common.table(["nmse", *map(common.width, WIDTHS)], rows)
    gaps = common.table(
        ["bits to the limit", *map(common.width, WIDTHS)],
        [
            [row, *(f"{gap(figures, row, str(b)):.2f}" if str(b) in own else "" for b in WIDTHS)]
            for row, own in figures["nmses"].items()
        ],
    )
    savings = common.table(
        ["trellis: bits that an entropy code saves", "entropy", "other levels", "at most (to the limit)"],
        [
            [
                common.width(int(bits)),
                f"{int(bits) - entropy:.2f}",
                f"{max(0.0, saved_by_other_levels(figures, bits)):.2f}",
                f"{gap(figures, TRELLIS, bits):.2f}",
            ]
            for bits, entropy in figures["entropies"].items()
        ],
    )
    twice = {
        name: eden_twice(common.mean(figures["nmses"][row]["4"]))
        for name, row in (("twice", EDEN), ("twice_trellis", TRELLIS))
    }
    return "\n\n".join([errors, gaps, savings, OTHERS.format(limit=limit(5), **twice), FEEDBACK])


def eden_twice(nmse: float) -> float:
    """Return the nmse of unrelated gradients after two roundings."""
    return nmse + nmse * (1 + nmse)


def shown(nmse: float) -> str:
    return f"{nmse:.3g}"


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    plot = Plot("limits.png", "nmse by bits. Black: the least that an unbiased code can have.")
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot(WIDTHS, [limit(bits) for bits in WIDTHS], color="black", label="limit")
    for row, (name, workers) in ROWS.items():
        own = figures["nmses"][row]
        kind = {EDEN: "eden", TRELLIS: "eden-trellis", "QSGD(bits=b)": "qsgd"}.get(row)
        kind = kind or ("global-qsgd-rotated" if "rotate" in name else "global-qsgd")
        style = "o--" if workers == 16 else "o-"
        x = [int(bits) for bits in own]
        axes.plot(
            x, [common.mean(each) for each in own.values()], style, color=common.COLORS[kind], label=row
        )
    axes.set_yscale("log")
    axes.set(xlabel="bits per element", ylabel="nmse")
    common.finish(figure, [axes], folder / plot.file)
    return [plot]
