"""Trials of methods during training steps, and the decision between them.

Imports no framework. A trial is a few steps with one method; a tuning session has several trials of each method. All
workers count its steps in the same way, so each knows which method a step uses. Each worker measures separately; the
decision uses sums of all workers' medians, in whole microseconds, which are equal on all workers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from horovod_quant.analysis.recommendation import fastest
from horovod_quant.analysis.units import show_seconds
from horovod_quant.autotune.candidates import Candidate
from horovod_quant.frontends.methods import NONE

ROUNDS = 3
"""Number of rounds, each with a trial of every method: a changing network rate affects all alike."""

MEASURED = 3
"""Number of measured steps of a trial."""

WARM_UP = 1
"""Number of warm-up steps of a trial, in which Horovod's cache has other shapes."""

FIRST_WARM_UP = 3
"""Number of warm-up steps in the first round: a method plans its groups, then tries the plan."""

_MICROSECONDS = 1e6


class TrialStep(NamedTuple):
    """Step of a trial, with its method; warm-up steps do not count."""

    method: int
    counts: bool


def timetable(methods: int) -> list[TrialStep]:
    """Return the steps of all trials in order."""
    return [
        TrialStep(method, step >= warm_up)
        for warm_up in (FIRST_WARM_UP, *[WARM_UP] * (ROUNDS - 1))
        for method in range(methods)
        for step in range(warm_up + MEASURED)
    ]


class Trial:
    """One worker's measurements in a tuning session, and the next step.

    Args:
        methods: the number of methods.
    """

    def __init__(self, methods: int) -> None:
        self._timetable = timetable(methods)
        self._steps = 0
        self._exchanges: list[list[float]] = [[] for _ in range(methods)]
        self._wholes: list[list[float]] = [[] for _ in range(methods)]

    @property
    def current(self) -> TrialStep | None:
        """Next step; None when all trials are over."""
        return self._timetable[self._steps] if self._steps < len(self._timetable) else None

    @property
    def progress(self) -> tuple[int, int]:
        """Number of counted steps, and of all steps."""
        return self._steps, len(self._timetable)

    def count_step(self) -> None:
        """Count a step in which every worker participated."""
        self._steps += 1

    def record(self, step: TrialStep, exchange: float, whole: float) -> None:
        """Record a step's times.

        Args:
            step: the step.
            exchange: seconds from the first gradient to the last result.
            whole: seconds from the last result of the step before to the last result of this one.
        """
        if step.counts:
            self._exchanges[step.method].append(exchange)
            self._wholes[step.method].append(whole)

    def medians(self) -> list[int]:
        """Return medians in microseconds.

        First of each method's step communication, then of each method's whole steps, finally of the rest of a step
        (whole minus communication) over all methods.
        """
        rests = [
            whole - exchange
            for wholes, exchanges in zip(self._wholes, self._exchanges)
            for whole, exchange in zip(wholes, exchanges)
        ]
        return [_median(times) for times in (*self._exchanges, *self._wholes, rests)]


def _median(seconds: Sequence[float]) -> int:
    return round(_MICROSECONDS * statistics.median(seconds))


class Measurement(NamedTuple):
    """Measurements of a method in all its trials.

    All times are in seconds: means over the workers of their medians.

    Attributes:
        method: name of the method.
        nmse: the value of `Scheme.expected_nmse`; None where the scheme does not state one.
        exchange: time from a step's first gradient to the last result.
        whole: time from one step's last result to the last result of the next.
        step: the time that decides: ``exchange`` plus the rest of a step. The rest does not depend on the method but is
            noisy, so it is estimated from the steps of all methods.
    """

    method: str
    nmse: float | None
    exchange: float
    whole: float
    step: float


class Report(NamedTuple):
    """Progress and result of a tuning session.

    Attributes:
        method: name of the method that was chosen last; None while nothing is chosen.
        measurements: one for each method, no compression first; empty during the first trials, and if the choice is
            from a checkpoint, or there was nothing to choose from.
        workers: number of workers; 0 before the first step.
        step: number of steps of the trials that every worker has taken.
        steps: number of steps of all trials; 0 where there are none.
    """

    method: str | None
    measurements: tuple[Measurement, ...] = ()
    workers: int = 0
    step: int = 0
    steps: int = 0

    @property
    def speed_up(self) -> float | None:
        """Step time without compression divided by the chosen method's.

        If no compression is chosen, divided by that of the fastest method. None where they were not measured.
        """
        none = next((each for each in self.measurements if each.method == NONE), None)
        best = self._best
        return None if none is None or best is None else none.step / best.step

    @property
    def _best(self) -> Measurement | None:
        """Return the chosen method, or the fastest if that is no compression."""
        others = [each for each in self.measurements if each.method != NONE]
        if self.method == NONE:
            return min(others, key=lambda each: each.step, default=None)
        return next((each for each in others if each.method == self.method), None)

    def __str__(self) -> str:
        """Return ``tuning: step 40 of 98``, or the choice.

        It is ``chose eden-3: 1.97x (212 ms per step, none 417 ms; 4 workers)``.
        """
        if self.method is None or self.step < self.steps:
            return f"tuning: step {self.step} of {self.steps}" if self.steps else "tuning: not begun"
        chosen = [each for each in self.measurements if each.method == self.method]
        if not chosen:
            return f"chose {self.method}, without tuning ({self.workers} workers)"
        others = [each for each in self.measurements if each.method != self.method]
        times = [f"{show_seconds(chosen[0].step)} per step"]
        times += [f"{each.method} {show_seconds(each.step)}" for each in others]
        best = self._best
        gain = "" if best is None else f": {self.speed_up:.2f}x"
        with_best = f" with {best.method}" if best is not None and self.method == NONE else ""
        return f"chose {self.method}{gain}{with_best} ({', '.join(times)}; {self.workers} workers)"


def evaluate(candidates: Sequence[Candidate], sums: Sequence[int], workers: int) -> Report:
    """Choose the method with the shortest steps, see `fastest`.

    Args:
        candidates: the candidates, in the order of the trials.
        sums: the sums of all workers' `Trial.medians`.
        workers: the number of workers in the sums.
    """
    seconds = [each / workers / _MICROSECONDS for each in sums]
    count = len(candidates)
    measurements = tuple(
        Measurement(each.name, each.nmse, exchange, whole, exchange + seconds[-1])
        for each, exchange, whole in zip(candidates, seconds[:count], seconds[count:])
    )
    chosen = fastest(measurements, attrgetter("step"))
    steps = len(timetable(count))
    return Report(chosen.method, measurements, workers, steps, steps)
