"""Runs the schemes' exchanges over Horovod's asynchronous collectives."""

from __future__ import annotations

import hashlib
from typing import Any, Callable, Dict, Hashable, List, NamedTuple, Optional, Sequence, Tuple

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
    """

    def __init__(self, gradient: Gradient, scheme: Scheme) -> None:
        self.gradient = gradient
        self.scheme = scheme
        self.group: Optional[Group] = None
        self.index = 0

    @property
    def name(self) -> str:
        return self.gradient.keys.name

    def decoded(self) -> Decoded:
        assert self.group is not None and self.group.decoded is not None
        return self.group.decoded


class Group:
    """Gradients that share their collectives, and where their exchange stands."""

    def __init__(
        self, members: Sequence[Submission], kernels: Any, process_set: Any, count: Callable[[str, float], None]
    ) -> None:
        self.members = list(members)
        self.decoded: Optional[Decoded] = None
        self._process_set = process_set
        self._count = count
        self._stage = 0
        self._request: Any = None
        self._handle: Any = None
        workers = Workers(process_set.rank(), process_set.size())
        gradients = [member.gradient for member in self.members]
        self._exchange = self.members[0].scheme.exchange(gradients, workers, kernels)
        for index, member in enumerate(self.members):
            member.group, member.index = self, index

    def start(self) -> None:
        """Computes and launches the first stage."""
        self._resume(None)

    def advance(self) -> None:
        """Waits for the stage in flight; computes and launches the next one."""
        self._resume(_collect(self._request, self._handle))

    def _resume(self, answer: Any) -> None:
        try:
            self._request = self._exchange.send(answer)
        except StopIteration as stop:
            self.decoded = stop.value
            self._request = self._handle = None
            return
        for member, sent in zip(self.members, sent_bytes(self._request, self._process_set.size())):
            self._count(member.name, sent)
        name = f"horovod_quant.{self.members[0].name}.{self._stage}"
        self._handle = _launch(self._request, name, self._process_set)
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


def _collect(request: Any, handle: Any) -> Any:
    import horovod.torch as hvd

    output = hvd.synchronize(handle)
    if isinstance(request, Allreduce):
        return output.numpy()
    if isinstance(request, Allgather):
        return split_gathered(output.numpy(), request)
    received, lengths = output
    at = np.concatenate([[0], np.cumsum(lengths.numpy())])
    array = received.numpy()
    return [array[at[i] : at[i + 1]] for i in range(len(lengths))]


class _Waiting(NamedTuple):
    process_set: Any
    submissions: List[Submission]


class HorovodExchange:
    """Collects submissions and exchanges them in groups.

    Collectives are launched at moments that depend on the number of submissions alone: all of them when the first
    result is asked for, which Horovod does after it has asked for the compression of every gradient of the step.
    Then every worker has the same submissions, and groups them alike: by name, by scheme, up to ``group_bytes``.

    Args:
        kernels: backend of the kernels.
        group_bytes: bytes of gradients that share collectives.
        count: called with a gradient's name and the bytes that this worker sends for it.
    """

    def __init__(self, kernels: Any, group_bytes: int, count: Callable[[str, float], None]) -> None:
        self._kernels = kernels
        self._group_bytes = group_bytes
        self._count = count
        self._waiting: Dict[Hashable, _Waiting] = {}
        self._session: Any = None

    def submit(self, submission: Submission, owner: Hashable, process_set: Any) -> None:
        """Adds a gradient to those that ``owner`` (an optimizer, or one call) exchanges together."""
        self._drop_stale()
        if owner not in self._waiting:
            self._waiting[owner] = _Waiting(process_set, [])
        self._waiting[owner].submissions.append(submission)

    def finish(self, submission: Submission, owner: Hashable) -> Decoded:
        """The result for a gradient; exchanges everything that its owner has submitted."""
        if submission.group is None:
            waiting = self._waiting.pop(owner)
            groups = [
                Group(members, self._kernels, waiting.process_set, self._count)
                for members in self._grouped(waiting.submissions)
            ]
            for group in groups:
                group.start()
            running = [group for group in groups if group.decoded is None]
            while running:
                for group in running:
                    group.advance()
                running = [group for group in running if group.decoded is None]
        return submission.decoded()

    def _grouped(self, submissions: List[Submission]) -> List[List[Submission]]:
        by_scheme: Dict[Scheme, List[Submission]] = {}
        for submission in sorted(submissions, key=lambda submission: submission.name):
            by_scheme.setdefault(submission.scheme, []).append(submission)
        groups: List[List[Submission]] = []
        for members in by_scheme.values():
            room = 0
            for member in members:
                size = member.gradient.values.nbytes
                if size > room:
                    groups.append([])
                    room = self._group_bytes
                groups[-1].append(member)
                room -= size
        return groups

    def _drop_stale(self) -> None:
        """Forgets what was submitted before Horovod was initialized again: nobody will answer it."""
        from horovod.torch import mpi_ops

        session = mpi_ops._handle_map
        if session is not self._session:
            self._waiting.clear()
            self._session = session


def carrier_signs(text: str) -> Tuple[float, ...]:
    """16 signs, +1 or -1, that depend on ``text``."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "little")
    return tuple(1.0 if digest >> bit & 1 else -1.0 for bit in range(16))
