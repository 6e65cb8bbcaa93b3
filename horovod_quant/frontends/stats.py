"""Statistics of a compressor: bytes sent, and bytes in float32."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class Traffic(NamedTuple):
    """Bytes sent by one worker.

    Attributes:
        bytes_sent: bytes that this compressor has sent.
        float32_bytes: bytes that a ring allreduce of the same gradients in float32 would have sent.
        exchanged_again: number of buckets that were resent because a sum overflowed its field (Global-QSGD with
            ``rotate=True``). ``bytes_sent`` includes their bytes.
    """

    bytes_sent: int
    float32_bytes: int
    exchanged_again: int = 0

    @property
    def ratio(self) -> float:
        """``float32_bytes`` divided by ``bytes_sent``; nan while nothing has been sent."""
        return self.float32_bytes / self.bytes_sent if self.bytes_sent else float("nan")

    def __repr__(self) -> str:
        again = f", exchanged_again={self.exchanged_again}" if self.exchanged_again else ""
        return (
            f"Traffic(bytes_sent={self.bytes_sent}, float32_bytes={self.float32_bytes}, "
            f"ratio={self.ratio:.2f}{again})"
        )


OTHER_NAMES = "(other names)"
"""Name in `Stats` for direct calls that have not been used recently."""


class Stats(NamedTuple):
    """Traffic per parameter name and in total, since the compressor was constructed.

    Attributes:
        parameters: traffic by parameter name.
        total: sum over the parameters.
        steps: largest number of reductions of a parameter.
        uncounted: names of parameters that are reduced without the compressor, such as those with sparse
            gradients; their bytes are not in ``total``.
        seconds_waited: time in which the training waited for collectives and decoding; None where it is not measured
            (TensorFlow, DDP).
        nmse: squared error of the averages divided by their square, on a sample of the gradients; None without
            ``nmse_every``.
    """

    parameters: dict[str, Traffic]
    total: Traffic
    steps: int = 0
    uncounted: tuple[str, ...] = ()
    seconds_waited: float | None = None
    nmse: float | None = None

    def metrics(self) -> dict[str, float]:
        """Return figures for TensorBoard, Weights & Biases or MLflow.

        There are none before the first send.

        Returns:
            ``horovod_quant/mb_sent_per_step`` (10^6 bytes), ``horovod_quant/compression_ratio`` (bytes in float32
            by those sent), and where they are measured ``horovod_quant/nmse`` and ``horovod_quant/ms_waited_per_step``.
        """
        if not self.steps or not self.total.bytes_sent:
            return {}
        found: dict[str, float | None] = {
            "mb_sent_per_step": self.total.bytes_sent / 1e6 / self.steps,
            "compression_ratio": self.total.ratio,
            "nmse": self.nmse,
            "ms_waited_per_step": None
            if self.seconds_waited is None
            else 1e3 * self.seconds_waited / self.steps,
        }
        return {f"horovod_quant/{name}": float(value) for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        width = max([len(name) for name in self.parameters] + [len("parameter")])
        lines = [f"{'parameter':{width}} {'bytes sent':>14} {'float32':>14} {'ratio':>7}"]
        for name, traffic in [*self.parameters.items(), ("total", self.total)]:
            figures = f"{traffic.bytes_sent:14,.0f} {traffic.float32_bytes:14,.0f} {traffic.ratio:7.2f}"
            again = f" ({traffic.exchanged_again} buckets again)" if traffic.exchanged_again else ""
            lines.append(f"{name:{width}} {figures}{again}")
        if self.uncounted:
            names = ", ".join(self.uncounted[:8]) + (", ..." if len(self.uncounted) > 8 else "")
            lines.append(
                f"not counted, as they are reduced without the compressor (sparse gradients): {names}"
            )
        if self.nmse is not None:
            lines.append(f"nmse, measured on a sample: {self.nmse:.3g}")
        return "\n".join(lines)


class Repeated:
    """Counter of sends that have the same length every time.

    Attributes:
        times: number of sends so far; the sender adds one.
    """

    __slots__ = ("_added", "float32_bytes", "name", "sent_bytes", "times")

    def __init__(self, name: str, float32_bytes: float, sent_bytes: float) -> None:
        self.name = name
        self.float32_bytes = float32_bytes
        self.sent_bytes = sent_bytes
        self.times = 0
        self._added = 0

    def take(self) -> int:
        """Return the number of sends since the last call."""
        times = self.times
        new, self._added = times - self._added, times
        return new


_GROUPS = 256
"""Maximum number of groups whose sends are counted separately."""


class TrafficCounter:
    """Thread-safe counters of sent bytes.

    Attributes:
        seconds_waited: time in which the training waited for collectives, where a frontend adds it.
    """

    def __init__(self) -> None:
        self.seconds_waited = 0.0
        self._lock = threading.Lock()
        self._sent: dict[str, float] = defaultdict(float)
        self._expected: dict[str, float] = defaultdict(float)
        self._again: dict[str, int] = defaultdict(int)
        self._times: dict[str, int] = defaultdict(int)
        self._repeated: dict[tuple[str, float, float], Repeated] = {}
        self._groups: dict[tuple[tuple[str, ...], tuple[float, ...]], int] = {}

    def expect(self, name: str, float32_bytes: float, times: int = 1) -> None:
        """Count reductions of a gradient, and their bytes in float32."""
        with self._lock:
            self._expected[name] += float32_bytes
            self._times[name] += times

    def count(self, name: str, sent: float) -> None:
        with self._lock:
            self._sent[name] += sent

    def count_group(self, names: Iterable[str], sent: Iterable[float]) -> None:
        """Count bytes by name; a repeated send takes one addition."""
        key = tuple(names), tuple(sent)
        with self._lock:
            self._groups[key] = self._groups.get(key, 0) + 1
            if len(self._groups) > _GROUPS:  # as where groups change again and again
                self._add_groups()

    def _add_groups(self) -> None:
        for (names, sent), times in self._groups.items():
            for name, each in zip(names, sent):
                self._sent[name] += times * each
        self._groups.clear()

    def repeated(self, name: str, float32_bytes: float, sent_bytes: float) -> Repeated:
        """Return a counter of repeated sends, with one addition per send."""
        key = name, float32_bytes, sent_bytes
        with self._lock:
            self._expected.setdefault(name, 0.0)
            return self._repeated.setdefault(key, Repeated(*key))

    def _add_up(self) -> None:
        self._add_groups()
        for repeated in self._repeated.values():
            name, times = repeated.name, repeated.take()
            if times:
                self._expected[name] += times * repeated.float32_bytes
                self._sent[name] += times * repeated.sent_bytes
                self._times[name] += times

    def count_again(self, name: str, buckets: int) -> None:
        """Count resent buckets."""
        if buckets:
            with self._lock:
                self._again[name] += buckets

    def merge(self, of: str, into: str) -> list[str]:
        """Move counts of the operation ``of`` to ``into``; return the operation's names."""
        with self._lock:
            self._add_up()
            merged = [name for name in self._expected if name == of or _is_member(name, of)]
            for name in merged:
                self._sent[into] += self._sent.pop(name, 0.0)
                self._expected[into] += self._expected.pop(name, 0.0)
                self._again[into] += self._again.pop(name, 0)
                self._times.pop(name, None)
        return merged

    def stats(self) -> Stats:
        with self._lock:
            self._add_up()
            parameters = {
                name: Traffic(round(self._sent.get(name, 0.0)), round(expected), self._again.get(name, 0))
                for name, expected in self._expected.items()
            }
            steps = max(self._times.values(), default=0)
        total = Traffic(*map(sum, zip(*parameters.values()))) if parameters else Traffic(0, 0)
        return Stats(parameters, total, steps)


def _is_member(name: str, of: str) -> bool:
    """True for the name of a tensor of a grouped operation."""
    prefix, _, position = name.rpartition(".")
    return prefix == of and position.isdigit()
