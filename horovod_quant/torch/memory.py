"""Memory of a reduction's arrays: on the host or a GPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Callable

import numpy as np
import torch

from horovod_quant import kernels as kernel_backends
from horovod_quant.frontends.arguments import require_no_host
from horovod_quant.kernels import notices
from horovod_quant.kernels.buffer_view import BufferView
from horovod_quant.kernels.segments import segment_kernels
from horovod_quant.schemes.base import Decoded, Exchange, Gradient, Scheme, Workers

TRITON = "triton"

STAGING = "HOROVOD_QUANT_STAGING"
"""Environment variable, the same on all workers: 1 makes collectives use host memory only.

For example for workers that share a GPU, which NCCL refuses.
"""

EARLY_ENDS = "HOROVOD_ENABLE_ASYNC_COMPLETION"
"""Environment variable by which Horovod ends an operation when NCCL has launched it."""

_NO_CONTEXT = contextlib.nullcontext()

BUFFER_VIEW_TYPES = {
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


class Destination:
    """Memory into which a result is decoded.

    Args:
        destination: a tensor of any layout.
        array: the flat array of its memory, or a `BufferView` of it; None if there is none.
    """

    __slots__ = ("array", "destination")

    def __init__(self, destination: torch.Tensor, array: Any) -> None:
        self.destination, self.array = destination, array


class Memory:
    """Memory in which a reduction computes.

    By default kernels are synchronous, so nothing has to wait for them.

    Attributes:
        kernels: the backend.
        device: the device of its arrays.
        takes_tensors: whether collectives take its tensors without a copy.
        decodes_together: whether decoding a whole group at once is faster than each gradient on request.
    """

    kernels: Any
    device: torch.device
    takes_tensors: bool
    decodes_together: bool

    def is_plain(self, tensor: torch.Tensor) -> bool:
        """True if its memory is contiguous and on the device."""
        raise NotImplementedError

    def flat(self, tensor: torch.Tensor) -> Any:
        """Return the tensor's elements as an array for kernels.

        It shares the tensor's memory if that is contiguous and on the device.
        """
        raise NotImplementedError

    def taken(self, tensor: torch.Tensor, before: Any) -> Any:
        """Return a gradient's elements for kernels.

        Kernels run after what has been launched so far.

        Args:
            tensor: the gradient.
            before: an earlier return value for the same type and shape that is no longer used; or None.
        """
        raise NotImplementedError

    def can_fill(self, tensor: torch.Tensor, taken: Any) -> bool:
        """True if results can be decoded into the tensor's memory.

        ``taken`` is the return value of `taken`.
        """
        return type(taken) is BufferView or self.is_plain(tensor)

    def destination_of(self, tensor: torch.Tensor, taken: Any) -> Destination:
        """Return the tensor as a destination.

        ``taken`` is the return value of `taken`.
        """
        return Destination(tensor, taken if self.can_fill(tensor, taken) else None)

    def working(self) -> AbstractContextManager[Any]:
        """Return a context for calls of kernels."""
        return _NO_CONTEXT

    def hand_over(self, *results: Any) -> None:
        """Make the caller's later work run after kernels.

        Args:
            results: tensors created in `working` that the caller will read.
        """

    def catch_up(self) -> None:
        """Make kernels run after the caller's work so far."""

    def mark(self) -> Any:
        """Return a mark, for `wait_for`, behind the work so far."""

    def wait_for(self, mark: Any) -> None:
        """Make kernels run after a mark; may be called by any thread."""

    def decodes_early(self, destinations: Sequence[Destination]) -> bool:
        """True if the progress thread may decode results before they are requested."""
        return False

    def begun(self, scheme: Scheme, gradients: Sequence[Gradient], workers: Workers) -> Exchange:
        """Begin a scheme's reduction of arrays of this memory."""
        return scheme.begin(gradients, workers, self.kernels)

    def resumed(self, exchange: Exchange, on_host: bool) -> Exchange:
        """Wrap a scheme's reduction so that its requests suit the collectives.

        Args:
            exchange: the scheme's reduction, of this memory's arrays.
            on_host: whether requests must have arrays in host memory in any case.
        """
        return exchange

    def decode(
        self, decoded: Decoded, indices: Sequence[int], factor: float, destinations: Sequence[Destination]
    ) -> None:
        """Decode gradients of a group times ``factor``.

        To be called in a context of `working`.
        """
        arrays = list(map(self._array_of, destinations))
        copies = []
        for place, array in enumerate(arrays):
            if array is None:
                tensor = destinations[place].destination
                contiguous = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
                arrays[place] = self.flat(contiguous)
                copies.append((tensor, contiguous))
        decoded.decode(indices, factor, arrays)
        if copies:
            self.settle([contiguous for _, contiguous in copies])
            for tensor, contiguous in copies:
                tensor.copy_(contiguous)

    def _array_of(self, destination: Destination) -> Any:
        """Return a destination's memory, or None if it is not plain."""
        if destination.array is not None:
            return destination.array
        tensor = destination.destination
        return self.flat(tensor) if self.is_plain(tensor) else None

    def settle(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch the kernels that write the tensors, for PyTorch to read them."""


class HostMemory(Memory):
    """Host memory with numpy arrays.

    The host waits for copies of gradients on a GPU.

    Args:
        kernels: a backend for numpy arrays.
    """

    takes_tensors = False
    decodes_together = False
    device = torch.device("cpu")

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self._takes_views = segment_kernels(kernels).wants_views

    def is_plain(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu and tensor.is_contiguous()

    def flat(self, tensor: torch.Tensor) -> np.ndarray:
        """Return a tensor's elements as a numpy array.

        Bfloat16 as uint16, which kernels expect.
        """
        detached = tensor.detach() if tensor.requires_grad else tensor
        if not self.is_plain(detached):
            detached = detached.cpu().contiguous()
        if detached.dtype == torch.bfloat16:
            return detached.view(torch.int16).numpy().view(np.uint16).reshape(-1)
        array = detached.numpy()
        return array if array.ndim == 1 else array.reshape(-1)

    def taken(self, tensor: torch.Tensor, before: Any) -> np.ndarray | BufferView:
        """Return a `BufferView` of the gradient's memory, or an array.

        It is a view if the kernels accept one.
        """
        if not (self._takes_views and self.is_plain(tensor)):
            return self.flat(tensor)
        if type(before) is not BufferView:
            before = BufferView(BUFFER_VIEW_TYPES[tensor.dtype], tensor.numel(), self.flat)
        address = tensor.data_ptr()
        # Empty, misaligned, or lazily negated.
        if not address or address % before.dtype.itemsize or tensor.is_neg():
            return self.flat(tensor)
        # The view keeps the storage: a script may replace it (``tensor.data = ...``) before the kernels have run.
        return before.at(address, tensor, tensor.untyped_storage())

    def decodes_early(self, destinations: Sequence[Destination]) -> bool:
        """True if all destinations are contiguous and in host memory."""
        return all(destination.array is not None for destination in destinations)


def check(kernels: str, schemes: Iterable[Scheme]) -> None:
    """Raise the errors that `choose` would raise for any gradient.

    Raises:
        ValueError: there are no such kernels, or not for such schemes.
        ImportError: kernels requested by name cannot be loaded.
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
    """Return the memory for gradients on a device.

    Args:
        kernels: the requested backend. ``"auto"`` chooses Triton's kernels for gradients on a GPU; all others except
            ``"triton"`` work in host memory.
        device: the gradients' device.
        schemes: the schemes that may reduce them; some need host memory.
        has_nccl: returns whether collectives take GPU tensors; by default Horovod's build decides.

    Raises:
        ValueError: Triton's kernels were requested by name, and the gradients are in host memory; or Triton's
            interpreter is active, and they are on a GPU.
    """
    name, request = kernel_backends.requested(kernels)
    wants_triton = name == TRITON or (name == "auto" and device.type == "cuda" and _has_triton())
    if wants_triton and all(scheme.host_requirement() is None for scheme in schemes):
        from horovod_quant.kernels import triton

        if device.type == "cpu" and not triton.INTERPRETED:
            raise ValueError(
                f"{request}: the gradients are in host memory, where Triton's kernels cannot run; use 'auto', or train "
                f"on a GPU"
            )
        if device.type == "cuda" and triton.INTERPRETED:
            raise ValueError(
                f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')}: Triton's interpreter cannot read gradients on "
                f"a GPU; unset it, or use kernels='native'"
            )
        return _device_memory(device, (has_nccl or _horovod_has_nccl)())
    return HostMemory(kernel_backends.get(kernels))


def _horovod_has_nccl() -> bool:
    import horovod.torch as hvd

    has_nccl = bool(hvd.nccl_built())
    if has_nccl and os.environ.get(EARLY_ENDS, "0") not in ("", "0") and not is_staging_asked_for():
        raise ValueError(
            f"{EARLY_ENDS}=1: with it Horovod returns what NCCL has not received yet, which the kernels would read too "
            f"early; unset it on all workers"
        )
    return has_nccl


@functools.cache
def _device_memory(device: torch.device, has_nccl: bool) -> Memory:
    from horovod_quant.torch.device import DeviceMemory

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
