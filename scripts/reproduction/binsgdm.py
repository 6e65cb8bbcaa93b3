"""BinSGDM (NeurIPS 2023, as Birder): loss, step time, and bytes between hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from reproduction import common, running, steps, transformer
from reproduction.common import Plot, Verdict

TITLE = "BinSGDM: one bit per element, compared with Adam"
SCALE = (
    "loss: 119,000 parameters, 1,000 and 2,000 steps, 4 workers on 2 cores; speed: 7.2 million parameters, 4 hosts on "
    "2 cores; bytes: 21 million, 2 and 4 hosts of 2 workers"
)
CLAIM = (
    "An optimizer that sends one bit per element trains as well as Adam with float32 gradients, and up to 2.5× "
    "(ResNet-50) and 6.3× (BERT-Base) faster between hosts with links of 10 Gbit/s. The hierarchical reduction sends "
    "`2 (H-1)/H d/8` bytes from each of H hosts, for any number of workers per host (Peng et al., ICLR 2023 "
    "submission; NeurIPS 2023)."
)
METHOD = (
    "*Loss*: the trainings of `scripts/reproduce transformer` with Adam and with BinSGDM. The beta of BinSGDM is 0.9 "
    "here; another section tunes it. *Speed*: whole steps of a wider transformer between 4 hosts of `scripts/lab` with "
    "1 worker each, over Gloo. Each round has a trial of every method; ratios are taken within a round, and the table "
    "shows their median. The paper has faster GPUs and a faster network; here all hosts share the cores of a machine, "
    "and links are slow. *Bytes*: counted by the network interfaces of the hosts in `scripts/lab` while a "
    "transformer of 21 million parameters trains over Gloo, with 2 workers per host."
)

METHODS = ("none", "binsgdm")
ALONE = "alone"  # without communication: see steps_worker.py
HIERARCHICAL = "binsgdm-hierarchical"  # see steps_worker.py

TRAININGS = (
    transformer.plain("none")._replace(title="Adam"),
    transformer.binsgdm(),
    transformer.LONGER._replace(style="--"),
)

# Between measured and predicted bytes: TCP headers, Horovod's messages and control tensors are on the wire as well.
TOLERANCE = 0.05


class Settings(NamedTuple):
    """Trainings, speeds by rate, and clusters whose bytes are counted."""

    trainings: transformer.Settings
    speeds: tuple[steps.Settings, ...]
    clusters: tuple[steps.Settings, ...]


def _speed(hosts: int, rate: str, model: dict[str, int], **others: int) -> steps.Settings:
    return steps.Settings(hosts, 1, rate, (ALONE, "fp16", *METHODS), model, **others)


def _cluster(hosts: int, model: dict[str, int], **others: int) -> steps.Settings:
    # All gradients are sent in one bit, as in the formula. Horovod workers negotiate in every cycle, also while they
    # compute: a long cycle keeps these bytes, which are not gradients, few.
    methods = (*METHODS, HIERARCHICAL)
    return steps.Settings(hosts, 2, "1gbit", methods, model, min_elements=1, cycle_time=500, **others)


# Large, for the same reason; with little compute.
LARGE = {"layers": 3, "width": 768, "heads": 12, "context": 16}

SIZES = {
    "full": Settings(
        transformer.SIZES["full"],
        (
            _speed(4, "100mbit", steps.WIDE),
            _speed(4, "1gbit", steps.WIDE, rounds=7, steps=2),
        ),
        tuple(_cluster(hosts, LARGE, rounds=3, warm_up=1) for hosts in (2, 4)),
    ),
    "tiny": Settings(
        transformer.SIZES["tiny"],
        (_speed(2, "1gbit", steps.NARROW, rounds=2, warm_up=1),),
        (_cluster(2, steps.NARROW, rounds=1, warm_up=1),),
    ),
}


def study(settings: Settings) -> dict[str, Any]:
    reason = running.why_no_lab()
    rates, clusters = ((), ()) if reason else (settings.speeds, settings.clusters)
    return {
        "trainings": {each.key: transformer.trained(settings.trainings, each) for each in TRAININGS},
        "speeds": {each.rate: steps.measure(each) for each in rates},
        "no_lab": reason,
        "clusters": [{"hosts": each.hosts, **steps.measure(each)} for each in clusters],
    }


# ---- verdicts ----------------------------------------------------------------------------------------------------


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found = [
        Verdict(
            f"{when} {transformer.BINSGDM} ends within 1% of Adam's validation loss",
            transformer.loss_ratio(figures, key) <= transformer.LIMIT,
            transformer.difference(figures, key),
            source,
        )
        for key, when, source in (
            ("binsgdm", "After the same number of steps", "BinSGDM (Birder), abstract: “comparable” to Adam"),
            (
                transformer.LONGER.key,
                "After 2× the steps of Adam, which is not the comparison of the paper,",
                common.OURS,
            ),
        )
    ]
    for rate, measured in figures["speeds"].items():
        ratio, limit = steps.speed_up(measured, "binsgdm"), steps.speed_up(measured, ALONE)
        found.append(
            Verdict(
                f"At {transformer.rate_title(rate)} BinSGDM runs more steps per second than Adam with float32",
                ratio > 1,
                f"{ratio:.2f}× faster; {limit:.2f}× faster without communication",
                "BinSGDM (Birder), abstract: a speed-up, whose size is not tested",
            )
        )
    if figures["clusters"]:
        ratios = [steps.link_bytes(each, HIERARCHICAL) / predicted(each) for each in figures["clusters"]]
        shown = ", ".join(
            f"{ratio:.3f} times the formula with {cluster(e)}"
            for ratio, e in zip(ratios, figures["clusters"])
        )
        found.append(
            Verdict(
                f"The hierarchical reduction sends the bytes of the formula between hosts, within {TOLERANCE:.0%}",
                all(abs(ratio - 1) <= TOLERANCE for ratio in ratios),
                shown,
                "BinSGDM (Birder), hierarchical 1-bit all-reduce",
            )
        )
    return found


def in_short(figures: dict[str, Any]) -> str:
    equal, longer = (transformer.difference(figures, key) for key in ("binsgdm", transformer.LONGER.key))
    return (
        f"Validation loss of {transformer.BINSGDM} relative to Adam: {equal} after the same number of steps; {longer} "
        "after 2× the steps of Adam, which is not the comparison of the paper."
    )


def adams_steps(figures: dict[str, Any], key: str) -> tuple[int, int]:
    """Return Adam's steps to BinSGDM's final loss, and all Adam's steps.

    Losses are training losses, means of 50 steps.
    """
    (ours, theirs) = (
        [common.mean(step) for step in zip(*figures["trainings"][name]["losses"])] for name in (key, "none")
    )
    width = min(50, len(ours), len(theirs))
    end = common.mean(ours[-width:])
    smooth = (common.mean(theirs[i - width : i]) for i in range(width, len(theirs) + 1))
    return next((i for i, loss in enumerate(smooth, width) if loss <= end), len(theirs)), len(theirs)


def predicted(figures: dict[str, Any]) -> float:
    """Return the bytes per host and step, by the formula."""
    hosts = figures["hosts"]
    return 2 * (hosts - 1) / hosts * figures["elements"] / 8


def cluster(figures: dict[str, Any]) -> str:
    return f"{figures['hosts']} hosts of {figures['workers'] // figures['hosts']} workers"


def tables(figures: dict[str, Any]) -> str:
    reached, of = adams_steps(figures, "binsgdm")
    longer = transformer.FACTOR * of
    note = (
        f"Losses and bytes: {common.link('transformer')}. Adam needs {reached:,} steps to reach the training loss of "
        f"BinSGDM after {of:,}. Adam can also train for {longer:,} steps: see {common.link('binsgdm-tuning')}."
    )
    parts = [note, speed_table(figures)]
    if figures["clusters"]:
        header = (
            "KB sent per host and step",
            "float32",
            "BinSGDM",
            "hierarchical",
            "formula",
            "hierarchical / formula",
        )
        parts.append(common.table(header, map(_cluster_row, figures["clusters"])))
    return "\n\n".join(parts)


def speed_table(figures: dict[str, Any]) -> str:
    speeds = figures["speeds"]
    if not speeds:
        return f"**The speed was not measured, because no lab of several hosts can be made: {figures['no_lab']}**"
    header = [""]
    for rate in speeds:
        header += [f"s per step at {transformer.rate_title(rate)}", "speed-up", "MB leaving a host"]
    rows = []
    for method in (ALONE, "fp16", *METHODS):
        row = ["no communication" if method == ALONE else common.title(method)]
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


def _cluster_row(figures: dict[str, Any]) -> tuple[str, ...]:
    formula = predicted(figures)
    measured = [steps.link_bytes(figures, method) for method in (*METHODS, HIERARCHICAL)]
    shown = [f"{value / 1e3:,.0f}" for value in (*measured, formula)]
    return (cluster(figures), *shown, f"{measured[-1] / formula:.3f}")


# ---- plots -------------------------------------------------------------------------------------------------------


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    plots = [
        Plot(
            "binsgdm-loss.png",
            "Loss during training (mean of the seeds), and validation loss at the end (each seed).",
        )
    ]
    transformer.draw_losses(figures["trainings"], TRAININGS, folder / plots[0].file)
    if figures["speeds"]:
        plots.append(
            Plot(
                "binsgdm-speed.png",
                "Steps per second, relative to Adam with float32 in the same round. Dashed: no communication.",
            )
        )
        draw_speeds(figures["speeds"], folder / plots[1].file)
    return plots


def draw_speeds(speeds: dict[str, Any], path: Path) -> None:
    chosen = ("fp16", "binsgdm")
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
            title=transformer.rate_title(rate),
            xlabel="steps per second, relative to float32",
        )
        axes.set_xlim(0, 1.12 * max(limit, *ratios))
        axes.grid(axis="x", alpha=0.25)
    grid[0][0].invert_yaxis()
    common.save_plot(figure, path)
