"""Where the arrays of an exchange are: numpy arrays in the host's memory, or tensors on a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Callable, Protocol

import numpy as np
import torch

from horovod_quant import kernels as kernel_backends
from horovod_quant.frontends.arguments import require_no_host
from horovod_quant.kernels import notices
from horovod_quant.kernels.buffer_view import BufferView, as_array
from horovod_quant.kernels.segments import segment_kernels
from horovod_quant.schemes.base import Decoded, Exchange, Gradient, Scheme, Workers

TRITON = "triton"

STAGING = "HOROVOD_QUANT_STAGING"
"""An environment variable, the same on all workers: 1 gives Horovod no tensors of a GPU, e.g. because workers share
one, which NCCL refuses.
"""

_NO_CONTEXT = contextlib.nullcontext()

_TENSOR_BITS = {torch.bfloat16: torch.int16}

BUFFER_VIEW_TYPES = {
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


class Destination(Protocol):
    """What a result is decoded into.

    Attributes:
        destination: a tensor of any layout.
        array: the flat array of its memory, or a `BufferView` of it; None if there is none.
    """

    destination: torch.Tensor
    array: Any


class Memory(Protocol):
    """Where an exchange computes.

    Attributes:
        kernels: the backend.
        device: where its arrays are.
        takes_tensors: whether Horovod's collectives get its tensors as they are.
        decodes_together: whether decoding a whole group at once is faster than each gradient when it is asked for.
    """

    kernels: Any
    device: torch.device
    takes_tensors: bool
    decodes_together: bool

    def flat(self, tensor: torch.Tensor) -> Any:
        """The tensor's elements as an array for kernels.

        They share the tensor's memory, if it is contiguous and on the device.
        """

    def taken(self, tensor: torch.Tensor, before: Any) -> Any:
        """A gradient's elements, for the exchange, whose kernels run after what has been launched so far.

        Args:
            tensor: the gradient.
            before: what was returned for an earlier one of the same type and shape, and is no longer used; or None.
        """

    def can_fill(self, tensor: torch.Tensor, taken: Any) -> bool:
        """Whether what `taken` has returned is the tensor's own memory, into which numbers can be decoded."""

    def working(self) -> AbstractContextManager[Any]:
        """A context for calls of kernels."""

    def hand_over(self, *results: Any) -> None:
        """To be called when results have been computed that others will read.

        Args:
            results: tensors that were made in `working`, and that others will read.
        """

    def catch_up(self) -> None:
        """To be called when others have computed what kernels will read."""

    def mark(self) -> Any:
        """What has been launched so far of what computes the gradients that were taken, for `wait_for`."""

    def wait_for(self, mark: Any) -> None:
        """To be called, by any thread, before kernels that read what was computed before a mark."""

    def decodes_early(self, places: Sequence[Destination]) -> bool:
        """Whether results may be decoded by another thread than the one that asks for them."""
        return False

    def begun(self, scheme: Scheme, gradients: Sequence[Gradient], workers: Workers) -> Exchange:
        """A scheme's exchange of arrays of this memory, at its start."""

    def resumed(self, exchange: Exchange, on_host: bool) -> Exchange:
        """An exchange whose requests and answers are what those who perform collectives take and return.

        Args:
            exchange: of a scheme, on this memory's arrays.
            on_host: whether they shall be arrays in the host's memory in any case.
        """

    def write(self, decoded: Decoded, index: int, factor: float, place: Destination) -> None:
        """Decodes a gradient of a group, times ``factor``; in a context of `working`."""

    def array_of(self, place: Destination) -> Any:
        """A destination's own memory, or a `BufferView` of it; None if it is not flat, or elsewhere."""

    def write_all(self, decoded: Decoded, factor: float, places: Sequence[Destination]) -> None:
        """`write` for all gradients of a group."""
        arrays = list(map(self.array_of, places))
        if any(array is None for array in arrays):
            for index, place in enumerate(places):
                self.write(decoded, index, factor, place)
        else:
            decoded.decode(range(len(arrays)), factor, arrays)


class HostMemory(Memory):
    """numpy arrays; gradients on a GPU are copied, for which the host waits.

    Kernels have ended when they return, so that nobody has to be told.

    Args:
        kernels: a backend for them.
    """

    takes_tensors = False
    decodes_together = False
    device = torch.device("cpu")

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self._takes_spans = segment_kernels(kernels).wants_spans

    def flat(self, tensor: torch.Tensor) -> np.ndarray:
        """bfloat16 as the uint16 that the kernels take for it."""
        detached = tensor.detach() if tensor.requires_grad else tensor
        if not _is_plain(detached):
            detached = detached.cpu().contiguous()
        if detached.dtype in _TENSOR_BITS:
            return detached.view(_TENSOR_BITS[detached.dtype]).numpy().view(np.uint16).reshape(-1)
        array = detached.numpy()
        return array if array.ndim == 1 else array.reshape(-1)

    def taken(self, tensor: torch.Tensor, before: Any) -> np.ndarray | BufferView:
        """A `BufferView` of the gradient's own memory, if the kernels take one."""
        if not (self._takes_spans and _is_plain(tensor)):
            return self.flat(tensor)
        if type(before) is not BufferView:
            before = BufferView(BUFFER_VIEW_TYPES[tensor.dtype], tensor.numel(), self.flat)
        address = tensor.data_ptr()
        # Without elements, not at a multiple of their size, or with others than the memory says.
        if not address or address % before.dtype.itemsize or tensor.is_neg():
            return self.flat(tensor)
        # A script may give the tensor other memory (``tensor.data = ...``) before the kernels have run.
        return before.at(address, tensor, tensor.untyped_storage())

    def can_fill(self, tensor: torch.Tensor, taken: Any) -> bool:
        return type(taken) is BufferView or _is_plain(tensor)

    def working(self) -> AbstractContextManager[Any]:
        return _NO_CONTEXT

    def hand_over(self, *results: Any) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def mark(self) -> None:
        pass

    def wait_for(self, mark: Any) -> None:
        pass

    def decodes_early(self, places: Sequence[Destination]) -> bool:
        """Where all are flat and in the host's memory."""
        return all(place.array is not None for place in places)

    def begun(self, scheme: Scheme, gradients: Sequence[Gradient], workers: Workers) -> Exchange:
        return scheme.begin(gradients, workers, self.kernels)

    def resumed(self, exchange: Exchange, on_host: bool) -> Exchange:
        return exchange

    def write(self, decoded: Decoded, index: int, factor: float, place: Destination) -> None:
        """The tensor may be on any device."""
        array = as_array(self.array_of(place))
        if array is not None:
            decoded.write(index, factor, array)
            return
        destination = place.destination
        target = torch.empty(destination.shape, dtype=destination.dtype, device=self.device)
        decoded.write(index, factor, self.flat(target))
        destination.copy_(target)

    def array_of(self, place: Destination) -> np.ndarray | BufferView | None:
        if place.array is not None:
            return place.array
        return self.flat(place.destination) if _is_plain(place.destination) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is the host's, and flat."""
    return tensor.is_cpu and tensor.is_contiguous()


def check(kernels: str, schemes: Iterable[Scheme]) -> None:
    """Raises what `choose` would raise for any gradient.

    Raises:
        ValueError: there are no such kernels, or not for such schemes.
        ImportError: they were asked for by name and cannot be loaded.
    """
    if kernels != TRITON:
        if not isinstance(kernels, str) or kernels not in ("auto", *kernel_backends.BACKENDS):
            usable = ", ".join(map(repr, ("auto", *sorted(kernel_backends.BACKENDS))))
            raise ValueError(
                f"kernels={kernels!r}: no such backend; use {usable}, or {TRITON!r} for gradients on a GPU"
            )
        kernel_backends.get(kernels)
        return
    from horovod_quant.kernels import triton  # noqa: F401

    for scheme in schemes:
        require_no_host(scheme, TRITON)


def choose(
    kernels: str,
    device: torch.device,
    schemes: Iterable[Scheme] = (),
    has_nccl: Callable[[], bool] | None = None,
) -> Memory:
    """The memory for gradients on a device.

    Args:
        kernels: the backend that was asked for. ``"auto"`` takes Triton's kernels for gradients on a GPU; others but
            ``"triton"`` work in the host's memory.
        device: that of the gradients.
        schemes: those that may exchange them; some need the host's memory.
        has_nccl: whether collectives take tensors of a GPU; by default Horovod is asked.

    Raises:
        ValueError: Triton's kernels were asked for by name, and the gradients are in the host's memory.
    """
    name = (os.environ.get("HOROVOD_QUANT_KERNELS") or "auto") if kernels == "auto" else kernels
    wants_triton = name == TRITON or (name == "auto" and device.type == "cuda" and _has_triton())
    if wants_triton and all(scheme.host_requirement() is None for scheme in schemes):
        return _device_memory(device, (has_nccl or _horovod_has_nccl)())
    return HostMemory(kernel_backends.get(kernels))


def _horovod_has_nccl() -> bool:
    import horovod.torch as hvd

    return bool(hvd.nccl_built())


@functools.cache
def _device_memory(device: torch.device, has_nccl: bool) -> Memory:
    from horovod_quant.kernels import triton
    from horovod_quant.torch.device import DeviceMemory

    if device.type == "cpu" and not triton.INTERPRETED:
        raise ValueError(
            "kernels='triton': the gradients are in host memory, where Triton's kernels cannot run; use "
            "kernels='auto', or train on a GPU"
        )
    takes_tensors = device.type == "cpu" or has_nccl
    return DeviceMemory(device, takes_tensors and not is_staging_asked_for())


def is_staging_asked_for() -> bool:
    return os.environ.get(STAGING, "0") not in ("", "0")


@functools.cache
def _has_triton() -> bool:
    try:
        from horovod_quant.kernels import triton  # noqa: F401
    except ImportError as error:
        notices.warn(f"gradients on a GPU are quantized on the host: {error}", stacklevel=3)
        return False
    return True
