"""Global-QSGD (2023; ECAI 2025): error and bytes by the number of workers, its O(sqrt n), and training curves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from proofs import bounds

from horovod_quant import kernels
from horovod_quant.codecs.levels import uniform_levels
from horovod_quant.codecs.rounding_error import rounding_variance
from horovod_quant.kernels.keys import RngKey
from reproduction import common, gradients, variance
from reproduction.common import Plot, Slope, Verdict

TITLE = "Global-QSGD: one scale for all workers"
SCALE = "142,000 parameters, digits, up to 1,024 simulated workers"
CLAIM = (
    "With one scale for all workers, an allreduce can sum integers, without bias and without error feedback. This "
    "compresses up to O(√n) better than QSGD with n workers, and training keeps its accuracy (Xin, Canini, Richtárik, "
    "Horváth, 2023; ECAI 2025). The abstracts say neither at which error of an average nor with which norm; what this "
    "page says about these is our reading."
)
METHOD = (
    "Up to 1,024 simulated workers, each with the gradient of its own 8 images, at the same weights of a convolutional "
    "network (the first {elements:,} elements of its second layer, in buckets of {bucket:,}). *Range*: the largest sum "
    "of the workers' integers with {levels} levels, for these gradients and for the worst case (all workers have the "
    "same single element). *Equal levels*: the number of non-zero integers, which decides what an entropy coder sends, "
    "and the error, both relative to QSGD with as many levels ({sparse}). *Equal error*: the fewest bits with which "
    "Global-QSGD's error is at most that of QSGD (with each worker's own l2 norm), and the bytes that a worker sends. "
    "QSGD gathers every worker's codes, so its bytes grow with n; Global-QSGD sums integers, whose bits grow with log "
    "n. *Training*: as for NUQSGD, with {workers} workers. Errors are `||estimate - average||²`, relative to the mean "
    "of `||g_i||²`."
)

BUCKET = 1024
WORKERS = 4
NORMS = ("max", "l2")
METHOD_OF_NORM = {"max": "global-qsgd", "l2": "global-qsgd-l2"}
WIDTHS = range(2, 17)
BOUNDED_WIDTHS = (4, 8, 12, 16)  # those whose expected error is computed
RANGE_LEVELS = 127
SPARSE_LEVELS = 1
TRAINED = (
    "none", "global-qsgd-8", "global-qsgd-4", "global-qsgd-l2-8", "global-qsgd-exp-8", "global-qsgd-exp-4",
)  # fmt: skip
STYLES = {"4": "--", "8": "-"}
ERRORS_DRAWN = ("qsgd-8", "qsgdinf-8", "global-qsgd-8", "global-qsgd-l2-8", "global-qsgd-exp-8")

MATCH = 1.1  # what counts as equal
FIRST, SECOND = "Global-QSGD (2023), abstract:", "Global-QSGD (ECAI 2025), abstract:"


class Settings(NamedTuple):
    workers: tuple[int, ...]
    elements: int
    references: tuple[int, ...]  # bits of QSGD
    seeds: tuple[int, ...]
    steps: int  # of the trainings


ELEMENTS = 4096
SIZES = {
    "full": Settings(tuple(2**k for k in range(1, 11)), ELEMENTS, (4, 8), (0, 1, 2), gradients.STEPS),
    "tiny": Settings((2, 4, 8), 2048, (4,), (0, 1), 6),
}
METHOD = METHOD.format(
    elements=ELEMENTS, bucket=BUCKET, levels=RANGE_LEVELS, sparse=SPARSE_LEVELS, workers=WORKERS
)


def study(settings: Settings) -> dict[str, Any]:
    sizes = settings.workers
    per_seed = [_scaling(settings, seed) for seed in common.progress(settings.seeds, "global-qsgd: seeds")]
    losses: dict[str, list] = {method: [] for method in TRAINED}
    accuracies: dict[str, list] = {method: [] for method in TRAINED}
    for method in common.progress(TRAINED, "global-qsgd: trainings"):
        for seed in settings.seeds:
            trained = gradients.train(
                None if method == "none" else common.scheme(method),
                seed=seed,
                workers=WORKERS,
                steps=settings.steps,
            )
            losses[method].append(trained.losses)
            accuracies[method].append(trained.accuracy)
    return {
        "workers": list(sizes),
        "elements": settings.elements,
        "references": list(settings.references),
        "seeds": list(settings.seeds),
        # Of each figure: one list a seed, in it one value for each number of workers, None where there is none.
        **{name: [own[name] for own in per_seed] for name in per_seed[0]},
        "losses": losses,
        "accuracies": accuracies,
    }


def _scaling(settings: Settings, seed: int) -> dict[str, Any]:
    """What depends on the number of workers, for one seed: by figure, then key, then number of workers."""
    all_gradients = gradients.worker_gradients(
        seed=seed, workers=max(settings.workers), steps=20, images_each=8, elements=settings.elements
    )
    figures: dict[str, dict[str, list]] = {
        name: {} for name in ("errors", "bounded", "ranges", "levels", "equal")
    }

    def note(name: str, key: str, value: Any) -> None:
        figures[name].setdefault(key, []).append(value)

    for size in settings.workers:
        own = all_gradients[:size]
        references = {f"qsgd-{bits}" for bits in settings.references}
        exchanged = {name: _exchange(name, own, seed) for name in sorted({*ERRORS_DRAWN, *references})}
        for name, done in exchanged.items():
            note("errors", name, done and done[0])
        for norm in NORMS:
            by_width = {bits: _exchange(f"{METHOD_OF_NORM[norm]}-{bits}", own, seed) for bits in WIDTHS}
            for bits in BOUNDED_WIDTHS:
                done = by_width[bits]
                if done is not None:
                    expected, bound = _expected_error(own, norm, bits)
                    note("bounded", f"{norm}-{bits}", [done[0], expected, bound])
            for bits in settings.references:
                error, sent = exchanged[f"qsgd-{bits}"] or (0.0, 0.0)
                enough = {width: done[1] for width, done in by_width.items() if done and done[0] <= error}
                note("equal", f"{norm} bits {bits}", min(enough, default=None))
                note("equal", f"{norm} bytes {bits}", enough[min(enough)] if enough else None)
                if norm == NORMS[0]:
                    note("equal", f"qsgd bytes {bits}", sent)
            note("ranges", f"{norm} gradients", _largest_sum(own, norm, seed))
            spike = np.zeros((size, BUCKET), np.float32)
            spike[:, 0] = 1
            note("ranges", f"{norm} worst", _largest_sum(spike, norm, seed))
            note("ranges", f"{norm} limit", bounds.global_qsgd_sum_limit(size, RANGE_LEVELS, norm))
        for key, value in _at_equal_levels(own, seed).items():
            note("levels", key, value)
    return figures


def _exchange(name: str, own: np.ndarray, seed: int) -> tuple[float, float] | None:
    """Error by the mean of ||g_i||^2, and bytes that a worker sends; None where the bits do not hold the sum.

    With independent roundings, as the paper's are.
    """
    scheme = common.scheme(name, bucket_size=BUCKET, rounding="independent")
    found = common.exchanged(scheme, own, seed)
    if found is None:
        return None
    done, difference = found
    return variance.squared([difference]) / variance.squared([own]) * len(own), sum(done.bytes_sent.values())


def _expected_error(own: np.ndarray, norm: str, bits: int) -> tuple[float, float]:
    """Exact expectation of the error, and its bound (of each bucket the smaller one), by the mean of ||g_i||^2."""
    levels = common.scheme(f"{METHOD_OF_NORM[norm]}-{bits}").levels_for(len(own))
    buckets = own.reshape(len(own), -1, BUCKET).transpose(1, 0, 2)
    error = sum(bounds.global_qsgd_error(bucket, levels, norm, "independent") for bucket in buckets)
    bound = sum(
        min(bounds.global_qsgd_error_bounds(bucket, levels, norm, "independent")) for bucket in buckets
    )
    scale = len(own) / variance.squared([own])
    return error * scale, bound * scale


def _digits(own: np.ndarray, levels: int, seed: int, norm: str) -> tuple[np.ndarray, np.ndarray]:
    """Everybody's integers, int32[n, d], and the norms of the buckets, float64[n, buckets].

    ``norm`` is ``"max"`` or ``"l2"`` for the scale of all workers, ``"own"`` for QSGD's, the 2-norm of each alone.
    """
    backend = kernels.get("auto")
    rows = own.astype(np.float64).reshape(len(own), -1, BUCKET)
    if norm == "max":
        norms = np.broadcast_to(np.abs(rows).max(axis=(0, 2)), rows.shape[:2])
    elif norm == "l2":
        norms = np.broadcast_to(np.sqrt(np.square(rows).sum(axis=(0, 2))), rows.shape[:2])
    else:
        norms = np.sqrt(np.square(rows).sum(axis=2))
    keys = RngKey(seed, norm)
    digits = [
        backend.round_uniform(own[i], norms[i].astype(np.float32), BUCKET, levels, keys.key("worker", 0, i))
        for i in range(len(own))
    ]
    return np.stack(digits), norms


def _largest_sum(own: np.ndarray, norm: str, seed: int) -> int:
    digits, _ = _digits(own, RANGE_LEVELS, seed, norm)
    return int(np.abs(digits.sum(axis=0)).max())


def _at_equal_levels(own: np.ndarray, seed: int) -> dict[str, float]:
    """Global-QSGD with the l2 norm by QSGD with as many levels: non-zeros of all workers, and expected error."""
    ours, norms = _digits(own, SPARSE_LEVELS, seed, "l2")
    theirs, own_norms = _digits(own, SPARSE_LEVELS, seed, "own")
    rows = own.astype(np.float64).reshape(-1, BUCKET)
    levels = uniform_levels(SPARSE_LEVELS)

    def error(scales: np.ndarray) -> float:
        flat = scales.reshape(-1)
        some = flat > 0
        ratios = np.minimum(np.abs(rows[some]) / flat[some, None], 1)
        return float(np.square(flat[some]) @ rounding_variance(ratios, levels).sum(axis=1))

    return {
        "non-zeros": np.count_nonzero(ours) / np.count_nonzero(theirs),
        "error": error(norms) / error(own_norms),
    }


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    sizes = figures["workers"]
    errors = [point for own in figures["bounded"] for points in own.values() for point in points]
    within = sum(expected <= bound for _, expected, bound in errors)
    rounds_well, deviation = common.as_expected([e[0] for e in errors], [e[1] for e in errors])
    inside = all(
        sum_ <= limit
        for own in figures["ranges"]
        for norm in NORMS
        for what in ("gradients", "worst")
        for sum_, limit in zip(own[f"{norm} {what}"], own[f"{norm} limit"])
    )
    l2, largest = (_slope(figures, "ranges", f"{norm} worst") for norm in ("l2", "max"))
    nonzeros, error = _slope(figures, "levels", "non-zeros"), _slope(figures, "levels", "error")
    found = [
        Verdict(
            "An allreduce can add the workers' integers: every sum fits its field",
            inside,
            f"{sizes[0]} to {sizes[-1]} workers, both norms, gradients and the worst case",
            f"{FIRST} “Allreduce-compatible”",
        ),
        Verdict(
            "With as many levels as QSGD, √n times fewer integers are non-zero",
            _agrees(nonzeros, -0.5),
            f"∝ n^({nonzeros})",
            f"{FIRST} “up to O(√n) additional compression ratio”",
        ),
    ]
    for method in TRAINED[1:]:
        ratios = common.loss_ratios(figures["losses"][method], figures["losses"]["none"])
        found.append(
            Verdict(
                f"{common.title(method)}, trains as well as float32: at most {MATCH} times its mean loss",
                common.mean(ratios) <= MATCH,
                f"{common.ratio(ratios)} times",
                f"{SECOND} “preserving accuracy”",
            )
        )
    found += [
        Verdict(
            "The error is as expected, and stays below its bound",
            rounds_well and within == len(errors),
            f"{within} of {len(errors)} exchanges: {sizes[0]} to {sizes[-1]} workers, both norms; the kernels' error "
            f"is off by {deviation}",
        ),
        Verdict(
            "The sum of n workers' integers needs √n times more room with the l2 norm, and n times with the max norm",
            _agrees(l2, 0.5) and _agrees(largest, 1),
            f"worst case ∝ n^({l2}) with l2, n^({largest}) with max",
        ),
        Verdict(
            "The √n costs no accuracy: with as many levels the error does not grow relative to QSGD's",
            error.value <= 2 * error.error,
            f"the error relative to QSGD's ∝ n^({error})",
        ),
    ]
    for bits in figures["references"]:
        slope = _saving(figures, "l2", bits)
        found.append(
            Verdict(
                f"At the error of QSGD with {bits} bits, the l2 norm's saving in bytes grows at least as √n",
                slope is not None and slope.value >= 0.5 - 2 * slope.error,
                f"QSGD's bytes relative to Global-QSGD's ∝ n^({slope}){_reach(figures, 'l2', bits)}",
            )
        )
        bits_ = {norm: _equal(figures, f"{norm} bits {bits}") for norm in NORMS}
        both = [(a, b) for a, b in zip(bits_["l2"], bits_["max"]) if a is not None and b is not None]
        found.append(
            Verdict(
                f"At that error ({bits} bits) the l2 norm needs fewer bits than the max norm",
                bool(both) and all(a < b for a, b in both),
                "; ".join(
                    f"{n:,} workers: {_bits(a)} against {_bits(b)}"
                    for n, a, b in zip(sizes, bits_["l2"], bits_["max"])
                    if n in (sizes[0], sizes[len(sizes) // 2], sizes[-1])
                ),
            )
        )
    return found


def in_short(figures: dict[str, Any]) -> str:
    nonzeros, error = _slope(figures, "levels", "non-zeros"), _slope(figures, "levels", "error")
    return (
        f"With as many levels as QSGD, n^{-nonzeros.value:.2f} times fewer integers are non-zero, but the error is "
        f"n^{error.value:.2f} times QSGD's, which the abstracts do not mention."
    )


def _slope(figures: dict[str, Any], figure: str, key: str) -> Slope:
    values = np.mean([own[key] for own in figures[figure]], axis=0)
    return common.fit_slope(figures["workers"], values)


def _agrees(slope: Slope, exponent: float) -> bool:
    """Whether a fit has the exponent: within two standard errors, or 0.05 (rounding to integers bends the ends)."""
    return abs(slope.value - exponent) <= max(2 * slope.error, 0.05)


def _equal(figures: dict[str, Any], key: str) -> list[float | None]:
    """For each number of workers the mean over the seeds; None where a seed has none."""
    columns = zip(*(own[key] for own in figures["equal"]))
    return [None if None in column else common.mean(column) for column in columns]


def _savings(figures: dict[str, Any], norm: str, bits: int) -> list[tuple[int, float]]:
    """Number of workers, and QSGD's bytes by Global-QSGD's at equal error, as far as 16 bits reach."""
    ours, theirs = _equal(figures, f"{norm} bytes {bits}"), _equal(figures, f"qsgd bytes {bits}")
    return [
        (n, b / a) for n, a, b in zip(figures["workers"], ours, theirs) if a is not None and b is not None
    ]


def _saving(figures: dict[str, Any], norm: str, bits: int) -> Slope | None:
    points = _savings(figures, norm, bits)
    return common.fit_slope(*zip(*points)) if len(points) > 2 else None


def _reach(figures: dict[str, Any], norm: str, bits: int) -> str:
    """Says up to how many workers there are savings, where that is not all of them."""
    reach = max((n for n, _ in _savings(figures, norm, bits)), default=0)
    return (
        ""
        if reach == figures["workers"][-1]
        else f", up to {reach:,} workers; more workers need more than 16 bits"
    )


def _bits(value: float | None) -> str:
    return "more than 16" if value is None else f"{value:.1f}"


# ---- tables and plots --------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> str:
    rows = []
    for i, size in enumerate(figures["workers"]):
        row: list[Any] = [f"{size:,}"]
        for bits in figures["references"]:
            row.append(f"{common.mean(own[f'qsgd-{bits}'][i] for own in figures['errors']):.2e}")
            row += [_bits(_equal(figures, f"{norm} bits {bits}")[i]) for norm in NORMS]
            for norm in NORMS:
                row.append(next((f"{r:.1f}" for n, r in _savings(figures, norm, bits) if n == size), ""))
        rows.append(row)
    header = ["workers"]
    for bits in figures["references"]:
        header += [f"error of QSGD, {bits} bits", "bits: max", "bits: l2", "saving: max", "saving: l2"]
    trainings = [
        (common.title(m), *common.training_columns(figures["losses"][m], figures["accuracies"][m]))
        for m in TRAINED
    ]
    return (
        "Global-QSGD at the same error as QSGD: bits per integer, and how many times fewer bytes a worker sends.\n\n"
        + common.table(header, rows)
        + f"\n\nTraining with {WORKERS} workers:\n\n"
        + common.table(("", *common.TRAINING_HEADER), trainings)
    )


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    _draw_scaling(figures, folder / "global-qsgd-scaling.png")
    _draw_equal_error(figures, folder / "global-qsgd-equal-error.png")
    _draw_losses(figures, folder / "global-qsgd-loss.png")
    return [
        Plot(
            "global-qsgd-scaling.png",
            f"Left: error with 8 bits per element. Right: the largest sum of integers with {RANGE_LEVELS} levels; "
            "dashed: the limits.",
        ),
        Plot(
            "global-qsgd-equal-error.png",
            "At the same error as QSGD: bits per element of one worker's message, and how many times fewer bytes a "
            "worker sends than with QSGD; dashed: √n, scaled to the first point.",
        ),
        Plot("global-qsgd-loss.png", "Training loss, mean of the seeds and of the last 10 steps."),
    ]


def _draw_scaling(figures: dict[str, Any], path: Path) -> None:
    sizes = figures["workers"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for name in ERRORS_DRAWN:
        columns = list(zip(*(own[name] for own in figures["errors"])))
        errors = [math.nan if None in column else common.mean(column) for column in columns]
        left.plot(
            sizes,
            errors,
            marker="o",
            markersize=3,
            color=common.COLORS[common.kind(name)],
            label=common.title(name),
        )
    for norm in NORMS:
        color, name = common.COLORS[METHOD_OF_NORM[norm]], f"{norm} norm"
        for what, style in (("worst", "s"), ("gradients", "o")):
            sums = np.mean([own[f"{norm} {what}"] for own in figures["ranges"]], axis=0)
            title = {"worst": "worst case", "gradients": "real gradients"}[what]
            line = {"linestyle": "none"} if what == "worst" else {}
            right.plot(sizes, sums, color=color, marker=style, markersize=4, label=f"{name}, {title}", **line)
        right.plot(
            sizes,
            figures["ranges"][0][f"{norm} limit"],
            "--",
            color=color,
            linewidth=1,
            label=f"{name}, limit",
        )
    left.set_ylabel("||estimate − average||² / mean ||g_i||²")
    right.set_ylabel("largest |sum of integers|")
    _finish(figure, (left, right), path)


def _draw_equal_error(figures: dict[str, Any], path: Path) -> None:
    sizes = figures["workers"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for bits, style in zip(figures["references"], ("-", ":")):
        label = f"at the error of QSGD, {bits} bits"
        left.plot(sizes, [bits] * len(sizes), style, color=common.COLORS["qsgd"], label=f"QSGD, {bits} bits")
        for norm in NORMS:
            color = common.COLORS[METHOD_OF_NORM[norm]]
            widths = [math.nan if v is None else v for v in _equal(figures, f"{norm} bits {bits}")]
            left.plot(
                sizes, widths, style, marker="o", markersize=3, color=color, label=f"{norm} norm, {label}"
            )
            points = _savings(figures, norm, bits)
            if points:
                right.plot(*zip(*points), style, marker="o", markersize=3, color=color)
    start = _savings(figures, "max", figures["references"][0])[0]
    guide = [start[1] * math.sqrt(n / start[0]) for n in sizes]
    right.plot(sizes, guide, "--", color="#999999", linewidth=1, label="∝ √n")
    left.set_ylabel("bits per element")
    right.set_ylabel("bytes of QSGD / bytes of Global-QSGD")
    _finish(figure, (left, right), path, log_y=(right,))


def _draw_losses(figures: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for method in TRAINED:
        style = STYLES.get(method.rpartition("-")[2], "-")
        common.plot_loss(axes, figures["losses"][method], method, linestyle=style)
    axes.set(yscale="log", xlabel="step", ylabel="training loss, nats")
    common.finish(figure, [axes], path)


def _finish(figure: Any, panels: tuple, path: Path, log_y: tuple | None = None) -> None:
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("workers")
    for axes in panels if log_y is None else log_y:
        axes.set_yscale("log")
    common.finish(figure, panels, path)
