"""Control messages beside payloads: control tensors, and active-rank queries."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.reductions.agreement import different, disagreement, fingerprint_of, signs_of
from horovod_quant.transports.progress import Job


class ControlTensor:
    """Small tensor in host memory, reduced in place of a gradient.

    Its memory is reused once the reduced values have been read. If they have not, as after a cancelled step, a new
    tensor replaces it, and Horovod keeps the old one until it is done.

    Args:
        dtype: the control tensor's dtype, float32 or float64.
    """

    __slots__ = (
        "_answer", "_bytes", "_dtype", "_fresh", "_is_out", "_length", "_numbers", "_read", "_tensor",
    )  # fmt: skip

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensor: torch.Tensor | None = None
        self._bytes = memoryview(b"")
        self._numbers: tuple[float, ...] | None = None
        self._fresh, self._length = b"", 0
        self._is_out = False
        self._read = b""
        self._answer: tuple[float, Sequence[float]] | None = None

    def filled(self, numbers: tuple[float, ...]) -> torch.Tensor:
        """Return the tensor filled with 1 and the numbers.

        Horovod reduces it in place.
        """
        if numbers != self._numbers:
            self._fresh, self._length = _contents(numbers, self._dtype)
            self._numbers = numbers
        tensor = self._tensor
        if tensor is None or self._is_out or len(self._bytes) != len(self._fresh):
            tensor = self._tensor = torch.empty(self._length, dtype=self._dtype, device="cpu")
            self._bytes = memoryview(tensor.numpy()).cast("B")
        self._is_out = True
        self._bytes[:] = self._fresh
        return tensor

    def answer(self, output: torch.Tensor) -> tuple[float, Sequence[float]] | None:
        """Return the cached result for these output bits, or None.

        Releases the tensor's memory for reuse.
        """
        if output is not self._tensor:
            return None
        self._is_out = False
        return self._answer if self._bytes == self._read else None

    def learn(self, output: torch.Tensor, answer: tuple[float, Sequence[float]]) -> None:
        """Cache the validated result for these output bits."""
        if output is self._tensor:
            self._read, self._answer = bytes(self._bytes), answer


@functools.lru_cache(maxsize=4096)
def _contents(numbers: tuple[float, ...], dtype: torch.dtype) -> tuple[bytes, int]:
    """Return a new control tensor's bytes and number of elements."""
    tensor = torch.tensor((1.0, *numbers), dtype=dtype, device="cpu")
    return tensor.numpy().tobytes(), tensor.numel()


def numbers_of(output: torch.Tensor) -> list[float]:
    """Return the numbers of a reduced control tensor.

    Horovod has ended the operation, so a GPU's are read on a separate stream, which waits for no other work.
    """
    if not output.is_cuda:
        return output.tolist()
    with torch.cuda.stream(_reading_stream(output.device)):
        return output.tolist()


@functools.cache
def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Question:
    """Content of an optimizer's active-rank queries.

    Args:
        process_set: Horovod's workers, active or not.
        label: part of the collective's name, the same on every worker.
        arguments: the local compressor's arguments, as `horovod_quant.reductions.agreement` compares them.
        order: the names of the gradients, in the order in which they are cut into groups.
    """

    def __init__(
        self, process_set: Any, label: str, arguments: Mapping[str, str], order: Sequence[str] = ()
    ) -> None:
        self.process_set = process_set
        self.arguments = arguments
        self.name = f"horovod_quant.{label}.active"
        self.size = process_set.size()
        ranks = [int(rank == process_set.rank()) for rank in range(self.size)]
        self._sent = np.array([*ranks, *fingerprint_of(arguments), *signs_of("\n".join(order))], np.int32)

    def asked(self) -> torch.Tensor:
        """Return a copy of the local values for Horovod to add."""
        return torch.from_numpy(self._sent.copy())


class HorovodJob(Job):
    """Job that ends with an error when Horovod is initialized again."""

    def __init__(self, name: str) -> None:
        from horovod.torch import mpi_ops

        super().__init__(name)
        self._mpi_ops = mpi_ops
        self._session = mpi_ops._handle_map

    def poll(self) -> bool:
        if self._mpi_ops._handle_map is not self._session:
            from horovod.common.exceptions import HorovodInternalError

            raise HorovodInternalError(
                "Horovod was initialized again before the step's collectives had ended"
            )
        return self.ready()

    def ready(self) -> bool:
        """True if `advance` can do something now."""
        raise NotImplementedError


class ActiveRankQuery(HorovodJob):
    """Job that finds a step's active workers, and compares their arguments.

    Workers that have called ``hvd.join()``, because their data is at an end, are not active. Horovod adds zeros for
    them to sums and maxima. In an allgather or alltoall their absence crashes Horovod, or the others wait indefinitely,
    so a worker must know the active ones before it launches one.

    Args:
        question: the local content of the query.

    Attributes:
        ranks: the active workers, in order, once it has ended.
        same_order: whether all of them cut their gradients into groups in the same order.
    """

    def __init__(self, question: Question) -> None:
        super().__init__(question.name)
        self._question = question
        self._handle: Any = None
        self.ranks: Sequence[int] = ()
        self.same_order = True

    def ready(self) -> bool:
        if self._handle is None:
            return self.may_begin()
        return self._mpi_ops.poll(self._handle)

    def advance(self) -> bool:
        """Launch the allreduce; when it is complete, read its result.

        Raises:
            RuntimeError: the active workers' arguments are not the same.
        """
        mpi_ops, question = self._mpi_ops, self._question
        if self._handle is None:
            self._handle = mpi_ops.allreduce_async_(
                question.asked(), name=self.name, op=mpi_ops.Sum, process_set=question.process_set
            )
            self.urgent = False  # what is left is to read the result
            return False
        total = mpi_ops.synchronize(self._handle).numpy()
        self.ranks = np.flatnonzero(total[: question.size]).tolist()
        signs = total[question.size :]
        if not (np.abs(signs) == len(self.ranks)).all():
            if unequal := different(question.arguments, signs.tolist(), len(self.ranks)):
                raise RuntimeError(disagreement(question.arguments, unequal))
            self.same_order = False
        return True
