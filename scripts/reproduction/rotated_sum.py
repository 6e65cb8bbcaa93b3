"""Global-QSGD with ``rotate=True``: nmse and overflows by the number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np

from horovod_quant import simulator
from horovod_quant.codecs.rotated_sum_steps import rotated_sum_nmse
from horovod_quant.kernels.layout import TILE
from reproduction import common, gradients, variance
from reproduction.common import Plot, Verdict

TITLE = "Global-QSGD with a rotation: room for the sum that occurs"
SCALE = "32,768 elements, up to 256 simulated workers, no training"
SOURCE = common.PACKAGE
CLAIM = (
    "This claim is not from a paper: after a rotation common to all workers, a field needs room only for the sum that "
    "the gradients have, not for the largest possible one. So integers suit any number of workers. A sum that "
    "overflows its field, in less than one bucket of a million, is detected and resent."
)
METHOD = (
    "Simulated workers with `GlobalQSGD`, with and without `rotate=True`, at the same number of bits, both with "
    "correlated rounding. *Gaussian*: independent gradients. *Rows*: independent gradients whose rows have different "
    "scales, and 0.1% of outliers. *Layer*: each worker has the gradient of its own 8 images, at the same weights of a "
    "convolutional network (its second layer). *A sixteenth alike*: of 16 buckets that share an estimate, one is the "
    "same on all workers. The estimate misses that, so sums overflow their fields. The nmse is `||average - exact||² / "
    "||exact||²`."
)

LAYER = "layer"
LAYER_ELEMENTS = 9216
PROVOKED = "a sixteenth alike"
KINDS = ("gaussian", "rows", LAYER, PROVOKED)
ORDINARY = KINDS[:3]
METHODS = ("global-qsgd", "global-qsgd-rotated")
GAIN = 10  # minimum ratio of the two nmses
MANY = 64
FEW = 6  # a larger count with an expectation of 1 has a probability below 1 in 10,000


class Settings(NamedTuple):
    workers: tuple[int, ...]
    elements: int
    bits: tuple[int, ...]
    seeds: tuple[int, ...]
    counted: int  # thousands of buckets of two workers, with the most bits, in which overflows are counted


SIZES = {
    "full": Settings((4, 16, 64, 256), 2**15, (4, 6, 8), (0, 1, 2), 1024),
    "tiny": Settings((4, 64), 2**14, (8,), (0, 1), 4),
}


def study(settings: Settings) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    for seed in common.progress(settings.seeds, "rotated-sum: seeds"):
        for kind in KINDS:
            drawn = _gradients(kind, seed, max(settings.workers), settings.elements)
            for size in settings.workers:
                for bits in settings.bits:
                    found += [_exchange(method, bits, kind, drawn[:size], seed) for method in METHODS]
    return {
        "workers": list(settings.workers),
        "bits": list(settings.bits),
        "exchanges": [each for each in found if each],
        "counted": _count(settings),
    }


def _count(settings: Settings) -> dict[str, int]:
    """Count overflows of two gradients under many names, with different rotations."""
    scheme, size = common.scheme(f"{METHODS[1]}-{max(settings.bits)}"), 1024
    own = list(np.random.default_rng(0).standard_normal((2, size * TILE), np.float32))
    again = sum(
        simulator.run(scheme, own, names=[str(name)]).exchanged_again
        for name in common.progress(range(settings.counted), "rotated-sum: overflows")
    )
    return {"again": again, "buckets": size * settings.counted}


def _gradients(kind: str, seed: int, workers: int, elements: int) -> np.ndarray:
    if kind == LAYER:
        return gradients.worker_gradients(
            seed=seed, workers=workers, steps=20, images_each=8, elements=LAYER_ELEMENTS
        )
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((workers, elements), np.float32)
    if kind == "rows":
        rows = drawn.reshape(workers, -1, 256)
        rows *= np.exp(rng.standard_normal((1, rows.shape[1], 1))).astype(np.float32)
        drawn[:, rng.random(elements) < 1e-3] *= np.float32(30)
    if kind == PROVOKED:
        drawn.reshape(workers, -1, 16, TILE)[:, :, 0] = rng.standard_normal(TILE)
    return drawn


def _exchange(method: str, bits: int, kind: str, own: np.ndarray, seed: int) -> dict[str, Any] | None:
    """Simulate a reduction and return its figures.

    Return None if the sum does not fit.
    """
    scheme = common.scheme(f"{method}-{bits}")
    found = common.exchanged(scheme, own, seed)
    if found is None:
        return None
    done, difference = found
    return {
        "method": method,
        "bits": bits,
        "kind": kind,
        "workers": len(own),
        "nmse": variance.squared([difference]) / variance.squared([own.mean(axis=0, dtype=np.float64)]),
        "bytes": sum(done.bytes_sent.values()) / own.shape[1],
        "again": done.exchanged_again,
        "buckets": -(-own.shape[1] // TILE),
    }


# ---- verdicts ----------------------------------------------------------------------------------------------------


def _those(figures: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [each for each in figures["exchanges"] if all(each[key] == value for key, value in wanted.items())]


def _errors(figures: dict[str, Any], **wanted: Any) -> list[float]:
    """Return the nmse of each seed.

    Empty if the sum does not fit.
    """
    return [each["nmse"] for each in _those(figures, **wanted)]


def _share(exchanges: list[dict[str, Any]]) -> tuple[int, int]:
    return sum(each["again"] for each in exchanges), sum(each["buckets"] for each in exchanges)


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    bits = max(figures["bits"])
    pairs = {
        kind: [_errors(figures, method=method, bits=bits, kind=kind, workers=MANY) for method in METHODS]
        for kind in ORDINARY
    }
    gains = {kind: common.mean(paper) / common.mean(ours) for kind, (paper, ours) in pairs.items()}
    ratios = [
        each["nmse"] / rotated_sum_nmse(each["bits"], each["workers"])
        for each in _those(figures, method=METHODS[1], kind="gaussian")
    ]
    ordinary = [each for each in _those(figures, method=METHODS[1]) if each["kind"] in ORDINARY]
    again, buckets = (a + figures["counted"][b] for a, b in zip(_share(ordinary), ("again", "buckets")))
    provoked, of = _share(_those(figures, method=METHODS[1], kind=PROVOKED, bits=bits))
    worst = max(
        common.mean(_errors(figures, method=METHODS[1], kind=PROVOKED, bits=bits, workers=size))
        / rotated_sum_nmse(bits, size)
        for size in figures["workers"]
    )
    return [
        Verdict(
            f"With {MANY} workers and {bits} bits the nmse is less than a tenth of that with the scale of the paper",
            min(gains.values()) > GAIN,
            ", ".join(f"{kind}: {gain:.0f}× smaller" for kind, gain in gains.items()),
        ),
        Verdict(
            "For independent Gaussian gradients the nmse is within a quarter of the one that `advise` prints",
            abs(common.mean(ratios) - 1) < 0.25,
            f"{common.ratio(ratios)} times that, over all numbers of workers and bits",
        ),
        Verdict(
            "Sums of ordinary gradients overflow their fields in one bucket of a million at most, except by chance",
            again <= FEW,
            f"{again:,} of {buckets:,} buckets resent",
        ),
        Verdict(
            "Provoked overflows are detected, and do not increase the nmse",
            provoked > 0 and worst < 1.25,
            f"{provoked:,} of {of:,} buckets resent; the nmse is at most {worst:.2f} times the usual",
        ),
    ]


# ---- tables and plots --------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> str:
    header = [
        "workers, bits",
        *(f"{kind}: paper, rotated" for kind in KINDS),
        "predicted",
        "resent: ordinary, provoked",
    ]
    rows = []
    for bits in figures["bits"]:
        for size in figures["workers"]:
            cells = []
            for kind in KINDS:
                both = (
                    _errors(figures, method=method, bits=bits, kind=kind, workers=size) for method in METHODS
                )
                cells.append(", ".join(f"{common.mean(own):.2g}" if own else "none" for own in both))
            ours = _those(figures, method=METHODS[1], bits=bits, workers=size)
            counted = [
                "{:,} of {:,}".format(
                    *_share([each for each in ours if (each["kind"] == PROVOKED) == provoked])
                )
                for provoked in (False, True)
            ]
            predicted = f"{rotated_sum_nmse(bits, size):.2g}"
            rows.append((f"{size}, {bits}", *cells, predicted, "; ".join(counted)))
    most = max(figures["bits"])
    sent = [
        common.mean([each["bytes"] for each in _those(figures, method=method, bits=most, kind="gaussian")])
        for method in METHODS
    ]
    return "\n\n".join(
        [
            "The nmse, mean of the seeds; *none* where the scale of the paper leaves no level. The last column counts "
            "the resent buckets.",
            common.table(header, rows),
            f"With {most} bits a worker sends {sent[0]:.2f} bytes per element with the scale of the paper and "
            f"{sent[1]:.2f} with a rotation, on average over the numbers of workers.",
        ]
    )


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    bits = max(figures["bits"])
    for method in METHODS:
        for kind, style in zip(ORDINARY, ("-", "--", ":")):
            points = [
                (size, common.mean(own))
                for size in figures["workers"]
                if (own := _errors(figures, method=method, bits=bits, kind=kind, workers=size))
            ]
            axes.loglog(
                *zip(*points),
                style,
                color=common.COLORS[method],
                marker=".",
                label=f"{common.title(f'{method}-{bits}')}: {kind}",
            )
    axes.set_xlabel("workers")
    axes.set_ylabel("nmse of the average")
    common.finish(figure, [axes], folder / "rotated-sum.png")
    return [
        Plot(
            "rotated-sum.png", f"nmse with {bits} bits; with the scale of the paper where it leaves a level."
        )
    ]
