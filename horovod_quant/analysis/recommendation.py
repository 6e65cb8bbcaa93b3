"""Recommended method, the best others, and the reasons against the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from horovod_quant.analysis.advice import MOST_NMSE, Row
from horovod_quant.analysis.cost_model import NONE
from horovod_quant.analysis.units import show_rate, show_seconds

AS_FAST = 1.02
"""Ratio of times up to which methods count as equally fast; then nmse decides."""

FEW = 5
"""Number of methods shown in addition to no compression."""

_Timed = TypeVar("_Timed", bound=Any)

_STEP, _TO_LOSS = attrgetter("step"), attrgetter("to_loss")

NOTHING_FASTER = "no method is meaningfully faster"


class Recommendation(NamedTuple):
    """A recommended method and the reasons.

    Attributes:
        method: name of the method.
        code: value of ``compression=`` in a script.
        faster: the speed-up, in a sentence.
        why: the reason, and faster methods that are not recommended.
    """

    method: str
    code: str
    faster: str
    why: str


def recommend(rows: Sequence[Row], max_nmse: float = MOST_NMSE) -> Recommendation:
    """Return `best_of` the rows with its reasons.

    A method that is another optimizer, or does not state its nmse, is mentioned if it is faster still, but never
    recommended.

    Args:
        rows: predictions of all methods, that of no compression first.
        max_nmse: see `Row.nmse`.
    """
    none, best = rows[0], best_of(rows, max_nmse)
    others = _not_recommended([row for row in rows[1:] if row.pays], best, max_nmse)
    if best is none:
        return Recommendation(NONE, none.choice.code, NOTHING_FASTER, " ".join(others) or _stay(rows))
    faster = (
        f"{best.gain:.2f}x faster to the same loss; a step takes {show_seconds(best.step)} instead of "
        f"{show_seconds(none.step)} ({best.speed_up:.2f}x)"
    )
    biased = ", and its expected average has not been shown to be the exact one" if best.is_biased else ""
    nmse = best.nmse or 0.0
    why = f"{_limit(best)}; its nmse is {nmse:.2g}: at most {100 * nmse:.2g}% more steps to the same loss{biased}."
    return Recommendation(best.name, best.choice.code, faster, " ".join([why, *others]))


def best_of(rows: Sequence[Row], max_nmse: float = MOST_NMSE) -> Row:
    """Return the method that is fastest to the same loss.

    One within ``max_nmse`` that pays, see `fastest`; no compression if there is none.
    """
    good = [row for row in rows if row.pays and is_fine(row, max_nmse)]
    if not good:
        return next(row for row in rows if row.name == NONE)
    return fastest(good, _TO_LOSS)


def fastest(methods: Sequence[_Timed], seconds: Callable[[_Timed], float]) -> _Timed:
    """Return the fastest; among equally fast, that with the smallest nmse."""
    shortest = min(map(seconds, methods))
    equal = [each for each in methods if seconds(each) <= AS_FAST * shortest]
    return min(equal, key=lambda each: (math.inf if each.nmse is None else each.nmse, seconds(each)))


def is_fine(row: Row, max_nmse: float) -> bool:
    """True if the method averages, and its nmse is within the limit."""
    return row.own_optimizer is None and row.nmse is not None and row.nmse <= max_nmse


def best_few(rows: Sequence[Row], max_nmse: float = MOST_NMSE) -> list[Row]:
    """Return no compression and `FEW` methods: the best, and other families' fastest."""
    none, best = rows[0], best_of(rows, max_nmse)
    chosen = {} if best is none else {best.choice.family: best}
    fine = [row for row in rows[1:] if is_fine(row, max_nmse)]
    for row in sorted(fine, key=_TO_LOSS):
        chosen.setdefault(row.choice.family, row)
    return [none, *sorted(list(chosen.values())[:FEW], key=_TO_LOSS)]


def fallen_out(rows: Sequence[Row], shown: Sequence[Row], max_nmse: float = MOST_NMSE) -> list[str]:
    """Return a line for each family left out, with the reason."""
    best = best_of(rows, max_nmse)
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.choice.family, []).append(row)
    for row in shown:
        families.pop(row.choice.family, None)
    return [f"{name}: {_why_out(members, best, max_nmse)}" for name, members in families.items()]


def _why_out(members: Sequence[Row], best: Row, max_nmse: float) -> str:
    possible = [row for row in members if row.refusal is None]
    if not possible:
        return f"impossible: {members[-1].refusal}"
    fine = [row for row in possible if is_fine(row, max_nmse)]
    if fine:
        own = min(fine, key=_TO_LOSS)
        return (
            f"{own.to_loss / best.to_loss:.3g}x the time to the same loss, with an nmse of {own.nmse:.2g} ({own.name}, "
            f"{show_seconds(own.step)} a step)"
        )
    quickest = min(possible, key=_STEP)
    if quickest.own_optimizer is not None:
        return _optimizer(quickest)
    known = [row for row in possible if row.nmse is not None]
    if not known:
        return f"its scheme does not state its nmse ({quickest.name}, {show_seconds(quickest.step)} a step)"
    least = min(known, key=lambda row: row.nmse or 0.0)
    return f"too rough: an nmse of at least {least.nmse:.2g} ({least.name})"


def _optimizer(row: Row) -> str:
    return (
        f"another optimizer, hvq.optim.{row.own_optimizer}: {show_seconds(row.step)} a step, and {row.steps:g} "
        f"times the steps are recommended"
    )


def _limit(row: Row) -> str:
    if row.break_even is None:
        return "it sends less"
    if row.break_even == math.inf:
        return "it pays at any bandwidth"
    return f"it pays below {show_rate(row.break_even)}"


def _stay(rows: Sequence[Row]) -> str:
    others = [row for row in rows[1:] if row.refusal is None]
    if not others:
        return "Nothing else is possible here."
    best = max(
        [row for row in others if row.gain is not None] or others,
        key=lambda row: row.gain or row.speed_up or 0,
    )
    exposed = rows[0].cost.exposed if rows[0].cost else 0.0
    speed_up = (
        f"of a step would be {best.speed_up:.2f}x"
        if best.gain is None
        else f"to the same loss would be {best.gain:.2f}x"
    )
    return (
        f"Without compression the step communication adds {show_seconds(exposed)} a step; with the best other method, "
        f"{best.name}, the speed-up {speed_up}."
    )


def _not_recommended(paying: Sequence[Row], best: Row, max_nmse: float) -> list[str]:
    """Return sentences on faster methods: too rough, another optimizer, or unknown nmse."""
    faster = sorted((row for row in paying if row.step < best.step), key=_STEP)
    rough = [row for row in faster if row.nmse is not None and row.nmse > max_nmse]
    clearly = [row for row in faster if row.step * AS_FAST < best.step]
    optimizers = [row for row in clearly if row.own_optimizer is not None]
    unknown = [row for row in clearly if row.nmse is None and row.own_optimizer is None]
    return [
        *(
            f"Not recommended, though its steps are shorter: {row.name}, whose "
            f"{f'{row.levels} levels' if row.levels != 1 else 'only level'} would add {row.nmse:.2g} times the "
            f"gradients' own noise."
            for row in rough[:1]
        ),
        *(f"{row.name} is {_optimizer(row)}." for row in optimizers[:1]),
        *(
            f"{row.name} would take {show_seconds(row.step)}, but its scheme does not state its nmse."
            for row in unknown[:1]
        ),
    ]
