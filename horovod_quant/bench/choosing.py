"""What a benchmark's figures say to take: the line for the script, and the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod_quant.analysis.advice import LEAST_SPEED_UP, MOST_NMSE, Row, choice_of, steps_to_loss
from horovod_quant.analysis.recommendation import NOTHING_FASTER, first, is_fine
from horovod_quant.analysis.units import show_seconds
from horovod_quant.bench.variants import Variant
from horovod_quant.frontends.frontend import GROUP_BYTES
from horovod_quant.frontends.methods import NONE


class Chosen(NamedTuple):
    """The method's name, what comes after ``compression=``, and the reason in a sentence or two."""

    method: str
    code: str
    reason: str


def choose(variants: Sequence[Variant], results: Sequence[dict[str, Any]]) -> Chosen | None:
    """What to take, by the same rules as ``advise``; None where `none` was not measured.

    Args:
        variants: what was measured, some of them perhaps no method.
        results: see `report.results`, one for each variant.
    """
    rows = [
        _row(variant, result) for variant, result in zip(variants, results) if _is_usable(variant, result)
    ]
    none = next((row for row in rows if row.name == NONE), None)
    if none is None:
        return None
    paying = [row for row in rows if row.pays and row.name != NONE]
    good = [row for row in paying if is_fine(row, MOST_NMSE)]
    if not good:
        text = f"{NOTHING_FASTER}: with an nmse up to {MOST_NMSE:g} none is {LEAST_SPEED_UP - 1:.0%} faster"
        return Chosen(NONE, none.choice.code, " ".join([f"{text}.", *_optimizers(paying, none)]))
    best = first(good)
    text = (
        f"with {best.name} an exchange takes {show_seconds(best.exchange or 0.0)} instead of "
        f"{show_seconds(none.exchange or 0.0)}, {best.speed_up:.2f}x faster, and the average's nmse is "
        f"{best.nmse:.2g}; up to {MOST_NMSE:g} counts as harmless. horovod-quant advise --calibrate predicts whole "
        f"steps, also on other clusters."
    )
    return Chosen(best.name, best.choice.code, " ".join([text, *_optimizers(paying, best)]))


def lines(chosen: Chosen, framework: str) -> list[str]:
    """For the end of the report."""
    imported = f" (import horovod_quant.{framework} as hvq)" if chosen.code.startswith("hvq.") else ""
    return [f"In the script{imported}: compression={chosen.code}", f"Why: {chosen.reason}"]


def _is_usable(variant: Variant, result: dict[str, Any]) -> bool:
    return variant.method is not None and result["speed_up"] is not None


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


def _optimizers(paying: Sequence[Row], best: Row) -> list[str]:
    """About the fastest that is another optimizer."""
    faster = [row for row in paying if row.own_optimizer and (row.step or 0.0) < (best.step or 0.0)]
    return [
        f"{row.name} takes {show_seconds(row.exchange or 0.0)}, but it is another optimizer, "
        f"hvq.optim.{row.own_optimizer}, for which {row.steps:g} times the steps are recommended."
        for row in sorted(faster, key=lambda row: row.step or 0.0)[:1]
    ]
