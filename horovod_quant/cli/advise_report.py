"""Text and JSON of the results of ``horovod-quant advise``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from horovod_quant import kernels
from horovod_quant.analysis.advice import HIERARCHICAL, Row, script_code
from horovod_quant.analysis.cost_model import Setting
from horovod_quant.analysis.models import elements
from horovod_quant.analysis.network import DDP
from horovod_quant.analysis.recommendation import Recommendation
from horovod_quant.analysis.steps import Step
from horovod_quant.analysis.units import show_rate, show_seconds
from horovod_quant.frontends import methods

VERSION = 2
"""Version of the JSON; version 1 had ``relative_error``, the root of ``nmse``."""

COLUMNS = (
    "method",
    "communication",
    "hidden",
    "step",
    "speed-up",
    "to loss",
    "pays below",
    "MB sent",
    "levels",
    "nmse",
)


class Found(NamedTuple):
    """All results of ``horovod-quant advise``.

    Attributes:
        model: name of the model; None for other shapes.
        setting, step: the setting and step of the prediction.
        rows: rows of all modelled methods.
        shown: rows in the table.
        fallen_out: a line for each family that is not in the table.
        advised: the recommendation.
        warnings: reasons to doubt the recommendation.
        assumed: the assumptions, in sentences.
    """

    model: str | None
    setting: Setting
    step: Step
    rows: list[Row]
    shown: list[Row]
    fallen_out: list[str]
    advised: Recommendation
    warnings: list[str]
    assumed: list[str]


def text(found: Found, verbose: bool = False) -> str:
    """Return the recommendation, warnings, the table, and with ``verbose`` the reasons."""
    advised = found.advised
    ddp = found.setting.network.controller == DDP
    code = script_code(advised.method, advised.code, ddp=ddp)
    if advised.code.startswith("hvq."):
        code += "   (import horovod_quant.torch as hvq)"
    if advised.method.endswith(HIERARCHICAL) and not ddp:
        code += " after hvd.init(process_sets=hvq.hierarchical_process_sets())"
    lines = [f"Write:   {code}", f"Faster:  {advised.faster}", f"Why:     {advised.why}"]
    lines += [f"Warning: {line}" for line in found.warnings]
    possible = [row for row in found.shown if row.refusal is None]
    lines += ["", title(found), "", *_aligned([COLUMNS, *map(cells, possible)])]
    refused = [f"  {row.name}: {row.refusal}" for row in found.shown if row.refusal is not None]
    if refused:
        lines += ["", "Impossible here:", *refused]
    if not verbose:
        return "\n".join(
            [*lines, "", "More with --verbose: what this assumes, and why other methods were rejected."]
        )
    if found.fallen_out:
        lines += ["", f"Why not the others, compared with {advised.method} (--all shows them all):"]
        lines += [f"  {line}" for line in found.fallen_out]
    return "\n".join([*lines, "", "Assumed:", *(f"- {line}" for line in found.assumed)])


def title(found: Found) -> str:
    network, step, shapes = found.setting.network, found.step, found.setting.shapes
    elsewhere = " on an accelerator" if step.accelerator else ""
    return "; ".join(
        [
            f"{found.model or 'own shapes'}: {1e-6 * elements(shapes):,.1f} million parameters in "
            f"{_counted(len(shapes), 'gradient')}",
            f"{_counted(network.workers, 'worker')} on {_counted(network.hosts, 'host')}",
            f"{show_rate(network.bandwidth)}, {show_seconds(network.latency)}, {network.controller}",
            f"a step of {show_seconds(step.seconds)}, backward {show_seconds(step.backward)}{elsewhere}",
        ]
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def cells(row: Row) -> tuple[str, ...]:
    assert row.cost is not None
    return (
        row.name,
        *(show_seconds(seconds) for seconds in (row.exchange, row.hidden, row.step)),
        f"{row.speed_up:.2f}",
        "" if row.gain is None else f"{row.gain:.2f}",
        "" if row.name == methods.NONE or row.break_even is None else _limit(row.break_even),
        f"{1e-6 * row.cost.bytes_sent:,.1f}",
        "" if row.levels is None else f"{row.levels:,}",
        "" if row.nmse is None else f"{row.nmse:.2g}",
    )


def _limit(bandwidth: float) -> str:
    if not bandwidth:
        return "never"
    return "always" if bandwidth == float("inf") else show_rate(bandwidth)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table)]
    return [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in table
    ]


def as_json(found: Found) -> dict[str, Any]:
    """Return the results for JSON output.

    A bandwidth of null means that the method always pays.
    """
    network, step = found.setting.network, found.step
    return {
        "version": VERSION,
        "model": found.model,
        "elements": elements(found.setting.shapes),
        "workers": network.workers,
        "hosts": network.hosts,
        "workers_per_host": network.workers_per_host,
        "bandwidth_bytes_per_second": _finite(network.bandwidth),
        "latency_seconds": network.latency,
        "cores_per_worker": network.cores_per_worker,
        "controller": network.controller,
        "software": vars(network.software),
        "kernels": kernels.describe(),
        "step_seconds": step.seconds,
        "backward_seconds": step.backward,
        "accelerator": step.accelerator,
        "results": [_row_as_json(row) for row in found.rows],
        "recommended": found.advised.method,
        "code": found.advised.code,
        "faster": found.advised.faster,
        "why": found.advised.why,
        "warnings": found.warnings,
        "shown": [row.name for row in found.shown],
        "others": found.fallen_out,
        "assumptions": found.assumed,
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    if row.cost is None:
        return {"method": row.name, "impossible": row.refusal}
    cost = row.cost
    return {
        "method": row.name,
        "exchange_seconds": row.exchange,
        "hidden_seconds": row.hidden,
        "kernel_seconds": cost.kernels,
        "network_seconds": cost.network,
        "step_seconds": row.step,
        "speed_up": row.speed_up,
        "steps_to_loss": row.steps,
        "speed_up_to_loss": row.gain,
        **({} if row.break_even is None else {"pays_below_bytes_per_second": _finite(row.break_even)}),
        "bytes_sent": cost.bytes_sent,
        "host_bytes_sent": cost.host_bytes,
        "levels": row.levels,
        "nmse": row.nmse,
    }


def _finite(number: float | None) -> float | None:
    return None if number == float("inf") else number
