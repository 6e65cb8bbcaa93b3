"""Recommendation from a benchmark's figures, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.analysis.advice import (
    LEAST_SPEED_UP,
    MOST_NMSE,
    Row,
    choice_of,
    script_code,
    steps_to_loss,
)
from horovod_quant.analysis.recommendation import NOTHING_FASTER, best_of
from horovod_quant.analysis.units import show_seconds
from horovod_quant.bench.variants import DDP, Variant
from horovod_quant.frontends.arguments import GROUP_BYTES
from horovod_quant.frontends.methods import NONE


class Chosen(NamedTuple):
    """Chosen method, with its expression for ``compression=`` and the reason."""

    method: str
    code: str
    reason: str


def choose(variants: Sequence[Variant], results: Sequence[dict[str, Any]]) -> Chosen | None:
    """Choose a method by the rules of ``advise``.

    Returns None if `none` was not measured.

    Args:
        variants: the measured variants, which need not all be methods.
        results: see `report.results`, one for each variant.
    """
    rows = [_row(variant, result) for variant, result in zip(variants, results) if variant.method is not None]
    none = next((row for row in rows if row.name == NONE), None)
    if none is None:
        return None
    best = best_of(rows)
    if best is none:
        text = f"{NOTHING_FASTER}: with an nmse up to {MOST_NMSE:g} none is {LEAST_SPEED_UP - 1:.0%} faster."
    else:
        text = (
            f"with {best.name} step communication takes {show_seconds(best.exchange)} instead of "
            f"{show_seconds(none.exchange)}, {best.speed_up:.2f}x faster, and the average's nmse is "
            f"{best.nmse:.2g}; up to {MOST_NMSE:g} counts as harmless. horovod-quant advise --calibrate predicts whole "
            f"steps, also on other clusters."
        )
    return Chosen(best.name, best.choice.code, " ".join([text, *_optimizers(rows, best)]))


def lines(chosen: Chosen, framework: str) -> list[str]:
    """Return the last lines of the report: the code, and the reason."""
    module = "torch" if framework == DDP else framework
    imported = f" (import horovod_quant.{module} as hvq)" if chosen.code.startswith("hvq.") else ""
    code = script_code(chosen.method, chosen.code, ddp=framework == DDP)
    return [f"In the script{imported}: {code}", f"Why: {chosen.reason}"]


def _row(variant: Variant, result: dict[str, Any]) -> Row:
    assert variant.method is not None
    choice = choice_of(variant.method)
    if variant.ours and variant.group_bytes != GROUP_BYTES:
        choice = choice._replace(code=variant.method.code(group_bytes=variant.group_bytes))
    seconds, nmse = float(np.median(result["wall_seconds"])), result["nmse"]
    return Row(
        choice,
        exchange=seconds,
        step=seconds,
        speed_up=result["speed_up"],
        nmse=nmse,
        steps=steps_to_loss(choice.method, nmse),
    )


def _optimizers(rows: Sequence[Row], best: Row) -> list[str]:
    """Return a line about the fastest method that needs its own optimizer."""
    faster = [row for row in rows if row.pays and row.own_optimizer and row.step < best.step]
    return [
        f"{row.name} takes {show_seconds(row.exchange)}, but it is another optimizer, "
        f"hvq.optim.{row.own_optimizer}, for which {row.steps:g}x the number of steps is recommended."
        for row in sorted(faster, key=lambda row: row.step)[:1]
    ]
