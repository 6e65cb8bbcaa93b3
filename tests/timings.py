"""What a test run's time went to, for the table at its end: launches, test files, single tests and scenarios.

A launch runs many scenarios, and pytest counts all of it to the first of them that it asks for; here each scenario has
its own seconds.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

SLOWEST = 25
LEAST_SHARE = 0.005
"""Rows of less are not printed."""


class Launch(NamedTuple):
    test: str
    """That has asked for it."""
    name: str
    seconds: float
    scenarios: Mapping[str, float]
    """Each one's seconds, those of the slowest worker."""


LAUNCHES: list[Launch] = []
"""Of this process."""


def record(name: str, seconds: float, scenarios: Mapping[str, float]) -> None:
    """Called by whoever launches scenarios, from within a test."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    LAUNCHES.append(Launch(test, name, seconds, dict(scenarios)))


def table(tests: Mapping[str, float], launches: Iterable[Launch]) -> Iterator[str]:
    """The lines, in Markdown.

    Args:
        tests: the seconds of each, set-up and launches included.
    """
    own, rows, single = dict(tests), defaultdict[str, float](float), {}
    for launch in launches:
        if launch.test in own:
            own[launch.test] -= launch.seconds
        rows[f"{launch.name}, {len(launch.scenarios)} scenarios"] += launch.seconds
        single.update({f"{launch.name}, {name}": seconds for name, seconds in launch.scenarios.items()})
    for test, seconds in own.items():
        rows[test.partition("::")[0]] += seconds
    single.update(own)
    total = sum(rows.values())
    yield from _lines(
        "Launch or test file", rows, total, [s for s in rows.values() if s >= LEAST_SHARE * total]
    )
    yield ""
    yield from _lines("Test or scenario", single, total, sorted(single.values())[-SLOWEST:])


def _lines(title: str, seconds: Mapping[str, float], total: float, kept: list[float]) -> Iterator[str]:
    yield f"| {title} | seconds | share |"
    yield "|---|---:|---:|"
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    for name, own in ordered[: len(kept)]:
        yield f"| {name} | {own:.1f} | {own / total if total else 0:.1%} |"
    rest = sum(own for _, own in ordered[len(kept) :])
    yield f"| {len(ordered) - len(kept)} others | {rest:.1f} | {rest / total if total else 0:.1%} |"
