"""Draw README.md's picture: training speed between four hosts, and final loss.

Losses come from docs/results/transformer.json, measured by `scripts/reproduce transformer`, those of BinSGDM with its
default beta from binsgdm-tuning.json, those of EDEN from eden.json; speeds from machines.json, each in the
configuration of the machine where it is least.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from reproduction import binsgdm_tuning, common, machines, transformer

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
CLAIMS = ("transformer", "binsgdm-tuning", "machines", "eden")
FIGURES, TUNED, SPEEDS, EDENS = (RESULTS / f"{claim}.json" for claim in CLAIMS)
PICTURE = RESULTS / "overview.png"
LEFT = f"Training speed, 4 emulated hosts, {machines.LARGE}\nparameters, slowest of 3 configurations"
RIGHT = f"Final validation loss\n{machines.SMALL} parameters, {transformer.STEPS:,} steps, 4 workers"
LINKS = {"1gbit": 1.0, "100mbit": 0.45}
"""Opacity of the bars for each rate."""


class Row(NamedTuple):
    """One method at a setting that README.md names.

    Attributes:
        label: for readers, as README.md writes it.
        key: of the training in `FIGURES`, `TUNED` or `EDENS`; empty if there are not several seeds.
        measured: of `machines.METHODS`.
        steps: number of steps relative to float32.
    """

    label: str
    key: str
    measured: str
    steps: int = 1


ROWS = (
    Row("fp16, Horovod's own", "", "fp16"),
    Row("GlobalQSGD()", "global-qsgd-8", "global-qsgd-8"),
    Row("QSGD()", "qsgdinf-4/256", "qsgd-4"),
    Row("NUQSGD()", "nuqsgd-4", "nuqsgd-4"),
    Row("EDEN()", "eden-3/4", "eden-3"),
    Row("EDEN(server_bits=3)", "eden-3", "eden-3-server3"),
    Row("BinSGDM(), twice the steps", binsgdm_tuning.OURS_MORE, "binsgdm", transformer.FACTOR),
    Row("BinSGDM(), equal steps", binsgdm_tuning.OURS, "binsgdm"),
)


def together(figures: dict[str, Any], tuned: dict[str, Any], speeds: dict[str, Any]) -> dict[str, Any]:
    """Return `FIGURES` with the trainings of `TUNED`, and with `SPEEDS`.

    Both have the same float32 training.
    """
    return {**figures, **speeds, "trainings": {**tuned["trainings"], **figures["trainings"]}}


def speed_up(figures: dict[str, Any], row: Row, rate: str) -> float:
    """Return the least speed-up of the whole training over float32.

    With the number of steps of this row.
    """
    return machines.least(figures, machines.LARGE, rate, row.measured) / row.steps


def draw(figures: dict[str, Any], edens: dict[str, Any], path: Path) -> None:
    """Draw the picture.

    Args:
        figures: from `together`.
        edens: `EDENS`, with separate float32 trainings.
        path: of the PNG file.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    height = 0.38
    for position, row in enumerate(ROWS):
        color = next(own for name, own in common.COLORS.items() if row.measured.startswith(name))
        for offset, (rate, opacity) in zip((-height / 2, height / 2), LINKS.items()):
            gain = speed_up(figures, row, rate)
            bar = left.barh(position + offset, gain, height, color=color, alpha=opacity)
            label = f"{gain:.1f}x at {transformer.rate_title(rate)}"
            background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            left.bar_label(bar, [label], padding=3, fontsize="small", bbox=background)
        if not row.key:
            continue
        own = figures if row.key in figures["trainings"] else edens
        losses, baseline = (
            own["trainings"][key]["validation_losses"] for key in (row.key, transformer.TRAININGS[0].key)
        )
        ratios = [100 * (a / b - 1) for a, b in zip(losses, baseline)]
        mean = 100 * (transformer.loss_ratio(own, row.key) - 1)
        right.plot(ratios, [position] * len(ratios), "o", color=color, alpha=0.35, markersize=4)
        right.plot(mean, position, "|", color=color, markersize=18, markeredgewidth=2)
        beside = max(*ratios, 100 * (transformer.LIMIT - 1)) + 0.3
        label = f"{mean:+.1f}%"
        if row.key == binsgdm_tuning.OURS_MORE:
            label += f" ({100 * (binsgdm_tuning.ratio(own, row.key) - 1):+.1f}% against\nAdam with twice the steps)"
        right.text(beside, position, label, va="center", fontsize="small")
    left.axvline(1, color="black", linewidth=1)
    left.set_title(LEFT, fontsize="medium")
    left.set(xlabel="speed-up over float32", xlim=(0, 11))
    left.set_yticks(range(len(ROWS)), [row.label for row in ROWS])
    left.invert_yaxis()
    right.axvline(0, color="black", linewidth=1)
    right.axvline(100 * (transformer.LIMIT - 1), color="black", linewidth=1, linestyle="--")
    right.set_title(RIGHT, fontsize="medium")
    right.set(xlabel="% above float32 (dashed: 1%)", xlim=(-4, 12.5))
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.25)
    common.save_plot(figure, path)


def main() -> int:
    results = {path: common.load(path) for path in (FIGURES, TUNED, SPEEDS, EDENS)}
    for path, result in results.items():
        if result is None:
            print(f"readme-picture: there is no {path}: run scripts/reproduce {path.stem}", file=sys.stderr)
            return 1
    figures, tuned, speeds, edens = (result["figures"] for result in results.values() if result)
    draw(together(figures, tuned, speeds), edens, PICTURE)
    print(f"readme-picture: {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
