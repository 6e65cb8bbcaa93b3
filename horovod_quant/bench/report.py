"""JSON, table and plot of a benchmark's results."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant.bench.rounds import Found
from horovod_quant.bench.variants import DDP
from horovod_quant.cli.problem import write_file
from horovod_quant.frontends.methods import NONE

VERSION = 2
"""Version of the JSON. Version 1 had ``relative_error``, the root of ``nmse``, and the names of version 0.1.0."""


def results(labels: Sequence[str], found: Found) -> list[dict[str, Any]]:
    """Return one entry for each trial, in JSON's types.

    Empty if no round was finished. Times are lists with an entry for each round: ``wall_seconds`` of the slowest
    worker, the others means over the workers. ``speed_up`` is the median over the rounds of the time of ``none``
    divided by the time of the trial in the same round; None without ``none``.
    """
    if not found.rounds:
        return []
    wall = found.field("wall").max(axis=2)  # [round, trial]
    means = {
        f"{name}_seconds": found.field(name).mean(axis=2) for name in ("cpu", "horovod_cpu", "system_cpu")
    }
    return [
        {
            "method": label,
            "wall_seconds": wall[:, index].tolist(),
            "speed_up": float(np.median(wall[:, labels.index(NONE)] / wall[:, index]))
            if NONE in labels
            else None,
            **{name: seconds[:, index].tolist() for name, seconds in means.items()},
            "page_faults": float(np.median(found.field("page_faults").mean(axis=2)[:, index])),
            "bytes_sent": found.bytes_sent[index],
            "interface_bytes_sent": _interface_bytes(found.field("interface")[:, index]),
            "nmse": found.nmses[index],
        }
        for index, label in enumerate(labels)
    ]


def _interface_bytes(counted: np.ndarray) -> float | None:
    """Return the bytes per host, mean over the hosts, from ``[round, worker]``.

    Returns None if a host cannot read them.
    """
    leaders = counted[:, ~np.isnan(counted).all(axis=0)]
    return float(np.median(leaders.mean(axis=1))) if leaders.size else None


def write_json(path: str, setting: dict[str, Any], found: list[dict[str, Any]]) -> None:
    rounds = len(found[0]["wall_seconds"]) if found else 0
    text = json.dumps({"version": VERSION, **setting, "rounds": rounds, "results": found}, indent=1)
    text = re.sub(r"\[[^][{}\"]*\]", lambda numbers: f"[{' '.join(numbers[0][1:-1].split())}]", text)
    write_file(path, text + "\n")


def title(setting: dict[str, Any]) -> str:
    """Return a title: ``resnet50 in PyTorch, 4 workers on 2 hosts, Gloo``"""
    framework = {"torch": "PyTorch", "tensorflow": "TensorFlow", DDP: "PyTorch's DDP"}[setting["framework"]]
    controller = {"gloo": "Gloo", "mpi": "MPI"}[setting["controller"]]
    model = setting["model"] or f"{setting['elements']:,} elements"
    hosts = f"{setting['hosts']} host{'s' if setting['hosts'] > 1 else ''}"
    return f"{model} in {framework}, {setting['workers']} workers on {hosts}, {controller}"


def console() -> Any:
    """Return a console without colours, ASCII only.

    horovodrun may split output between any two bytes.
    """
    from rich.console import Console

    return Console(width=120, color_system=None, highlight=False, emoji=False, markup=False)


def table(setting: dict[str, Any], found: list[dict[str, Any]]) -> Any:
    """Return the main table, for `console`."""
    from rich import box
    from rich.table import Table

    interface = "+".join(setting["interface"]) or "network"
    rows = Table(title=title(setting), box=box.MARKDOWN)
    rows.add_column("method", no_wrap=True)
    for column in ("wall ms", "range", "speed-up", "CPU ms", "MB sent", f"MB on {interface}", "nmse"):
        rows.add_column(column, justify="right", no_wrap=True)
    for result in found:
        wall, cpu = 1e3 * np.array(result["wall_seconds"]), 1e3 * np.array(result["cpu_seconds"])
        counted = result["interface_bytes_sent"]
        rows.add_row(
            result["method"],
            f"{np.median(wall):,.1f}",
            f"{wall.min():,.1f}-{wall.max():,.1f}",
            shown(result["speed_up"], 2),
            f"{np.median(cpu):,.1f}",
            shown(1e-6 * result["bytes_sent"], 2),
            "" if counted is None else f"{1e-6 * counted:,.2f}",
            "" if result["nmse"] is None else f"{result['nmse']:.2g}",
        )
    return rows


def caption(setting: dict[str, Any], found: list[dict[str, Any]]) -> str:
    """Return the explanation of the table's columns."""
    lines = [
        f"Medians over {len(found[0]['wall_seconds'])} rounds. Wall: time of the slowest worker. Speed-up: over none, "
        "in the same round. CPU: time of all threads of a worker. MB sent: per worker, counted.",
    ]
    if setting["interface"]:
        where = "the loopback interface" if setting["hosts"] == 1 else "the interface to the other hosts"
        lines.append(
            f"MB on {'+'.join(setting['interface'])}: sent per host ({setting['workers_per_host']} workers) over "
            f"{where}, as counted by the kernel."
        )
    else:
        lines.append("No network interface could be read on every host.")
    lines.append(
        "nmse: the squared error of the average, divided by the square of the exact average; about the share of "
        "further steps that a training needs; blank where the result is not an average."
    )
    return " ".join(lines)


def shown(number: float | None, digits: int = 1) -> str:
    return "" if number is None else f"{number:,.{digits}f}"


def plot(path: str, setting: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Write a bar plot of wall times, with ranges, and bytes."""
    bars(setting, found).savefig(path, dpi=150)


def bars(setting: dict[str, Any], found: list[dict[str, Any]]) -> Any:
    """Return the figure of `plot`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.35 * len(found)), layout="constrained")
    time, size = figure.subplots(1, 2, sharey=True)
    positions = np.arange(len(found))
    wall = [1e3 * np.array(result["wall_seconds"]) for result in found]
    medians = np.array([np.median(each) for each in wall])
    lowest, highest = (np.array([end(each) for each in wall]) for end in (np.min, np.max))
    megabytes = np.array([1e-6 * result["bytes_sent"] for result in found])
    time.barh(positions, medians, xerr=[medians - lowest, highest - medians], capsize=3, color="tab:blue")
    size.barh(positions, megabytes, color="tab:orange")
    for axes, values, ends in ((time, medians, highest), (size, megabytes, megabytes)):
        axes.set_xlim(0, 1.2 * max(*ends, 1e-9))  # room for the values
        for position, value, end in zip(positions, values, ends):
            axes.annotate(
                f"{value:,.3g}" if value < 1000 else f"{value:,.0f}", (end, position), (4, 0),
                textcoords="offset points", verticalalignment="center", fontsize="small",
            )  # fmt: skip
    time.set_xlabel("ms of step communication: median and range")
    size.set_xlabel("MB sent per worker")
    time.set_yticks(positions, [result["method"] for result in found])
    time.invert_yaxis()
    figure.suptitle(f"{title(setting)}, {len(found[0]['wall_seconds'])} rounds")
    return figure
