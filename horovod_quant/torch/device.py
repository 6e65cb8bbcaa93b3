"""GPU tensors as the arrays of a reduction; docs/gpu.md describes the streams."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels import notices
from horovod_quant.kernels.buffer_view import BufferView, as_array
from horovod_quant.reductions.requests import drive
from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Decoded,
    Exchange,
    Gradient,
    Scheme,
    Workers,
    with_explained_errors,
)
from horovod_quant.torch.memory import BUFFER_VIEW_TYPES, Memory


class Copying:
    """Request to wait for the copy of an input to the host."""

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
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.numpy()


class DeviceMemory(Memory):
    """Tensors on a GPU, or, in tests, of Triton's interpreter.

    Kernels run on a separate stream, concurrent with the backward pass. The host never waits for that stream here.

    Args:
        device: the GPU.
        takes_tensors: whether collectives take its tensors; else their inputs are copied to the host.
    """

    decodes_together = True

    def __init__(self, device: torch.device, takes_tensors: bool) -> None:
        from horovod_quant.kernels import triton

        self.kernels: Any = triton
        self.device = device
        self.takes_tensors = takes_tensors
        self._streams = _Streams(device) if device.type == "cuda" else None
        self._compiled: set[tuple[Scheme, Workers]] = set()

    def is_plain(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device and tensor.is_contiguous() and not tensor.is_neg()

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_plain(tensor):
            return tensor.detach().view(-1) if tensor.requires_grad else tensor.view(-1)
        return tensor.detach().to(self.device, non_blocking=True).resolve_neg().contiguous().view(-1)

    def taken(self, tensor: torch.Tensor, before: Any) -> torch.Tensor | BufferView:
        """Return a `BufferView` of the gradient's memory, or a copy.

        It is a view if the gradient is contiguous and on this device.
        """
        is_viewed = tensor.dtype in BUFFER_VIEW_TYPES and self.is_plain(tensor)
        source = tensor if is_viewed else self.flat(tensor)
        if self._streams is not None:
            self._streams.reads(source)
        if not is_viewed:
            return source
        if type(before) is not BufferView:
            before = BufferView(BUFFER_VIEW_TYPES[tensor.dtype], tensor.numel(), self.flat)
        return before.at(tensor.data_ptr(), tensor, tensor.untyped_storage())

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Launch each kernel once for all tensors of a group.

        It runs after what `catch_up` and `wait_for` ordered before.
        """
        with self._on_stream(), self.kernels.batch():
            yield

    def hand_over(self, *results: Any) -> None:
        """Make the caller's stream wait for the kernels launched so far."""
        if self._streams is not None:
            self._streams.hand_over(results)

    def catch_up(self) -> None:
        """Make kernels wait for the launches so far on the caller's stream."""
        if self._streams is not None:
            self._streams.catch_up()

    def mark(self) -> Sequence[Any]:
        """Record an event on each stream that computes gradients.

        Later work there need not be waited for.
        """
        return () if self._streams is None else self._streams.events()

    def wait_for(self, mark: Any) -> None:
        for event in mark:
            self._streams.own.wait_event(event)  # type: ignore[union-attr]

    def begun(self, scheme: Scheme, gradients: Sequence[Gradient], workers: Workers) -> Exchange:
        if self.device.type == "cuda" and (scheme, workers) not in self._compiled:
            self._compiled.add((scheme, workers))
            self.compile(scheme, gradients, workers)
        exchange = with_explained_errors(scheme, gradients, workers, self.kernels, "tensors of a GPU")
        return _of_one(exchange) if workers.size == 1 else exchange

    def compile(self, scheme: Scheme, gradients: Sequence[Gradient], workers: Workers) -> None:
        """Compile a reduction's kernels in parallel, for such gradients."""
        from horovod_quant.kernels.triton.compiling import compile_kernels_of

        try:
            compile_kernels_of(lambda: self.rehearse(scheme, gradients, workers), str(scheme), self.device)
        except Exception as problem:  # the reduction will raise it, or do without
            notices.log(
                logging.DEBUG, "horovod_quant: %s: kernels are not compiled ahead: %r", scheme, problem
            )

    def rehearse(self, scheme: Scheme, gradients: Sequence[Gradient], workers: Workers) -> None:
        """Run a reduction that receives zeros; decode into new memory.

        Only for `compile_kernels_of`: kernels would update the states.
        """
        with self.working():
            reduction = scheme.begin(gradients, workers, self.kernels)
            decoded: Decoded = drive(reduction, lambda request: _zeros_for(request, workers))
            outs = [_like(as_array(gradient.buffer)) for gradient in gradients]
            decoded.decode(range(len(outs)), 1.0, outs)

    def resumed(self, exchange: Exchange, on_host: bool) -> Exchange:
        """Yield requests with tensors.

        They have host arrays if ``on_host``, or if collectives take no device tensors.
        """
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

    def settle(self, tensors: Sequence[torch.Tensor]) -> None:
        self.kernels.launching.settle(tensors)

    def _on_stream(self) -> Any:
        return contextlib.nullcontext() if self._streams is None else torch.cuda.stream(self._streams.own)

    def _keep(self, answer: Any) -> None:
        """Keep a collective's output until kernels have read it.

        It was allocated on another stream.
        """
        if self._streams is not None:
            for tensor in answer if isinstance(answer, list) else [answer]:
                tensor.record_stream(self._streams.own)

    def _back(self, answer: Any, uploaded: list[tuple[torch.Tensor, np.ndarray]]) -> Any:
        """Copy a collective's output to the device.

        Append pairs (device tensor, host array) to ``uploaded``.
        """
        if isinstance(answer, list):
            return [self._back(array, uploaded) for array in answer]
        with self._on_stream():
            array = np.ascontiguousarray(answer)
            tensor = self.kernels.launching.on_device(array, self.device)
        uploaded.append((tensor, array))
        return tensor


_STREAMS_AT_MOST = 8
"""Maximum number of recorded streams: backward passes run on one or two."""


class _Streams:
    """The stream of this package's kernels, and the streams that compute gradients.

    Attributes:
        own: the stream of this package's kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self.own = torch.cuda.Stream(device, priority=-1)
        self._device = device
        self._lock = threading.Lock()
        self._computing: dict[int, torch.cuda.Stream] = {}

    def reads(self, tensor: Any) -> None:
        """Record that kernels will read a tensor computed on the caller's stream.

        The allocator must not reuse its memory before, even if the caller releases it.
        """
        tensor.record_stream(self.own)
        self.note_current()

    def note_current(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        with self._lock:
            self._computing.pop(stream.cuda_stream, None)
            self._computing[stream.cuda_stream] = stream
            if len(self._computing) > _STREAMS_AT_MOST:
                self.own.wait_stream(self._computing.pop(next(iter(self._computing))))

    def events(self) -> list[Any]:
        """Record an event on each stream that has recently computed gradients."""
        self.note_current()
        with self._lock:
            streams = list(self._computing.values())
        return [stream.record_event() for stream in streams if stream != self.own]

    def catch_up(self) -> None:
        """Make kernels wait for the launches so far on the caller's stream."""
        stream = torch.cuda.current_stream(self._device)
        if stream != self.own:
            self.own.wait_stream(stream)

    def hand_over(self, results: Sequence[Any]) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self.own)
        for tensor in results:
            tensor.record_stream(stream)


def _zeros_for(request: Any, workers: Workers) -> Any:
    """Return an answer to a request, of the right sizes."""
    array, count = request.array, workers.size_of(request.group)
    if isinstance(request, Allreduce):
        return array
    if isinstance(request, Allgather):
        lengths = request.lengths or [len(array)] * count
    else:
        lengths = [request.splits[workers.rank_in(request.group)]] * count
    zeros = array.new_zeros(max(lengths))
    return [zeros[:length] for length in lengths]


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return new memory with the same alignment to vectors of 16 bytes."""
    before = tensor.data_ptr() % 16 // tensor.element_size()
    return torch.empty(before + len(tensor), dtype=tensor.dtype, device=tensor.device)[before:]


def _of_one(exchange: Exchange) -> Exchange:
    """Set the active worker count to 1.

    With one worker, no read from the GPU is necessary.
    """
    decoded = yield from exchange
    decoded.active = 1
    return decoded


def _with_known_count(decoded: Decoded, uploaded: Sequence[tuple[torch.Tensor, np.ndarray]]) -> Decoded:
    """Replace the GPU's active worker count by the host's copy, if any.

    Otherwise the host has to wait for the GPU to read it.
    """
    active = decoded.active
    if not isinstance(active, torch.Tensor):
        return decoded
    address = active.data_ptr()
    for tensor, array in uploaded:
        offset = address - tensor.data_ptr()
        if 0 <= offset < array.nbytes and active.dtype == tensor.dtype:
            decoded.active = int(array.reshape(-1)[offset // array.itemsize])
            break
    return decoded
