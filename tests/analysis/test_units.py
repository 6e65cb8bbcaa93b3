"""Rates and times are read as people write them, and shown with three digits."""

from __future__ import annotations

import math

import pytest

from horovod_quant.analysis.units import parse_rate, parse_seconds, show_rate, show_seconds


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("100mbit", 12.5e6),
        ("1gbit", 125e6),
        ("2.5gbit", 312.5e6),
        ("56kbit", 7e3),
        ("none", math.inf),
        *(
            (text, 1.25e9)
            for text in ("10Gbps", "10G", "10g", "10gbe", "10GbE", "10 Gbit/s", "10Gb/s", "10Gb")
        ),
        ("100M", 12.5e6),
    ],
)
def test_rates(text: str, bandwidth: float) -> None:
    assert parse_rate(text) == bandwidth


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "gbit",
        "1Gbits/min",
        "1bit",
        "-1gbit",
        "0gbit",
        "1e3mbit",
        "1tbit",
        "1.gbit",
        "nan",
        "9999999999gbit",
        "0.0001kbit",
    ],
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate; use one such as 100mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["10GB", "10GBps", "10GB/s", "10 MB/s", "1GiB/s", "1 GByte"])
def test_bytes_are_not_taken_for_bits(text: str) -> None:
    with pytest.raises(ValueError, match="is not a rate in bits; a byte has 8"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50us", 5e-5), ("1ms", 1e-3), ("0.35", 0.35), (".35s", 0.35), ("0", 0.0), ("7ns", 7e-9)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "ms", "1min", "-1s", "1 s", "inf", "1" + 400 * "0", "1000000001"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; use one such as 50us"):
        parse_seconds(text)


def test_what_is_shown() -> None:
    assert [show_rate(bandwidth) for bandwidth in (12.5e6, 125e6, 312.5e6, 1e3, math.inf)] == [
        "100 Mbit/s",
        "1 Gbit/s",
        "2.5 Gbit/s",
        "8 kbit/s",
        "no limit",
    ]
    assert [show_seconds(seconds) for seconds in (5e-5, 0.0123, 1.234, 1234.5, 0.0, 1e-18)] == [
        "50 us",
        "12.3 ms",
        "1.23 s",
        "1,234 s",
        "0 s",
        "0 s",
    ]
