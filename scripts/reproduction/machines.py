"""Time per step of two transformers on three kinds of machine.

Workers communicate between the hosts of a lab.

Estimates for two cores: a round of the larger transformer takes 15 s at 100 Mbit/s, the whole study 25 minutes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from horovod_quant.frontends import former_names
from reproduction import common, running, steps, transformer
from reproduction.common import Plot, Verdict

TITLE = "The time per step on three kinds of machine"
SCALE = "119,000 and 7.2 million parameters, 4 hosts on 2 cores, and on 1"
SOURCE = common.PACKAGE
CLAIM = (
    "With every recommended setting a step takes less time than with float32, with AVX-512, with AVX2 alone, and where "
    "all hosts share one core."
)
METHOD = (
    "Whole steps of two character-level transformers between 4 hosts of `scripts/lab` with one worker each, over Gloo, "
    "at 100 Mbit/s and 1 Gbit/s. A round has a trial of every method; a ratio is taken within a round, and the tables "
    "show medians. *AVX2 alone*: `HOROVOD_QUANT_ISA=avx2` and `ATEN_CPU_CAPABILITY=avx2`. *One core*: all processes of "
    "all hosts are bound to it."
)


NAMES = former_names.VERSION
"""Version of the names of methods here."""


class Machine(NamedTuple):
    """Part of this machine that all hosts share.

    Attributes:
        cores: None for all.
        isa: as HOROVOD_QUANT_ISA takes it; None for the best.
    """

    title: str
    cores: int | None = None
    isa: str | None = None


MACHINES = {
    "all": Machine("all cores"),
    "avx2": Machine("all cores, AVX2 alone", isa="avx2"),
    "one-core": Machine("one core", cores=1),
}
NARROW = {"layers": 2, "width": 64, "heads": 4, "context": 32}
METHODS = (
    "none", "fp16", "global-qsgd-8", "qsgd-4", "nuqsgd-4", "eden-3", "eden-3-server3", "qsgd-4-l2-bucket1024",
    "binsgdm",
)  # fmt: skip
RECOMMENDED = ("global-qsgd-8", "qsgd-4", "nuqsgd-4", "eden-3", "binsgdm")


class Settings(NamedTuple):
    """Settings of the measurements.

    Attributes:
        machines: names from `MACHINES`.
        models: settings of each rate, by the number of parameters in words.
    """

    machines: tuple[str, ...]
    models: dict[str, dict[str, steps.Settings]]


def _of(model: dict[str, int], rates: dict[str, dict[str, int]], hosts: int = 4) -> dict[str, steps.Settings]:
    return {
        rate: steps.Settings(hosts, 1, rate, METHODS, model, **others, version=NAMES)
        for rate, others in rates.items()
    }


LARGE, SMALL = "7.2 million", "119,000"
SIZES = {
    "full": Settings(
        tuple(MACHINES),
        {
            SMALL: _of(
                NARROW,
                dict.fromkeys(("100mbit", "1gbit"), {"sequences": 8, "rounds": 8, "warm_up": 2, "steps": 10}),
            ),
            LARGE: _of(
                steps.WIDE,
                {"100mbit": {"rounds": 5, "warm_up": 2}, "1gbit": {"rounds": 7, "warm_up": 2, "steps": 2}},
            ),
        },
    ),
    "tiny": Settings(
        ("one-core",), {SMALL: _of(steps.NARROW, {"1gbit": {"rounds": 2, "warm_up": 1}}, hosts=2)}
    ),
}  # fmt: skip


def problem(size: str) -> str | None:
    """Return the reason why the claim cannot be tested here, or None."""
    return running.why_no_lab()


def study(settings: Settings) -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machines": {
            name: {
                model: {
                    rate: steps.measure(each._replace(cores=MACHINES[name].cores, isa=MACHINES[name].isa))
                    for rate, each in rates.items()
                }
                for model, rates in settings.models.items()
            }
            for name in settings.machines
        },
    }


def least(figures: dict[str, Any], model: str, rate: str, method: str) -> float:
    """Return a method's least step speed-up over float32 among the machines."""
    return min(steps.speed_up(own[model][rate], method) for own in figures["machines"].values())


def verdicts(figures: dict[str, Any]) -> list[Verdict]:
    found = []
    for name, models in figures["machines"].items():
        for model, rates in models.items():
            for rate, measured in rates.items():
                ratios = {method: steps.speed_up(measured, method) for method in RECOMMENDED}
                found.append(
                    Verdict(
                        f"{MACHINES[name].title}, {model} parameters, {transformer.rate_title(rate)}: a step takes "
                        "less time with every recommended setting than with float32",
                        min(ratios.values()) > 1,
                        ", ".join(f"{written(method)} {ratio:.2f}" for method, ratio in ratios.items()),
                    )
                )
    return found


def in_short(figures: dict[str, Any]) -> str:
    """Say where the small model gains, and how long float32 takes there."""
    parts = []
    slowest = next(iter(next(iter(figures["machines"].values()))[SMALL]))
    least = min(
        steps.speed_up(models[SMALL][slowest], method)
        for models in figures["machines"].values()
        for method in RECOMMENDED
    )
    for name, models in figures["machines"].items():
        for rate, measured in models.get(SMALL, {}).items():
            own = [1e3 * steps.seconds(measured, method) for method in RECOMMENDED]
            parts.append(
                f"{MACHINES[name].title}, {transformer.rate_title(rate)}: float32 "
                f"{1e3 * steps.seconds(measured, 'none'):.0f}, recommended settings {min(own):.0f} to {max(own):.0f}"
            )
    return (
        f"Steps of {SMALL} parameters, in ms: {'; '.join(parts)}. These are the machines that were tried to find one "
        f"where nothing gains at {transformer.rate_title(slowest)}: the least speed-up there is {least:.2f}. One core "
        "with AVX2 alone was not tried. Fewer cores take more of the gain than narrower instructions. A step of this "
        "model is mostly compute and Python, and sends 0.7 MB with float32. Where four workers share a core, what "
        "quantizing adds is added four times."
    )


def written(method: str) -> str:
    return common.title(method, version=NAMES)


def tables(figures: dict[str, Any]) -> str:
    return "\n\n".join(
        f"### {model} parameters, {transformer.rate_title(rate)}\n\n{table(figures, model, rate)}"
        for model, rates in next(iter(figures["machines"].values())).items()
        for rate in rates
    )


def table(figures: dict[str, Any], model: str, rate: str) -> str:
    measured = {name: own[model][rate] for name, own in figures["machines"].items()}
    header = [""]
    for name in measured:
        header += [f"{MACHINES[name].title}: ms per step", "speed-up"]
    rows = []
    for method in METHODS:
        row = [written(method)]
        for own in measured.values():
            row += [f"{1e3 * steps.seconds(own, method):.0f}", f"{steps.speed_up(own, method):.2f}"]
        rows.append(row)
    return common.table(header, rows)


def draw(figures: dict[str, Any], folder: Path) -> list[Plot]:
    rates = {model: list(own) for model, own in next(iter(figures["machines"].values())).items()}
    cells = [(model, rate) for model, own in rates.items() for rate in own]
    columns = max(map(len, rates.values()))
    figure, grid = plt.subplots(
        len(rates), columns, figsize=(9, 3.2 * len(rates)), layout="constrained", sharey=True, squeeze=False
    )
    height = 0.8 / len(figures["machines"])
    for axes, (model, rate) in zip(grid.flat, cells):
        for number, (name, own) in enumerate(figures["machines"].items()):
            ratios = [steps.speed_up(own[model][rate], method) for method in METHODS[1:]]
            places = [place + number * height for place in range(len(ratios))]
            axes.barh(places, ratios, height, label=MACHINES[name].title)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_title(f"{model} parameters, {transformer.rate_title(rate)}", fontsize="medium")
        axes.set_xlabel("speed-up over float32")
        axes.grid(axis="x", alpha=0.25)
    grid[0][0].set_yticks([place + height for place in range(len(METHODS) - 1)], map(written, METHODS[1:]))
    grid[0][0].invert_yaxis()
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    common.save_plot(figure, folder / "machines.png")
    return [Plot("machines.png", "Steps per second, relative to float32 in the same round.")]
