"""What a compressor has sent, and what float32 would have sent."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes sent by one worker.

    Attributes:
        bytes_sent: bytes that this compressor has sent.
        float32_bytes: bytes that a ring allreduce of the same gradients in float32 would have sent.
        exchanged_again: buckets that were exchanged a second time because a sum overflowed its field (Global-QSGD with
            ``rotate=True``). ``bytes_sent`` includes their bytes.
    """

    bytes_sent: float
    float32_bytes: float
    exchanged_again: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than float32; nan while nothing has been sent."""
        return self.float32_bytes / self.bytes_sent if self.bytes_sent else float("nan")


OTHER_NAMES = "(other names)"
"""In `Stats`: names of direct calls that have not been used for a long time."""


class Stats(NamedTuple):
    """Traffic per parameter name and in total, since the compressor was constructed."""

    parameters: dict[str, Traffic]
    total: Traffic

    def __str__(self) -> str:
        width = max([len(name) for name in self.parameters] + [len("parameter")])
        lines = [f"{'parameter':{width}} {'bytes sent':>14} {'float32':>14} {'ratio':>7}"]
        for name, traffic in [*self.parameters.items(), ("total", self.total)]:
            figures = f"{traffic.bytes_sent:14,.0f} {traffic.float32_bytes:14,.0f} {traffic.ratio:7.2f}"
            again = f" ({traffic.exchanged_again} buckets again)" if traffic.exchanged_again else ""
            lines.append(f"{name:{width}} {figures}{again}")
        return "\n".join(lines)


def total_of(parameters: dict[str, Traffic]) -> Stats:
    """The parameters' traffic with its sum."""
    total = Traffic(
        sum(traffic.bytes_sent for traffic in parameters.values()),
        sum(traffic.float32_bytes for traffic in parameters.values()),
        sum(traffic.exchanged_again for traffic in parameters.values()),
    )
    return Stats(parameters, total)


class Repeated:
    """What is sent for a gradient if it is the same number of bytes every time.

    Attributes:
        times: how often it was sent so far; the sender adds one.
    """

    __slots__ = ("_added", "float32_bytes", "name", "sent_bytes", "times")

    def __init__(self, name: str, float32_bytes: float, sent_bytes: float) -> None:
        self.name = name
        self.float32_bytes = float32_bytes
        self.sent_bytes = sent_bytes
        self.times = 0
        self._added = 0

    def take(self) -> int:
        """How often since this was last asked."""
        times = self.times
        new, self._added = times - self._added, times
        return new


_GROUPS = 256
"""How many different sends of groups are counted apart, at most."""


class TrafficCounter:
    """Adds up what is sent, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[str, float] = {}
        self._expected: dict[str, float] = {}
        self._again: dict[str, int] = {}
        self._repeated: dict[tuple[str, float, float], Repeated] = {}
        self._groups: dict[tuple[tuple[str, ...], tuple[float, ...]], int] = {}

    def expect(self, name: str, float32_bytes: float) -> None:
        with self._lock:
            self._expected[name] = self._expected.get(name, 0.0) + float32_bytes

    def count(self, name: str, sent: float) -> None:
        with self._lock:
            self._sent[name] = self._sent.get(name, 0.0) + sent

    def count_all(self, names: Iterable[str], sent: Iterable[float]) -> None:
        """Counts for several names at once."""
        with self._lock:
            self._add_all(names, sent, 1)

    def count_group(self, names: Iterable[str], sent: Iterable[float]) -> None:
        """`count_all` for what is sent again and again: one addition for all names."""
        key = tuple(names), tuple(sent)
        with self._lock:
            self._groups[key] = self._groups.get(key, 0) + 1
            if len(self._groups) > _GROUPS:  # as where groups change again and again
                self._add_groups()

    def _add_all(self, names: Iterable[str], sent: Iterable[float], times: int) -> None:
        for name, each in zip(names, sent):
            self._sent[name] = self._sent.get(name, 0.0) + times * each

    def _add_groups(self) -> None:
        for (names, sent), times in self._groups.items():
            self._add_all(names, sent, times)
        self._groups.clear()

    def repeated(self, name: str, float32_bytes: float, sent_bytes: float) -> Repeated:
        """For repeated sends of known size: costs only one addition each time."""
        key = name, float32_bytes, sent_bytes
        with self._lock:
            self._expected.setdefault(name, 0.0)
            return self._repeated.setdefault(key, Repeated(*key))

    def _add_up(self) -> None:
        self._add_groups()
        for repeated in self._repeated.values():
            name, times = repeated.name, repeated.take()
            if times:
                self._expected[name] = self._expected.get(name, 0.0) + times * repeated.float32_bytes
                self._sent[name] = self._sent.get(name, 0.0) + times * repeated.sent_bytes

    def count_again(self, name: str, buckets: int) -> None:
        """Counts buckets that were exchanged a second time."""
        if buckets:
            with self._lock:
                self._again[name] = self._again.get(name, 0) + buckets

    def merge(self, of: str, into: str) -> list[str]:
        """Counts what was sent in the operation ``of`` as sent for ``into``; returns the names that it had."""
        with self._lock:
            self._add_up()
            merged = [name for name in self._expected if name == of or _is_member(name, of)]
            for counts in (self._sent, self._expected):
                for name in merged:
                    counts[into] = counts.get(into, 0.0) + counts.pop(name, 0.0)
            for name in merged:
                self._again[into] = self._again.get(into, 0) + self._again.pop(name, 0)
        return merged

    def stats(self) -> Stats:
        with self._lock:
            self._add_up()
            parameters = {
                name: Traffic(self._sent.get(name, 0.0), expected, self._again.get(name, 0))
                for name, expected in self._expected.items()
            }
        return total_of(parameters)


def _is_member(name: str, of: str) -> bool:
    """Whether it is the name of a tensor of a grouped operation."""
    prefix, _, position = name.rpartition(".")
    return prefix == of and position.isdigit()
