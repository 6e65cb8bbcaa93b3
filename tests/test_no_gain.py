"""What a scheme that sends more than float32 is told: each remedy sends less."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from horovod_quant.autotune.candidates import bits_sent
from horovod_quant.frontends.no_gain import warn_if_it_sends_more
from horovod_quant.frontends.policy import Policy
from horovod_quant.schemes import EDEN, NUQSGD, QSGD
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.transports.traffic import ring_allreduce_bytes

ELASTIC = Workers(0, 1)
"""Elastic TensorFlow does not know its number of workers when ``exchange="auto"`` chooses."""


def share_of_float32(scheme: Scheme, workers: Workers, resolved_for: Workers) -> float:
    resolved = scheme.for_workers(resolved_for).fixed_length_proxy()
    return bits_sent(resolved, workers) / ring_allreduce_bytes(32, workers.size)


@pytest.mark.parametrize(
    ("scheme", "size", "resolved_for", "remedy"),
    [
        (NUQSGD(exchange="allgather"), 16, None, "exchange='auto'"),
        (EDEN(exchange="allgather"), 32, None, "exchange='auto'"),
        (QSGD(coding="elias"), 32, None, "coding='fixed'"),
        (NUQSGD(coding="elias", exchange="allgather"), 64, None, "exchange='auto', coding='fixed'"),
        (QSGD(bits=15, bucket_size=32), 4, None, "exchange='alltoall'"),
        (QSGD(bits=15, bucket_size=32, exchange="allgather"), 4, None, "exchange='alltoall'"),
        (QSGD(bits=15, bucket_size=32, coding="elias"), 4, None, "exchange='alltoall', coding='fixed'"),
        (QSGD(bits=4), 64, ELASTIC, "exchange='alltoall'"),
    ],
)
def test_a_remedy_sends_less_than_float32(
    scheme: Scheme, size: int, resolved_for: Workers | None, remedy: str
) -> None:
    workers = Workers(0, size)
    resolved_for = resolved_for or workers
    assert share_of_float32(scheme, workers, resolved_for) >= 1
    with pytest.warns(RuntimeWarning, match=f"among {size} workers; use {remedy}$"):
        assert warn_if_it_sends_more(Policy(scheme), workers, resolved_for, False)
    changed = {
        name: ast.literal_eval(value) for name, value in (each.split("=") for each in remedy.split(", "))
    }
    mended = dataclasses.replace(scheme, **changed)  # type: ignore[type-var]
    assert share_of_float32(mended, workers, resolved_for) < 1
    assert not warn_if_it_sends_more(Policy(mended), workers, resolved_for, False)
