"""Compares methods by the performance model, and recommends one.

Units: seconds, bytes, bytes per second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from horovod_quant import methods
from horovod_quant.analysis.cost_model import NONE, Cost, Method, Setting, exchange_cost, workers_of
from horovod_quant.analysis.groups import compressed_names
from horovod_quant.analysis.steps import Step, break_even_bandwidth, step_seconds, with_bandwidth
from horovod_quant.analysis.units import show_rate, show_seconds
from horovod_quant.analysis.work import resolved
from horovod_quant.schemes import Hierarchical
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.hierarchical import inner_of

LEAST_SPEED_UP = 1.05
"""From here on a method pays: the model is not so good that less would mean anything."""

MOST_ERROR = 1.0
"""Of a method that is recommended: above, its rounding adds more noise than the gradients have themselves."""

AS_FAST = 1.02
"""Steps so much longer than the shortest count as equal, and the smaller error decides."""

HIERARCHICAL = " hierarchical"
"""What follows a method's name whose exchange is hierarchical."""


class Choice(NamedTuple):
    """A method by its name; ``method`` is what the model takes."""

    name: str
    method: Method


class Row(NamedTuple):
    """What the model says of a method.

    Attributes:
        choice: the method.
        refusal: why it is impossible; then everything else is None.
        exchange: seconds of an exchange that no backward pass overlaps with.
        cost: of the exchange in the step.
        step: seconds.
        speed_up: over none.
        break_even: the bandwidth in bytes per second below which it pays against none; 0: never, inf: always.
        levels: magnitudes that an element can have, None where that means nothing.
        error: of the averaged gradient, relative, for gradients like white noise; None where that means nothing, and
            where the scheme does not tell.
    """

    choice: Choice
    refusal: str | None = None
    exchange: float | None = None
    cost: Cost | None = None
    step: float | None = None
    speed_up: float | None = None
    break_even: float | None = None
    levels: int | None = None
    error: float | None = None

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def hidden(self) -> float | None:
        """Seconds of the exchange that pass during the backward pass."""
        if self.exchange is None or self.cost is None:
            return None
        return max(self.exchange - self.cost.exposed, 0.0)

    @property
    def own_optimizer(self) -> str | None:
        """The optimizer that the method belongs to, and replaces one's own with."""
        method = self.choice.method
        return inner_of(method).own_optimizer if isinstance(method, Scheme) else None

    @property
    def is_biased(self) -> bool:
        """Whether nobody has shown that the expected average is the exact one."""
        method = self.choice.method
        return isinstance(method, Scheme) and not inner_of(method).unbiased

    @property
    def pays(self) -> bool:
        return self.speed_up is not None and self.speed_up >= LEAST_SPEED_UP


def choices(names: Iterable[str], hierarchical: bool) -> list[Choice]:
    """None, and the methods of these names, each once; hierarchical ones of this package's beside them if wanted.

    Raises:
        ValueError: there is no such method.
    """
    found = {NONE: Choice(NONE, NONE)}
    for name in names:
        method = methods.parse(name)
        scheme = method.scheme()
        found[method.name] = Choice(method.name, method.name if scheme is None else scheme)
        if hierarchical and scheme is not None:
            label = method.name + HIERARCHICAL
            found[label] = Choice(label, Hierarchical(scheme))
    return list(found.values())


def compare(chosen: Sequence[Choice], setting: Setting, step: Step) -> list[Row]:
    """One row for each method, in their order."""
    return [_row(choice, setting, step) for choice in chosen]


def _row(choice: Choice, setting: Setting, step: Step) -> Row:
    network, method = setting.network, choice.method
    refusal = refusal_of(choice, setting)
    if refusal is not None:
        return Row(choice, refusal)
    cost = exchange_cost(method, setting, backward=step.backward, accelerator=step.accelerator)
    seconds = step.seconds + cost.exposed
    scheme = method if isinstance(method, Scheme) else None
    return Row(
        choice,
        None,
        exchange_cost(method, setting).exposed,
        cost,
        seconds,
        step_seconds(NONE, setting, step) / seconds,
        break_even_bandwidth(method, setting, step),
        scheme.levels_left(network.workers, network.hosts) if scheme else None,
        scheme.relative_error(network.workers, network.hosts) if scheme else _FLOAT_ERRORS[choice.name],
    )


# Errors of rounding to 11 bits are spread evenly over a unit in the last place, values over an octave.
_FLOAT_ERRORS = {NONE: 0.0, methods.FP16: 2**-10 / math.sqrt(12) / math.sqrt(7 / 3)}


def refusal_of(choice: Choice, setting: Setting) -> str | None:
    """Why a method is impossible there."""
    scheme = choice.method
    if not isinstance(scheme, Scheme):
        return None
    try:
        resolved(scheme, workers_of(scheme, setting.network))
    except ValueError as error:
        return str(error)
    if isinstance(scheme, Hierarchical) and setting.network.workers_per_host == 1:
        return "with one worker on each host it is the same as without"
    if not compressed_names(scheme, setting.shapes, setting.min_elements):
        return f"every gradient has less than {setting.min_elements} elements, and stays as it is"
    return None


# ---- what to do -----------------------------------------------------------------------------------------------------


class Recommendation(NamedTuple):
    """The method's name, and a sentence or two that say why."""

    method: str
    text: str


def recommend(rows: Sequence[Row], setting: Setting) -> Recommendation:
    """The fastest method that pays and is no rougher than `MOST_ERROR`; none where there is no such method.

    A method that is another optimizer, or does not tell its error, is named beside it where it is faster still, never
    in its place.

    Args:
        rows: of `compare`; the first is none's.
        setting: what they were computed for.
    """
    none = rows[0]
    assert none.step is not None
    paying = [row for row in rows[1:] if row.pays]
    good = [row for row in paying if row.error is not None and row.error <= MOST_ERROR]
    if not good:
        return Recommendation(NONE, " ".join([_stay(rows), *_rough(paying, None), *_others(paying, none)]))
    shortest = min(_step(row) for row in good)
    equal = [row for row in good if _step(row) <= AS_FAST * shortest]
    best = min(equal, key=lambda row: (row.error or 0.0, _step(row)))
    text = (
        f"Take {best.name}: a step takes {show_seconds(_step(best))} instead of {show_seconds(none.step)}, "
        f"{_step_ratio(none, best)} times as fast; {_limit(best)}; {_quality(best, setting)}."
    )
    if best.is_biased:
        text += " That its expected average is the exact one, nobody has shown."
    return Recommendation(best.name, " ".join([text, *_rough(paying, best), *_others(paying, best)]))


def _step(row: Row) -> float:
    assert row.step is not None
    return row.step


def _step_ratio(none: Row, row: Row) -> str:
    return f"{_step(none) / _step(row):.2f}"


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
    return f"{left}its rounding adds {_share(row.error or 0.0)} of the noise that gradients have themselves"


def shares_levels(scheme: Scheme, workers: int) -> bool:
    """Whether a flat scheme has fewer levels because so many workers' integers are summed."""
    return scheme.levels_left(workers, workers) != scheme.levels_left(1, 1)


def _share(error: float) -> str:
    return f"{error:.2g} times as much" if error > 1 else f"{100 * error:.2g}%"


def _stay(rows: Sequence[Row]) -> str:
    others = [row for row in rows[1:] if row.step is not None]
    none = rows[0]
    if not others:
        return "Stay with none: nothing else is possible here."
    best = min(others, key=_step)
    if best.pays:
        return f"Stay with none: what is faster {_why_not(row for row in others if row.pays)}."
    exposed = none.cost.exposed if none.cost else 0.0
    return (
        f"Stay with none: it makes a step {show_seconds(exposed)} longer, and the best of the others, {best.name}, "
        f"{_step_ratio(none, best)} times as fast, is no gain to count on."
    )


def _why_not(rows: Iterable[Row]) -> str:
    """What keeps methods that pay from being recommended."""
    kinds = {
        "is too rough": lambda row: row.error is not None,
        "is another optimizer": lambda row: row.error is None and row.own_optimizer is not None,
        "does not tell its error": lambda row: row.error is None and row.own_optimizer is None,
    }
    paying = list(rows)
    return ", or ".join(text for text, fits in kinds.items() if any(map(fits, paying)))


def _rough(paying: Sequence[Row], best: Row | None) -> list[str]:
    """About faster methods that are too rough."""
    rough = [row for row in paying if row.error is not None and row.error > MOST_ERROR]
    rough = [row for row in rough if best is None or _step(row) < _step(best)]
    return [
        f"Not recommended, though faster: {row.name}, whose "
        f"{f'{row.levels} levels' if row.levels != 1 else 'only level'} would add {row.error:.2g} times the "
        f"gradients' own noise."
        for row in sorted(rough, key=_step)[:1]
    ]


def _others(paying: Sequence[Row], best: Row) -> list[str]:
    """About the fastest that is another optimizer, and the fastest that does not tell its error."""
    faster = sorted((row for row in paying if _step(row) * AS_FAST < _step(best)), key=_step)
    optimizers = [row for row in faster if row.error is None and row.own_optimizer is not None]
    untold = [row for row in faster if row.error is None and row.own_optimizer is None]
    return [
        *(
            f"{row.name} would take {show_seconds(_step(row))}, but is another optimizer: "
            f"hvq.optim.{row.own_optimizer}."
            for row in optimizers[:1]
        ),
        *(
            f"{row.name} would take {show_seconds(_step(row))}, but what error its rounding adds is not known: its "
            f"scheme tells no relative_error."
            for row in untold[:1]
        ),
    ]


# ---- curves ---------------------------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """Seconds of a step at each place; None where the method is impossible."""

    name: str
    steps: list[float | None]


def over_bandwidths(
    chosen: Sequence[Choice], setting: Setting, step: Step, bandwidths: Sequence[float]
) -> list[Curve]:
    """A step's seconds at each bandwidth, in bytes per second."""
    return _curves(chosen, step, [with_bandwidth(setting, bandwidth) for bandwidth in bandwidths])


def over_hosts(chosen: Sequence[Choice], setting: Setting, step: Step, hosts: Sequence[int]) -> list[Curve]:
    """A step's seconds with each number of hosts, all with as many workers."""
    networks = [dataclasses.replace(setting.network, hosts=number) for number in hosts]
    return _curves(chosen, step, [setting._replace(network=network) for network in networks])


def _curves(chosen: Sequence[Choice], step: Step, settings: Sequence[Setting]) -> list[Curve]:
    def seconds(choice: Choice, setting: Setting) -> float | None:
        return None if refusal_of(choice, setting) else step_seconds(choice.method, setting, step)

    return [Curve(choice.name, [seconds(choice, setting) for setting in settings]) for choice in chosen]
