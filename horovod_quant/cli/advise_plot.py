"""Plots of ``horovod-quant advise``: step time against bandwidth, and against workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from horovod_quant.analysis.advice import Choice, refusal_of
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.network import MOST_WORKERS
from horovod_quant.analysis.steps import Step, step_seconds
from horovod_quant.analysis.units import show_rate

POINTS = 33
MOST_CURVES = 5
"""Maximum number of methods in a plot: more curves are hard to distinguish."""

SPAN = 100.0
"""Factor between the given bandwidth and the smallest and largest plotted one."""

_USUAL_BANDWIDTH = 1.25e9


def draw(path: str, model: str, chosen: Sequence[Choice], setting: Setting, step: Step) -> None:
    """Write a file with both plots.

    Args:
        path: the file, whose extension is its format.
        model: name of the model in the title.
        chosen: methods to draw where they are possible; `MOST_CURVES` at most.
        setting: the setting whose bandwidth and number of hosts are varied.
        step: the step without step communication.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    network = setting.network
    middle = network.bandwidth if network.bandwidth < float("inf") else _USUAL_BANDWIDTH
    bandwidths = np.geomspace(middle / SPAN, middle * SPAN, POINTS).tolist()
    hosts = host_numbers(network.hosts, MOST_WORKERS // network.workers_per_host)

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [8e-9 * bandwidth for bandwidth in bandwidths]
    workers = [number * network.workers_per_host for number in hosts]
    for choice in chosen:
        at_rates = [setting.with_network(bandwidth=bandwidth) for bandwidth in bandwidths]
        left.plot(rates, step_times(choice, at_rates, step), label=choice.name)
        of_hosts = [setting.with_network(hosts=number) for number in hosts]
        right.plot(workers, step_times(choice, of_hosts, step), label=choice.name)
    left.axvline(8e-9 * middle, color="lightgray", zorder=0)
    left.set_xscale("log")
    left.set_xlabel("rate of each host's link (Gbit/s)")
    left.set_title(f"{model}, {network.workers:,} workers on {network.hosts:,} hosts", fontsize="medium")
    right.axvline(network.workers, color="lightgray", zorder=0)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
    right.set_xlabel("workers")
    right.set_title(f"{model}, {show_rate(network.bandwidth)}, {network.workers_per_host} workers per host",
                    fontsize="medium")  # fmt: skip
    for axes in (left, right):
        axes.axhline(step.seconds, color="black", linestyle=":", linewidth=1, label="no communication")
        axes.set_yscale("log")
        axes.set_ylabel("seconds per step")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)


def host_numbers(hosts: int, most: int) -> list[int]:
    """Return the numbers of hosts to plot.

    They are ``hosts``, and powers of two to 64 or ``4 * hosts``; at most ``most``.
    """
    powers = [1]
    while powers[-1] < max(4 * hosts, 64) and 2 * powers[-1] <= most:
        powers.append(2 * powers[-1])
    return sorted({*powers, hosts})


def step_times(choice: Choice, settings: Sequence[Setting], step: Step) -> list[float]:
    """Return the seconds of a step in each setting; NaN if impossible."""
    return [
        math.nan if refusal_of(choice, setting) else step_seconds(choice.method, setting, step)
        for setting in settings
    ]
