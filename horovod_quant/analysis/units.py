"""Parser of rates and times: ``10gbit``, ``10Gbps``, ``10G``, ``10gbe``; ``50us``, ``1ms``."""

from __future__ import annotations

import math
import re

_BITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_AFTER = ("bit", "bit/s", "bits", "bps", "b/s", "b", "be", "")
RATES, TIMES = (1.0, 1e18), (0.0, 1e9)
"""Limits of rates and seconds that keep the model's numbers finite."""

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def parse_rate(text: str) -> float:
    """Return the bytes per second of a rate such as ``2.5gbit``.

    Other examples are ``10Gbps``, ``10G`` and ``10GbE``; it is inf for ``none``.

    Raises:
        ValueError: ``text`` is not a rate, or one in bytes.
    """
    if text.lower() == "none":
        return math.inf
    if re.fullmatch(r"[0-9.]+ ?[kmgKMG]i?B(ps|/s|yte.*)?", text):
        raise ValueError(f"{text!r} is not a rate in bits; a byte has 8: for 10 GB/s use 80gbit")
    units = {prefix + after: bits for prefix, bits in _BITS.items() for after in _AFTER}
    rate = _number(text.lower().replace(" ", ""), units, *RATES)
    if rate is None:
        raise ValueError(
            f"{text!r} is not a rate; use one such as 100mbit, 2.5gbit, 10Gbps, 10G, up to 1000000000gbit, or none"
        )
    return rate / 8


def parse_seconds(text: str) -> float:
    """Return the seconds of ``50us``, ``1ms`` or ``0.35``, which is in seconds.

    Raises:
        ValueError: ``text`` is not a time.
    """
    seconds = _number(text, {**_SECONDS, "": 1.0}, *TIMES)
    if seconds is None:
        raise ValueError(f"{text!r} is not a time; use one such as 50us, 1ms, 0.35s, up to 1000000000s")
    return seconds


def _number(text: str, units: dict[str, float], low: float, high: float) -> float | None:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)([a-z/]*)", text)
    if found is None or found[2] not in units:
        return None
    number = float(found[1]) * units[found[2]]
    return number if low <= number <= high else None


def show_rate(bandwidth: float) -> str:
    """Return bytes per second as text: ``2.5 Gbit/s``."""
    if bandwidth == math.inf:
        return "no limit"
    return _show(8 * bandwidth, {"Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3})


def show_seconds(seconds: float) -> str:
    """Return seconds as text: ``350 ms``, ``1.24 s``."""
    return _show(seconds, _SECONDS) if seconds >= 1e-9 else "0 s"


def _show(number: float, units: dict[str, float]) -> str:
    """Return a number in the largest unit that is not above it."""
    name = next((name for name, unit in units.items() if number >= unit), list(units)[-1])
    number /= units[name]
    return f"{number:,.0f} {name}" if number >= 100 else f"{number:.3g} {name}"
