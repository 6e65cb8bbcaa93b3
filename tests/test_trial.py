"""Turns, and the decision from numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from horovod_quant.autotune import candidates, trial
from horovod_quant.autotune.candidates import Candidate
from horovod_quant.autotune.trial import Measurement, Report, Trial, TrialStep, evaluate, timetable


def named(name: str, error: float | None) -> Candidate:
    return Candidate(name, None, error, 1.0)


NONE, FINE, ROUGH, UNTOLD = (
    candidates.NONE, named("fine", 0.1), named("rough", 0.4), named("untold", None),
)  # fmt: skip


def test_methods_alternate_and_each_begins_with_steps_that_do_not_count() -> None:
    table = timetable(3)
    rounds = [(method, list(steps)) for method, steps in itertools.groupby(table, lambda each: each.method)]
    assert [method for method, _ in rounds] == [0, 1, 2] * trial.ROUNDS
    for number, (_, steps) in enumerate(rounds):
        warm_up = trial.FIRST_WARM_UP if number < 3 else trial.WARM_UP
        assert [each.counts for each in steps] == [False] * warm_up + [True] * trial.MEASURED
    assert Counter(each.method for each in table if each.counts) == dict.fromkeys(range(3), 9)


def tried(exchange: Any, rest: Any, methods: int = 3) -> Trial:
    """A whole trial: ``exchange(method, step)`` and ``rest(step)`` say what each step takes."""
    tested = Trial(methods)
    for step in itertools.count():
        each = tested.current
        if each is None:
            return tested
        seconds = exchange(each.method, step)
        tested.record(each, seconds, seconds + rest(step))
        tested.count_step()
    raise AssertionError


def sums_of(*trials: Trial) -> list[int]:
    return [sum(each) for each in zip(*(own.medians() for own in trials))]


def test_steps_that_do_not_count_are_not_measured_and_outliers_do_not_matter() -> None:
    counts = [each.counts for each in timetable(2)]
    slow = tried(lambda method, step: 1.0 + method if counts[step] else 99.0, lambda step: 0.5, 2)
    assert slow.medians() == [1_000_000, 2_000_000, 1_500_000, 2_500_000, 500_000]
    tested = tried(lambda method, step: 99.0 if step in (4, 12) else 1.0, lambda step: 0.5, 2)
    assert tested.medians()[:2] == [1_000_000, 1_000_000]


def test_the_fastest_is_taken_and_its_report_has_all_numbers() -> None:
    workers = [
        tried(lambda method, _, own=own: [0.4, 0.3, 0.1][method] + own, lambda _: 0.1) for own in (0, 0.2)
    ]
    report = evaluate([NONE, FINE, ROUGH], sums_of(*workers), 2)
    assert report.method == "rough"
    assert [each.method for each in report.measurements] == ["none", "fine", "rough"]
    expected = Measurement("none", 0.0, 0.5, 0.6, 0.6)
    assert report.measurements[0] == pytest.approx(expected) or report.measurements[0][2:] == pytest.approx(
        expected[2:]
    )
    assert str(report) == "chose rough: 2.00x (300 ms per step, none 600 ms, fine 500 ms; 2 workers)"
    assert report.speed_up == pytest.approx(2)
    assert (report.step, report.steps) == (len(timetable(3)),) * 2


def test_where_compression_does_not_pay_the_report_says_by_how_much() -> None:
    tested = tried(lambda method, _: [0.97, 1.0, 1.2][method], lambda _: 0.0)
    report = evaluate([NONE, FINE, ROUGH], sums_of(*[tested] * 4), 4)
    assert report.speed_up == pytest.approx(0.97)
    assert str(report) == "chose none: 0.97x with fine (970 ms per step, fine 1 s, rough 1.2 s; 4 workers)"


def test_a_trial_that_has_not_ended_is_one_line() -> None:
    assert str(Report(None)) == "tuning: not begun"
    tested = Trial(7)
    for _ in range(40):
        tested.count_step()
    assert tested.progress == (40, 98)
    assert str(Report(None, (), 4, *tested.progress)) == "tuning: step 40 of 98"
    assert str(Report("eden-3", (), 4, *tested.progress)) == "tuning: step 40 of 98"  # once more
    assert Report(None).speed_up is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.00, 0.99, 0.985], "none"),  # compression that does not pay
        ([1.00, 0.95, 0.94], "fine"),  # 2% are no reason for a larger error
        ([1.00, 0.95, 0.90], "rough"),
        ([0.80, 0.95, 0.90], "none"),
    ],
)
def test_of_equals_the_smallest_error_counts(seconds: list[float], expected: str) -> None:
    tested = tried(lambda method, _: seconds[method] / 2, lambda _: 0.0)
    halves = [round(5e5 * each) for each in seconds]
    assert tested.medians() == [*halves, *halves, 0]
    assert evaluate([NONE, FINE, ROUGH], sums_of(tested), 1).method == expected


def test_a_method_that_does_not_tell_its_error_counts_as_the_roughest() -> None:
    tested = tried(lambda method, _: [2.0, 1.0, 0.99][method], lambda _: 0.0)
    assert evaluate([NONE, ROUGH, UNTOLD], sums_of(tested), 1).method == "rough"
    tested = tried(lambda method, _: [2.0, 1.0, 0.9][method], lambda _: 0.0)
    assert evaluate([NONE, ROUGH, UNTOLD], sums_of(tested), 1).method == "untold"


def test_what_scripts_do_between_exchanges_adds_no_noise() -> None:
    """5% between two methods, beside steps whose rest changes by half: always found (fixed seeds; no false alarm)."""
    for seed in range(50):
        noise = np.random.default_rng(seed)
        tested = tried(
            lambda method, _, noise=noise: [0.100, 0.092][method] * noise.uniform(0.99, 1.01),
            lambda _, noise=noise: noise.uniform(0.05, 0.15),
            2,
        )
        assert evaluate([NONE, FINE], sums_of(tested), 1).method == "fine"


def test_every_worker_decides_from_the_same_whole_numbers() -> None:
    trials = [
        tried(lambda m, s, r=r: 0.1 * m + 1e-3 * (s * r % 7) + 0.1, lambda s: 1e-3 * s) for r in range(3)
    ]
    assert all(isinstance(number, int) for own in trials for number in own.medians())


def test_a_choice_without_a_trial_says_so() -> None:
    assert str(Report("eden-3", (), 4)) == "chose eden-3, without tuning (4 workers)"
    assert Trial(1).current == TrialStep(0, False)
