"""Runs the exchange of one group of gradients over Horovod's asynchronous collectives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import torch

from horovod_quant.schemes.base import (
    Allgather,
    Allreduce,
    Alltoall,
    Decoded,
    Gradient,
    Scheme,
    Workers,
    split_gathered,
)
from horovod_quant.traffic import sent_bytes

_POLL_SECONDS = 2e-4

_TENSOR_BITS = {torch.bfloat16: torch.int16}


def flat_array(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor's memory as a flat array; bfloat16 as the uint16 that the kernels take for it."""
    flat = tensor.detach().view(-1)
    if flat.dtype in _TENSOR_BITS:
        return flat.view(_TENSOR_BITS[flat.dtype]).numpy().view(np.uint16)
    return flat.numpy()


class Submission:
    """One gradient that waits for its exchange.

    Args:
        gradient: what the scheme gets.
        scheme: the scheme that exchanges it.
        state_copies: pairs (the state where it is kept, the copy that the exchange updates).
    """

    def __init__(
        self,
        gradient: Gradient,
        scheme: Scheme,
        state_copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        self.gradient = gradient
        self.scheme = scheme
        self.state_copies = state_copies
        self.group: Group | None = None
        self.index = 0

    @property
    def name(self) -> str:
        return self.gradient.keys.name

    @property
    def bytes(self) -> int:
        return self.gradient.values.nbytes


class Group:
    """Gradients that share their collectives, and where their exchange stands.

    Args:
        members: the gradients, in the same order on every worker.
        name: of the group's collectives, the same on every worker.
        kernels: backend of the kernels.
        process_set: Horovod's workers that take part.
        count: called with a gradient's name and the bytes that this worker sends for it.
    """

    def __init__(
        self,
        members: Sequence[Submission],
        name: str,
        kernels: Any,
        process_set: Any,
        count: Callable[[str, float], None],
    ) -> None:
        self.members = list(members)
        self._name = name
        self._process_set = process_set
        self._count = count
        self._decoded: Decoded | None = None
        self._stage = 0
        self._request: Any = None
        self._handle: Any = None
        scheme = self.members[0].scheme
        workers = Workers(process_set.rank(), process_set.size())
        self._stages = len(scheme.collectives)
        self._exchange = scheme.exchange([member.gradient for member in self.members], workers, kernels)
        for index, member in enumerate(self.members):
            member.group, member.index = self, index

    @property
    def in_last_stage(self) -> bool:
        """Whether every collective has been launched."""
        return self._stage == self._stages

    def start(self) -> None:
        """Computes and launches the first stage."""
        self._resume(None)

    def advance(self) -> None:
        """Waits for the stage in flight; computes and launches the next one, if there is one."""
        self._resume(_collect(self._request, self._handle))

    def wait(self) -> None:
        """Waits for the stage in flight, if there is one."""
        if self._handle is not None:
            _wait(self._handle)

    def decoded(self) -> Decoded:
        """The result; waits for the last stage."""
        if self._decoded is None:
            self.advance()
            assert self._decoded is not None, "a scheme launched more collectives than it declares"
        return self._decoded

    def _resume(self, answer: Any) -> None:
        try:
            self._request = self._exchange.send(answer)
        except StopIteration as stop:
            self._decoded = stop.value
            self._request = self._handle = None
            return
        for member, sent in zip(self.members, sent_bytes(self._request, self._process_set.size())):
            self._count(member.name, sent)
        self._handle = _launch(self._request, f"{self._name}.{self._stage}", self._process_set)
        self._stage += 1


def _launch(request: Any, name: str, process_set: Any) -> Any:
    import horovod.torch as hvd

    tensor = torch.from_numpy(request.array)
    if isinstance(request, Allreduce):
        op = hvd.Max if request.op == "max" else hvd.Sum
        return hvd.allreduce_async_(tensor, name=name, op=op, process_set=process_set)
    if isinstance(request, Allgather):
        return hvd.allgather_async(tensor, name=name, process_set=process_set)
    if isinstance(request, Alltoall):
        splits = torch.tensor(list(request.splits), dtype=torch.int32)
        return hvd.alltoall_async(tensor, splits, name=name, process_set=process_set)
    raise TypeError(f"not a request that Horovod can perform: {request!r}")


def _wait(handle: Any) -> None:
    """Horovod's own wait spins, and takes a core from what it waits for."""
    import horovod.torch as hvd

    while not hvd.poll(handle):
        time.sleep(_POLL_SECONDS)


def _collect(request: Any, handle: Any) -> Any:
    import horovod.torch as hvd

    _wait(handle)
    output = hvd.synchronize(handle)
    if isinstance(request, Allreduce):
        return output.numpy()
    if isinstance(request, Allgather):
        return split_gathered(output.numpy(), request)
    received, lengths = output
    at = np.concatenate([[0], np.cumsum(lengths.numpy())])
    array = received.numpy()
    return [array[at[i] : at[i + 1]] for i in range(len(lengths))]
