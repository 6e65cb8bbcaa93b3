"""Names of what a profiler shows, on the threads that it does not follow by itself."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd import profiler

from horovod_quant.schemes import EDEN
from horovod_quant.torch.ranges import named_range

NAME = "horovod_quant.compute 0.weight.1 EDEN stage 1"


def enter() -> None:
    with named_range("compute", "horovod_quant.0.weight.1", EDEN(bits=3), 1):
        torch.ones(1)


def test_ranges_are_recorded_on_the_thread_of_a_profiler() -> None:
    enter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        enter()
    assert [event.name for event in found.events() if event.name.startswith("horovod_quant")] == [NAME]


def test_other_threads_give_nsight_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", given.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: given.append("end"))
    enter()
    assert not given
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)  # as emit_nvtx sets it
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert given == [NAME, "end"]
