"""A transformer on real text (claim of this package): the loss with each method, and the length of a step."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from reproduction import common, running, steps
from reproduction.common import Plot, Verdict

TITLE = "A transformer: the loss with each method, and the time per step"
SCALE = "119,000 parameters (loss), 7.2 million (speed), 1,000 steps, 4 workers on 2 cores"
SOURCE = common.PACKAGE
CLAIM = (
    "With every method at its recommended settings, a character-level transformer ends within 1% of float32's loss; "
    "where the network is slow it gets there sooner. BinSGDM's recommended setting has twice as many steps as "
    "float32's."
)
METHOD = (
    "*Loss*: `examples/torch_char_transformer.py` trains a transformer on the sources of Python's library with 4 real "
    "workers (`horovodrun`), and then validates it on text that it has not seen. Every method has the learning rate "
    "that is best for float32 with Adam; BinSGDM, an optimizer of its own, has its own, and "
    "a beta of 0.9. Learning rates were chosen "
    "with a different seed from those reported. BinSGDM is recommended with twice as many steps, because each of its "
    "steps moves every element equally far, up or down at random; the table also shows it with as many steps as "
    "float32. *Speed*: whole steps of a wider transformer between 4 hosts of `scripts/lab` with 1 worker each, over "
    "Gloo. In each round every method has a turn; ratios are taken within a round, and the table shows their median. "
    "All hosts share this machine's cores, so computing takes longer than on 4 machines."
)

# The first one is what the others are compared with.
METHODS = (
    "none",
    "qsgd-4",
    "qsgdinf-4",
    "nuqsgd-4",
    "global-qsgd-8",
    "global-qsgd-exp-8",
    "eden-3",
    "binsgdm",
)
ALONE = "alone"  # without any exchange: see steps_worker.py


class Training(NamedTuple):
    """Trainings with one method.

    Attributes:
        key: among the figures.
        title: that the reader sees.
        options: of the example, besides the method's.
        style: of the line in the plot.
        recommended: whether this is a setting for which the claim is made.
        shade: the color, where it is not the method's.
    """

    key: str
    method: str
    title: str
    options: tuple[str, ...] = ()
    style: str = "-"
    recommended: bool = False
    shade: str = ""

    @property
    def color(self) -> str:
        return self.shade or common.COLORS.get(common.kind(self.key), common.COLORS[common.kind(self.method)])


def plain(method: str, recommended: bool = False, style: str = "-") -> Training:
    return Training(method, method, common.title(method), (), style, recommended)


class TrainedInParts(NamedTuple):
    """What a study trains whose parts can be run one by one.

    Attributes:
        options: of the example; those of a training come after them.
        seeds, workers: of every training.
        only: of the study's ``PARTS``, to be run; all where None.
    """

    options: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: int
    only: tuple[str, ...] | None = None


FACTOR = 2
LONGER = Training(  # its options are the settings'
    "binsgdm, longer", "binsgdm", "BinSGDM, twice the steps", recommended=True
)
TRAININGS = (
    plain("none"),
    plain("qsgd-4", style="--"),
    plain("qsgd-8", recommended=True),
    plain("qsgdinf-4", style="--"),
    Training(
        "qsgdinf-4/256", "qsgdinf-4", "QSGDinf, 4 bits, buckets of 256", ("--bucket-size=256",), "-", True
    ),
    plain("nuqsgd-4", recommended=True),
    plain("global-qsgd-8", recommended=True),
    plain("global-qsgd-exp-8", recommended=True),
    plain("binsgdm", style="--"),
    LONGER,
)

LIMIT = 1.01
HALF = " with half as many steps"  # whose, with which `LONGER` is compared

NEAR = 0.05
"""Of a loss, what others may be off for the plot to show them larger."""

Curve = tuple[list[float], list[float]]
"""Steps and losses."""

STEPS = 1000

SCRIPT, IMPORTED = "torch_char_transformer.py", ("training.py", "python_text.py")

WIDE = {"layers": 4, "width": 384, "heads": 6, "context": 64}
NARROW = {"layers": 1, "width": 32, "heads": 2, "context": 16}


class Settings(NamedTuple):
    """What is trained, and what is measured in the lab.

    Attributes:
        options: of the example.
        longer: options of `LONGER`, besides: `FACTOR` times as many steps, and a learning rate for them.
        seeds, workers: of each training.
    """

    options: tuple[str, ...]
    longer: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: int
    speeds: tuple[steps.Settings, ...]


def _speed(hosts: int, rate: str, model: dict[str, int], **others: int) -> steps.Settings:
    return steps.Settings(hosts, 1, rate, (ALONE, "fp16", *METHODS), model, **others)


SIZES = {
    "full": Settings(
        (f"--steps={STEPS}",),
        (f"--steps={FACTOR * STEPS}", "--lr=0.003"),
        (0, 1, 2),
        4,
        (_speed(4, "100mbit", WIDE), _speed(4, "1gbit", WIDE, rounds=7, steps=2)),
    ),
    "tiny": Settings(
        ("--steps=4", "--layers=1", "--width=32", "--context=16", "--batch-size=4"),
        (f"--steps={FACTOR * 4}",),
        (0, 1),
        2,
        (_speed(2, "1gbit", NARROW, rounds=2, warm_up=1),),
    ),
}


def study(settings: Settings) -> dict[str, Any]:
    return {
        "trainings": {each.key: trained(settings, each) for each in TRAININGS},
        "entropies": entropies(),
        **speeds(settings.speeds),
    }


def trained(settings: Settings, each: Training, options: Sequence[str] = ()) -> dict[str, Any]:
    """What the trainings with one method gave: a list has an entry for each seed.

    Args:
        options: of the example; they count more than those common to all, and less than the training's own.
    """
    options = (*settings.options, *options, *(settings.longer if each.key == LONGER.key else each.options))
    job = running.Job(SCRIPT, IMPORTED, each.method, options, settings.workers)
    return summary(running.trainings(job, settings.seeds))


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is shown of trainings with one method: a list has an entry for each seed."""
    return {
        "losses": [[round(loss, 4) for loss in run["losses"]] for run in runs],
        "validation_losses": [run["validation_loss"] for run in runs],
        "seconds": [run["seconds"] for run in runs],
        "bytes_per_step": runs[0]["bytes_per_step"],
        "float32_bytes_per_step": runs[0]["float32_bytes_per_step"],
    }


def trained_in_part(
    job: running.Job, seeds: Sequence[int], run: bool, before: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The `summary` of what is kept of a job, or an earlier one that has more seeds; None where there is neither.

    Args:
        run: whether seeds that are missing are trained first.
    """
    if run:
        running.trainings(job, seeds)
    runs = running.kept_trainings(job, seeds)
    if before is not None and len(before["losses"]) > len(runs):
        return before
    return summary(runs) if runs else None


def speeds(settings: Sequence[steps.Settings]) -> dict[str, Any]:
    """``speeds``, figures of `steps.measure` by rate; none where there can be no lab, and ``no_lab`` says why."""
    reason = running.why_no_lab()
    return {
        "speeds": {} if reason else {each.rate: steps.measure(each) for each in settings},
        "no_lab": reason,
    }


def entropies() -> dict[str, float]:
    """Of the next character, in nats, given nothing and given the one before it: what no transformer is needed for."""
    text = running.import_example("python_text").load_text()
    pairs = collections.Counter(zip(text.training[:-1].tolist(), text.training[1:].tolist()))
    firsts: collections.Counter[int] = collections.Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    total = sum(firsts.values())
    return {
        "nothing": sum(-n / total * math.log(n / total) for n in firsts.values()),
        "one character": sum(-n / total * math.log(n / firsts[first]) for (first, _), n in pairs.items()),
    }


# ---- what the figures say ----------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found = loss_verdicts(figures)
    for rate, measured in figures["speeds"].items():
        ratios = {method: training_speed_up(measured, method) for method in METHODS[1:]}
        shown = ", ".join(f"{common.title(method)} {ratio:.2f}" for method, ratio in ratios.items())
        found.append(
            Verdict(
                f"At {rate_title(rate)} training takes less time with every method than with float32",
                min(ratios.values()) > 1,
                f"times as fast: {shown}, with its {FACTOR} times as many steps",
            )
        )
    return found


def in_short(figures: dict[str, Any]) -> str:
    parts = [f"{each.title} {difference(figures, each.key)}" for each in TRAININGS if each.recommended]
    return f"Loss relative to float32's: {'; '.join(parts)}, where float32 has half as many steps."


def training_speed_up(measured: dict[str, Any], method: str) -> float:
    """How many times as fast as float32 a training with the recommended number of steps is."""
    return steps.speed_up(measured, method) / (FACTOR if method == LONGER.method else 1)


def loss_verdicts(figures: dict[str, Any]) -> list[Verdict]:
    return [
        Verdict(
            f"{each.title}, ends within 1% of float32's loss" + (HALF if each.key == LONGER.key else ""),
            loss_ratio(figures, each.key) <= LIMIT,
            difference(figures, each.key),
        )
        for each in TRAININGS
        if each.recommended
    ]


def loss_ratio(figures: dict[str, Any], key: str) -> float:
    """Of the mean validation loss to float32's, over the seeds that both have."""
    own, other = (figures["trainings"][k]["validation_losses"] for k in (key, "none"))
    seeds = min(len(own), len(other))
    return common.mean(own[:seeds]) / common.mean(other[:seeds])


def difference(figures: dict[str, Any], key: str) -> str:
    """`loss_ratio` as a difference, and the standard error of what the seeds say, each for itself."""
    own, other = (figures["trainings"][k]["validation_losses"] for k in (key, "none"))
    ratios = [100 * a / b for a, b in zip(own, other)]
    error = f" ± {common.standard_error(ratios):.2f}" if len(ratios) > 1 else ""
    return f"{100 * (loss_ratio(figures, key) - 1):+.2f}%{error}"


def rate_title(rate: str) -> str:
    """``"1 Gbit/s"`` of ``"1gbit"``."""
    number = rate.rstrip("kmgbit")
    return f"{number} {rate[len(number)].upper().replace('K', 'k')}bit/s"


def tables(figures: dict[str, Any]) -> str:
    return "\n\n".join([loss_table(figures), speed_table(figures, METHODS)])


def loss_table(figures: dict[str, Any]) -> str:
    header = [
        "",
        "steps",
        "validation loss",
        "relative to float32",
        "MB sent per step",
        "times fewer than float32",
    ]
    rows: list[list[str]] = []
    for each in TRAININGS:
        training = figures["trainings"][each.key]
        rows.append(
            [
                f"**{each.title}**" if each.recommended else each.title,
                f"{len(training['losses'][0]):,}",
                common.spread(training["validation_losses"], 4),
                difference(figures, each.key) if each.key != "none" else "",
                f"{training['bytes_per_step'] / 1e6:.3f}",
                f"{training['float32_bytes_per_step'] / training['bytes_per_step']:.1f}",
            ]
        )
    losses = common.table(header, rows)
    entropy = figures["entropies"]
    note = (
        f"Losses are in nats per character: {entropy['nothing']:.2f} if only the frequency of each character is known, "
        f"{entropy['one character']:.2f} if its frequency after each other character is known. Recommended settings "
        "are bold. With the l2 norm of a bucket of 1,024, QSGD has too few levels at 4 bits; smaller buckets have "
        "smaller maxima."
    )
    return f"{losses}\n\n{note}"


def whole(figures: dict[str, Any], key: str) -> bool:
    """Whether it has been trained with every seed, or more."""
    own = figures["trainings"].get(key)
    return own is not None and len(own["validation_losses"]) >= figures["seeds"]


def parts_table(figures: dict[str, Any], chosen: Sequence[Training]) -> str:
    """The losses of those that have been trained, and which have not."""
    trainings = figures["trainings"]
    rows = []
    for each in chosen:
        own = trainings.get(each.key)
        if own is None:
            continue
        rows.append(
            [
                each.title,
                len(own["validation_losses"]),
                common.spread(own["validation_losses"], 4),
                difference(figures, each.key) if each.key != "none" and "none" in trainings else "",
                f"{own['bytes_per_step'] / 1e6:.3f}",
            ]
        )
    header = ("", "seeds", "validation loss", "relative to float32", "MB sent per step")
    parts = [common.table(header, rows)] if rows else []
    missing = [each.title for each in chosen if each.key not in trainings]
    if missing:
        parts.append(f"**Not trained yet: {', '.join(missing)}.**")
    return "\n\n".join(parts)


def speed_table(figures: dict[str, Any], chosen: Sequence[str]) -> str:
    speeds = figures["speeds"]
    if not speeds:
        return f"**The speed was not measured, because no lab of several hosts can be made: {figures['no_lab']}**"
    header = [""]
    for rate in speeds:
        header += [f"s per step at {rate_title(rate)}", "speed-up", "MB leaving a host"]
    rows = []
    for method in (ALONE, "fp16", *chosen):
        row = ["no exchange" if method == ALONE else common.title(method)]
        for measured in speeds.values():
            row += [
                f"{steps.seconds(measured, method):.3f}",
                f"{steps.speed_up(measured, method):.2f}",
                f"{steps.link_bytes(measured, method) / 1e6:.2f}",
            ]
        rows.append(row)
    measured = next(iter(speeds.values()))
    note = (
        f"Whole steps of a transformer of {measured['elements'] / 1e6:.1f} million parameters, "
        f"between {measured['workers']} hosts with 1 worker each."
    )
    return f"{note}\n\n{common.table(header, rows)}"


# ---- plots -------------------------------------------------------------------------------------------------------


LOSS_CAPTION = (
    "Left: training loss, averaged over seeds and over each 2% of the steps; inset: those close to float32's, relative "
    "to it. Right: validation loss of each seed, and their mean."
)


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    plots = [Plot("transformer-loss.png", LOSS_CAPTION)]
    draw_losses(figures["trainings"], TRAININGS, folder / plots[0].file)
    if figures["speeds"]:
        plots.append(
            Plot("transformer-speed.png", "Steps per second, relative to float32's in the same round.")
        )
        draw_speeds(figures["speeds"], ("fp16", *METHODS[1:]), folder / plots[1].file)
    return plots


def draw_parts(figures: dict[str, Any], chosen: Sequence[Training], folder: Path, file: str) -> list[Plot]:
    """`draw_losses` of those that have been trained; none without float32 and something beside it."""
    trained_ones = [each for each in chosen if each.key in figures["trainings"]]
    if len(trained_ones) < 2 or trained_ones[0].key != "none":
        return []
    draw_losses(figures["trainings"], trained_ones, folder / file)
    return [Plot(file, LOSS_CAPTION)]


def draw_losses(figures: dict[str, Any], chosen: Sequence[Training], path: Path) -> None:
    """Losses along the trainings, and at their ends relative to the first ones'.

    Args:
        figures: `trained`, by key.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 5), layout="constrained")
    curves = [curve(figures[each.key]["losses"]) for each in chosen]
    baseline = figures[chosen[0].key]["validation_losses"]
    for place, (each, points) in enumerate(zip(chosen, curves)):
        left.plot(*points, each.style, color=each.color, label=each.title, linewidth=1.4)
        own = figures[each.key]["validation_losses"]
        ratios = [100 * (a / b - 1) for a, b in zip(own, baseline)]
        mean = 100 * (common.mean(own) / common.mean(baseline[: len(own)]) - 1)
        right.plot(ratios, [place] * len(ratios), "o", color=each.color, alpha=0.5)
        right.plot(mean, place, "|", color=each.color, markersize=24)
    zoom_in(left, chosen, curves)
    left.set(xlabel="step", ylabel="training loss, nats per character")
    right.axvline(0, color="black", linewidth=1)
    right.axvline(100 * (LIMIT - 1), color="black", linewidth=1, linestyle="--")
    right.set(xlabel=f"validation loss, % above {chosen[0].title}'s", ylim=(len(chosen) - 0.5, -0.5))
    right.set_yticks(range(len(chosen)), [each.title for each in chosen])
    for label, each in zip(right.get_yticklabels(), chosen):
        label.set_color(each.color)
    common.finish(figure, (left, right), path)


def zoom_in(axes: Any, chosen: Sequence[Training], curves: Sequence[Curve]) -> None:
    """Shows, as ratios to the first curve, those that lie on it at its end, within `NEAR`; nothing where none does."""
    steps, losses = curves[0]
    ratios = {
        each: [100 * (a / b - 1) for a, b in zip(points[1], losses)]
        for each, points in zip(chosen, curves)
        if points[0] == steps
    }
    near = {each: ratio for each, ratio in ratios.items() if abs(ratio[-1]) <= 100 * NEAR}
    if len(near) < 2:
        return
    inset = axes.inset_axes((0.42, 0.5, 0.55, 0.4))
    for each, ratio in near.items():
        inset.plot(steps, ratio, each.style, color=each.color, linewidth=1.1)
    inset.set_title(f"% above {chosen[0].title}'s", fontsize="small", pad=3)
    inset.tick_params(labelsize="x-small")
    inset.grid(alpha=0.25)


def curve(runs: Sequence[Sequence[float]], points: int = 50) -> Curve:
    """Steps and mean losses, of all runs and of the steps between two points."""
    losses = [common.mean(step) for step in zip(*runs)]
    width = max(1, len(losses) // points)
    starts = range(0, len(losses) - width + 1, width)
    return [start + width / 2 for start in starts], [common.mean(losses[i : i + width]) for i in starts]


def draw_speeds(speeds: dict[str, Any], chosen: Sequence[str], path: Path) -> None:
    figure, grid = plt.subplots(
        1, len(speeds), figsize=(9, 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (rate, measured) in zip(grid[0], speeds.items()):
        ratios = [steps.speed_up(measured, method) for method in chosen]
        colors = [common.COLORS[common.kind(method)] for method in chosen]
        bars = axes.barh([common.title(method) for method in chosen], ratios, color=colors)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize="small")
        limit = steps.speed_up(measured, ALONE)
        axes.axvline(1, color="black", linewidth=1)
        axes.axvline(limit, color="black", linewidth=1, linestyle="--")
        axes.set(
            title=f"{rate_title(rate)} (dashed: no exchange)", xlabel="steps per second, relative to float32"
        )
        axes.set_xlim(0, 1.12 * max(limit, *ratios))
        axes.grid(axis="x", alpha=0.25)
    grid[0][0].invert_yaxis()
    common.save_plot(figure, path)
