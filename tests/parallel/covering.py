"""Chooses, of all scenarios and launches, few that together have every pair of what matters.

A *covering array*: not every scenario under every launch, but each pair of method and feature, controller and feature,
number of workers and feature, and launch and method somewhere. A launch is a controller and a number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from scenario_table import split


class Launch(NamedTuple):
    controller: str
    workers: int

    def __str__(self) -> str:
        return f"{self.controller}-{self.workers}"


Pair = tuple[str, str, str, str]
"""Two factors, each with its value: ``("controller", "gloo", "feature", "average")``."""

Choice = dict[Launch, list[str]]
"""The scenarios of each launch, in the order of the table."""


def pairs(name: str, launch: Launch) -> Iterator[Pair]:
    """What one scenario in one launch covers."""
    feature, method = split(name)
    yield "controller", launch.controller, "feature", feature
    yield "workers", str(launch.workers), "feature", feature
    if method:
        yield "method", method, "feature", feature
        yield "launch", str(launch), "method", method


def cover(names: Sequence[str], costs: Mapping[Launch, float], few_workers: Iterable[str] = ()) -> Choice:
    """Every scenario in some launch, and every pair that can be had, greedily: next what covers most for its cost.

    Args:
        names: all scenarios.
        costs: what a scenario takes in each launch, compared with the other launches.
        few_workers: features that are tried only in the launches with the fewest workers.
    """
    few, fewest = set(few_workers), min(launch.workers for launch in costs)
    places = {
        name: [launch for launch in costs if split(name)[0] not in few or launch.workers == fewest]
        for name in names
    }
    missing = {
        pair for name, launches in places.items() for launch in launches for pair in pairs(name, launch)
    }
    chosen: dict[Launch, set[str]] = {launch: set() for launch in costs}
    features: Counter[tuple[Launch, str]] = Counter()

    def worth(place: tuple[str, Launch]) -> tuple[float, int]:
        """Of equals, the feature that this launch has tried least."""
        name, launch = place
        new = len(missing.intersection(pairs(name, launch)))
        return new / costs[launch], -features[launch, split(name)[0]]

    def choose(name: str, launch: Launch) -> None:
        chosen[launch].add(name)
        features[launch, split(name)[0]] += 1
        missing.difference_update(pairs(name, launch))

    for name, launches in places.items():
        choose(*max(((name, launch) for launch in launches), key=worth))
    while missing:
        choose(*max(((name, launch) for name, launches in places.items() for launch in launches), key=worth))
    return {launch: [name for name in names if name in own] for launch, own in chosen.items()}


def each_feature_once(names: Sequence[str]) -> list[str]:
    """One scenario of each feature, with the method that has had the fewest."""
    by_feature: dict[str, list[str]] = {}
    for name in names:
        by_feature.setdefault(split(name)[0], []).append(name)
    methods: Counter[str] = Counter()
    once = set()
    for own in by_feature.values():
        name = min(own, key=lambda name: methods[split(name)[1]])
        methods[split(name)[1]] += 1
        once.add(name)
    return [name for name in names if name in once]
