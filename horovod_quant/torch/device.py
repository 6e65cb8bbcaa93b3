"""Tensors of a GPU as the arrays of an exchange. docs/gpu.md lists which stream hands what to which."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels.buffer_view import BufferView, as_array
from horovod_quant.schemes.base import Decoded, Exchange, Gradient, Scheme, Workers, with_explained_errors
from horovod_quant.torch.memory import BUFFER_VIEW_TYPES, Destination, Memory


class Copying:
    """Asked for before a collective: to be resumed when what it sends has arrived in the host's memory."""

    def __init__(self, source: torch.Tensor) -> None:
        self._event = None
        if source.device.type == "cpu":
            self._copy = source
            return
        self._copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def array(self) -> np.ndarray:
        """The copy; waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


class DeviceMemory(Memory):
    """Tensors of a GPU, or, for tests, those of Triton's interpreter.

    Kernels run on a stream of their own, beside the backward pass. The host waits for it nowhere here.

    Args:
        device: the GPU.
        takes_tensors: whether Horovod's collectives take its tensors; else what is sent is copied to the host.
    """

    decodes_together = True

    def __init__(self, device: torch.device, takes_tensors: bool) -> None:
        from horovod_quant.kernels import triton

        self.kernels: Any = triton
        self.device = device
        self.takes_tensors = takes_tensors
        self._streams = _Streams(device) if device.type == "cuda" else None

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == self.device and tensor.is_contiguous():
            return tensor.detach().view(-1) if tensor.requires_grad else tensor.view(-1)
        return tensor.detach().to(self.device, non_blocking=True).contiguous().view(-1)

    def taken(self, tensor: torch.Tensor, before: Any) -> torch.Tensor | BufferView:
        """A `BufferView` of the gradient's own memory, if it is contiguous and here."""
        streams = self._streams
        kind = BUFFER_VIEW_TYPES.get(tensor.dtype)
        if kind is None or not _is_plain(tensor, self.device):
            taken: torch.Tensor | BufferView = self.flat(tensor)
            if streams is not None:
                streams.reads(taken)
            return taken
        if streams is not None:
            streams.reads(tensor)
        if type(before) is not BufferView:
            before = BufferView(kind, tensor.numel(), self.flat)
        return before.at(tensor.data_ptr(), tensor, tensor.untyped_storage())

    def can_fill(self, tensor: torch.Tensor, taken: Any) -> bool:
        return type(taken) is BufferView

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Each kernel is launched once for all tensors of a group, after what `catch_up` and `wait_for` have said."""
        if self._streams is None:
            with self.kernels.batch():
                yield
            return
        with torch.cuda.stream(self._streams.own), self.kernels.batch():
            yield

    def hand_over(self, *results: Any) -> None:
        """What is launched from now on, on the caller's stream, runs after the kernels."""
        if self._streams is not None:
            self._streams.hand_over(results)

    def catch_up(self) -> None:
        """Kernels run after what has been launched so far on the caller's stream."""
        if self._streams is not None:
            self._streams.catch_up()

    def mark(self) -> Sequence[Any]:
        """An event on each stream that gradients come from: by the time the thread gets there, more is behind it."""
        return () if self._streams is None else self._streams.events()

    def wait_for(self, mark: Any) -> None:
        for event in mark:
            self._streams.own.wait_event(event)  # type: ignore[union-attr]

    def begun(self, scheme: Scheme, gradients: Sequence[Gradient], workers: Workers) -> Exchange:
        exchange = with_explained_errors(scheme, gradients, workers, self.kernels, "tensors of a GPU")
        return _of_one(exchange) if workers.size == 1 else exchange

    def resumed(self, exchange: Exchange, on_host: bool) -> Exchange:
        """They are tensors, unless ``on_host``, or Horovod takes no tensors of the device."""
        answer: Any = None
        uploaded: list[tuple[torch.Tensor, np.ndarray]] = []
        while True:
            try:
                with self.working():
                    request: Any = exchange.send(answer)
            except StopIteration as stop:
                return _with_known_count(stop.value, uploaded)
            uploaded = []
            if self.takes_tensors and not on_host:
                answer = yield request
                self._keep(answer)
            else:
                with self._on_stream():
                    copying: Any = Copying(request.array)
                yield copying
                answer = self._back((yield request._replace(array=copying.array())), uploaded)

    def write(self, decoded: Decoded, index: int, factor: float, place: Destination) -> None:
        """The tensor is on the device."""
        destination = place.destination
        if place.array is not None:
            decoded.write(index, factor, as_array(place.array))
            return
        if destination.is_contiguous():
            decoded.write(index, factor, self.flat(destination))
            return
        from horovod_quant.kernels.triton.launching import settle

        target = torch.empty(destination.shape, dtype=destination.dtype, device=self.device)
        decoded.write(index, factor, self.flat(target))
        settle([target])
        destination.copy_(target)

    def array_of(self, place: Destination) -> torch.Tensor | BufferView | None:
        if place.array is not None:
            return place.array
        return self.flat(place.destination) if place.destination.is_contiguous() else None

    def _on_stream(self) -> Any:
        return contextlib.nullcontext() if self._streams is None else torch.cuda.stream(self._streams.own)

    def _keep(self, answer: Any) -> None:
        """Horovod's tensors belong to another stream, which must not take them back while kernels read them."""
        if self._streams is not None:
            for tensor in answer if isinstance(answer, list) else [answer]:
                tensor.record_stream(self._streams.own)

    def _back(self, answer: Any, uploaded: list[tuple[torch.Tensor, np.ndarray]]) -> Any:
        """The answer on the device; ``uploaded`` gets what is there, and what it was on the host."""
        from horovod_quant.kernels.triton.launching import on_device

        if isinstance(answer, list):
            return [self._back(array, uploaded) for array in answer]
        with self._on_stream():
            array = np.ascontiguousarray(answer)
            tensor = on_device(array, self.device)
        uploaded.append((tensor, array))
        return tensor


_STREAMS_AT_MOST = 8
"""That are remembered: backward passes run on one or two."""


class _Streams:
    """The package's own stream, and the streams on which gradients are computed.

    Attributes:
        own: the package's.
    """

    def __init__(self, device: torch.device) -> None:
        self.own = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._lock = threading.Lock()
        self._computing: dict[int, torch.cuda.Stream] = {}

    def reads(self, tensor: Any) -> None:
        """Kernels will read the tensor, which has been computed on the caller's stream.

        Its memory must not be given to others before, even if the caller releases it.
        """
        tensor.record_stream(self.own)
        self.note_current()

    def note_current(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        with self._lock:
            self._computing.pop(stream.cuda_stream, None)
            self._computing[stream.cuda_stream] = stream
            if len(self._computing) > _STREAMS_AT_MOST:
                del self._computing[next(iter(self._computing))]

    def events(self) -> list[Any]:
        """One on each stream that gradients have been computed on lately, behind what was launched there so far."""
        self.note_current()
        with self._lock:
            streams = list(self._computing.values())
        return [stream.record_event() for stream in streams if stream != self.own]

    def catch_up(self) -> None:
        """Kernels run after what has been launched so far on the caller's stream."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self.own:
            self.own.wait_stream(stream)

    def hand_over(self, results: Sequence[Any]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self.own)
        for tensor in results:
            tensor.record_stream(stream)


def _is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.is_contiguous() and not tensor.is_neg()


def _of_one(exchange: Exchange) -> Exchange:
    """One worker is the only one that has contributed: the host need not ask the GPU."""
    return _with_count((yield from exchange), 1)


def _with_count(decoded: Decoded, active: int) -> Decoded:
    decoded.active = active
    return decoded


def _with_known_count(decoded: Decoded, uploaded: Sequence[tuple[torch.Tensor, np.ndarray]]) -> Decoded:
    """With the number of workers as the host has received it, where that is what the scheme has found on the GPU.

    Otherwise the host will have to wait for the GPU to read it.
    """
    active = decoded.active
    if not isinstance(active, torch.Tensor):
        return decoded
    address = active.data_ptr()
    for tensor, array in uploaded:
        offset = address - tensor.data_ptr()
        if 0 <= offset < array.nbytes and active.dtype == tensor.dtype:
            return _with_count(decoded, int(array.reshape(-1)[offset // array.itemsize]))
    return decoded
