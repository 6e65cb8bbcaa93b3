"""Chooses, of all scenarios and launches, few that together have every pair of what matters.

A *covering array*: not every scenario under every launch, but each pair of method and feature, controller and feature,
number of workers and feature, and launch and method somewhere. A launch is a controller and a number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from scenario_table import split


class Launch(NamedTuple):
    controller: str
    workers: int

    def __str__(self) -> str:
        return f"{self.controller}-{self.workers}"


Pair = tuple[str, str, str, str]
"""Two factors, each with its value: ``("controller", "gloo", "feature", "average")``."""

DEAR = 4.0
"""How many times the usual a dear feature is taken to cost."""

Choice = dict[Launch, list[str]]
"""The scenarios of each launch, in the order of the table."""


def pairs(name: str, launch: Launch, sampled: bool) -> Iterator[Pair]:
    """What one scenario in one launch covers. A method that is ``sampled`` need not meet every feature."""
    feature, method = split(name)
    yield "controller", launch.controller, "feature", feature
    yield "workers", str(launch.workers), "feature", feature
    if sampled:
        yield "controller", launch.controller, "method", method
        yield "workers", str(launch.workers), "method", method
    elif method:
        yield "method", method, "feature", feature
        yield "launch", str(launch), "method", method


def cover(
    names: Sequence[str],
    costs: Mapping[Launch, float],
    few_workers: Collection[str] = (),
    sampled: Collection[str] = (),
    dear: Collection[str] = (),
) -> Choice:
    """Every pair that can be had, greedily: next what covers most for its cost.

    Args:
        names: all scenarios.
        costs: what a scenario takes in each launch, compared with the other launches.
        few_workers: features that are tried only in the launches with the fewest workers.
        sampled: methods that need not meet every feature.
        dear: features that cost more than others, and cover what any feature can only where there is no other.
    """
    fewest = min(launch.workers for launch in costs)
    places = [
        (name, launch)
        for name in names
        for launch in costs
        if split(name)[0] not in few_workers or launch.workers == fewest
    ]
    covers = {(name, launch): set(pairs(name, launch, split(name)[1] in sampled)) for name, launch in places}
    missing = set[Pair]().union(*covers.values())
    chosen: dict[Launch, set[str]] = {launch: set() for launch in costs}
    tried: Counter[tuple[Launch, str]] = Counter()

    def cost(name: str, launch: Launch) -> float:
        return costs[launch] * (DEAR if split(name)[0] in dear else 1.0)

    def worth(place: tuple[str, Launch]) -> tuple[float, int, int]:
        """Of equals, the method that this launch has tried least, and then the feature."""
        name, launch = place
        feature, method = split(name)
        return len(missing & covers[place]) / cost(*place), -tried[launch, method], -tried[launch, feature]

    def choose(places: Sequence[tuple[str, Launch]]) -> None:
        name, launch = place = max(places, key=worth)
        chosen[launch].add(name)
        tried.update((launch, part) for part in split(name))
        missing.difference_update(covers[place])

    for name in _by_turns(names):
        if split(name)[1] not in sampled:
            choose([place for place in places if place[0] == name])
    while missing:
        choose(places)
    # What was chosen early may be covered by what had to be chosen later.
    times = Counter(pair for launch, own in chosen.items() for name in own for pair in covers[name, launch])
    for name, launch in sorted(covers, key=lambda place: cost(*place), reverse=True):
        if name in chosen[launch] and all(times[pair] > 1 for pair in covers[name, launch]):
            chosen[launch].remove(name)
            times.subtract(covers[name, launch])
    return {launch: [name for name in names if name in own] for launch, own in chosen.items()}


def _by_turns(names: Sequence[str]) -> Iterator[str]:
    """Feature by feature, each beginning with another method: of what comes first a launch has most."""
    for index, own in enumerate(_by_feature(names)):
        first = index % len(own)
        yield from (*own[first:], *own[:first])


def _by_feature(names: Sequence[str]) -> Collection[list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(split(name)[0], []).append(name)
    return found.values()


def each_feature_once(names: Sequence[str], last: Collection[str] = ()) -> list[str]:
    """One scenario of each feature, by the method that has had the fewest; of ``last`` only where there is no other."""
    methods: Counter[str] = Counter()
    once = set()
    for own in _by_feature(names):
        name = min(own, key=lambda name: (split(name)[1] in last, methods[split(name)[1]]))
        methods[split(name)[1]] += 1
        once.add(name)
    return [name for name in names if name in once]
