"""Transformer (claim of this package): loss with each method."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from reproduction import common, running
from reproduction.common import Plot, Verdict

TITLE = "A transformer: the loss with each method"
SCALE = "119,000 parameters, 1,000 steps, 4 workers on 2 cores"
SOURCE = common.PACKAGE
CLAIM = (
    "With every method at its recommended settings, a character-level transformer ends within 1% of the float32 loss. "
    "The recommended setting of BinSGDM has twice the steps of float32."
)
METHOD = (
    "`examples/torch_char_transformer.py` trains a transformer on the sources of Python's library with 4 real "
    "workers (`horovodrun`), and then validates it on text that it has not seen. Every method has the learning rate "
    "that is best for float32 with Adam; BinSGDM, which is an optimizer, has another, and a beta of 0.9. Learning "
    "rates were tuned with a different seed from those reported. BinSGDM is recommended with twice the steps, because "
    "each step moves every element equally far, up or down at random; the table also shows it with the steps of "
    "float32."
)


class Training(NamedTuple):
    """Trainings with one method.

    Attributes:
        key: in the figures.
        method: a name of `horovod_quant.frontends.methods`.
        title: for readers.
        options: of the example, besides those of the method.
        style: of the line in the plot.
        recommended: True if the claim is about this setting.
        shade: the color, if not that of the method.
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


def binsgdm(style: str = "-") -> Training:
    return plain("binsgdm", style=style)._replace(title=BINSGDM)


class TrainedInParts(NamedTuple):
    """Settings of trainings in a study that can run in parts.

    The parts can run one by one.

    Attributes:
        options: of the example; those of a training follow them.
        seeds, workers: of every training.
        only: names from ``PARTS`` of the study to run; None for all.
    """

    options: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: int
    only: tuple[str, ...] | None = None


BINSGDM = "BinSGDM(beta=0.9)"
"""Title of the example's optimizer."""

FACTOR = 2
LONGER = Training(  # its options are the settings'
    "binsgdm, longer", "binsgdm", f"{BINSGDM}, twice the steps", recommended=True
)
TRAININGS = (
    plain("none"),
    plain("qsgd-4", style="--"),
    plain("qsgd-8", recommended=True),
    plain("qsgdinf-4", style="--"),
    Training(
        "qsgdinf-4/256",
        "qsgdinf-4",
        common.title("qsgdinf-4", bucket_size=256),
        ("--bucket-size=256",),
        "-",
        True,
    ),
    plain("nuqsgd-4", recommended=True),
    plain("global-qsgd-8", recommended=True),
    plain("global-qsgd-exp-8", recommended=True),
    binsgdm("--"),
    LONGER,
)

LIMIT = 1.01
HALF = " with half the steps"  # of float32, the baseline of `LONGER`

NEAR = 0.05
"""Maximum relative difference to the baseline of curves in the inset of the plot."""

Curve = tuple[list[float], list[float]]
"""Steps and losses."""

STEPS = 1000

SCRIPT, IMPORTED = "torch_char_transformer.py", ("training.py", "python_text.py")


class Settings(NamedTuple):
    """Settings of trainings.

    Attributes:
        options: of the example.
        longer: additional options of `LONGER`: `FACTOR` times the steps, and a learning rate for them.
        seeds, workers: of each training.
    """

    options: tuple[str, ...]
    longer: tuple[str, ...]
    seeds: tuple[int, ...]
    workers: int


SIZES = {
    "full": Settings(
        (f"--steps={STEPS}",),
        (f"--steps={FACTOR * STEPS}", "--lr=0.003"),
        (0, 1, 2),
        4,
    ),
    "tiny": Settings(
        ("--steps=4", "--layers=1", "--width=32", "--context=16", "--batch-size=4"),
        (f"--steps={FACTOR * 4}",),
        (0, 1),
        2,
    ),
}


def study(settings: Settings) -> dict[str, Any]:
    return {
        "trainings": {each.key: trained(settings, each) for each in TRAININGS},
        "entropies": entropies(),
    }


def trained(settings: Settings, each: Training, options: Sequence[str] = ()) -> dict[str, Any]:
    """Train with one method; return the `summary`.

    Args:
        options: of the example; they override the common ones, and those of the training override them.
    """
    options = (*settings.options, *options, *(settings.longer if each.key == LONGER.key else each.options))
    job = running.Job(SCRIPT, IMPORTED, each.method, options, settings.workers)
    return summary(running.trainings(job, settings.seeds))


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of trainings with one method.

    Lists have one entry per seed.
    """
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
    """Return the `summary` of cached trainings, or an earlier summary.

    The earlier one is returned if it has more seeds.

    Args:
        run: True to train missing seeds first.
        before: the earlier summary.

    Returns:
        None if there is neither.
    """
    if run:
        running.trainings(job, seeds)
    runs = running.kept_trainings(job, seeds)
    if before is not None and len(before["losses"]) > len(runs):
        return before
    return summary(runs) if runs else None


def entropies() -> dict[str, float]:
    """Return entropies of the next character in nats.

    One is unconditional, one given the character before. These losses need no transformer.
    """
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


# ---- verdicts ----------------------------------------------------------------------------------------------------


def in_short(figures: dict[str, Any]) -> str:
    return (
        f"Among the verdicts is a BinSGDM with twice the steps of float32; {common.link('binsgdm-tuning')} "
        f"compares it with Adam after the same number of steps."
    )


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    return [
        Verdict(
            f"{each.title} ends within 1% of the float32 loss" + (HALF if each.key == LONGER.key else ""),
            loss_ratio(figures, each.key) <= LIMIT,
            difference(figures, each.key),
        )
        for each in TRAININGS
        if each.recommended
    ]


def loss_ratio(figures: dict[str, Any], key: str) -> float:
    """Return the mean validation loss relative to float32, over common seeds."""
    own, other = (figures["trainings"][k]["validation_losses"] for k in (key, "none"))
    seeds = min(len(own), len(other))
    return common.mean(own[:seeds]) / common.mean(other[:seeds])


def difference(figures: dict[str, Any], key: str) -> str:
    """Format `loss_ratio` as a difference, with the standard error over seeds."""
    own, other = (figures["trainings"][k]["validation_losses"] for k in (key, "none"))
    ratios = [100 * a / b for a, b in zip(own, other)]
    error = f" ± {common.standard_error(ratios):.2f}" if len(ratios) > 1 else ""
    return f"{100 * (loss_ratio(figures, key) - 1):+.2f}%{error}"


def difference_and_seeds(figures: dict[str, Any], key: str) -> str:
    own, other = (figures["trainings"][k]["validation_losses"] for k in (key, "none"))
    return f"{difference(figures, key)}, {min(len(own), len(other))} seeds"


def rate_title(rate: str) -> str:
    """Return a rate for readers: ``"1 Gbit/s"`` for ``"1gbit"``."""
    number = rate.rstrip("kmgbit")
    return f"{number} {rate[len(number)].upper().replace('K', 'k')}bit/s"


def tables(figures: dict[str, Any]) -> str:
    header = [
        "",
        "steps",
        "validation loss",
        "relative to float32",
        "MB sent per step",
        "N× less than float32",
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
        "are bold. With 4 bits and the l2 norm of a bucket of 1,024, QSGD has too few levels."
    )
    return f"{losses}\n\n{note}"


def whole(figures: dict[str, Any], key: str) -> bool:
    """True if a training has every seed, or more."""
    own = figures["trainings"].get(key)
    return own is not None and len(own["validation_losses"]) >= figures["seeds"]


def parts_table(
    figures: dict[str, Any], chosen: Sequence[Training], elsewhere: Mapping[str, str] | None = None
) -> str:
    """Return a table of losses, and the list of missing trainings.

    Args:
        elsewhere: trainings that another section shows: its claim by their keys.
    """
    trainings, elsewhere = figures["trainings"], elsewhere or {}
    rows = []
    for each in chosen:
        own = trainings.get(each.key)
        if own is None or each.key in elsewhere:
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
    if elsewhere:
        parts.append(shown_elsewhere(chosen, elsewhere))
    missing = [each.title for each in chosen if each.key not in trainings]
    if missing:
        parts.append(f"**Not trained yet: {', '.join(missing)}.**")
    return "\n\n".join(parts)


def shown_elsewhere(chosen: Sequence[Training], elsewhere: Mapping[str, str]) -> str:
    """Return links to the sections with the other rows.

    See `parts_table`.
    """
    titles: dict[str, list[str]] = collections.defaultdict(list)
    for each in chosen:
        if each.key in elsewhere:
            titles[elsewhere[each.key]].append(each.title)
    return " ".join(f"{'; '.join(own)}: see {common.link(claim)}." for claim, own in titles.items())


# ---- plots -------------------------------------------------------------------------------------------------------


LOSS_CAPTION = (
    "Left: training loss, averaged over seeds and over each 2% of the steps; inset: losses close to float32, relative "
    "to it. Right: validation loss of each seed, and their mean."
)


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    plot = Plot("transformer-loss.png", LOSS_CAPTION)
    draw_losses(figures["trainings"], TRAININGS, folder / plot.file)
    return [plot]


def draw_parts(
    figures: dict[str, Any],
    chosen: Sequence[Training],
    folder: Path,
    file: str,
    inset: Sequence[str] | None = None,
) -> list[Plot]:
    """Draw the losses of finished trainings.

    Draw nothing unless float32 and another one are among them.

    Args:
        inset: keys of the trainings in the inset; None for all that end close to float32.
    """
    trained_ones = [each for each in chosen if each.key in figures["trainings"]]
    if len(trained_ones) < 2 or trained_ones[0].key != "none":
        return []
    draw_losses(figures["trainings"], trained_ones, folder / file, inset)
    return [Plot(file, LOSS_CAPTION)]


def draw_losses(
    figures: dict[str, Any], chosen: Sequence[Training], path: Path, inset: Sequence[str] | None = None
) -> None:
    """Draw training losses, and final validation losses relative to the first training.

    Args:
        figures: `trained`, by key.
        inset: see `draw_parts`.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.5), layout="constrained")
    curves = [curve(figures[each.key]["losses"]) for each in chosen]
    baseline = figures[chosen[0].key]["validation_losses"]
    for place, (each, points) in enumerate(zip(chosen, curves)):
        left.plot(*points, each.style, color=each.color, label=each.title, linewidth=1.4)
        own = figures[each.key]["validation_losses"]
        ratios = [100 * (a / b - 1) for a, b in zip(own, baseline)]
        mean = 100 * (common.mean(own) / common.mean(baseline[: len(own)]) - 1)
        right.plot(ratios, [place] * len(ratios), "o", color=each.color, alpha=0.5)
        right.plot(mean, place, "|", color=each.color, markersize=24)
    zoom_in(left, chosen, curves, inset)
    left.set(xlabel="step", ylabel="training loss, nats per character")
    right.axvline(0, color="black", linewidth=1)
    right.axvline(100 * (LIMIT - 1), color="black", linewidth=1, linestyle="--")
    right.set(xlabel=f"validation loss, % above {chosen[0].title}", ylim=(len(chosen) - 0.5, -0.5))
    right.set_yticks(range(len(chosen)), [each.title for each in chosen])
    for label, each in zip(right.get_yticklabels(), chosen):
        label.set_color(each.color)
    common.finish(figure, (left, right), path)


def zoom_in(
    axes: Any, chosen: Sequence[Training], curves: Sequence[Curve], only: Sequence[str] | None
) -> None:
    """Draw an inset with ratios of curves to the first one.

    It has the curves that end close to the first one.
    """
    steps, losses = curves[0]
    ratios = {
        each: [100 * (a / b - 1) for a, b in zip(points[1], losses)]
        for each, points in zip(chosen, curves)
        if points[0] == steps
    }
    near = {
        each: ratio
        for each, ratio in ratios.items()
        if abs(ratio[-1]) <= 100 * NEAR and (only is None or each.key in only)
    }
    if len(near) < 2:
        return
    inset = axes.inset_axes((0.42, 0.5, 0.55, 0.4))
    for each, ratio in near.items():
        inset.plot(steps, ratio, each.style, color=each.color, linewidth=1.1)
    inset.set_title(f"% above {chosen[0].title}", fontsize="small", pad=3)
    inset.tick_params(labelsize="x-small")
    inset.grid(alpha=0.25)


def curve(runs: Sequence[Sequence[float]], points: int = 50) -> Curve:
    """Return steps and losses, averaged over all runs and between two points."""
    losses = [common.mean(step) for step in zip(*runs)]
    width = max(1, len(losses) // points)
    starts = range(0, len(losses) - width + 1, width)
    return [start + width / 2 for start in starts], [common.mean(losses[i : i + width]) for i in starts]
