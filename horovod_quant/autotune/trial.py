"""Measures methods in turn during training steps, and decides among them. It imports no framework.

All workers count the steps of a trial in the same way, so each knows which method a step uses. Each measures by itself;
the decision uses sums of all workers' medians, in whole microseconds, which are the same everywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from horovod_quant.analysis.units import show_seconds
from horovod_quant.autotune.candidates import Candidate
from horovod_quant.frontends.methods import NONE

ROUNDS = 3
"""Turns of each method. They alternate, so that a network whose rate changes meanwhile treats all alike."""

MEASURED = 3
"""Steps of a turn that count."""

WARM_UP = 1
"""Steps before them: Horovod's response cache has other tensors' shapes."""

FIRST_WARM_UP = 3
"""The same in a method's first turn: it plans its groups in one step, and tries the plan in the next."""

AS_FAST = 1.02
"""Steps so much longer than the shortest count as equal, and the smaller error decides; none has no error."""

_MICROSECONDS = 1e6


class Turn(NamedTuple):
    """A step of a trial: the number of its method, and whether it counts."""

    method: int
    counts: bool


def timetable(methods: int) -> list[Turn]:
    """The steps of a trial of so many methods, in order."""
    return [
        Turn(method, step >= warm_up)
        for warm_up in (FIRST_WARM_UP, *[WARM_UP] * (ROUNDS - 1))
        for method in range(methods)
        for step in range(warm_up + MEASURED)
    ]


class Trial:
    """What one worker has measured so far, and which method is next.

    Args:
        methods: how many there are.
    """

    def __init__(self, methods: int) -> None:
        self._timetable = timetable(methods)
        self._steps = 0
        self._exchanges: list[list[float]] = [[] for _ in range(methods)]
        self._wholes: list[list[float]] = [[] for _ in range(methods)]

    @property
    def turn(self) -> Turn | None:
        """The next step's; None when the trial is over."""
        return self._timetable[self._steps] if self._steps < len(self._timetable) else None

    @property
    def progress(self) -> tuple[int, int]:
        """Steps that have been counted, and the number of all."""
        return self._steps, len(self._timetable)

    def count_step(self) -> None:
        """To be called for each step in which every worker has taken part."""
        self._steps += 1

    def record(self, turn: Turn, exchange: float, whole: float) -> None:
        """Takes a step's times.

        Args:
            turn: the step's.
            exchange: seconds from the first gradient to the last result.
            whole: seconds from the last result of the step before to this one's.
        """
        if turn.counts:
            self._exchanges[turn.method].append(exchange)
            self._wholes[turn.method].append(whole)

    def medians(self) -> list[int]:
        """In microseconds: of each method's exchanges, of each one's whole steps, and of what all steps' exchanges have
        left of them.
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
    """A trial's measurements of a method, in seconds: means over the workers of their medians.

    Attributes:
        method: its name.
        nmse: what its scheme expects, see `Scheme.expected_nmse`; None where the scheme does not state one.
        exchange: time from a step's first gradient to the last result.
        whole: time from one step's last result to the next one's.
        step: what decides: ``exchange`` plus the rest of a step, measured over the steps of all methods. What a script
            does outside of exchanges does not depend on the method, but varies more between steps than methods differ.
    """

    method: str
    nmse: float | None
    exchange: float
    whole: float
    step: float


class Report(NamedTuple):
    """How far a trial is, and its result.

    Attributes:
        method: name of the method that was chosen last; None while nothing is chosen.
        measurements: one for each method that was tried for it, none first; empty during the first trial, and if the
            choice comes from a checkpoint, or there was nothing to choose from.
        workers: number of workers; 0 before the first step.
        step: number of steps of the trial that every worker has taken.
        steps: number of steps of the whole trial; 0 where there is none.
    """

    method: str | None
    measurements: tuple[Measurement, ...] = ()
    workers: int = 0
    step: int = 0
    steps: int = 0

    @property
    def speed_up(self) -> float | None:
        """Step time of none by that of the chosen method, or of the fastest other one if none is chosen.

        None where they were not measured.
        """
        none, best = self._none, self._best
        return None if none is None or best is None else none.step / best.step

    @property
    def _none(self) -> Measurement | None:
        return next((each for each in self.measurements if each.method == NONE), None)

    @property
    def _best(self) -> Measurement | None:
        """The chosen method, or if that is none the fastest other."""
        others = [each for each in self.measurements if each.method != NONE]
        if self.method == NONE:
            return min(others, key=lambda each: each.step, default=None)
        return next((each for each in others if each.method == self.method), None)

    def __str__(self) -> str:
        """``trial: step 40 of 98``; then ``chose eden-3: 1.97x (212 ms per step, none 417 ms; 4 workers)``."""
        if self.method is None or self.step < self.steps:
            return f"trial: step {self.step} of {self.steps}" if self.steps else "trial: not begun"
        own = [each for each in self.measurements if each.method == self.method]
        if not own:
            return f"chose {self.method}, without a trial ({self.workers} workers)"
        others = [each for each in self.measurements if each.method != self.method]
        times = [f"{show_seconds(own[0].step)} per step"]
        times += [f"{each.method} {show_seconds(each.step)}" for each in others]
        best = self._best
        gain = "" if best is None else f": {self.speed_up:.2f}x"
        with_best = f" with {best.method}" if best is not None and self.method == NONE else ""
        return f"chose {self.method}{gain}{with_best} ({', '.join(times)}; {self.workers} workers)"


def evaluate(candidates: Sequence[Candidate], sums: Sequence[int], workers: int) -> Report:
    """The decision: of the shortest steps the one with the smallest error.

    Args:
        candidates: in the order in which they were tried.
        sums: of all workers' `Trial.medians`.
        workers: how many have added theirs.
    """
    seconds = [each / workers / _MICROSECONDS for each in sums]
    count = len(candidates)
    measurements = tuple(
        Measurement(each.name, each.nmse, exchange, whole, exchange + seconds[-1])
        for each, exchange, whole in zip(candidates, seconds[:count], seconds[count:])
    )
    shortest = min(each.step for each in measurements)
    equal = [each for each in measurements if each.step <= AS_FAST * shortest]
    chosen = min(equal, key=lambda each: (float("inf") if each.nmse is None else each.nmse, each.step))
    steps = len(timetable(count))
    return Report(chosen.method, measurements, workers, steps, steps)
