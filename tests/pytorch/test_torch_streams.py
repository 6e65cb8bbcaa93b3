"""Streams wait for each other: what is read has been written. CUDA's streams are simulated; work is numbers."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from horovod_quant.torch import device_memory  # noqa: E402


class Stream:
    """Knows how much of each stream's work has been done before what it is given next.

    Attributes:
        seen: by a stream's handle, the number of its launches.
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = id(self)
        self.seen: dict[int, int] = {self.cuda_stream: 0}

    def launch(self) -> tuple[int, int]:
        self.seen[self.cuda_stream] += 1
        return self.cuda_stream, self.seen[self.cuda_stream]

    def wait_stream(self, other: Stream) -> None:
        for handle, count in other.seen.items():
            self.seen[handle] = max(count, self.seen.get(handle, 0))

    def runs_after(self, launched: tuple[int, int]) -> bool:
        handle, count = launched
        return self.seen.get(handle, 0) >= count


class Tensor:
    """Notes which streams it is kept for."""

    def __init__(self) -> None:
        self.kept_for: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.kept_for.append(stream)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(stream=Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.stream)
    return found


def test_kernels_run_after_what_has_computed_the_gradients(current: SimpleNamespace) -> None:
    streams, computed, tensors = device_memory._Streams(torch.device("cuda", 0)), [], []
    for stream in (current.stream, Stream(), Stream()):
        current.stream = stream
        computed.append(stream.launch())
        tensors.append(Tensor())
        streams.reads(tensors[-1])
    assert not any(streams.own.runs_after(each) for each in computed)
    streams.catch_up()
    assert all(streams.own.runs_after(each) for each in computed)
    assert all(tensor.kept_for == [streams.own] for tensor in tensors)
    # Only what comes later is waited for again.
    late = current.stream.launch()
    streams.catch_up()
    assert not streams.own.runs_after(late)
    streams.note_current()
    streams.catch_up()
    assert streams.own.runs_after(late)


def test_callers_run_after_the_kernels_and_keep_results(current: SimpleNamespace) -> None:
    streams, result = device_memory._Streams(torch.device("cuda", 0)), Tensor()
    decoded = streams.own.launch()
    streams.hand_over([result])
    assert current.stream.runs_after(decoded)
    assert result.kept_for == [current.stream]


def test_the_own_stream_does_not_wait_for_itself(current: SimpleNamespace) -> None:
    streams = device_memory._Streams(torch.device("cuda", 0))
    current.stream = streams.own
    streams.note_current()
    streams.own.wait_stream = None  # type: ignore[method-assign]
    streams.catch_up()


def test_another_threads_waiting_is_launched_first(
    current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread finds nothing to wait for only when another one has launched that waiting."""
    streams = device_memory._Streams(torch.device("cuda", 0))
    computed = current.stream.launch()
    streams.note_current()
    begun, go_on = threading.Event(), threading.Event()
    wait = streams.own.wait_stream

    def slow(other: Stream) -> None:
        begun.set()
        assert go_on.wait(10)
        wait(other)

    monkeypatch.setattr(streams.own, "wait_stream", slow)
    first = threading.Thread(target=streams.catch_up)
    first.start()
    assert begun.wait(10)
    runs_after: list[bool] = []

    def second_catches_up() -> None:
        streams.catch_up()
        runs_after.append(streams.own.runs_after(computed))

    second = threading.Thread(target=second_catches_up)
    second.start()
    second.join(0.1)
    assert not runs_after
    go_on.set()
    first.join()
    second.join()
    assert runs_after == [True]


def test_a_count_that_the_host_has_seen_is_not_read_again() -> None:
    received = np.array([5, 6, 7], np.int32)
    uploaded = [(torch.from_numpy(np.zeros(4, np.float32)), np.zeros(4, np.float32))]
    uploaded.append((torch.from_numpy(received.copy()), received))
    decoded = device_memory.Decoded(uploaded[1][0][-1], lambda i, factor, out: out)
    found = device_memory._with_known_count(decoded, uploaded)
    assert type(found.active) is int
    assert found.active == 7
    elsewhere = device_memory.Decoded(torch.ones(1, dtype=torch.int32)[0], lambda i, factor, out: out)
    assert isinstance(device_memory._with_known_count(elsewhere, uploaded).active, torch.Tensor)
    assert device_memory._with_known_count(device_memory.Decoded(3, print), uploaded).active == 3
