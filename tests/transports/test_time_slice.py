"""The slice that a thread requests is its own, and nothing else of its scheduling changes."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from horovod_quant.transports import time_slice
from horovod_quant.transports.progress import Job, Progress

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux"
    or platform.machine() not in SCHED_GETATTR
    or tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 12),
    reason="slices need Linux 6.12",
)


def scheduling() -> tuple[int, int, int]:
    """Policy, nice value and slice in nanoseconds of the calling thread."""
    attributes = ctypes.create_string_buffer(48)
    call = ctypes.CDLL(None).syscall
    assert call(ctypes.c_long(SCHED_GETATTR[platform.machine()]), 0, attributes, 48, 0) == 0
    _, policy, _, nice, _, runtime, _, _ = struct.unpack("=IIQiIQQQ", attributes.raw)
    return policy, nice, runtime


def in_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_thread_gets_the_shortest_slice_and_keeps_its_nice_value() -> None:
    def shortened() -> tuple[Any, Any]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 7)
        before = scheduling()
        time_slice.shorten()
        return before, scheduling()

    own = scheduling()
    before, after = in_a_thread(shortened)
    assert before[:2] == after[:2] == (os.SCHED_OTHER, 7)
    assert before[2] > after[2] == time_slice.SHORTEST
    assert scheduling() == own


def test_another_policy_is_kept() -> None:
    def shortened() -> tuple[Any, Any]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        before = scheduling()
        time_slice.shorten()
        return before, scheduling()

    before, after = in_a_thread(shortened)
    assert before == after
    assert before[0] == os.SCHED_BATCH


def test_a_system_that_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getscheduler", forbidden)
    before = scheduling()
    assert in_a_thread(lambda: (time_slice.shorten(), scheduling())) == (None, before)


def test_the_progress_thread_has_the_shortest_slice() -> None:
    class Look(Job):
        seen: Any = None

        def poll(self) -> bool:
            return True

        def advance(self) -> bool:
            self.seen = scheduling()
            return True

    progress, job = Progress(), Look("look")
    progress.hand(job)
    assert progress.wait([job], lambda: job.ended, 60)
    progress.stop()
    assert job.error is None
    assert job.seen[2] == time_slice.SHORTEST
