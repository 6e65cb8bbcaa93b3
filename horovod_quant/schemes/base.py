"""Base class of schemes, and the names that schemes import.

A scheme computes with kernels and *yields* a request for each collective; a transport (the simulator, mpi4py, Horovod)
performs it and sends the result back in. A scheme imports no framework.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, Literal

import numpy as np

from horovod_quant.codecs.arguments import is_correlated
from horovod_quant.kernels import notices
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, split_points  # noqa: F401 (what schemes import from here)
from horovod_quant.reductions.base import Reduction, worker_rounder
from horovod_quant.reductions.requests import (  # noqa: F401 (what schemes import from here)
    ALL,
    CROSS,
    LOCAL,
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    CustomAllreduce,
    Request,
    Workers,
    check_pieces,
    map_requests,
    ragged_payload,
    split_gathered,
    split_ragged,
    validated,
)
from horovod_quant.reductions.tensors import (  # noqa: F401
    BinaryState,
    Decoded,
    Exchange,
    Gradient,
    TensorInfo,
)

ExchangeKind = Literal["allgather", "alltoall", "auto"]
ALLGATHER: Final = "allgather"
ALLTOALL: Final = "alltoall"
AUTO: Final = "auto"

Rounding = Literal["correlated", "independent"]
CORRELATED: Final = "correlated"
"""Kind of the random bits that round the workers' gradients; see `worker_key`."""


def worker_key(gradient: Gradient, workers: Workers, rounding: str) -> Key:
    """Return the key with which a worker rounds its gradient.

    ``"correlated"``: each worker's numbers in [0, 1) are uniform, and the workers' numbers sum to a constant, see
    `horovod_quant.kernels.keys`. ``"independent"``: the workers' numbers are independent.
    """
    rounder = worker_rounder("worker", workers, is_correlated(rounding))
    return rounder.key(gradient.keys, gradient.step)


_MANY_WORKERS = Workers(0, 1024)


class Scheme:
    """Base class of schemes: immutable values that validate their arguments.

    A scheme is a ``@dataclass(frozen=True)``. Its fields are its arguments; they must be hashable (tuples, no lists),
    and workers compare their string forms. `reduction` is required, or `collectives` and `begin` where no reduction
    fits; everything else has a default.
    ``@horovod_quant.register`` before the class makes it available as ``hvq.<Name>`` and by name in the commands.

    Guarantees and obligations of a reduction:

    - **Gradients are read-only.** ``gradient.values`` is the user's memory: a flat array of float16, float32,
      float64 or bfloat16 (as uint16); kernels accept all of them. Do not write to it or keep it after the reduction.
    - **Arrays belong to the backend**: they are numpy arrays, or tensors in TensorFlow graphs and on GPUs. A scheme
      that computes only with ``kernels``, cuts with slices and uses ``shape[0]`` for lengths runs everywhere. One that
      calls numpy itself declares ``host_only = True``.
    - **An answer belongs to this reduction** and does not change until everything is decoded. An array that was sent is
      consumed: a transport may add in place and answer with the same memory. So do not read an array after sending it.
    - **``out=`` is a destination, not a promise.** An encoding kernel given ``out`` (as ``kernels.pack`` gives it to
      what fills a part) writes there and returns it; without ``out``, or where the backend's arrays cannot be written
      to, it returns another array. Use what is returned. A decoding kernel always needs the ``out`` given to
      `Decoded.write`, or one from ``kernels.empty``; return what the kernel returns.
    - **Random bits come only from keys**: ``gradient.keys.key(domain, gradient.step, rank)`` for values that only this
      worker rounds, or `worker_key`, with which the workers' errors partly cancel; no rank for values that all workers
      must round identically. Use one key per rounding: another domain gives other bits. Other random numbers would make
      runs irreproducible.
    - **``gradient.step`` is this worker's local count.** Others may differ: a worker may have started later (elastic
      training) or missed steps (``hvd.join()``). No result may need equal counts: where others need the key to decode,
      send its step along, as EDEN does with ``kernels.step_word`` and ``kernels.key_of_word``.
    - **``gradient.start``** is the index of the first element in the whole tensor; it is not always 0 in hierarchical
      reductions. Pass it to kernels that draw bits, so that the result does not depend on which worker computes a part.
      It is a multiple of 1,024 and of the scheme's ``bucket_size``, if it has one.
    - **Every worker makes the same requests**: those of `collectives`, in that order, with arrays of the lengths that
      `Allgather` and `Alltoall` state; also for gradients without elements, and with a single worker.
    - **Received arrays can be passed on**, if the scheme has `received_lengths` and `decode_received`: see there.
      Otherwise the workers of a host pass on averages in float32.
    - **NaN or infinity** on any worker should reach all workers as NaN, in its part of the gradient.

    Declare these in the class, without type annotations, which would make them arguments; the first two are not
    inherited:

    Attributes:
        presets: short names, each with some of the arguments: ``{"sparse": {"share": 0.1}}``. Where a scheme has an
            argument ``bits`` that a preset leaves open, the method's name ends with it: ``qsgd-4``. By default there
            is one name, that of the class in lower case.
        variants: arguments that the commands consider besides the defaults, such as ``({"norm": "l2"},)``; their
            methods' names spell out what differs: ``qsgd-4-l2``.
        compared: full names of the methods that ``bench`` and ``advise`` compare by default.
        renamed: former names of arguments, which are accepted with a DeprecationWarning, and their present names.
        own_optimizer: name of the only class in ``hvq.optim`` that can use the scheme; its result is then
            that optimizer's update, not an average. A frontend without such a class refuses the scheme.
        own_steps: recommended number of steps with that optimizer, relative to other optimizers.
        unbiased: True if the expected result is known to be the exact sum, for `EDEN` up to the bias that it states.
        host_only: whether it uses numpy itself and so needs arrays in host memory, which ``kernels="auto"`` then
            provides; otherwise TensorFlow operations and GPUs may run it.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ()
    renamed: ClassVar[Mapping[str, str]] = {}
    compared: ClassVar[Sequence[str]] = ()
    own_optimizer: ClassVar[str | None] = None
    own_steps: ClassVar[float] = 1.0
    unbiased: ClassVar[bool] = False
    host_only: ClassVar[bool] = False

    @property
    def extra_compute(self) -> bool:
        """True if the arguments lower the nmse by computing without more bytes.

        ``Auto`` and `horovod_quant.autotune.candidates` prefer other arguments where a smaller nmse is not needed.
        """
        return False

    def reduction(self, workers: Workers) -> Reduction:
        """Return the reduction for these workers; required, unless `begin` is defined."""
        raise TypeError(f"{type(self).__name__} defines no reduction")

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of a reduction, in order, without custom reductions.

        By default those of `reduction`, for many workers if it depends on their number.
        """
        return self.reduction(_MANY_WORKERS).collectives

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        """Start the reduction of a group of gradients.

        A generator. By default that of `reduction`.

        Args:
            gradients: the group, in the same order on every worker.
            workers: the participating workers.
            kernels: a backend of `horovod_quant.kernels`.
        """
        return self.reduction(workers).run(gradients, workers, kernels)

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        """Start the reduction as `begin`: a scheme is a `Reduction`."""
        return self.begin(gradients, workers, kernels)

    def received_lengths(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]] | None:
        """Return lengths and dtypes of `Decoded.received` for gradients, or None.

        int32 and float32 arrays have these lengths exactly. For uint8 arrays, all or none, they are estimates.
        """
        if type(self).reduction is Scheme.reduction:
            return None
        return self.reduction(workers).received_lengths(elements, workers)

    def decode_received(
        self, received: Sequence[Any], tensors: Sequence[TensorInfo], workers: Workers, kernels: Any
    ) -> Decoded:
        """Return a reduction's result from the arrays received by any worker.

        A hierarchical reduction calls it for each part of a gradient, also for parts that other workers have reduced.
        So it may depend neither on local gradients and steps nor on the rank. Only needed with `received_lengths`.
        """
        if type(self).reduction is Scheme.reduction:
            name = type(self).__name__
            raise TypeError(f"{name}.received_lengths: define {name}.decode_received as well")
        return self.reduction(workers).decode_received(received, tensors, workers, kernels)

    def replaced(self, **arguments: Any) -> Scheme:
        """Return the scheme with other arguments, as ``overrides`` give them.

        To be overridden where the default of an argument depends on another one.
        """
        return dataclasses.replace(self, **arguments)  # type: ignore[type-var]

    def for_workers(self, workers: Workers) -> Scheme:
        """Return the scheme for these workers, the same on all of them.

        Raises:
            ValueError: the arguments do not support these workers.
        """
        return self

    def check_workers(self, size: int) -> None:
        """Raise ValueError if the arguments do not work with ``size`` workers."""

    def owned(self, name: str, elements: int, workers: Workers) -> tuple[int, int]:
        """Return the range of elements whose state this worker keeps: start, stop."""
        return 0, elements

    def levels_left(self, workers: int, hosts: int) -> int | None:
        """Return the number of non-zero magnitudes of an encoded element.

        It is None if meaningless.

        Args:
            workers: number of workers. If their integers are summed, each may have fewer levels.
            hosts: number of hosts, for a hierarchical reduction.
        """
        return None

    def expected_nmse(self, workers: int, hosts: int) -> float | None:
        """Return the expected nmse for independent Gaussian gradients; None if unknown.

        It is ``||average - exact||^2 / ||exact||^2`` for these workers. A training needs about this share of steps more
        for the same loss: at 1 the rounding adds the same noise as the gradients have. ``advise`` recommends no method
        without it. `horovod_quant.codecs.rounding_error` computes it for stochastic rounding to levels.
        """
        if type(self).relative_error is Scheme.relative_error:
            return None
        rel_rmse = self.relative_error(workers, hosts)
        return None if rel_rmse is None else rel_rmse**2

    def relative_error(self, workers: int, hosts: int) -> float | None:
        """Return the root of `expected_nmse`. Schemes of version 0.1 define it instead."""
        if type(self).expected_nmse is Scheme.expected_nmse:
            return None
        nmse = self.expected_nmse(workers, hosts)
        return None if nmse is None else math.sqrt(nmse)

    def fixed_length_proxy(self) -> Scheme:
        """Return a scheme with constant bytes for the performance model."""
        return self

    def host_requirement(self) -> str | None:
        """Return the argument or declaration that requires host memory, or None."""
        return "host_only=True" if self.host_only else None

    def compress(self, tensor: Any = None) -> Any:
        """Raise TypeError.

        Horovod calls it when given a scheme instead of a compressor.
        """
        is_scheme = isinstance(self, Scheme)
        shown = repr(self) if is_scheme else "a scheme's class"
        usable = self.compressor_call() if is_scheme else "hvq.Compressor(...)"
        raise TypeError(f"compression={shown}: that is a scheme, not a compressor; use {usable}")

    def compressor_call(self, *options: str) -> str:
        """Return the call that makes a compressor of the scheme, for messages."""
        if self.own_optimizer is None:
            return f"hvq.Compressor({', '.join([repr(self), *options])})"
        return f"hvq.{type(self).__name__}({', '.join(options) or '...'}), for the optimizer {self.own_optimizer}"


class WithRounding(Scheme):
    """Scheme with the argument ``rounding``, which selects random bits: see `worker_key`."""

    rounding: Rounding

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounding", CORRELATED if is_correlated(self.rounding) else "independent")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore pickles, also of version 0.1.0, which called correlated rounding "joint"."""
        former = {"rounding": CORRELATED} if state.get("rounding") == "joint" else {}
        vars(self).update(state, **former)

    @property
    def is_correlated(self) -> bool:
        """True if the workers' errors partly cancel."""
        return self.rounding == CORRELATED


def with_explained_errors(
    scheme: Scheme, gradients: Sequence[Gradient], workers: Workers, kernels: Any, arrays: str
) -> Exchange:
    """Run ``scheme.begin`` on a framework's tensors, and explain errors.

    It fails where a scheme needs numpy arrays.

    Args:
        arrays: name of the kind of tensors, for the message.

    Raises:
        TypeError: the scheme needs something of its arrays or kernels that only numpy has.
    """
    with _explained(scheme, arrays):
        found: Decoded = yield from scheme.begin(gradients, workers, kernels)
    found.decode = _explained(scheme, arrays)(found.decode)
    return found


@contextmanager
def _explained(scheme: Scheme, arrays: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, NotImplementedError, TypeError) as error:
        raise TypeError(
            f"{scheme} cannot be run on {arrays}. If it computes with numpy, declare host_only = True in its "
            f"class, or use kernels='native'; if not, use only functions of kernels. The error was: "
            f"{' '.join(str(error).split())}"
        ) from error


def argument_names(scheme: Any) -> list[str]:
    """Return the names of the arguments of a scheme or its class."""
    return [field.name for field in dataclasses.fields(scheme) if field.init]


def type_hints(of: Any) -> dict[str, Any]:
    """Return the annotations as types; none if Python cannot evaluate them."""
    try:
        return typing.get_type_hints(of)
    except (TypeError, NameError):
        return {}


def renamed_arguments(kind: type[Scheme], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by present names; former names issue a DeprecationWarning.

    Raises:
        TypeError: an argument is given by both names.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        present = kind.renamed.get(name, name)
        if present in found or (present != name and present in given):
            raise TypeError(f"{kind.__name__}() got {name!r} and {present!r}, two names of one argument")
        if present != name:
            notices.deprecated(f"{kind.__name__}({name}=...) is now {kind.__name__}({present}=...)")
        found[present] = value
    return found


def require_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: use an integer from {low} to {high}")


def use_int(scheme: Scheme, name: str, low: int, high: int) -> None:
    """Require an integer argument, and make it a plain int.

    Integers of numpy lack methods that kernels use.
    """
    require_int(name, getattr(scheme, name), low, high)
    object.__setattr__(scheme, name, int(getattr(scheme, name)))


def require_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: use a number from {low:g} to {high:g}")


def require_bool(name: str, value: Any) -> None:
    """Raise ValueError unless it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r}: use True or False")


def require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r}: use one of {', '.join(map(repr, choices))}")


UNEVEN_HOSTS = (
    "hierarchical=True: some hosts have more workers than others; start the same number on every host, or give the "
    "number of consecutive ranks per node, as in hierarchical=2"
)


def require_whole_nodes(size: int, local_size: int) -> None:
    require_int("local_size", local_size, 1, 2**31)
    if size % local_size:
        raise ValueError(
            f"hierarchical: {size} workers cannot form nodes of {local_size}; start the same number on every node"
        )


def nodes_of(ranks: Sequence[int], hierarchical: bool | int, hosts: Sequence[Any] = ()) -> list[list[int]]:
    """Return the ranks of each node.

    Args:
        ranks: ranks of the workers.
        hierarchical: True where hosts are nodes, the number of consecutive ranks of a node, or False for nodes of one.
        hosts: the host of each rank, for True.

    Raises:
        ValueError: nodes have different numbers of workers.
    """
    if hierarchical is not True:
        local_size = 1 if hierarchical is False else hierarchical
        require_whole_nodes(len(ranks), local_size)
        return [list(ranks[i : i + local_size]) for i in range(0, len(ranks), local_size)]
    by_host: dict[Any, list[int]] = {}
    for rank, host in zip(ranks, hosts):
        by_host.setdefault(host, []).append(rank)
    if len({len(node) for node in by_host.values()}) != 1:
        raise ValueError(UNEVEN_HOSTS)
    return list(by_host.values())


def use_bucket_size(scheme: Any) -> None:
    """Require a bucket size, and make it a plain int."""
    require_bucket_size(scheme.bucket_size)
    object.__setattr__(scheme, "bucket_size", int(scheme.bucket_size))


def require_bucket_size(value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < ROW or value % ROW:
        raise ValueError(f"bucket_size={value!r}: use a multiple of {ROW}, for example 1024")
