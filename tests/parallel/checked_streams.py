"""Streams of a GPU beside Triton's interpreter: an access that does not wait for an earlier one fails.

Everything still runs at once, on the host. But each operation of PyTorch, kernel, collective and read by the host is
noted with the stream on which a GPU would run it. A stream, like the host, knows how much of each stream's work has
ended before what it is given next. An access to memory fails if its stream does not know that the last write has ended,
or, for a write, the reads since. So does the release of memory that another stream may still use.

Not seen: launches' own tables and pinned slots, what is copied from the host, the device on which a tensor lies, waits
that only CUDA's calls do, DDP and FSDP2.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from horovod.torch import mpi_ops, optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from horovod_quant.kernels.triton import arguments, launching
from horovod_quant.torch import buckets, compressor, control, device, exchange


class Clock:
    """Knows how much of each stream's work has ended; by the streams' handles."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def merge(self, other: Any) -> None:
        for handle, count in other.seen.items():
            self.seen[handle] = max(count, self.seen.get(handle, 0))

    def knows(self, access: Access) -> bool:
        return self.seen.get(access.stream.cuda_stream, 0) >= access.count


HOST = Clock()


class Stream(Clock):
    def __init__(self, device: Any = None, priority: int = 0, name: str = "the package's stream") -> None:
        super().__init__()
        self.cuda_stream, self.name = id(self), name

    def launch(self) -> int:
        """Note an operation that is launched now, after all that has ended."""
        self.merge(HOST)
        self.seen[self.cuda_stream] = self.seen.get(self.cuda_stream, 0) + 1
        return self.seen[self.cuda_stream]

    wait_stream = wait_event = Clock.merge

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event(Clock):
    def record(self, stream: Stream | None = None) -> None:
        self.seen = dict((stream or current()).seen)

    def query(self) -> bool:
        HOST.merge(self)
        return True

    synchronize = query


class Access(NamedTuple):
    low: int
    high: int
    stream: Stream
    count: int
    writes: bool
    place: str


class Memory:
    """A tensor's storage: who has accessed it, and on which stream it was allocated."""

    def __init__(self, low: int, size: int, owner: Stream) -> None:
        self.low, self.high, self.owner = low, low + size, owner
        self.is_pinned = False
        self.kept_for: set[Stream] = {owner}
        self.accesses: list[Access] = []


DEFAULT, CALLER, HOROVOD = (
    Stream(name=name) for name in ("the default stream", "the caller's stream", "Horovod's stream")
)
_lock = threading.RLock()
_memories: dict[int, Memory] = {}
_lows: list[int] = []
_thread = threading.local()
errors: list[str] = []
"""Of what has been released, where nothing can be raised."""


def current(device: Any = None) -> Stream:
    return getattr(_thread, "stream", DEFAULT)


@contextlib.contextmanager
def switched(stream: Stream) -> Iterator[None]:
    before, _thread.stream = current(), stream
    try:
        yield
    finally:
        _thread.stream = before


def _place() -> str:
    """The innermost lines of the package, or of the script."""
    frames = [each for each in traceback.extract_stack() if __file__ != each.filename]
    ours = [each for each in frames if "horovod_quant/" in each.filename] or frames
    lines = "; ".join(f"{each.filename[-28:]}:{each.lineno} {each.line}" for each in ours[-3:])
    return f"{current().name} of {threading.current_thread().name}, {lines}"


def _find(address: int) -> Memory | None:
    number = bisect.bisect_right(_lows, address) - 1
    memory = _memories[_lows[number]] if number >= 0 else None
    return memory if memory is not None and address < memory.high else None


def register(tensor: torch.Tensor, owner: Stream) -> Memory | None:
    """Note new memory, of a stream's allocator."""
    storage = tensor.untyped_storage()
    low, size = storage.data_ptr(), storage.nbytes()
    if not low or not size:
        return None
    if low in _memories:
        _forget(_memories[low])
    memory = _memories[low] = Memory(low, size, owner)
    bisect.insort(_lows, low)
    weakref.finalize(storage, _released, memory).atexit = False
    return memory


def _forget(memory: Memory) -> None:
    if _memories.get(memory.low) is memory:
        del _memories[memory.low], _lows[bisect.bisect_left(_lows, memory.low)]


def _released(memory: Memory) -> None:
    with _lock:
        _forget(memory)
        for each in memory.accesses:
            if each.stream not in memory.kept_for and not (memory.owner.knows(each) or HOST.knows(each)):
                errors.append(f"RELEASED while {each.stream.name} may use it\n  {each.place}\n  {_place()}")


def access(low: int, high: int, stream: Stream, writes: bool) -> None:
    memory = _find(low)
    if memory is None or low >= high:
        return
    if errors:
        raise AssertionError(errors.pop())
    count, place = stream.launch(), _place()
    others = [each for each in memory.accesses if each.low < high and low < each.high]
    for each in others:
        if (writes or each.writes) and not stream.knows(each):
            action = "written" if each.writes else "read"
            raise AssertionError(
                f"NOT WAITED FOR: {action} on {each.place}\n  {'written' if writes else 'read'} on {place}"
            )
    done = [each for each in others if writes and low <= each.low and each.high <= high]
    memory.accesses = [each for each in memory.accesses if each not in done]
    memory.accesses.append(Access(low, high, stream, count, writes, place))


def access_tensor(tensor: torch.Tensor, stream: Stream, writes: bool) -> None:
    storage = tensor.untyped_storage()
    if tensor.is_contiguous():
        low = tensor.data_ptr()
        access(low, low + tensor.numel() * tensor.element_size(), stream, writes)
    else:
        access(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), stream, writes)


def read_by_host(tensor: torch.Tensor) -> None:
    """As CUDA does: on the current stream, for which the host waits; pinned memory is read without."""
    memory = _find(tensor.data_ptr())
    if memory is None or getattr(_thread, "paused", False):
        return
    if memory.is_pinned:
        late = [each for each in memory.accesses if each.writes and not HOST.knows(each)]
        assert not late, f"NOT WAITED FOR: written on {late[-1].place}\n  read by the host, {_place()}"
        return
    stream = current()
    access_tensor(tensor, stream, writes=False)
    if getattr(_thread, "in_hook", False) and stream in (DEFAULT, CALLER):
        raise AssertionError(f"THE HOST WAITS in a hook: {_place()}")
    HOST.merge(stream)


class Operations(TorchDispatchMode):
    """Notes PyTorch's operations on the current stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            with _lock:
                read_by_host(args[0])
            return func(*args, **kwargs)
        passed = dict(zip((each.name for each in func._schema.arguments), args), **kwargs)
        with _lock:
            if not func.is_view and func._overloadpacket is not torch.ops.aten.set_:
                for each in func._schema.arguments:
                    for tensor in _tensors(passed.get(each.name)):
                        access_tensor(
                            tensor, current(), each.alias_info is not None and each.alias_info.is_write
                        )
        out = func(*args, **kwargs)
        if not func.is_view:
            known = {t.untyped_storage()._cdata for value in passed.values() for t in _tensors(value)}
            with _lock:
                for tensor in _tensors(out):
                    if tensor.untyped_storage()._cdata not in known and register(tensor, current()):
                        access_tensor(tensor, current(), writes=True)
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.layout is torch.strided else []
    return [each for one in value for each in _tensors(one)] if isinstance(value, (list, tuple)) else []


def _launched(kernel: Any, jobs: Any, constants: Any) -> None:
    ranges = [each for job in jobs.jobs for each in job.ranges()]
    for rows in jobs.rows:
        for pairs, writes in ((rows.read, False), (rows.written, True)):
            for lows, highs in pairs:
                both = zip(
                    torch.as_tensor(lows).reshape(-1).tolist(), torch.as_tensor(highs).reshape(-1).tolist()
                )
                ranges += [(low, high, writes) for low, high in both]
    with _lock:
        for low, high, writes in ranges:
            access(low, high, current(), writes)
    _thread.paused = True
    try:
        with _disable_current_modes():
            return _launch(kernel, jobs, constants)
    finally:
        _thread.paused = False


_launch = launching.Kernel.__call__


def _copying(self: device.Copying, source: torch.Tensor) -> None:
    """As `Copying` does on a GPU."""
    self._copy = source.clone()
    with _lock:
        if memory := _find(self._copy.data_ptr()):
            memory.is_pinned = True
    self._event = torch.cuda.Event()
    self._event.record()


def _filled(self: Any, numbers: Any) -> torch.Tensor:
    """Control tensors are the host's alone."""
    _thread.paused = True
    with _disable_current_modes():
        tensor = _fill(self, numbers)
    _thread.paused = False
    return tensor


_fill = control.ControlTensor.filled
_ended: dict[Any, Event] = {}
"""What the host knows once a collective of tensors has ended, by its handle."""


def _enqueued(function: Any, tensors_of: Any) -> Any:
    @functools.wraps(function)
    def enqueue(first: Any, *args: Any, **options: Any) -> Any:
        handle = function(first, *args, **options)
        tensors = [
            each for each in tensors_of(first) if isinstance(each, torch.Tensor) and _find(each.data_ptr())
        ]
        if tensors:
            with _lock:
                HOROVOD.merge(current())
                for tensor in tensors:
                    access_tensor(tensor, HOROVOD, writes=True)
                _ended[handle] = HOROVOD.record_event()
        return handle

    return enqueue


def _synchronized(handle: Any) -> Any:
    output = _synchronize(handle)
    with _lock:
        after = _ended.pop(handle, None)
        for tensor in _tensors(output):
            memory = _find(tensor.data_ptr())
            if after is None and memory is not None:  # of a tensor of the host's
                _forget(memory)
            elif after is not None and memory is None:
                register(tensor, HOROVOD)
        if after is not None:
            after.synchronize()
    return output


_synchronize = mpi_ops.synchronize


def _uploaded(function: Any) -> Any:
    def on_device(array: Any, device: Any) -> torch.Tensor:
        tensor = function(array, device)
        with _lock:
            if register(tensor, current()):
                access_tensor(tensor, current(), writes=True)
        return tensor

    return on_device


def _hook(function: Any, is_hook: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        _thread.in_hook = is_hook()
        try:
            return function(*args)
        finally:
            _thread.in_hook = False

    return call


def _read(function: Any) -> Any:
    def read(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        with _lock:
            read_by_host(tensor)
        return function(tensor, *args, **options)

    return read


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    with _lock:
        if memory := _find(tensor.data_ptr()):
            memory.kept_for.add(stream)


def install() -> None:
    """Check this process's streams from here on; the main thread computes on a stream other than the default one."""
    _thread.stream = CALLER
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream, cuda.current_stream = Stream, Event, switched, current
    tensor: Any = torch.Tensor
    tensor.record_stream = _record_stream
    tensor.numpy, tensor.tolist = _read(tensor.numpy), _read(tensor.tolist)
    tensor.is_cuda, tensor.pin_memory = True, tensor.clone
    memory: Any = device.DeviceMemory
    make = memory.__init__

    def init(self: Any, *args: Any) -> None:
        make(self, *args)
        self._streams = device._Streams(self.device)

    memory.__init__ = init
    device.Copying.__init__ = _copying  # type: ignore[method-assign]
    control.ControlTensor.filled = _filled  # type: ignore[method-assign]
    launching.Kernel.__call__ = _launched  # type: ignore[method-assign]
    for module in (arguments, launching):
        module.on_device = _uploaded(module.on_device)  # type: ignore[attr-defined]
    launching.stream_of = lambda device: current().cuda_stream
    exchange.launch = _enqueued(exchange.launch, lambda request: [request.array])
    for module, suffix in ((mpi_ops, ""), (optimizer, "_")):
        for name, tensors_of in (("allreduce", lambda tensor: [tensor]), ("grouped_allreduce", list)):
            function = f"{name}_async{suffix}"
            setattr(module, function, _enqueued(getattr(module, function), tensors_of))
    optimizer.synchronize = mpi_ops.synchronize = _synchronized
    advance = exchange.Group.advance

    def advance_noted(group: exchange.Group) -> bool:
        with Operations():
            return advance(group)

    exchange.Group.advance = advance_noted  # type: ignore[method-assign]
    method: Any = compressor.Compressor
    method.compress = _hook(method.compress, buckets.in_pass)
    method.decompress = _hook(method.decompress, lambda: True)
    Operations().__enter__()
