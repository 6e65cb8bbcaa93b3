"""Which method to use, which come next, and why the others are not recommended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from horovod_quant.analysis.advice import MOST_ERROR, Row
from horovod_quant.analysis.cost_model import NONE, Setting
from horovod_quant.analysis.units import show_rate, show_seconds
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.hierarchical import inner_of

AS_FAST = 1.02
"""What takes so much longer than the fastest counts as equal, and the smaller error decides."""

FEW = 5
"""Methods that are shown beside none."""


class Recommendation(NamedTuple):
    """The method's name, a sentence or two that say why, and what a script has after ``compression=``."""

    method: str
    text: str
    code: str


def recommend(rows: Sequence[Row], setting: Setting, max_error: float = MOST_ERROR) -> Recommendation:
    """The method that reaches the same loss first, among those that pay and are within ``max_error``; otherwise none.

    A method that is another optimizer, or does not state its error, is mentioned if it is faster still, but never
    recommended.

    Args:
        rows: of `compare`; the first is none's.
        setting: what they were computed for.
        max_error: see `Row.error`.
    """
    none = rows[0]
    paying = [row for row in rows[1:] if row.pays]
    good = [row for row in paying if is_fine(row, max_error)]
    if not good:
        stay = [_stay(rows), *_rough(paying, None, max_error), *_others(paying, none)]
        return Recommendation(NONE, " ".join(stay), none.choice.code)
    best = first(good)
    text = (
        f"Use {best.name}: a step takes {show_seconds(_step(best))} instead of {show_seconds(_step(none))}, "
        f"{_step(none) / _step(best):.2f} times as fast{_to_loss(best)}; {_limit(best)}; {_quality(best, setting)}."
    )
    if best.is_biased:
        text += " Its expected average has not been shown to be the exact one."
    text = " ".join([text, *_rough(paying, best, max_error), *_others(paying, best)])
    return Recommendation(best.name, text, best.choice.code)


def is_fine(row: Row, max_error: float) -> bool:
    """Whether it averages, tells its error, and keeps to the limit."""
    return row.own_optimizer is None and row.error is not None and row.error <= max_error


def first(good: Sequence[Row]) -> Row:
    """Of methods that are fine: the first at the same loss; of those about as fast, the finest."""
    shortest = min(map(_time, good))
    equal = [row for row in good if _time(row) <= AS_FAST * shortest]
    return min(equal, key=lambda row: (row.error or 0.0, _time(row)))


def best_few(rows: Sequence[Row], recommended: str, max_error: float = MOST_ERROR) -> list[Row]:
    """None, and the best `FEW`: what is recommended and, of each other family, the first at the same loss."""
    none = rows[0]
    chosen = {row.choice.family: row for row in rows[1:] if row.name == recommended}
    fine = [row for row in rows[1:] if row.step is not None and is_fine(row, max_error)]
    for row in sorted(fine, key=_time):
        chosen.setdefault(row.choice.family, row)
    return [none, *sorted(list(chosen.values())[:FEW], key=_time)]


def fallen_out(
    rows: Sequence[Row], shown: Sequence[Row], recommended: str, max_error: float = MOST_ERROR
) -> list[str]:
    """A line for each family without a row among those shown: why it fell out, beside what is recommended."""
    there = {row.choice.family for row in shown}
    best = next(row for row in rows if row.name == recommended)
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.choice.family, []).append(row)
    return [
        f"{name}: {_why_out(members, best, max_error)}"
        for name, members in families.items()
        if name not in there
    ]


def _why_out(members: Sequence[Row], best: Row, max_error: float) -> str:
    possible = [row for row in members if row.refusal is None]
    if not possible:
        return f"impossible: {members[-1].refusal}"
    quickest = min(possible, key=_step)
    if quickest.own_optimizer is not None:
        return _optimizer(quickest)
    told = [row for row in possible if row.error is not None]
    if not told:
        return (
            f"its scheme does not state its error ({quickest.name}, {show_seconds(_step(quickest))} per step)"
        )
    fine = [row for row in told if is_fine(row, max_error)]
    if not fine:
        least = min(told, key=lambda row: row.error or 0.0)
        levels = ", which leaves one level" if least.levels == 1 else ""
        return f"too rough: an error of at least {least.error:.2g} ({least.name}{levels})"
    own = min(fine, key=_time)
    times = _time(own) / _time(best)
    rough = [row.name for row in told if row not in fine and _step(row) < _step(own)]
    which = f"{own.name}, {show_seconds(_step(own))} per step" + (
        f"; {rough[-1]}: too rough" if rough else ""
    )
    if times < AS_FAST:
        return f"as fast, but rougher: an error of {own.error:.2g} ({which})"
    return f"slower: {times:.3g} times as long to reach the same loss ({which})"


def _optimizer(row: Row) -> str:
    return (
        f"another optimizer, hvq.optim.{row.own_optimizer}: {show_seconds(_step(row))} per step, and {row.steps:g} "
        f"times as many steps are recommended"
    )


def _step(row: Row) -> float:
    assert row.step is not None
    return row.step


def _time(row: Row) -> float:
    assert row.to_loss is not None
    return row.to_loss


def _to_loss(row: Row) -> str:
    if row.gain is None or f"{row.gain:.2f}" == f"{row.speed_up:.2f}":
        return ""
    return f", {row.gain:.2f} times as fast to the same loss"


def _limit(row: Row) -> str:
    if row.break_even == math.inf:
        return "it pays at any bandwidth"
    return f"it pays below {show_rate(row.break_even or 0.0)}"


def _quality(row: Row, setting: Setting) -> str:
    scheme, network = row.choice.method, setting.network
    is_nested = isinstance(scheme, Hierarchical)
    number = network.hosts if is_nested else network.workers
    if isinstance(scheme, Scheme) and shares_levels(inner_of(scheme), number):
        kind = "hosts" if is_nested else "workers"
        left = f"with the {row.levels} level{'s' * (row.levels != 1)} that the sum of {number} {kind} leaves "
    elif row.levels is not None:
        left = f"with {row.levels} levels "
    else:
        left = ""
    return f"{left}its rounding adds {_share(row.error or 0.0)} the gradients' own noise"


def shares_levels(scheme: Scheme, workers: int) -> bool:
    """Whether a flat scheme has fewer levels because so many workers' integers are summed."""
    return scheme.levels_left(workers, workers) != scheme.levels_left(1, 1)


def _share(error: float) -> str:
    return f"{error:.2g} times" if error > 1 else f"{100 * error:.2g}% of"


def _stay(rows: Sequence[Row]) -> str:
    others = [row for row in rows[1:] if row.step is not None]
    none = rows[0]
    if not others:
        return "Stay with none: nothing else is possible here."
    known = [row for row in others if row.gain is not None] or others
    best = max(known, key=lambda row: row.gain or row.speed_up or 0.0)
    if any(row.pays for row in others):
        return f"Stay with none: what is faster {_why_not([row for row in others if row.pays])}."
    exposed = none.cost.exposed if none.cost else 0.0
    return (
        f"Stay with none: it adds {show_seconds(exposed)} per step, and the best of the others, {best.name}, is "
        f"{best.gain or best.speed_up:.2f} times as fast, too little to rely on."
    )


def _why_not(rows: Iterable[Row]) -> str:
    """What keeps methods that pay from being recommended."""
    kinds = {
        "is too rough": lambda row: row.error is not None,
        "is another optimizer": lambda row: row.error is None and row.own_optimizer is not None,
        "does not state its error": lambda row: row.error is None and row.own_optimizer is None,
    }
    paying = list(rows)
    return ", or ".join(text for text, fits in kinds.items() if any(map(fits, paying)))


def _rough(paying: Sequence[Row], best: Row | None, max_error: float) -> list[str]:
    """About the fastest of those with shorter steps that are too rough."""
    rough = [row for row in paying if row.error is not None and row.error > max_error]
    rough = [row for row in rough if best is None or _step(row) < _step(best)]
    return [
        f"Not recommended, though its steps are shorter: {row.name}, whose "
        f"{f'{row.levels} levels' if row.levels != 1 else 'only level'} would add {row.error:.2g} times the "
        f"gradients' own noise."
        for row in sorted(rough, key=_step)[:1]
    ]


def _others(paying: Sequence[Row], best: Row) -> list[str]:
    """About the fastest that is another optimizer, and the fastest that does not tell its error."""
    faster = sorted((row for row in paying if _step(row) * AS_FAST < _step(best)), key=_step)
    optimizers = [row for row in faster if row.own_optimizer is not None]
    untold = [row for row in faster if row.error is None and row.own_optimizer is None]
    return [
        *(f"{row.name} is {_optimizer(row)}." for row in optimizers[:1]),
        *(
            f"{row.name} would take {show_seconds(_step(row))}, but the error of its rounding is not known: its "
            f"scheme defines no relative_error."
            for row in untold[:1]
        ),
    ]
