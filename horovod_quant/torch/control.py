"""What workers tell each other beside payloads: a gradient's control tensor, and a step's active-rank query."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.reductions.agreement import SIGNS, SLOTS, different, disagreement, fingerprint_of, signs_of
from horovod_quant.torch.waiting import wait
from horovod_quant.transports.progress import Job


class ControlTensor:
    """What Horovod reduces in place of one gradient: a small tensor in the host's memory, the same in each step.

    Its memory is used again as soon as what came back in it has been read; else, as when a step was given up, another
    takes its place, and Horovod keeps the one that it works on.

    Args:
        dtype: of the control tensor, float32 or float64.
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
        """The tensor that holds 1 and the numbers, for Horovod to reduce in place."""
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
        """What was found in the same bits before; None where it is yet to be found. The memory may be used again."""
        if output is not self._tensor:
            return None
        self._is_out = False
        return self._answer if self._bytes == self._read else None

    def learn(self, output: torch.Tensor, answer: tuple[float, Sequence[float]]) -> None:
        """Notes what was found, and was sound."""
        if output is self._tensor:
            self._read, self._answer = bytes(self._bytes), answer


@functools.lru_cache(maxsize=4096)
def _contents(numbers: tuple[float, ...], dtype: torch.dtype) -> tuple[bytes, int]:
    """The bytes of a fresh control tensor, and its number of elements."""
    tensor = torch.tensor((1.0, *numbers), dtype=dtype, device="cpu")
    return tensor.numpy().tobytes(), tensor.numel()


class Question:
    """What all active-rank queries of an optimizer ask.

    Args:
        process_set: Horovod's workers, active or not.
        label: of the collective's name, the same on every worker.
        arguments: of this worker's compressor, as `horovod_quant.reductions.agreement` compares them.
        order: the names of the gradients, in the order by which they are cut into groups.
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
        """What this worker adds."""
        return torch.from_numpy(self._sent.copy())


class ActiveRankQuery(Job):
    """Which workers are active in a step, and whether all have the same arguments.

    Workers that have called ``hvd.join()``, because their data is at an end, are not active. Horovod adds zeros for
    them to sums and maxima. In an allgather or alltoall their absence crashes it, or the others wait indefinitely:
    before one of these a worker has to know.

    Args:
        question: what it asks.

    Attributes:
        process_set: whom it asks.
        ranks: the active workers, in order, once it has ended.
        same_order: whether all of them cut their gradients into groups by the same order.
    """

    def __init__(self, question: Question) -> None:
        from horovod.torch import mpi_ops

        super().__init__(question.name)
        self._question = question
        self.process_set = question.process_set
        self._mpi_ops = mpi_ops
        self._session = mpi_ops._handle_map
        self._handle: Any = None
        self.ranks: Sequence[int] = ()
        self.same_order = True

    @property
    def has_result(self) -> bool:
        return self.ended

    def poll(self) -> bool:
        if self._mpi_ops._handle_map is not self._session:
            raise stale()
        if self._handle is None:
            return self.may_begin()
        return self._mpi_ops.poll(self._handle)

    def advance(self) -> bool:
        """Launch the sum; or take its answer.

        Raises:
            RuntimeError: the active workers' arguments are not the same.
        """
        mpi_ops, question = self._mpi_ops, self._question
        if self._handle is None:
            self._handle = mpi_ops.allreduce_async_(
                question.asked(), name=self.name, op=mpi_ops.Sum, process_set=self.process_set
            )
            return False
        total = mpi_ops.synchronize(self._handle).numpy()
        self.ranks = np.flatnonzero(total[: question.size]).tolist()
        agree = np.abs(total[question.size :]) == len(self.ranks)
        if not agree.all():
            unequal = different(
                question.arguments, total[question.size :][: SLOTS * SIGNS].tolist(), len(self.ranks)
            )
            if unequal:
                raise RuntimeError(disagreement(question.arguments, unequal))
            self.same_order = False
        return True

    def answer(self) -> Sequence[int]:
        """Return `ranks` where no thread drives it; waits for the other workers."""
        self.advance()
        wait(self._handle)
        self.advance()
        return self.ranks


def stale() -> Exception:
    """The error of a job from before Horovod was initialized again: no worker answers what it has launched."""
    from horovod.common.exceptions import HorovodInternalError

    return HorovodInternalError("Horovod was initialized again before the step's exchanges had ended")
