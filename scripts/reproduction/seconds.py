"""Seconds to the float32 loss: whole trainings on an emulated cluster.

Estimates: for each of its 118,656 parameters a worker sends 1.5 times 4 bytes in a ring, 57 ms at 100 Mbit/s, and four
workers on two cores compute for 50 to 60 ms. So float32 takes 2 minutes, compressed trainings one, and all trainings at
both rates half an hour, launches included.

Once `bytes_count` has a verdict, it replaces this section of the page.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from horovod_quant.analysis.units import parse_rate
from reproduction import common, eden, running, transformer
from reproduction.common import Plot, Verdict
from reproduction.transformer import Training, plain

TITLE = "A transformer: seconds to the float32 loss"
SCALE = "119,000 parameters, 1,000 steps, one training each, 4 hosts on 2 cores"
SOURCE = common.PACKAGE
CLAIM = (
    "On slow links, trainings with the recommended settings come within 1% of the final float32 loss in less time than "
    f"float32, and {common.title('eden-3')} in less time than PowerSGD."
)
METHOD = (
    "The trainings of `scripts/reproduce transformer` (the same transformer, text, learning rates and seed 0), one "
    "with each method, one after the other, with a worker on each of 4 hosts of `scripts/lab`, over Gloo. Each takes "
    "all its steps, since the learning rate falls to 0 with them and losses are low only near the end; BinSGDM takes "
    "twice the steps, as recommended. Only the time of steps counts, not that of launch and validation. A loss is the "
    "mean of the training losses of all workers over 100 steps. The final float32 loss is that of the last 100 steps, "
    "at the same rate, and a training reaches a loss at the first step where the mean over its last 100 steps is at or "
    "below it. Trainings of the same length see the same text at the same step, so that their losses go up and down "
    "together; still this is one training each, and batches that are a little easier move such a step by tens."
)

WORKER = Path(__file__).with_name("seconds_worker.py")
IMPORTED = (str(eden.WORKER), transformer.SCRIPT, *transformer.IMPORTED)

_OF_EDEN = {each.key: each for each in eden.TRAININGS}
BINSGDM = Training("binsgdm", "binsgdm", transformer.LONGER.title, (), "-", True)  # options: the settings'

# In the order of the page. PowerSGD uses the network code of another library, whose failure would stop later ones.
TRAININGS = (
    plain("none"),
    plain("fp16"),
    plain("qsgdinf-4"),
    plain("nuqsgd-4", recommended=True),
    plain("global-qsgd-8", recommended=True),
    plain("global-qsgd-4"),
    plain("eden-3", recommended=True),
    _OF_EDEN["eden-2/4"],
    BINSGDM,
    _OF_EDEN["powersgd-2"],
)
SHOWN = ("none", "fp16", "nuqsgd-4", "global-qsgd-8", "eden-3", "binsgdm", "powersgd-2")  # in the plot

LOCAL = "local"
"""Placeholder for a rate: workers on this machine, without a lab."""

RATES = ("100mbit", "1gbit", LOCAL)
PARTS = tuple(f"{each.key}@{rate}" for rate in RATES for each in TRAININGS)

WINDOW = 10
"""Number of losses in a mean: 100 steps, since there is one loss for 10 steps."""

# PyTorch's Gloo would otherwise look up the interface by the name of the host.
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "eth0", "HOROVOD_GLOO_TIMEOUT_SECONDS": "300", "PYTHONPATH": str(running.ROOT),
}  # fmt: skip


class Settings(NamedTuple):
    """Settings of the trainings.

    Attributes:
        options: of the example.
        longer: additional options of `BINSGDM`.
        workers: one per host, except for `LOCAL`.
        rates: of the links, as scripts/lab takes them, or `LOCAL`; each has a training with every method.
        every: steps between recorded losses and times.
        only: names from `PARTS` to run; None for all methods at ``rates``.
    """

    options: tuple[str, ...]
    longer: tuple[str, ...]
    workers: int
    rates: tuple[str, ...]
    every: int
    only: tuple[str, ...] | None = None


SIZES = {
    "full": Settings(*transformer.SIZES["full"][:2], 4, ("100mbit", "1gbit"), 10),
    "tiny": Settings(*transformer.SIZES["tiny"][:2], 2, (LOCAL,), 1),
}


def problem(size: str) -> str | None:
    """Return the reason why the claim cannot be tested here, or None."""
    return None if SIZES[size].rates == (LOCAL,) else running.why_no_lab()


def study(settings: Settings) -> dict[str, Any]:
    chosen = [part for part in PARTS if part.split("@")[1] in settings.rates]
    trainings = {each.key: each for each in TRAININGS}
    for part in chosen if settings.only is None else settings.only:
        key, rate = part.split("@")
        each = trainings[key]
        running.once(kept_as(settings, each, rate), lambda each=each, rate=rate: train(settings, each, rate))
    before = common.earlier("seconds", settings).get("rates", {})
    found: dict[str, dict[str, Any]] = {rate: {} for rate in RATES}
    for part in PARTS:
        key, rate = part.split("@")
        run = running.kept(kept_as(settings, trainings[key], rate))
        if run is not None:
            found[rate][key] = summary(run, settings.every)
        elif key in before.get(rate, {}):
            found[rate][key] = before[rate][key]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "workers": settings.workers,
        "every": settings.every,
        "rates": {rate: own for rate, own in found.items() if own},
    }


def kept_as(settings: Settings, each: Training, rate: str) -> str:
    chosen = [settings.workers, each.method, options(settings, each)]
    programs = [WORKER, *(running.EXAMPLES / name for name in IMPORTED)]
    return f"seconds-{rate}-{each.key.replace('/', '-')}-{running.key(chosen, programs)}"


def options(settings: Settings, each: Training) -> list[str]:
    longer = settings.longer if each.key == BINSGDM.key else ()
    return [*running.method_options(each.method), *settings.options, *each.options, *longer]


def train(settings: Settings, each: Training, rate: str) -> dict[str, Any]:
    """Train once; return the figures of the example, and ``times``.

    ``times`` are the seconds until each step ends.

    Writes a log to the folder of cached runs, to follow the training.

    Raises:
        running.RunFailed: a worker or the lab failed.
    """
    running.KEPT.mkdir(parents=True, exist_ok=True)
    log = running.KEPT.absolute() / f"{kept_as(settings, each, rate)}.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, str(WORKER), "--lines", str(log), "--every", str(settings.every)]
        command += [*options(settings, each), "--quiet", "--json", str(file)]
        if rate == LOCAL:
            running.horovodrun(command, settings.workers, running.TIME_LIMIT)
        else:
            with running.lab(settings.workers, rate) as lab:
                lab.horovodrun(command, 1, VARIABLES)
        (run,) = json.loads(file.read_text())["runs"]
    return run


def summary(run: dict[str, Any], every: int) -> dict[str, Any]:
    """Return the figures of a training, with losses averaged over ``every`` steps."""
    ends = range(every, len(run["losses"]) + 1, every)
    return {
        "losses": [round(common.mean(run["losses"][end - every : end]), 4) for end in ends],
        "seconds": [round(run["times"][end - 1], 3) for end in ends],
        "validation_loss": run["validation_loss"],
        "bytes_per_step": run["bytes_per_step"],
    }


# ---- verdicts ----------------------------------------------------------------------------------------------------


class Arrival(NamedTuple):
    """Steps and seconds until a training reached a loss."""

    steps: int
    seconds: float


def smoothed(training: dict[str, Any]) -> list[float]:
    """Return the moving average of losses over `WINDOW` of them."""
    losses = training["losses"]
    window = min(WINDOW, len(losses))
    return [common.mean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def arrival(
    figures: dict[str, Any], rate: str, key: str, factor: float = transformer.LIMIT
) -> Arrival | None:
    """Return when a training reached a multiple of the final float32 loss."""
    own = figures["rates"][rate]
    target = factor * smoothed(own["none"])[-1]
    means = smoothed(own[key])
    first = next((place for place, loss in enumerate(means) if loss <= target), None)
    if first is None:
        return None
    place = first + len(own[key]["losses"]) - len(means)
    return Arrival((place + 1) * figures["every"], own[key]["seconds"][place])


def times_as_fast(figures: dict[str, Any], rate: str, key: str, other: str = "none") -> float:
    """Return the speed-up over another training to the float32 loss.

    Both are timed until within 1% of the final float32 loss. The speed-up is 0 if this training never reaches it,
    infinite if the other one does not.
    """
    own, others = (arrival(figures, rate, each) for each in (key, other))
    return 0.0 if own is None else float("inf") if others is None else others.seconds / own.seconds


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    recommended = [each for each in TRAININGS if each.recommended]
    found = []
    for rate, own in figures["rates"].items():
        if all(key in own for key in ("none", *(each.key for each in recommended))):
            ratios = {each.title: times_as_fast(figures, rate, each.key) for each in recommended}
            found.append(
                Verdict(
                    f"{rate_title(rate)}: each recommended setting gets within 1% of the final float32 loss sooner "
                    "than float32",
                    min(ratios.values()) > 1,
                    "speed-ups: " + ", ".join(f"{title} {told(ratio)}" for title, ratio in ratios.items()),
                )
            )
        if all(key in own for key in ("none", "eden-3", "powersgd-2")):
            ratio = times_as_fast(figures, rate, "eden-3", "powersgd-2")
            found.append(
                Verdict(
                    f"{rate_title(rate)}: {common.title('eden-3')} gets within 1% of the final float32 loss sooner "
                    "than PowerSGD, rank 2",
                    ratio > 1,
                    f"speed-up: {told(ratio)}",
                )
            )
    return found


def in_short(figures: dict[str, Any]) -> str:
    parts = []
    for rate, own in figures["rates"].items():
        chosen = [each for each in TRAININGS if each.key in own and (each.recommended or each.key == "none")]
        if "none" in own:
            near = {each.title: arrival(figures, rate, each.key) for each in chosen}
            ends = [f"{title} {f'{to.seconds:.0f} s' if to else 'never'}" for title, to in near.items()]
            parts.append(f"{rate_title(rate)}, to within 1% of the final float32 loss: {'; '.join(ends)}.")
    return " ".join(parts)


def told(ratio: float) -> str:
    return {0.0: "never reached", float("inf"): "PowerSGD never gets there"}.get(ratio, f"{ratio:.2f}")


def rate_title(rate: str) -> str:
    return "One machine, no lab" if rate == LOCAL else transformer.rate_title(rate)


def step_seconds(figures: dict[str, Any], rate: str, key: str) -> float:
    own = figures["rates"][rate][key]
    return own["seconds"][-1] / (figures["every"] * len(own["seconds"]))


def network_seconds(figures: dict[str, Any], rate: str, key: str) -> float:
    """Return the transfer time of a step's bytes; 0 without a lab."""
    sent = figures["rates"][rate][key]["bytes_per_step"]
    return 0.0 if rate == LOCAL else sent / parse_rate(rate)


# ---- tables ------------------------------------------------------------------------------------------------------


def tables(figures: dict[str, Any]) -> str:
    parts = [introduction(figures)]
    for rate in figures["rates"]:
        parts += [f"### {rate_title(rate)}", *ratio_of_computing(figures, rate), table(figures, rate)]
    return "\n\n".join(parts)


def introduction(figures: dict[str, Any]) -> str:
    trainings = [own for rates in figures["rates"].values() for own in rates.values()]
    minutes = sum(own["seconds"][-1] for own in trainings) / 60
    return (
        f"**{figures['workers']} workers share {figures['cores']} cores of one machine, and their links are "
        f"emulated**: compute and compression take longer than on {figures['workers']} machines, and messages of up to "
        "some tens of KB pass faster than the rate of the links allows ([docs/lab.md](../lab.md)), which favours few "
        "bytes. Horovod waits in a busy loop and takes the cores from workers that compute, which would not affect "
        "workers with cores of their own; this package sleeps while it waits. That may be why float32 and float16 are "
        "slow here. *At the rate* is the time of the bytes of a step on a link that is never idle. PowerSGD's bytes "
        "are those of a step after the first tenth. "
        f"{len(trainings)} trainings, {minutes:.0f} minutes without launches and validation."
    )


def ratio_of_computing(figures: dict[str, Any], rate: str) -> list[str]:
    if rate == LOCAL or "none" not in figures["rates"][rate]:
        return []
    step, network = (of(figures, rate, "none") for of in (step_seconds, network_seconds))
    return [
        f"Of the {1e3 * step:.0f} ms of a step with float32 the links need {1e3 * network:.0f}; the rest, compute and "
        f"the work of Horovod, takes {step / network - 1:.1f}× that time."
    ]


def table(figures: dict[str, Any], rate: str) -> str:
    header = ["", "MB sent per step", "ms per step", "at the rate, ms"]
    header += ["training loss to float32", "validation loss to float32"]
    header += ["steps to 1%", "s to 1%", "speed-up", "s to the float32 loss"]
    rows = []
    for each in TRAININGS:
        own = figures["rates"][rate].get(each.key)
        if own is None:
            continue
        network = network_seconds(figures, rate, each.key)
        rows.append(
            [
                f"**{each.title}**" if each.recommended else each.title,
                f"{own['bytes_per_step'] / 1e6:.3f}",
                f"{1e3 * step_seconds(figures, rate, each.key):.1f}",
                f"{1e3 * network:.1f}" if network else "",
                *compared(figures, rate, each.key),
            ]
        )
    return common.table(header, rows)


def compared(figures: dict[str, Any], rate: str, key: str) -> list[str]:
    """Return the columns that need a training with float32."""
    own = figures["rates"][rate]
    if "none" not in own:
        return [""] * 6
    near, there = (arrival(figures, rate, key, factor) for factor in (transformer.LIMIT, 1.0))
    ratios = (
        smoothed(own[key])[-1] / smoothed(own["none"])[-1],
        own[key]["validation_loss"] / own["none"]["validation_loss"],
    )
    return [
        *("" if key == "none" else f"{100 * (ratio - 1):+.2f}%" for ratio in ratios),
        f"{near.steps:,}" if near else "never",
        f"{near.seconds:.0f}" if near else "",
        f"{times_as_fast(figures, rate, key):.2f}" if near else "",
        f"{there.seconds:.0f}" if there else "never",
    ]


# ---- plots -------------------------------------------------------------------------------------------------------


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    plots = []
    for rate, own in figures["rates"].items():
        if "none" in own:
            caption = (
                f"{rate_title(rate)}: training loss, mean of 100 steps. Circles: 1% above the final float32 loss "
                "(dashed)."
            )
            plots.append(Plot(f"seconds-{rate}.png", caption))
            draw_rate(figures, rate, folder / plots[-1].file)
    return plots


def draw_rate(figures: dict[str, Any], rate: str, path: Path) -> None:
    """Draw losses against seconds; label curves where they arrive or end."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    own = figures["rates"][rate]
    target = transformer.LIMIT * smoothed(own["none"])[-1]
    shown = [each for each in TRAININGS if each.key in SHOWN and each.key in own]
    ends = []
    for each in shown:
        means, seconds = smoothed(own[each.key]), own[each.key]["seconds"]
        axes.plot(seconds[-len(means) :], means, each.style, color=each.color, linewidth=1.4)
        near = arrival(figures, rate, each.key)
        name = f"{each.title}: " + (f"{near.seconds:.0f} s" if near else "not reached")
        ends.append(
            End(near.seconds if near else seconds[-1], target if near else means[-1], name, each.color)
        )
    axes.axhline(target, color="black", linewidth=1, linestyle="--")
    axes.set(xlabel="seconds", ylabel="training loss, nats per character")
    last = max(own[each.key]["seconds"][-1] for each in shown)
    axes.set_xlim(0, max(last, *(end.x / (1 - LETTER * (len(end.name) + 1)) for end in ends)))
    axes.grid(alpha=0.25)
    name_ends(axes, sorted(ends), target, 1.5 * target)
    common.save_plot(figure, path)


class End(NamedTuple):
    """Labelled end of a curve."""

    x: float
    y: float
    name: str
    color: str


LETTER, ROW = 0.0095, 0.06  # width of a letter and height of a label, relative to the plot


def name_ends(axes: Any, ends: Sequence[End], low: float, high: float) -> None:
    """Write labels right of and below their points, without crossing lines.

    Args:
        ends: from left to right.
        low, high: range of the curves; the labels extend it below.
    """
    width = axes.get_xlim()[1]
    rows: dict[End, int] = {}
    for place, end in reversed(list(enumerate(ends))):
        until = end.x + LETTER * width * len(end.name)
        rows[end] = 1 + max((rows[other] for other in ends[place + 1 :] if other.x < until), default=0)
    band = ROW * (max(rows.values()) + 1)
    axes.set_ylim(low - (high - low) * band / (1 - band), high)
    for end, row in rows.items():
        axes.plot(end.x, end.y, "o", color=end.color, markersize=4, zorder=3)
        axes.annotate(
            end.name, (end.x, end.y), (end.x / width + 0.008, band - ROW * row), textcoords="axes fraction",
            color=end.color, verticalalignment="center", fontsize="small",
            arrowprops={"arrowstyle": "-", "relpos": (0, 0.5), "color": end.color, "linewidth": 0.8},
        )  # fmt: skip
