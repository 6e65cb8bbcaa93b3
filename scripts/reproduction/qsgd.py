"""QSGD (NeurIPS 2017): bits against variance, with the bounds of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from proofs import bounds, code_lengths

from horovod_quant import kernels, simulator
from horovod_quant.kernels import entropy
from horovod_quant.kernels.keys import RngKey
from reproduction import common, gradients, variance
from reproduction.common import Plot, Slope, Verdict

TITLE = "QSGD: bits against variance"
SCALE = "142,000 elements, no training"
CLAIM = (
    "With s levels and the l2 norm of B elements, the variance is at most `min(B/s², √B/s) ||v||²`. Elias coding then "
    "needs O(√B log B) bits per array at s = 1, and at most 2.8 B + 32 at s = √B (Alistarh et al., NeurIPS 2017)."
)
METHOD = (
    "Three kinds of arrays: the gradient of the convolutional network of `scripts/reproduce nuqsgd` in the middle of "
    "its training (142,000 elements), Gaussian noise, and equal magnitudes, the worst case. The native kernels "
    "quantize each with s = 1 to 255 levels. The bits are those of the payload, including norms, with codes of fixed "
    "width, Elias gamma and Elias omega. For s = √B, and for s = 1 and growing B, every bucket is encoded separately, "
    "as in the paper. There are two bounds on lengths: the figure of the paper, and the one that "
    "`scripts/proofs/code_lengths.py` proves for the gamma code, which holds for every array."
)

KINDS = {"gradient": "gradient", "gaussian": "Gaussian noise", "equal": "equal magnitudes"}
CODINGS = {"fixed": "fixed width", "elias": "Elias gamma", "elias-omega": "Elias omega"}
CODES = {"elias": "gamma", "elias-omega": "omega"}
KIND_COLORS = {"gradient": "#009E73", "gaussian": "#E69F00", "equal": "#D55E00"}
CODING_COLORS = {"fixed": "black", "elias": common.COLORS["qsgd"], "elias-omega": common.COLORS["qsgdinf"]}


class Settings(NamedTuple):
    bits: tuple[int, ...]
    buckets: tuple[int, ...]
    elements: int  # per array that is not a gradient
    headline: tuple[int, ...]  # B where s = sqrt(B)
    sparse: tuple[int, ...]  # B where s = 1
    repetitions: int
    seeds: tuple[int, ...]
    steps: int  # trained before the gradient is recorded


SIZES = {
    "full": Settings(
        bits=tuple(range(2, 10)),
        buckets=(1024, 8192),
        elements=2**17,
        headline=(1024, 4096, 16384),
        sparse=tuple(2**k for k in range(8, 19)),
        repetitions=8,
        seeds=(0, 1, 2),
        steps=80,
    ),
    "tiny": Settings((2, 4), (1024,), 2**13, (1024,), (256, 1024, 4096), 2, (0, 1), 4),
}


def study(settings: Settings) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    headline: list[dict[str, Any]] = []
    sparse: list[dict[str, Any]] = []
    for seed in common.progress(settings.seeds, "qsgd: seeds"):
        arrays = _arrays(settings, seed)
        for kind, array in arrays.items():
            for bucket in settings.buckets:
                cells += [_cell(kind, array, bits, bucket, seed) for bits in settings.bits]
            for bucket in settings.headline:
                lengths = _lengths(array, bucket, math.isqrt(bucket), settings.repetitions, seed)
                headline.append({"kind": kind, "bucket": bucket, **lengths})
        for bucket in settings.sparse:
            for kind in ("gaussian", "equal"):
                array = _artificial(kind, bucket * settings.repetitions, seed)
                lengths = _lengths(array, bucket, 1, settings.repetitions, seed)
                sparse.append({"kind": kind, "bucket": bucket, **lengths})
    return {"seeds": list(settings.seeds), "cells": cells, "headline": headline, "sparse": sparse}


def _arrays(settings: Settings, seed: int) -> dict[str, np.ndarray]:
    taken: list[np.ndarray] = []

    def watch(step: int, own: Sequence[np.ndarray]) -> None:
        taken[:] = own

    gradients.train(None, seed=seed, workers=4, steps=settings.steps, watch=watch)
    artificial = {kind: _artificial(kind, settings.elements, seed) for kind in ("gaussian", "equal")}
    return {"gradient": np.concatenate(taken), **artificial}


def _artificial(kind: str, elements: int, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(elements, np.float32)
    return noise if kind == "gaussian" else np.copysign(np.float32(1), noise)


def _cell(kind: str, array: np.ndarray, bits: int, bucket: int, seed: int) -> dict[str, Any]:
    """Measure variance, and bits per element by coding, of one array."""
    schemes = {coding: common.scheme(f"qsgd-{bits}", bucket_size=bucket, coding=coding) for coding in CODINGS}
    sent = {
        # With two workers in an allgather each sends its payload once.
        coding: sum(simulator.run(scheme, [array, array], seed=seed).bytes_sent.values())
        for coding, scheme in schemes.items()
    }
    return {
        "kind": kind,
        "bucket": bucket,
        "levels": 2 ** (bits - 1) - 1,
        "variance": variance.measured(schemes["fixed"], [array], seed),
        "expected": variance.expected(schemes["fixed"], [array]),
        "bits": {coding: 8 * size / len(array) for coding, size in sent.items()},
    }


def _lengths(array: np.ndarray, bucket: int, levels: int, repetitions: int, seed: int) -> dict[str, float]:
    """Return mean bits of a bucket and its norm, by Elias code.

    Each bucket is encoded alone. Leaves out buckets of zeros.
    """
    backend = kernels.get("auto")
    rows = [row for row in array[: len(array) // bucket * bucket].reshape(-1, bucket) if row.any()]
    chosen = rows[:: max(1, len(rows) // repetitions)][:repetitions]
    keys = RngKey(seed, "lengths")
    totals: dict[str, list[int]] = {code: [] for code in CODES.values()}
    for i, row in enumerate(chosen):
        norm = np.sqrt(np.square(row, dtype=np.float64).sum(keepdims=True)).astype(np.float32)
        digits = backend.round_uniform(np.ascontiguousarray(row), norm, bucket, levels, keys.key("row", i))
        for code, lengths in totals.items():
            lengths.append(32 + 8 * len(entropy.encode(digits, code)))
    return {code: common.mean(lengths) for code, lengths in totals.items()}


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    cells = figures["cells"]
    bounded = [c["expected"] <= bounds.qsgd_variance_factor(c["bucket"], c["levels"]) for c in cells]
    rounds_well, deviation = common.as_expected(
        [c["variance"] for c in cells], [c["expected"] for c in cells]
    )
    short = [c["bits"][coding] <= _length_bound(c, code) for c in cells for coding, code in CODES.items()]
    paper = [c for c in cells if c["bits"]["elias"] > _length_bound(c, None)]
    savings = {
        levels: common.mean(c["bits"]["fixed"] / c["bits"]["elias"] for c in own)
        for levels, own in _by(cells, "levels", kind="gradient").items()
    }
    found = [
        Verdict(
            "The variance is as expected, and stays below the bound",
            rounds_well and all(bounded),
            f"{sum(bounded)} of {len(bounded)} arrays and settings; the variance of the kernels is off by {deviation}",
            "QSGD, Lemma 3.1",
        ),
        Verdict(
            "Elias codes stay below the lengths proved for them",
            all(short),
            f"{sum(short)} of {len(short)} payloads",
        ),
        Verdict(
            "Elias gamma codes also stay below the figures of the paper, without their o(1)",
            not paper,
            f"{len(cells) - len(paper)} of {len(cells)} payloads"
            + (
                f"; not those of {' and '.join(KINDS[kind] for kind in sorted({c['kind'] for c in paper}))}"
                if paper
                else ""
            ),
            "QSGD, Theorem 3.2, and Code' of its appendix",
        ),
        Verdict(
            "For gradients, Elias coding sends fewer bits than codes of fixed width, at every s",
            min(savings.values()) > 1,
            "; ".join(f"{saving:.1f}× fewer at s = {levels}" for levels, saving in savings.items()),
        ),
    ]
    for kind, name in KINDS.items():
        own = _by(figures["headline"], "bucket", kind=kind)
        means = {bucket: common.mean(c["gamma"] for c in cs) for bucket, cs in own.items()}
        found.append(
            Verdict(
                f"At s = √B at most 2.8 B + 32 bits: {name}",
                all(mean <= code_lengths.qsgd_headline_length(bucket) for bucket, mean in means.items()),
                "; ".join(
                    f"{(mean - 32) / bucket:.2f} B + 32 at B = {bucket:,}" for bucket, mean in means.items()
                ),
                "QSGD, section 3.1, the dense case",
            )
        )
    for kind in ("gaussian", "equal"):
        slope = _sparse_slope(figures, kind)
        found.append(
            Verdict(
                f"At s = 1 the bits grow no faster than √B log B: {KINDS[kind]}",
                slope.value <= 1 + 2 * slope.error,
                f"∝ (√B log B)^({slope})",
                "QSGD, section 3.1, the sparse case",
            )
        )
    return found


def in_short(figures: dict[str, Any]) -> str:
    own = _by(figures["headline"], "kind")
    most = {kind: max((c["gamma"] - 32) / c["bucket"] for c in cells) for kind, cells in own.items()}
    shown = ", ".join(f"{bits:.2f} ({KINDS[kind]})" for kind, bits in most.items())
    return f"Bits per element at s = √B, 2.8 in the paper: {shown}."


def _by(cells: Sequence[dict[str, Any]], key: str, **wanted: Any) -> dict[Any, list[dict[str, Any]]]:
    """Group the cells with given values by the value of a key."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for cell in cells:
        if all(cell[name] == value for name, value in wanted.items()):
            groups.setdefault(cell[key], []).append(cell)
    return groups


def _length_bound(cell: dict[str, Any], code: str | None) -> float:
    """Return the bound on bits per element, of the shorter layout."""
    lengths = (code_lengths.qsgd_sparse_length, code_lengths.qsgd_dense_length)
    return min(length(cell["bucket"], cell["levels"], code) for length in lengths) / cell["bucket"]


def _sparse_points(figures: dict[str, Any], kind: str) -> list[tuple[int, float]]:
    """Return pairs of bucket size and mean bits of a bucket.

    The bits are without its norm.
    """
    groups = _by(figures["sparse"], "bucket", kind=kind)
    return [(bucket, common.mean(c["gamma"] for c in own) - 32) for bucket, own in groups.items()]


def _sparse_slope(figures: dict[str, Any], kind: str) -> Slope:
    points = _sparse_points(figures, kind)
    return common.fit_slope([_sparse_growth(bucket) for bucket, _ in points], [bits for _, bits in points])


def _sparse_growth(bucket: int) -> float:
    return math.sqrt(bucket) * math.log2(bucket)


# ---- tables and plots --------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> str:
    parts = []
    for bucket in sorted({c["bucket"] for c in figures["cells"]}):
        rows = []
        for levels, own in _by(figures["cells"], "levels", kind="gradient", bucket=bucket).items():
            rows.append(
                (
                    levels,
                    common.spread([c["variance"] for c in own]),
                    f"{bounds.qsgd_variance_factor(bucket, levels):.3g}",
                    *(common.spread([c["bits"][coding] for c in own]) for coding in CODINGS),
                    *(f"{_length_bound(own[0], code):.3g}" for code in (None, "gamma")),
                )
            )
        header = (
            "s",
            "variance",
            "bound",
            *(f"bits: {name}" for name in CODINGS.values()),
            "bound of the paper",
            "proved bound",
        )
        parts.append(f"Gradients, buckets of {bucket:,}, bits per element:\n\n" + common.table(header, rows))
    return "\n\n".join(parts)


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    _draw_bits(figures, folder / "qsgd-bits.png")
    _draw_lengths(figures, folder / "qsgd-lengths.png")
    return [
        Plot(
            "qsgd-bits.png",
            "Top: variance by number of levels; dashed: the bound of the paper. Bottom: bits against variance, for "
            "gradients; dashed: the bounds of both.",
        ),
        Plot(
            "qsgd-lengths.png",
            "Elias gamma, every bucket encoded separately. Left: s = 1; dashed: √B log B, scaled to the last point, "
            "and the figure of the paper. Right: s = √B; dashed: the 2.8 bits of the paper.",
        ),
    ]


def _draw_bits(figures: dict[str, Any], path: Path) -> None:
    buckets = sorted({c["bucket"] for c in figures["cells"]})
    figure, grid = plt.subplots(
        2, len(buckets), figsize=(9, 7.5), layout="constrained", squeeze=False, sharey="row"
    )
    for bucket, upper, lower in zip(buckets, *grid):
        for kind, name in KINDS.items():
            groups = _by(figures["cells"], "levels", kind=kind, bucket=bucket)
            means = [common.mean(c["variance"] for c in own) for own in groups.values()]
            upper.plot(list(groups), means, marker="o", markersize=3, color=KIND_COLORS[kind], label=name)
        levels = list(groups)
        limits = [bounds.qsgd_variance_factor(bucket, s) for s in levels]
        upper.plot(levels, limits, "--", color="black", linewidth=1, label="variance bound")
        upper.set(xscale="log", yscale="log", xlabel="levels s", title=f"buckets of {bucket:,}")
        upper.xaxis.set_major_formatter("{x:g}")

        groups = _by(figures["cells"], "levels", kind="gradient", bucket=bucket)
        variances = [common.mean(c["variance"] for c in own) for own in groups.values()]
        for coding, name in CODINGS.items():
            bits = [common.mean(c["bits"][coding] for c in own) for own in groups.values()]
            lower.plot(bits, variances, marker="o", markersize=3, color=CODING_COLORS[coding], label=name)
        for code, color, name in (
            (None, "#CC79A7", "paper"),
            ("gamma", "#7F5FA8", "proved for gamma"),
        ):
            bits = [_length_bound({"bucket": bucket, "levels": s}, code) for s in levels]
            lower.plot(bits, limits, "--", color=color, linewidth=1, label=f"bounds: {name}")
        lower.set(yscale="log", xlabel="bits per element")
    for axes in grid[:, 0]:
        axes.set_ylabel("||Q(g) − g||² / ||g||²")
    for axes in grid.flat:
        axes.grid(alpha=0.25)
    grid[0, 0].legend(loc="lower left", fontsize="small")
    grid[1, 0].legend(loc="upper right", fontsize="small")
    common.save_plot(figure, path)


def _draw_lengths(figures: dict[str, Any], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for kind in ("gaussian", "equal"):
        points = _sparse_points(figures, kind)
        left.plot(*zip(*points), marker="o", markersize=3, color=KIND_COLORS[kind], label=KINDS[kind])
    last, bits = points[-1]
    sizes = [bucket for bucket, _ in points]
    guide = [bits * _sparse_growth(bucket) / _sparse_growth(last) for bucket in sizes]
    left.plot(sizes, guide, "--", color="#999999", linewidth=1, label="∝ √B log B")
    limits = [code_lengths.qsgd_sparse_length(bucket, 1) - 32 for bucket in sizes]
    left.plot(sizes, limits, "--", color="black", linewidth=1, label="paper")
    left.set(
        xscale="log",
        yscale="log",
        xlabel="elements B",
        ylabel="bits per bucket, without the norm",
        title="s = 1",
    )
    for kind, name in KINDS.items():
        groups = _by(figures["headline"], "bucket", kind=kind)
        per_element = [common.mean(c["gamma"] - 32 for c in own) / bucket for bucket, own in groups.items()]
        right.plot(list(groups), per_element, marker="o", markersize=4, color=KIND_COLORS[kind], label=name)
    right.axhline(2.8, linestyle="--", color="black", linewidth=1)
    right.set(xscale="log", xlabel="elements B", ylabel="bits per element, without the norm", title="s = √B")
    right.set_ylim(bottom=0)
    right.set_xticks(list(groups), [f"{bucket:,}" for bucket in groups])
    right.minorticks_off()
    common.finish(figure, [left, right], path)
