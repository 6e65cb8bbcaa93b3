"""Streams wait for each other: what is read has been written. CUDA's streams are simulated; work is numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from horovod_quant.frontends.stats import TrafficCounter  # noqa: E402
from horovod_quant.schemes.base import Allgather, Decoded, Workers  # noqa: E402
from horovod_quant.torch import averaging, control, device, driver, memory  # noqa: E402


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

    def wait_stream(self, other: Any) -> None:
        for handle, count in other.seen.items():
            self.seen[handle] = max(count, self.seen.get(handle, 0))

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(seen=dict(self.seen))

    def wait_event(self, event: Any) -> None:
        self.wait_stream(event)

    def runs_after(self, launched: tuple[int, int]) -> bool:
        handle, count = launched
        return self.seen.get(handle, 0) >= count


class Tensor:
    """Notes which streams it is kept for."""

    is_cuda, device = True, None

    def __init__(self) -> None:
        self.kept_for: list[Stream] = []

    def record_stream(self, stream: Stream) -> None:
        self.kept_for.append(stream)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(stream=Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.stream)

    @contextlib.contextmanager
    def switched(stream: Stream) -> Iterator[None]:
        before, found.stream = found.stream, stream
        yield
        found.stream = before

    monkeypatch.setattr(torch.cuda, "stream", switched)
    return found


def test_kernels_run_after_what_has_computed_the_gradients(current: SimpleNamespace) -> None:
    streams, computed, tensors = device._Streams(torch.device("cuda", 0)), [], []
    for stream in (current.stream, Stream(), Stream()):
        current.stream = stream
        computed.append(stream.launch())
        tensors.append(Tensor())
        streams.reads(tensors[-1])
    events = streams.events()
    late = current.stream.launch()
    current.stream = Stream()  # as for the progress thread
    assert not any(streams.own.runs_after(each) for each in computed)
    for event in events:
        streams.own.wait_event(event)
    assert all(streams.own.runs_after(each) for each in computed)
    assert all(tensor.kept_for == [streams.own] for tensor in tensors)
    assert not streams.own.runs_after(late)


def test_kernels_run_after_what_the_caller_has_launched(current: SimpleNamespace) -> None:
    streams = device._Streams(torch.device("cuda", 0))
    launched = current.stream.launch()
    streams.catch_up()
    assert streams.own.runs_after(launched)


def test_few_streams_are_remembered_and_kernels_run_after_all(current: SimpleNamespace) -> None:
    streams, computed = device._Streams(torch.device("cuda", 0)), []
    for stream in [Stream() for _ in range(100)]:
        current.stream = stream
        computed.append(stream.launch())
        streams.note_current()
    events = streams.events()
    assert len(events) == device._STREAMS_AT_MOST
    for event in events:
        streams.own.wait_event(event)
    assert all(map(streams.own.runs_after, computed))


def test_callers_run_after_the_kernels_and_keep_results(current: SimpleNamespace) -> None:
    streams, result = device._Streams(torch.device("cuda", 0)), Tensor()
    decoded = streams.own.launch()
    streams.hand_over([result])
    assert current.stream.runs_after(decoded)
    assert result.kept_for == [current.stream]


def test_the_own_stream_does_not_wait_for_itself(current: SimpleNamespace) -> None:
    streams = device._Streams(torch.device("cuda", 0))
    current.stream = streams.own
    streams.own.wait_stream = None  # type: ignore[method-assign]
    streams.catch_up()
    assert streams.events() == []


def test_numbers_of_a_control_tensor_wait_for_no_other_work(current: SimpleNamespace) -> None:
    caller, read_on = current.stream, []

    def tolist() -> list[float]:
        read_on.append(current.stream)
        return [1.0, 2.0]

    on_gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), tolist=tolist)
    assert control.numbers_of(on_gpu) == control.numbers_of(torch.tensor([1.0, 2.0])) == [1.0, 2.0]
    assert read_on[0] is not caller
    control._reading_stream.cache_clear()


def test_results_that_come_before_they_have_arrived_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd = pytest.importorskip("horovod.torch")
    monkeypatch.setenv(memory.EARLY_ENDS, "1")
    assert not memory._horovod_has_nccl()
    monkeypatch.setattr(hvd, "nccl_built", lambda: 1)
    with pytest.raises(ValueError, match="unset it on all workers"):
        memory._horovod_has_nccl()
    monkeypatch.setenv(memory.STAGING, "1")
    assert memory._horovod_has_nccl()


def test_ddps_buckets_are_averaged_after_what_has_computed_them(current: SimpleNamespace) -> None:
    averages = driver.Driver(SimpleNamespace(close=lambda: None), torch.device("cuda", 0))  # type: ignore[arg-type]
    computed = current.stream.launch()
    found: list[bool] = []
    averages.submit(lambda: found.append(current.stream.runs_after(computed)), torch.zeros(3)).wait()
    assert found == [True]


def test_ddps_collectives_and_kernels_run_after_each_other(current: SimpleNamespace) -> None:
    """With NCCL, which orders a collective by the stream that is current when it is launched."""
    streams, launched, ordered = device._Streams(torch.device("cuda", 0)), [], []
    memory = SimpleNamespace(
        working=lambda: torch.cuda.stream(streams.own), resumed=lambda exchange, on_host: exchange
    )

    def perform(request: Any) -> None:
        ordered.append(current.stream.runs_after(launched[-1]))
        launched.append(current.stream.launch())

    def exchange() -> Any:
        for _ in range(2):
            launched.append(streams.own.launch())
            yield Allgather(np.zeros(4, np.int32), parts=[16])
            ordered.append(streams.own.runs_after(launched[-1]))
        return Decoded(2, print)

    averager = object.__new__(averaging.Averager)
    averager._traffic = TrafficCounter()
    averager.groups = SimpleNamespace(workers=Workers(0, 2), perform=perform)  # type: ignore[assignment]
    averager.run(exchange(), ["weight"], memory)  # type: ignore[arg-type]
    assert ordered == [True] * 4


class OrderedMemory:
    """Memory of a device whose kernels do nothing but note what they run after.

    Attributes:
        in_order: whether the kernels ran after what was launched on the caller's stream before.
        written: the last kernel.
    """

    kernels, device = None, torch.device("cpu")

    def __init__(self, computed: tuple[int, int]) -> None:
        self._streams, self._computed = device._Streams(torch.device("cuda", 0)), computed
        self.in_order: list[bool] = []
        self.catch_up = self._streams.catch_up

    def begun(self, *arguments: Any) -> Iterator[Any]:
        self.in_order.append(self._streams.own.runs_after(self._computed))
        yield from ()
        return Decoded(2, print)

    def resumed(self, exchange: Any, on_host: bool) -> Any:
        return exchange

    def working(self) -> Any:
        return torch.cuda.stream(self._streams.own)

    def taken(self, tensor: Any, destination: Any) -> Any:
        return tensor

    def destination_of(self, tensor: Any, taken: Any) -> Any:
        return tensor

    def decode(self, *arguments: Any) -> None:
        self.written = self._streams.own.launch()

    def hand_over(self) -> None:
        self._streams.hand_over([])


def made_averager() -> Any:
    averager = object.__new__(averaging.Averager)
    averager._traffic = TrafficCounter()
    averager.groups = SimpleNamespace(workers=Workers(0, 2))  # type: ignore[assignment]
    return averager


def test_ddps_kernels_run_between_the_gradients_and_what_follows(current: SimpleNamespace) -> None:
    memory = OrderedMemory(current.stream.launch())
    group = SimpleNamespace(
        take=lambda tensors, memory: None, scheme=None, gradients=[], names=[], destinations=[], hooked=[]
    )
    made_averager()._exchange(group, [], memory)
    assert memory.in_order == [True]
    assert current.stream.runs_after(memory.written)


def test_fsdps_kernels_run_between_the_gradients_and_what_follows(
    current: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from horovod_quant.torch import fsdp

    memory, averager = OrderedMemory(current.stream.launch()), made_averager()
    monkeypatch.setattr(averager, "count", lambda bucket: None)
    monkeypatch.setattr(averager, "memory", lambda device: memory)
    hook = object.__new__(fsdp._IntraMesh)
    hook._state = SimpleNamespace(_averager=averager)  # type: ignore[assignment]
    hook._unit = SimpleNamespace(split=lambda flat: [flat])  # type: ignore[assignment]
    hook._bucket = SimpleNamespace(  # type: ignore[assignment]
        groups=[SimpleNamespace(indices=[0], gradients=[SimpleNamespace(step=0)], names=[])], rest=[]
    )
    hook._reductions = [memory.begun]
    hook._gradients = [[SimpleNamespace(), SimpleNamespace()]]  # type: ignore[list-item]
    hook._reduce(torch.zeros(2), torch.zeros(4), torch.distributed.ReduceOp.AVG)
    assert memory.in_order == [True]
    assert current.stream.runs_after(memory.written)


def test_fsdps_buffers_are_kept_for_the_stream_of_the_hook(current: SimpleNamespace) -> None:
    """PyTorch casts them there after the hook, and has no other reference."""
    from horovod_quant.torch import fsdp

    averager = SimpleNamespace(groups=None, bucket=lambda members: members)
    state = fsdp.State(None, averager)  # type: ignore[arg-type]
    state._run = lambda job: None  # type: ignore[method-assign]
    unit = SimpleNamespace(mesh=SimpleNamespace(local_rank=0), shards=[])
    buffer, current.stream = Tensor(), Stream()
    fsdp._InterNode(state, unit, 0)(buffer)  # type: ignore[arg-type]
    assert buffer.kept_for == [current.stream]


def test_a_count_that_the_host_has_seen_is_not_read_again() -> None:
    received = np.array([5, 6, 7], np.int32)
    uploaded = [(torch.from_numpy(np.zeros(4, np.float32)), np.zeros(4, np.float32))]
    uploaded.append((torch.from_numpy(received.copy()), received))
    decoded = device.Decoded(uploaded[1][0][-1], lambda i, factor, out: out)
    found = device._with_known_count(decoded, uploaded)
    assert type(found.active) is int
    assert found.active == 7
    elsewhere = device.Decoded(torch.ones(1, dtype=torch.int32)[0], lambda i, factor, out: out)
    assert isinstance(device._with_known_count(elsewhere, uploaded).active, torch.Tensor)
    assert device._with_known_count(device.Decoded(3, print), uploaded).active == 3
