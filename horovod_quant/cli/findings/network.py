"""Findings about the network: its allreduce speed, and the row of docs/pays.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from horovod_quant.analysis import pays
from horovod_quant.analysis.fabrics import GIGABIT
from horovod_quant.analysis.units import show_rate, show_seconds
from horovod_quant.cli.report import NOTE, OK, Finding

BETWEEN_HOSTS = (
    "measure between two hosts, by their names: horovodrun -np 2 -H host1:1,host2:1 horovod-quant doctor"
)


def findings(facts: Mapping[str, Mapping[str, Any]], model: str | None) -> list[Finding]:
    """Return findings about whether compression pays here.

    Args:
        facts: facts of the frameworks, one of which may have measured the network.
        model: the model to show; None, or one that is not in the table, shows all.
    """
    run = next((own["run"] for own in facts.values() if "network" in own.get("run", {})), None)
    if run is None:
        return [Finding(NOTE, "the network between workers was not measured", BETWEEN_HOSTS)]
    rate, small = run["network"]["bytes_per_second"], run["network"]["small_seconds"]
    hosts = len({worker["host"] for worker in run["workers"]})
    measured = f"allreduces of {run['size']} workers on {hosts} host{'s' * (hosts > 1)} get {show_rate(rate)}"
    if hosts == 1:
        return [
            Finding(NOTE, f"{measured} within the host, which says nothing about the network", BETWEEN_HOSTS)
        ]
    gigabits, many = nearest(rate / GIGABIT, pays.GIGABITS), nearest(hosts, pays.HOSTS)
    found = [Finding(OK, f"{measured}; a small one takes {show_seconds(small)}")]
    for name in [model] if model in pays.JOBS else list(pays.JOBS):
        text = pays.cell(name, many, gigabits * GIGABIT).text
        where = f"{pays.JOBS[name].title}, {many} hosts with an accelerator each and NCCL, {gigabits} Gbit/s"
        found.append(Finding(OK, f"the line of docs/pays.md that is nearest: {where}: {text}"))
    return found


def nearest(number: float, choices: Sequence[int]) -> int:
    """Return the choice whose ratio to the number is closest to 1."""
    return min(choices, key=lambda choice: abs(math.log(choice / number)))
