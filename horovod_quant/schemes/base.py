"""What a scheme is: a generator over collectives, written once and run by every exchange.

A scheme computes with kernels and *yields* a request wherever it needs the other workers; whoever runs it (the
simulator, mpi4py, Horovod) performs the collective and sends the result back in. It imports no framework.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Callable, NamedTuple, Union

import numpy as np

from horovod_quant.kernels.keys import KeyChain
from horovod_quant.kernels.layout import ROW


class Workers(NamedTuple):
    """Who takes part: this worker's rank, the number of workers, and what their transport can do."""

    rank: int
    size: int
    custom_reduction: bool = False


class BinaryState(NamedTuple):
    """BinSGDM's state of one gradient on one worker: two float32 arrays of its length, updated in place."""

    momentum: np.ndarray
    scale: np.ndarray
    beta: float


class Gradient(NamedTuple):
    """One tensor of a group: its elements (flat, only read), where its keys come from, and its state."""

    values: np.ndarray
    keys: KeyChain
    step: int = 0
    state: BinaryState | None = None

    @property
    def elements(self) -> int:
        return self.values.shape[0]


# Requests. ``parts`` are the bytes of ``array`` that belong to each gradient of the group: what `stats` reports.


class Allreduce(NamedTuple):
    """Sum or maximum over the workers; answered with an array of the same shape."""

    array: np.ndarray
    op: str
    parts: Sequence[float]


class Allgather(NamedTuple):
    """Everybody's array; answered with a list of n arrays in rank order.

    ``lengths`` are those of the n arrays where they differ. ``ragged``: nobody knows them, and each array is a uint8
    payload made by `ragged_payload`.
    """

    array: np.ndarray
    parts: Sequence[float]
    lengths: Sequence[int] | None = None
    ragged: bool = False


class Alltoall(NamedTuple):
    """``array`` cut into pieces of ``splits`` elements, piece j for worker j.

    Answered with a list of the n pieces meant for this worker, in rank order; all have its split's length.
    """

    array: np.ndarray
    splits: Sequence[int]
    parts: Sequence[float]


class CustomAllreduce(NamedTuple):
    """A reduction by ``combine(left, right, low, high)``; asked for only where ``Workers.custom_reduction``.

    ``left`` and ``right`` are reductions of neighbouring ranks, together those of ``low .. high - 1``.
    """

    array: np.ndarray
    combine: Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]
    parts: Sequence[float]


Request = Union[Allreduce, Allgather, Alltoall, CustomAllreduce]


class Collective(NamedTuple):
    """What is known of a request before it is made: its type, the type of its array, an allreduce's operation."""

    request: type
    dtype: str
    op: str = ""


class Decoded(NamedTuple):
    """What a finished exchange leaves.

    ``active`` is the number of workers that contributed. ``write(i, factor, out)`` decodes the sum over the workers
    of gradient i of the group, times ``factor``, into a flat floating-point array, and returns it.
    """

    active: int
    write: Callable[[int, float, Any], Any]


Exchange = Generator[Request, Any, Decoded]


class Scheme:
    """Base of the schemes: small immutable values that validate their arguments when they are made."""

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of an exchange on a transport without reductions of one's own, in order."""
        raise TypeError(f"{type(self).__name__} defines no exchange")

    def check_workers(self, size: int) -> None:
        """Raises ValueError when the scheme's arguments cannot serve ``size`` workers."""

    def exchange(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        """Exchanges a group of gradients.

        Args:
            gradients: the group, in the same order on every worker.
            workers: who takes part.
            kernels: a backend of `horovod_quant.kernels`.
        """
        raise TypeError(f"{type(self).__name__} defines no exchange")


def split_points(lengths: Sequence[int]) -> list[int]:
    """Offsets ``[0, l_0, l_0 + l_1, ...]`` of consecutive slices."""
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]


def ragged_payload(*body: np.ndarray) -> np.ndarray:
    """A uint8 payload that tells its own length: 8 bytes of length, then the parts of ``body``."""
    return np.concatenate([np.array([sum(map(len, body))], "<i8").view(np.uint8), *body])


def split_gathered(buffer: np.ndarray, request: Allgather) -> list[np.ndarray]:
    """Cuts the concatenation that a transport's allgather returns into the workers' arrays.

    Raises:
        ValueError: the lengths do not add up to the buffer.
    """
    if request.ragged:
        return split_ragged(buffer)
    if request.lengths is not None:
        lengths = list(request.lengths)
    else:
        own = max(len(request.array), 1)
        lengths = [own] * (len(buffer) // own)
    if sum(lengths) != len(buffer):
        raise ValueError(f"an allgather returned {len(buffer)} elements where {sum(lengths)} were expected")
    at = split_points(lengths)
    return [buffer[at[i] : at[i + 1]] for i in range(len(lengths))]


def split_ragged(buffer: np.ndarray) -> list[np.ndarray]:
    """Undoes the concatenation of ragged payloads; returns their bodies.

    Raises:
        ValueError: the lengths do not add up to the buffer.
    """
    bodies: list[np.ndarray] = []
    position = 0
    while position < len(buffer):
        header = buffer[position : position + 8]
        length = int(header.copy().view("<i8")[0]) if len(header) == 8 else -1
        if not 0 <= length <= len(buffer) - position - 8:
            raise ValueError(
                f"corrupt payload of worker {len(bodies)}: a length of {length} at byte {position}"
            )
        bodies.append(buffer[position + 8 : position + 8 + length])
        position += 8 + length
    return bodies


def use_plain_ints(scheme: Scheme, *names: str) -> None:
    """Makes numpy's integers among the arguments Python's, the only ones with all the methods that kernels use."""
    for name in names:
        object.__setattr__(scheme, name, int(getattr(scheme, name)))


def require_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: use an integer from {low} to {high}")


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, choices))}")


def require_bucket_size(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < ROW or value % ROW:
        raise ValueError(f"bucket_size={value!r}: use a multiple of {ROW}, for example 1024")
