from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_quant.frontends.stats import _GROUPS, Stats, Traffic, TrafficCounter
from horovod_quant.schemes.base import Allgather, Allreduce, Alltoall, CustomAllreduce
from horovod_quant.transports.traffic import ring_allreduce_bytes, sent_bytes

ARRAY = np.zeros(3, np.int32)


def test_a_ring_sends_everything_but_a_share_twice() -> None:
    assert [ring_allreduce_bytes(120, n) for n in (1, 2, 3, 4)] == [0, 120, 160, 180]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (Allreduce(ARRAY, "sum", [8, 0, 40]), [12, 0, 60]),
        (CustomAllreduce(ARRAY, lambda left, right, low, high: left, [8, 4]), [12, 6]),
        (Allgather(ARRAY, [8, 4]), [24, 12]),
        (Alltoall(ARRAY, [1, 1, 1, 0], [8, 4]), [6, 3]),
    ],
    ids=["allreduce", "custom allreduce", "allgather", "alltoall"],
)
def test_a_worker_of_four_sends_the_bytes_of_the_model(request_, expected: list) -> None:
    assert sent_bytes(request_, 4) == expected
    assert sum(sent_bytes(request_, 1)) == 0


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(TypeError, match="not a request: 'barrier'"):
        sent_bytes("barrier", 2)


def test_counted_bytes_add_up_by_name_and_in_total() -> None:
    counter = TrafficCounter()
    for _ in range(2):
        counter.expect("w", 1000)
        counter.expect("b", 10)
        counter.count("w", 100)
        counter.count("w", 25)
        counter.count("b", 10)
    stats = counter.stats()
    assert stats.parameters == {"w": Traffic(250, 2000), "b": Traffic(20, 20)}
    assert stats.total == Traffic(270, 2020)
    assert stats.parameters["w"].ratio == 8


def test_what_is_sent_again_and_again_is_added_up_when_it_is_asked_for() -> None:
    counter = TrafficCounter()
    first = counter.repeated("w", 1000, 100)
    assert counter.repeated("w", 1000, 100) is first
    other = counter.repeated("w", 500, 50)
    for _ in range(3):
        first.times += 1
    other.times += 1
    counter.count_group(["w", "b"], [6, 6])
    for _ in range(2):
        counter.count_group(["w", "b"], [0.5, 1])
    counter.expect("b", 9)
    for _ in range(2):
        assert counter.stats().parameters == {"w": Traffic(357, 3500), "b": Traffic(8, 9)}
    first.times += 1
    assert counter.merge("w", "others") == ["w"]
    assert counter.stats().parameters == {"b": Traffic(8, 9), "others": Traffic(457, 4500)}


def test_sends_of_groups_are_added_up_before_they_are_many() -> None:
    counter = TrafficCounter()
    for step in range(1000):
        counter.count_group(["w", "b"], [step, 1])
    counter.expect("w", 0)
    counter.expect("b", 0)
    assert len(counter._groups) <= _GROUPS
    assert counter.stats().parameters == {"w": Traffic(499500, 0), "b": Traffic(1000, 0)}


def test_nothing_sent_has_no_ratio() -> None:
    assert math.isnan(Traffic(0, 0).ratio)
    assert TrafficCounter().stats() == Stats({}, Traffic(0, 0))


def test_stats_print_as_a_table() -> None:
    table = str(Stats({"a.long.weight": Traffic(1234.4, 12345)}, Traffic(1234.4, 12345)))
    assert [line.split() for line in table.splitlines()] == [
        ["parameter", "bytes", "sent", "float32", "ratio"],
        ["a.long.weight", "1,234", "12,345", "10.00"],
        ["total", "1,234", "12,345", "10.00"],
    ]
    assert len({len(line) for line in table.splitlines()}) == 1


def test_buckets_that_were_exchanged_again_are_counted() -> None:
    counter = TrafficCounter()
    for name in ("a", "b"):
        counter.expect(name, 100.0)
        counter.count(name, 25.0)
    counter.count_again("a", 2)
    counter.count_again("a", 3)
    counter.count_again("b", 0)
    stats = counter.stats()
    assert stats.parameters == {"a": Traffic(25.0, 100.0, 5), "b": Traffic(25.0, 100.0)}
    assert stats.total.exchanged_again == 5
    a, b, total = str(stats).splitlines()[1:]
    assert a.endswith("4.00 (5 buckets again)")
    assert b.endswith("4.00")
    assert total.endswith("4.00 (5 buckets again)")
    counter.merge("a", "others")
    assert counter.stats().parameters["others"] == Traffic(25.0, 100.0, 5)
