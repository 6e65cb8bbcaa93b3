"""Comparison of EDEN's nmse with its formula and other methods.

It is a part of `eden`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from proofs import bounds

from horovod_quant.kernels.layout import TILE
from horovod_quant.schemes import EDEN
from reproduction import common, variance
from reproduction.common import Plot, Verdict

MOST_NON_ZEROS = 10


def _non_zeros(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw gradients with 1 to 10 non-zeros per bucket, at random positions."""
    ranks = rng.random(shape).reshape(-1, TILE).argsort(axis=1).argsort(axis=1)
    counts = rng.integers(1, MOST_NON_ZEROS, size=(len(ranks), 1), endpoint=True)
    return np.where(ranks < counts, rng.standard_normal(ranks.shape), 0).reshape(shape)


def _one_spike(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Draw noise whose energy is nearly all in one element per bucket."""
    drawn = rng.standard_normal(shape)
    buckets = drawn.reshape(-1, TILE)
    buckets[np.arange(len(buckets)), rng.integers(TILE, size=len(buckets))] = 1000
    return drawn


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "Gaussian": lambda rng, shape: rng.standard_normal(shape),
    "Laplace": lambda rng, shape: rng.laplace(size=shape),
    "Student's t": lambda rng, shape: rng.standard_t(2, size=shape),
    "90% zeros": lambda rng, shape: rng.standard_normal(shape) * (rng.random(shape) < 0.1),
    "1 to 10 non-zeros": _non_zeros,
    "one spike": _one_spike,
}

SCHEMES = {
    **{f"eden-{bits}": (common.title(f"eden-{bits}"), EDEN(bits, bits, "alltoall")) for bits in (4, 3, 2, 1)},
    "eden-2/4": (common.title("eden-2", server_bits=4), EDEN(2, 4, "alltoall")),
    **{
        f"eden-trellis-{bits}": (
            common.title(f"eden-trellis-{bits}"),
            EDEN(bits, bits, "alltoall", trellis=True),
        )
        for bits in (4, 3, 2, 1)
    },
    **{
        name: (common.title(name), common.scheme(name, exchange="alltoall"))
        for name in ("qsgdinf-4", "nuqsgd-4")
    },
    "global-qsgd-8": (common.title("global-qsgd-8"), common.scheme("global-qsgd-8")),
}
LIMIT = 0.05


class Settings(NamedTuple):
    workers: tuple[int, ...]
    elements: int
    seeds: tuple[int, ...]


def measure(settings: Settings) -> list[dict[str, Any]]:
    found = []
    for seed in common.progress(settings.seeds, "eden: errors"):
        for number, (kind, draw) in enumerate(KINDS.items()):
            rng = np.random.default_rng([seed, number])
            gradients = draw(rng, (max(settings.workers), settings.elements)).astype(np.float32)
            for size in settings.workers:
                own = gradients[:size]
                energy = variance.squared([own.mean(axis=0, dtype=np.float64)])
                for name, (_, scheme) in SCHEMES.items():
                    done = common.exchanged(scheme, own, seed)
                    if done is None:
                        continue
                    predicted = None
                    if isinstance(scheme, EDEN):
                        predicted = scheme.widths(size).nmse(bounds.energy_ratio(own))
                    found.append(
                        {
                            "method": name,
                            "kind": kind,
                            "workers": size,
                            "seed": seed,
                            "nmse": variance.squared([done[1]]) / energy,
                            "formula": predicted,
                        }
                    )
    return found


# ---- verdicts ----------------------------------------------------------------------------------------------------


def _mean(figures: list[dict[str, Any]], what: str = "nmse", **wanted: Any) -> float:
    """Return the mean of a figure over the seeds."""
    return common.mean(
        each[what] for each in figures if all(each[key] == value for key, value in wanted.items())
    )


def _cells(figures: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return sorted({(each["kind"], each["workers"]) for each in figures})


def verdicts(figures: list[dict[str, Any]]) -> list[Verdict]:
    cells = _cells(figures)
    ratios = {
        (name, kind, size): _mean(figures, method=name, kind=kind, workers=size)
        / _mean(figures, "formula", method=name, kind=kind, workers=size)
        for name in SCHEMES
        if name.startswith("eden")
        for kind, size in cells
    }
    furthest = max(ratios, key=lambda key: abs(ratios[key] - 1))
    found = [
        Verdict(
            f"The nmse of EDEN matches its formula to within {LIMIT:.0%}, for every distribution and number of workers",
            abs(ratios[furthest] - 1) <= LIMIT,
            f"{len(ratios)} reductions, {min(ratios.values()):.3f} to {max(ratios.values()):.3f} times the formula; "
            f"the furthest is {SCHEMES[furthest[0]][0]}, {furthest[1]}, {furthest[2]} workers",
        )
    ]
    for other in ("qsgdinf-4", "nuqsgd-4"):
        gains = {
            (kind, size): _mean(figures, method=other, kind=kind, workers=size)
            / _mean(figures, method="eden-4", kind=kind, workers=size)
            for kind, size in cells
        }
        worse = sorted({kind for (kind, size), gain in gains.items() if gain <= 1})
        found.append(
            Verdict(
                f"The nmse of {SCHEMES['eden-4'][0]} is smaller than that of {SCHEMES[other][0]}, for every "
                "distribution and number of workers",
                not worse,
                f"{min(gains.values()):.2g}× to {max(gains.values()):.3g}× smaller"
                + (f"; larger for {', '.join(worse)}" if worse else ""),
            )
        )
    return found


def table(figures: list[dict[str, Any]]) -> str:
    sizes = sorted({each["workers"] for each in figures})
    rows = []
    for name, (title, scheme) in SCHEMES.items():
        for size in (sizes[0], sizes[-1]):
            if not any(each["method"] == name and each["workers"] == size for each in figures):
                continue
            errors = [f"{_mean(figures, method=name, kind=kind, workers=size):.3g}" for kind in KINDS]
            formula = f"{scheme.widths(size).nmse():.3g}" if isinstance(scheme, EDEN) else ""
            rows.append([f"{title}, {size} workers", *errors, formula])
    note = (
        "The nmse, `||average - exact||² / ||exact||²`, of independent gradients, means of the seeds, with "
        '`exchange="alltoall"`, which rounds twice (GlobalQSGD: one sum). *Formula*: '
        "`horovod_quant.codecs.rotated_codes.eden_nmse`."
    )
    return f"{note}\n\n{common.table(['', *KINDS, 'formula'], rows)}"


def draw(figures: list[dict[str, Any]], folder: Path) -> Plot:
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    sizes = sorted({each["workers"] for each in figures})
    for name, (title, scheme) in SCHEMES.items():
        if name == "eden-2/4":
            continue
        columns = [
            [
                _mean(figures, method=name, kind=kind, workers=size)
                for kind in KINDS
                if any(e["method"] == name and e["workers"] == size for e in figures)
            ]
            for size in sizes
        ]
        shown = [(size, min(column), max(column)) for size, column in zip(sizes, columns) if column]
        x, low, high = zip(*shown)
        color = common.COLORS[common.kind(name)]
        axes.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
        label = {"eden-4": "EDEN(bits=b)", "eden-trellis-4": "EDEN(bits=b, trellis=True)"}.get(name)
        axes.plot(x, high, color=color, label=label, linewidth=1)
        if isinstance(scheme, EDEN) and scheme.trellis:
            continue
        if isinstance(scheme, EDEN):
            axes.annotate(common.width(scheme.bits), (x[-1], high[-1]), fontsize="small", color=color)
        else:
            axes.plot([], [], color=color, label=title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-3)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="workers", ylabel="nmse of the average")
    common.finish(figure, [axes], folder / "eden-errors.png")
    return Plot(
        "eden-errors.png",
        "nmse by the number of workers: from the least to the largest of the distributions.",
    )
