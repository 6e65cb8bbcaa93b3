"""What a scheme is: a generator over collectives, written once and run by every exchange.

A scheme computes with kernels and *yields* a request wherever it needs the other workers; whoever runs it (the
simulator, mpi4py, Horovod) performs the collective and sends the result back in. It imports no framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Callable, ClassVar, Final, Literal, NamedTuple, Union

import numpy as np

from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.kernels.keys import Key, KeyChain, joint_keys_of, keys_of
from horovod_quant.kernels.layout import ROW
from horovod_quant.kernels.span import Span, as_array

ALL, LOCAL, CROSS = "all", "local", "cross"
"""Groups of workers: all; those of one node; those with the same place on their nodes, one per node."""


Rounding = Literal["joint", "independent"]
JOINT: Final = "joint"
"""How the workers draw the random bits that round their gradients; see `worker_key`."""


class Workers(NamedTuple):
    """This worker's rank, the number of workers, and what their transport can do.

    The ``local_size`` workers of a node have consecutive ranks; it is 1 unless the exchange is hierarchical.
    """

    rank: int
    size: int
    custom_reduction: bool = False
    local_size: int = 1

    @property
    def local_rank(self) -> int:
        """This worker's place on its node: its rank in the group LOCAL."""
        return self.rank % self.local_size

    @property
    def node(self) -> int:
        """Number of this worker's node: its rank in the group CROSS."""
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        return self.size // self.local_size

    def rank_in(self, group: str) -> int:
        """This worker's rank in its group of that kind."""
        return {ALL: self.rank, LOCAL: self.local_rank, CROSS: self.node}[group]

    def size_of(self, group: str) -> int:
        """Number of workers in this worker's group of that kind."""
        return {ALL: self.size, LOCAL: self.local_size, CROSS: self.nodes}[group]


class BinaryState(NamedTuple):
    """BinSGDM's state of one gradient on one worker, for the elements given by `Scheme.owned`.

    Two float32 arrays, updated in place; kernels with a ``Table`` take a `Span` of each.
    """

    momentum: np.ndarray | Span
    scale: np.ndarray | Span
    beta: float


class Extent(NamedTuple):
    """What decoding may need to know of a gradient: all workers have the same."""

    keys: KeyChain
    elements: int
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.elements


class Gradient:
    """One tensor of a group: its elements (flat, read-only), the source of its keys, and its state.

    It may be a part of a tensor, which begins at index ``start``; ``start`` selects the random bits. Schemes do not
    change it: see `replaced`.

    Attributes:
        held: the elements as they were given, which is all that kernels with a ``Table`` need.
    """

    # No tuple, because what is made anew for every gradient in every step wakes Python's garbage collector, which then
    # visits all objects of a framework: the frontend for PyTorch uses one again when its exchange is over.
    __slots__ = ("_extent", "held", "keys", "start", "state", "step")

    def __init__(
        self,
        values: np.ndarray | Span,
        keys: KeyChain,
        step: int = 0,
        state: BinaryState | None = None,
        start: int = 0,
    ) -> None:
        self.held = values
        self._extent: Extent | None = None
        self.keys = keys
        self.step = step
        self.state = state
        self.start = start

    def replaced(self, values: np.ndarray, start: int | None = None) -> Gradient:
        """The same gradient with other elements, by default as many."""
        return Gradient(values, self.keys, self.step, self.state, self.start if start is None else start)

    @property
    def values(self) -> np.ndarray:
        return as_array(self.held)

    @property
    def elements(self) -> int:
        return self.held.shape[0]

    @property
    def extent(self) -> Extent:
        if self._extent is None:
            self._extent = Extent(self.keys, self.elements, self.start)
        return self._extent


def worker_key(gradient: Gradient, workers: Workers, rounding: str) -> Key:
    """The key with which a worker rounds its own gradient.

    ``"joint"``: each worker's numbers in [0, 1) are uniform, and the workers' numbers sum to a constant, see
    `horovod_quant.kernels.keys`. ``"independent"``: each worker draws its own numbers.
    """
    if rounding == JOINT:
        return gradient.keys.joint("worker", gradient.step, workers.rank, workers.size)
    return gradient.keys.key("worker", gradient.step, workers.rank)


def worker_keys(gradients: Sequence[Gradient], workers: Workers, rounding: str) -> np.ndarray:
    """`worker_key` of each gradient, uint32 ``[gradients, fields of Key]``."""
    chains, steps = [gradient.keys for gradient in gradients], [gradient.step for gradient in gradients]
    if rounding == JOINT:
        return joint_keys_of(chains, "worker", steps, workers.rank, workers.size)
    return keys_of(chains, "worker", steps, workers.rank)


# Requests. ``parts`` are the bytes of ``array`` that belong to each gradient of the group: what `stats` reports.
# ``group`` says which workers take part, n of them.


class Allreduce(NamedTuple):
    """Sum or maximum over the workers; answered with an array of the same shape."""

    array: np.ndarray
    op: str
    parts: Sequence[float]
    group: str = ALL


class Allgather(NamedTuple):
    """All workers' arrays; answered with a list of n arrays in rank order.

    ``lengths`` are the lengths of the n arrays where they differ. ``ragged``: the lengths are unknown, and each array
    is a uint8 payload made by `ragged_payload`.
    """

    array: np.ndarray
    parts: Sequence[float]
    lengths: Sequence[int] | None = None
    ragged: bool = False
    group: str = ALL


class Alltoall(NamedTuple):
    """``array`` cut into pieces of ``splits`` elements, piece j for worker j.

    Answered with a list of the n pieces meant for this worker, in rank order. Each has the length of this worker's own
    split, except with `split_sums`, which only PyTorch uses.
    """

    array: np.ndarray
    splits: Sequence[int]
    parts: Sequence[float]
    group: str = ALL


class CustomAllreduce(NamedTuple):
    """A reduction by ``combine(left, right, low, high)``; used only with ``Workers.custom_reduction``.

    ``left`` and ``right`` are reductions of adjacent ranges of ranks, together ``low .. high - 1``.
    """

    array: np.ndarray
    combine: Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]
    parts: Sequence[float]
    group: str = ALL


Request = Union[Allreduce, Allgather, Alltoall, CustomAllreduce]


class Collective(NamedTuple):
    """What is known of a request in advance: its type, the array's dtype, an allreduce's operation, and the group.

    ``swap``: whether it is a sum that replaces a gather, see `swaps`.
    """

    request: type
    dtype: str
    op: str = ""
    group: str = ALL
    swap: bool = False

    @property
    def needs_everybody(self) -> bool:
        """Whether it fails, hangs or is wrong when Horovod adds zeros for a worker that has called ``hvd.join()``."""
        return self.request is not Allreduce or self.group != ALL or self.swap


class Decoded(NamedTuple):
    """The result of an exchange.

    ``active`` is the number of workers that contributed. ``write(i, factor, out)`` decodes the sum over the workers
    of gradient i of the group, times ``factor``, into a flat floating-point array, and returns it.
    ``exchanged_again``: for each gradient, how many of its buckets were exchanged a second time; empty for none.
    ``write_all(factor, outs)`` does ``write`` for every gradient of the group, where that is faster; otherwise None.
    Its ``outs`` may be `horovod_quant.kernels.span.Span`, which kernels with a ``Table`` take as they are.
    ``received`` are the arrays that `Scheme.opened` makes this of, if the scheme has it; otherwise None.
    """

    active: int
    write: Callable[[int, float, Any], Any]
    exchanged_again: Sequence[int] = ()
    write_all: Callable[[float, Sequence[Any]], None] | None = None
    received: Sequence[Any] | None = None


Exchange = Generator[Request, Any, Decoded]


class Scheme:
    """Base class of the schemes: small immutable values that validate their arguments on construction.

    A scheme is a ``@dataclass(frozen=True)``. Its fields are its arguments; they must be hashable (tuples, no lists),
    and workers compare their string forms. `collectives` and `begin` are required; everything else has a default.
    ``@horovod_quant.register`` before the class makes it available as ``hvq.<Name>`` and by name in the commands.

    What the exchange can rely on, and must respect:

    - **Gradients are read-only.** ``gradient.values`` is the user's own memory: a flat array of float16, float32,
      float64 or bfloat16 (as uint16); kernels accept all of them. Do not write to it or keep it after the exchange.
    - **Arrays belong to the backend**: they are numpy arrays, or tensors in TensorFlow graphs and on GPUs. A scheme
      that computes only with ``kernels``, cuts with slices and uses ``shape[0]`` for lengths runs everywhere. One that
      calls numpy itself declares ``host_only = True``.
    - **An answer belongs to this exchange** and does not change until everything is decoded. An array that was sent is
      consumed: a transport may add in place and answer with the same memory. So do not send what you read again.
    - **``out=`` is a place, not a promise.** An encoding kernel given ``out`` (as `kernels.assemble` gives it to what
      fills a part) writes there and returns it; without ``out``, or where the backend's arrays cannot be written to, it
      returns another array. Use what is returned. A decoding kernel always needs the ``out`` given to `Decoded.write`,
      or one from ``kernels.target``; return what the kernel returns.
    - **Random bits come only from keys**: ``gradient.keys.key(stage, gradient.step, rank)`` for what only this worker
      rounds, or `worker_key`, with which the workers' errors partly cancel; no rank for what any worker might round
      and all must round identically. Use one key per rounding: another stage name gives other bits. Draw from nothing
      else, or runs cannot be reproduced.
    - **``gradient.step`` is this worker's own count.** Others may differ: a worker may have started later (elastic
      training) or missed steps (``hvd.join()``). No result may need equal counts: where others need the key to decode,
      send its step along, as EDEN does with ``kernels.step_word`` and ``kernels.key_of_word``.
    - **``gradient.start``** is the index of the first element in the whole tensor; it is not always 0 in hierarchical
      exchanges. Pass it to kernels that draw bits, so that the result does not depend on who computes which part. It
      is a multiple of 1,024 and of the scheme's ``bucket_size``, if it has one.
    - **Every worker makes the same requests**: those of `collectives`, in that order, with arrays of the lengths that
      `Allgather` and `Alltoall` state; also for gradients without elements, and with a single worker.
    - **What is received can be passed on**, if the scheme has `received_parts` and `opened`: see there. Otherwise
      the workers of a host pass on averages in float32.
    - **NaN or infinity** on any worker should reach all of them as NaN, in its part of the gradient.

    Declare these in the class, without type annotations, which would make them arguments; the first two are not
    inherited:

    Attributes:
        presets: short names, each with some of the arguments: ``{"qsgdinf": {"norm": "max"}}``. Where a scheme has an
            argument ``bits`` that a preset leaves open, the method's name ends with it: ``qsgdinf-4``. By default there
            is one name, that of the class in lower case.
        compared: full names of the methods that ``bench`` and ``advise`` compare by default.
        own_optimizer: name of the class in ``hvq.optim`` to whose gradients the scheme is limited; its result is then
            that optimizer's update, not an average. A frontend without such a class refuses the scheme.
        own_steps: recommended number of steps with that optimizer, relative to other optimizers.
        unbiased: whether the expected result is the exact sum, for `EDEN` up to the bias that it states; False also
            where this has not been shown.
        host_only: whether it uses numpy itself and so needs arrays in host memory, which ``kernels="auto"`` then
            provides; otherwise TensorFlow operations and GPUs may run it.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    compared: ClassVar[Sequence[str]] = ()
    own_optimizer: ClassVar[str | None] = None
    own_steps: ClassVar[float] = 1.0
    unbiased: ClassVar[bool] = False
    host_only: ClassVar[bool] = False

    @property
    def more_work(self) -> bool:
        """Whether its arguments buy a smaller error by work alone: other arguments send as many bytes with less work.

        Where a smaller error is not needed, ``Auto`` and `horovod_quant.candidates` prefer those.
        """
        return False

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of an exchange, in order, on a transport without custom reductions; required."""
        raise TypeError(f"{type(self).__name__} defines no exchange")

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        """Starts the exchange of a group of gradients; a generator, required.

        Args:
            gradients: the group, in the same order on every worker.
            workers: who takes part.
            kernels: a backend of `horovod_quant.kernels`.
        """
        raise TypeError(f"{type(self).__name__} defines no exchange")

    def received_parts(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]] | None:
        """Lengths and types of `Decoded.received`, for gradients with so many elements; None if there is none.

        int32 and float32 arrays have these lengths exactly. uint8 arrays, all or none, have about as many bytes.
        """
        return None

    def opened(
        self, received: Sequence[Any], extents: Sequence[Extent], workers: Workers, kernels: Any
    ) -> Decoded:
        """The result of an exchange of gradients with these extents, from what some worker has received.

        A hierarchical exchange calls it for each part of a gradient, wherever that part was exchanged. So it may depend
        neither on this worker's own gradients and steps nor on its rank. Only needed with `received_parts`.
        """
        raise TypeError(f"{type(self).__name__}.received_parts: define {type(self).__name__}.opened as well")

    def for_workers(self, workers: Workers) -> Scheme:
        """The scheme that these workers run, where it depends on their number; the same on all of them.

        Raises:
            ValueError: no scheme suits them.
        """
        return self

    def check_workers(self, size: int) -> None:
        """Raises ValueError if the scheme's arguments do not work with ``size`` workers."""

    def owned(self, name: str, elements: int, workers: Workers) -> tuple[int, int]:
        """The elements of a tensor whose state this worker keeps: start, and stop (exclusive)."""
        return 0, elements

    def levels_left(self, workers: int, hosts: int) -> int | None:
        """Number of non-zero magnitudes that an element can have on the wire; None where that is meaningless.

        Args:
            workers: their number. Where their integers are summed, fewer levels may be left for each.
            hosts: their number, for a hierarchical exchange.
        """
        return None

    def relative_error(self, workers: int, hosts: int) -> float | None:
        """Expected ``||average - exact|| / ||exact||`` for independent Gaussian gradients; None if unknown.

        At 1 the rounding adds as much noise as the gradients already have. ``advise`` recommends no method without it.
        `horovod_quant.analysis.rounding` computes it for stochastic rounding to levels.
        """
        return None

    def of_known_lengths(self) -> Scheme:
        """A stand-in for the performance model: a scheme whose bytes do not depend on the values."""
        return self

    def host_requirement(self) -> str | None:
        """The argument or declaration because of which it needs arrays in host memory; None if it does not."""
        return "host_only=True" if self.host_only else None

    def compress(self, tensor: Any = None) -> Any:
        """Raises TypeError: Horovod calls it when given a scheme instead of a compressor."""
        shown = repr(self) if isinstance(self, Scheme) else "a scheme's class"
        inner = repr(self) if isinstance(self, Scheme) else "..."
        raise TypeError(
            f"compression={shown}: that is a scheme, not a compressor; use hvq.Compressor({inner})"
        )


def explained(
    scheme: Scheme, gradients: Sequence[Gradient], workers: Workers, kernels: Any, arrays: str
) -> Exchange:
    """``scheme.begin`` on a framework's tensors, with an explanation if it fails because they are not numpy arrays.

    Args:
        arrays: what the tensors are, for the message.

    Raises:
        TypeError: the scheme needs something of its arrays or kernels that only numpy has.
    """

    def told(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except (AttributeError, NotImplementedError, TypeError) as error:
            raise TypeError(
                f"{scheme} cannot be run on {arrays}. If it computes with numpy, declare host_only = True in its "
                f"class, or use kernels='native'; if not, use only functions of kernels. The error was: "
                f"{' '.join(str(error).split())}"
            ) from error

    exchange = told(lambda: scheme.begin(gradients, workers, kernels))
    reply: Any = None
    while True:
        try:
            request = told(lambda: exchange.send(reply))  # noqa: B023
        except StopIteration as stop:
            found: Decoded = stop.value
            break
        reply = yield request
    return found._replace(write=lambda i, factor, out: told(lambda: found.write(i, factor, out)))


def argument_names(scheme: Any) -> list[str]:
    """Of a scheme or its class."""
    return [field.name for field in dataclasses.fields(scheme) if field.init]


def split_points(lengths: Sequence[int]) -> list[int]:
    """Offsets ``[0, l_0, l_0 + l_1, ...]`` of consecutive slices."""
    return [0, *np.cumsum(lengths, dtype=np.int64).tolist()]


def ragged_payload(*body: np.ndarray) -> np.ndarray:
    """A uint8 payload that starts with its own length (8 bytes), followed by the parts of ``body``."""
    return np.concatenate([np.array([sum(map(len, body))], "<i8").view(np.uint8), *body])


def answered(exchange: Exchange, answer: Callable[[Any], Generator[Request, Any, Any]]) -> Exchange:
    """An exchange whose requests are replaced: the generator that ``answer`` makes from each request answers it."""
    reply: Any = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = yield from answer(request)


def checked(request: Request, workers: Workers) -> Generator[Request, Any, Any]:
    """Yields a request and returns its answer, if it has the lengths that the request implies.

    Raises:
        ValueError: it has other lengths.
    """
    answer = yield request
    if isinstance(request, (Allreduce, CustomAllreduce)):
        if answer.shape[0] != request.array.shape[0]:
            raise ValueError(
                f"an allreduce returned {answer.shape[0]} elements where {request.array.shape[0]} were expected"
            )
        return answer
    size = workers.size_of(request.group)
    if isinstance(request, Alltoall):
        check_pieces(answer, [request.splits[workers.rank_in(request.group)]] * size)
    elif request.ragged:
        _check_count(answer, size)
    else:
        check_pieces(answer, request.lengths or [request.array.shape[0]] * size)
    return answer


def check_pieces(pieces: Sequence[Any], lengths: Sequence[int]) -> None:
    """Raises ValueError if a worker's piece is missing or has the wrong length."""
    _check_count(pieces, len(lengths))
    for worker, (piece, length) in enumerate(zip(pieces, lengths)):
        if piece.shape[0] != length:
            raise ValueError(
                f"corrupt payload from worker {worker}: {piece.shape[0]} elements where {length} were expected; or "
                f"its tensor has a different shape"
            )


def _check_count(pieces: Sequence[Any], size: int) -> None:
    if len(pieces) != size:
        raise ValueError(f"payloads came from {len(pieces)} workers where {size} were expected")


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
            raise CorruptPayloadError(
                f"corrupt payload from worker {len(bodies)}: a length of {length} at byte {position}"
            )
        bodies.append(buffer[position + 8 : position + 8 + length])
        position += 8 + length
    return bodies


def use_plain_ints(scheme: Scheme, *names: str) -> None:
    """Converts numpy integers among the arguments to Python's, which alone have all methods that kernels use."""
    for name in names:
        object.__setattr__(scheme, name, int(getattr(scheme, name)))


def require_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: use an integer from {low} to {high}")


def require_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: use a number from {low:g} to {high:g}")


def require_bool(name: str, value: Any) -> None:
    """Raises ValueError unless it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r}: use True or False")


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, choices))}")


def require_whole_nodes(size: int, local_size: int) -> None:
    if size % local_size:
        raise ValueError(
            f"hierarchical: {size} workers cannot form nodes of {local_size}; start the same number on every node"
        )


def require_bucket_size(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < ROW or value % ROW:
        raise ValueError(f"bucket_size={value!r}: use a multiple of {ROW}, for example 1024")
