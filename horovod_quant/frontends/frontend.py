"""What the frontends for PyTorch and TensorFlow have in common: arguments, checks, the control tensor."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

import numpy as np

from horovod_quant import kernels as kernel_backends
from horovod_quant.frontends import former_names, methods, nodes, switch
from horovod_quant.frontends.compressor_classes import refuse_unknown
from horovod_quant.frontends.policy import Policy
from horovod_quant.frontends.stats import Stats, TrafficCounter
from horovod_quant.kernels import notices
from horovod_quant.reductions.agreement import WIRE_VERSION, signs_of
from horovod_quant.schemes import Hierarchical, registry
from horovod_quant.schemes.base import (
    Scheme,
    Workers,
    argument_names,
    require_bool,
    require_int,
    require_number,
)
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.schemes.inside import FLOAT32, Inside, require_inside
from horovod_quant.transports.traffic import ring_allreduce_bytes

MIN_ELEMENTS = 1024
"""Default ``min_elements`` of the compressors."""

UNNAMED = "unnamed"
"""The name of a gradient that has none, whatever its shape, which shall not differ between workers unnoticed."""

REMEMBERED_NAMES = 1024
"""Of a script's own allreduces, at most."""

_FORGOTTEN = "forgotten"
"""In a compressor's state: the largest count of the names beyond those."""

GROUP_BYTES = 32 * 2**20
"""Default ``group_bytes`` of the compressors."""


class _CompressorClass(type):
    """What the compressors' classes are: one that Horovod asks to compress says what is missing.

    Horovod's own compressors are classes. Instances have methods of the same names, which cost them nothing more.
    """

    def __getattribute__(cls, name: str) -> Any:
        found = super().__getattribute__(name)
        return _of_instances(cls, found) if name in ("compress", "decompress") else found


def _of_instances(owner: type, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the class's instances, which explains itself when it is called on anything else."""

    @functools.wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        if not given or not isinstance(given[0], owner):
            raise TypeError(
                f"compression={owner.__name__}: that is a class; use an instance, {owner.__name__}()"
            )
        return method(*given, **named)

    return call


class BaseCompressor(metaclass=_CompressorClass):
    """The arguments and statistics that all compressors share.

    Horovod asks it to compress each gradient. The compressor quantizes the gradient, exchanges it over Horovod's own
    collectives, and gives Horovod a small *control tensor* to reduce instead: ``[1, +-1 x 16]``. The reduced first
    element shows the factor (average or sum, pre- and postscaling, joined workers). The signs, which depend on the
    gradient's name, show whether all workers exchange the same gradient.

    Args:
        scheme: a scheme with its arguments, such as ``schemes.QSGD(bits=4)`` or one of your own; or the name of a
            method, such as ``"qsgd-4-l2"``.
        min_elements: smaller gradients are left to Horovod, uncompressed.
        exclude: names or shell-style patterns of gradients to leave to Horovod, uncompressed; None for none.
        overrides: different arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: seed of the random rounding; the same on all workers.
        kernels: ``"auto"`` or the name of a backend.
        named_parameters: (name, parameter) pairs that name the gradients; by default they have Horovod's names.
        process_set: where the gradients are reduced; by default the optimizer's process set.
        hierarchical: whether the workers of each host first average among themselves, by default in full precision,
            so that only hosts exchange quantized gradients. A number instead of True makes that many consecutive ranks
            a node, whatever hosts they run on. Works only with all workers, not with a process set or elastic training.
        inside: how gradients travel to the workers of a host that average them, with ``hierarchical``: as
            ``"float32"``; as ``"float16"``, rounded to nearest; or as codes of ``8`` bits, QSGDinf's, without bias.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass.
        nmse_every: number of steps after which `stats` measures the nmse of the averages again, on a sample; 0 for
            never. For the gradients of an optimizer or tape, but not of BinSGDM, whose exchange is no average. Every
            worker must take the same number of steps.
        nmse_share: the sample: this share of each gradient's elements, and at least 1,024 of them.

    Raises:
        ValueError: an argument is out of range, or, with ``hierarchical`` after ``hvd.init()``, the hosts have
            different numbers of workers.
        RuntimeError: with ``hierarchical`` after ``hvd.init()``, its process sets are missing and cannot be added.
        TypeError: an argument is unknown.
        ImportError: Horovod is missing, or was built without the framework.
    """

    own_optimizer: str | None = None
    """The ``own_optimizer`` of the schemes that it accepts; see `Scheme`."""

    # Compressors that version 0.1.0 has pickled have neither.
    nmse_every = 0
    nmse_share = 0.01

    def __init__(
        self,
        scheme: Scheme | str,
        *,
        min_elements: int = MIN_ELEMENTS,
        exclude: str | Iterable[str] | None = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: str = "auto",
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        process_set: Any = None,
        hierarchical: bool | int = False,
        inside: Inside = FLOAT32,
        group_bytes: int = GROUP_BYTES,
        overlap: bool = True,
        nmse_every: int = 0,
        nmse_share: float = 0.01,
        **unknown: Any,
    ) -> None:
        kind = type(self)
        refuse_unknown(kind.__name__, list(unknown), list(inspect.signature(kind).parameters))
        scheme = _scheme(scheme)
        if scheme.own_optimizer != self.own_optimizer:
            raise ValueError(
                f"scheme={scheme!r}: it belongs to the optimizer {scheme.own_optimizer}; use "
                f"hvq.{type(scheme).__name__}(...)"
            )
        group_bytes = _whole(group_bytes)
        require_int("seed", seed, 0, 2**63 - 1)
        require_int("group_bytes", group_bytes, 1, 2**62)
        require_bool("overlap", overlap)
        require_int("nmse_every", nmse_every, 0, 2**62)
        require_number("nmse_share", nmse_share, 0, 1)
        _require_process_set(process_set)
        hierarchical = _hierarchy(hierarchical)
        if hierarchical and process_set is not None:
            raise ValueError(_NO_PROCESS_SET)
        inside = require_inside(inside)
        if hierarchical:
            scheme = Hierarchical(scheme, inside)
        elif inside != FLOAT32:
            raise ValueError(f"inside={inside!r}: it is for hierarchical exchanges; add hierarchical=True")
        self.policy = Policy(scheme, min_elements, exclude, overrides)
        self.policy.check_workers(2)  # one worker's Horovod asks for nothing, and would never say it
        self.hierarchical = hierarchical
        self.inside = inside
        self.seed = int(seed)
        self.group_bytes = int(group_bytes)
        self.overlap = bool(overlap)
        self.nmse_every, self.nmse_share = int(nmse_every), float(nmse_share)
        self._kernels = kernels
        self._said_nothing_is_compressed = False
        self._said_it_sends_more = False
        self._check_kernels()
        self._attach(process_set, None if named_parameters is None else _named(named_parameters))
        if hierarchical and self._is_initialized():  # otherwise at the first exchange
            self._check_workers(self._basics().size())
            nodes.require_process_sets(self._basics(), hierarchical)

    def _basics(self) -> Any:
        """Horovod's functions that need no framework."""
        raise NotImplementedError

    def _is_initialized(self) -> bool:
        """Whether Horovod knows its workers."""
        return self._basics().is_initialized()

    def _check_workers(self, size: int) -> None:
        """Raises ValueError when the arguments cannot serve so many workers, or nodes like these."""
        self.policy.check_workers(size, self._local_size())
        self._warn_if_it_sends_more(size)

    def _deciding(self, workers: Workers) -> Workers:
        """The workers for whose number ``exchange="auto"`` chooses."""
        return workers

    def _warn_if_it_sends_more(self, size: int) -> None:
        """Once, on the first worker: of arguments with which among so many workers float32 would send less."""
        from horovod_quant.autotune.candidates import bits_sent  # which imports this package

        if (
            self.policy.is_off
            or self._said_it_sends_more
            or not self._basics().is_initialized()
            or self._basics().rank() != 0
        ):
            return
        workers = Workers(0, size // self._local_size())
        for scheme in map(inner_of, self.policy.schemes):
            if workers.size == 1 or scheme.own_optimizer is not None:
                continue
            try:
                resolved = scheme.for_workers(self._deciding(workers))
                fixed = resolved.fixed_length_proxy()
                ratio = bits_sent(fixed, workers) / ring_allreduce_bytes(32, workers.size)
            except (AttributeError, NotImplementedError, TypeError, ValueError):  # another package's
                continue
            if ratio >= 1:
                self._said_it_sends_more = True
                notices.warn(
                    f"{type(scheme).__name__} sends {ratio:.2f} times the bytes of float32 among "
                    f"{workers.size} {'nodes' if self.hierarchical else 'workers'}; {_mended(scheme, resolved)}",
                    stacklevel=2,
                )
                return

    def _check_kernels(self) -> None:
        kernel_backends.get(self._kernels)

    def _attach(self, process_set: Any, named_parameters: Sequence[tuple[str, Any]] | None) -> None:
        """Makes what belongs to this process, in which Horovod has its own process sets, parameters and operations."""
        self.policy.is_off = switch.is_off()
        if self.policy.is_off and self.own_optimizer is not None:
            raise RuntimeError(
                f"{switch.VARIABLE}=1: the optimizer {self.own_optimizer} steps by the bits that its compressor sends; "
                f"train with another optimizer, or unset the variable"
            )
        lasting = set(vars(self))
        self._process_set = process_set
        self._traffic = TrafficCounter()
        # The largest count of the names that have been forgotten. Other names start from it: a name that comes again
        # would otherwise repeat its random bits.
        self._first_step = 0
        self._name_parameters(named_parameters)
        self._bind()
        self._attached = {*vars(self), "_attached"} - lasting

    def _name_parameters(self, named_parameters: Sequence[tuple[str, Any]] | None) -> None:
        """Takes the gradients' names."""
        raise NotImplementedError

    def _bind(self) -> None:
        """Makes a frontend's own part of it."""
        raise NotImplementedError

    _in_copies: tuple[str, ...] = ()
    """Of what `_attach` makes, the names that copies keep."""

    def __getstate__(self) -> dict[str, Any]:
        """All but what `_attach` has made."""
        left_out = self._attached.difference(self._in_copies)
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: state[name] for name in self._in_copies}
        vars(self).update({name: value for name, value in state.items() if name not in kept})
        self._attach(None, None)
        vars(self).update(kept)

    def stats(self) -> Stats:
        """Bytes that this worker has sent, and would have sent in float32: per parameter and in total."""
        found = self._traffic.stats()
        return found._replace(uncounted=tuple(self._uncounted(found.parameters)))

    def _uncounted(self, counted: Mapping[str, Any]) -> Iterable[str]:
        """Names of gradients that Horovod has reduced without asking this compressor."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """How often each gradient has been exchanged, by name: besides the seed, all that the random bits depend on.

        Of a script's own allreduces the last 1,024 names are kept; "forgotten" is the count from which other names
        start, once there are more.

        It is the same on all workers that have taken part in the same steps. Save it with a checkpoint and load it
        into a new compressor with the same arguments: training then continues with the same random bits as without
        the interruption.
        """
        forgotten = {_FORGOTTEN: self._first_step} if self._first_step else {}
        return {"exchanges": self._exchange_counts(), **forgotten}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned.

        Raises:
            ValueError: ``state`` is something else.
            RuntimeError: TensorFlow's graphs already contain the counts; load before the first exchange.
        """
        counts = state.get("exchanges") if isinstance(state, Mapping) else None
        sound = isinstance(counts, Mapping) and {"exchanges"} <= set(state) <= {"exchanges", _FORGOTTEN}
        if not sound or not all(
            _is_count(name, count)
            for name, count in [*counts.items(), (_FORGOTTEN, state.get(_FORGOTTEN, 0))]  # type: ignore[union-attr]
        ):
            raise ValueError(f"state={in_short(state)}: use what a compressor's state_dict() returned")
        named = {name: int(count) for name, count in counts.items()}  # type: ignore[union-attr]
        self._resume_at(named, state.get(_FORGOTTEN, 0))

    def _arguments(self) -> dict[str, str]:
        """What must be the same on all workers: see `horovod_quant.reductions.agreement`."""
        policy = self.policy
        values = {
            **self._choosing_arguments(),
            "min_elements": policy.min_elements,
            "exclude": policy.exclude,
            "overrides": policy.overrides,
            "seed": self.seed,
            "hierarchical": self.hierarchical,
            "inside": self.inside,
            "group_bytes": self.group_bytes,
            "overlap": self.overlap,
        }
        if self.nmse_every:
            values.update(nmse_every=self.nmse_every, nmse_share=self.nmse_share)
        return {argument: str(value) for argument, value in values.items()}

    def _choosing_arguments(self) -> dict[str, Any]:
        """Of `_arguments`, the class, as "compression", and what says how gradients are compressed."""
        inner = inner_of(self.policy.scheme)
        own = {argument: getattr(inner, argument) for argument in argument_names(inner)}
        return {"compression": type(inner).__name__, **own}

    def __repr__(self) -> str:
        """A call that constructs an equal compressor, except for ``named_parameters`` and ``process_set``."""
        scheme = inner_of(self.policy.scheme)
        name, parameters = type(self).__name__, inspect.signature(type(self)).parameters
        if "scheme" in parameters and registry.is_own(type(scheme)):
            name = type(scheme).__name__  # the frontend's class, which users have under the scheme's name
            shown = [f"{argument}={getattr(scheme, argument)!r}" for argument in argument_names(scheme)]
        elif "scheme" in parameters:
            shown = [repr(scheme)]
        else:
            own = [argument for argument in argument_names(scheme) if argument in parameters]
            shown = [f"{argument}={getattr(scheme, argument)!r}" for argument in own]
        others = {
            "exclude": tuple(self.policy.exclude),
            "overrides": self.policy.given_overrides() or None,
            "kernels": self._kernels,
            "min_elements": self.policy.min_elements,
        }
        for argument, parameter in parameters.items():
            value = others.get(argument, getattr(self, argument, parameter.default))
            if argument not in (*argument_names(scheme), "scheme") and value != parameter.default:
                shown.append(f"{argument}={value!r}")
        return f"{name}({', '.join(shown)})"

    def _exchange_counts(self) -> dict[str, int]:
        raise NotImplementedError

    def _resume_at(self, counts: dict[str, int], first_step: int) -> None:
        raise NotImplementedError

    def _check_process_set(self, used: Any) -> None:
        if self._process_set is not None and used is not self._process_set:
            raise ValueError(
                f"process_set={self._process_set}: Horovod reduces over {used}; use the same for both"
            )

        if self.hierarchical and used.process_set_id != 0:
            raise ValueError(_NO_PROCESS_SET)

    def _local_size(self) -> int:
        """How many workers a node has, as far as this worker knows; 1 without a hierarchy.

        Raises:
            ValueError: not every node has as many.
            RuntimeError: under elastic training.
        """
        if not self.hierarchical:
            return 1
        if int(os.environ.get("HOROVOD_ELASTIC", "0")):
            raise RuntimeError(
                "hierarchical: nodes cannot be re-formed under elastic training; leave it out there"
            )
        if self.hierarchical is not True:
            return self.hierarchical
        if not self._basics().is_homogeneous():
            raise ValueError(nodes.UNEVEN_HOSTS)
        return self._basics().local_size()

    def _warn_if_nothing_is_compressed(self, elements: Mapping[str, int]) -> None:
        """Once: of a model whose gradients, by name, have so many elements."""
        if not elements or self._said_nothing_is_compressed or self.policy.compresses_any(elements):
            return
        if self.policy.is_off:
            return
        self._said_nothing_is_compressed = True
        notices.warn(
            f"{type(self).__name__} compresses nothing: each of the model's {len(elements)} gradients has fewer than "
            f"min_elements={self.policy.min_elements} elements (the largest has {max(elements.values())}), or is "
            f"excluded",
            stacklevel=2,
        )

    def _check_operation(self, op: Any, usable: Sequence[Any], adasum: Any) -> None:
        if op is not None and op not in usable:
            shown = "Adasum" if op == adasum else repr(op)
            raise ValueError(f"op={shown}: {type(self).__name__} supports only op=hvd.Average and op=hvd.Sum")

    def _check_dtype(self, name: str, dtype: Any, usable: Sequence[Any]) -> None:
        if dtype not in usable:
            raise TypeError(
                f"{name}: a gradient of dtype {dtype} cannot be quantized; use float16, bfloat16, float32 or "
                f"float64, or leave compression out of this call"
            )

    def _signs(self, name: str, shape: Any, dtype: Any, scheme: Scheme) -> tuple[float, ...]:
        """The signs that a gradient's control tensor carries."""
        return _fingerprint(name, shape, dtype, scheme, self.seed)

    def _factor(self, name: str, signs: Sequence[float], output: Sequence[float]) -> float:
        """What Horovod has multiplied the sum over the workers by, from the control tensor that came back.

        Raises:
            RuntimeError: the workers meant different gradients.
        """
        first, *rest = output
        if [sign * first for sign in signs] != rest:
            raise RuntimeError(self._disagreement(name))
        return first

    def _disagreement(self, name: str) -> str:
        return (
            f"{name}: the workers did not exchange the same gradient here; check that all of them use the same "
            f"model, and {type(self).__name__} with the same arguments"
        )


def require_no_host(scheme: Scheme, kernels: str) -> None:
    """Raises ValueError where a scheme needs numpy's arrays, and kernels of a framework were asked for by name."""
    needs = scheme.host_requirement()
    if needs is not None:
        raise ValueError(
            f"{needs}: {type(inner_of(scheme)).__name__} then needs its arrays in host memory, where "
            f"kernels={kernels!r} cannot run; use kernels='auto' or kernels='native'"
        )


def in_short(value: Any) -> str:
    """For messages: of a mapping the keys alone, of anything else the beginning."""
    if isinstance(value, Mapping) and value:
        keys = ", ".join(repr(key)[:40] for key in list(value)[:6])
        return f"<{type(value).__name__} with the keys {keys}{', ...' * (len(value) > 6)}>"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _scheme(value: Any) -> Scheme:
    """The scheme that is meant; raises ValueError if there is none."""
    if isinstance(value, str):
        try:
            found = methods.parse(value, for_compressor=True).scheme()
        except ValueError as error:
            raise ValueError(f"scheme={value!r}: {error}") from None
        former_names.warn_of_another_meaning([value])
        if found is None:
            raise ValueError(
                f"scheme={value!r}: that is Horovod's own; use compression=hvd.Compression.{value}"
            )
        return found
    if isinstance(value, type) and issubclass(value, (Scheme, BaseCompressor)):
        raise ValueError(f"scheme={value.__name__}: that is a class; use an instance, {value.__name__}()")
    if isinstance(value, BaseCompressor):
        raise ValueError(f"scheme={value!r}: that is a compressor already; use it directly")
    if not isinstance(value, Scheme):
        raise ValueError(
            f"scheme={value!r}: use one of horovod_quant.schemes, as in QSGD(bits=4), or a method's name, as in "
            f"'qsgd-4'"
        )
    registry.check(type(value))
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(f"scheme={value!r}: {error}; use tuples and numbers as its arguments") from None
    return value


def _mended(scheme: Scheme, resolved: Scheme) -> str:
    """The arguments with which a scheme sends less."""
    found = {"exchange": "auto", "coding": "fixed"}
    changed = {name: value for name, value in found.items() if getattr(scheme, name, value) != value}
    if not changed and getattr(resolved, "exchange", None) == "allgather":
        changed = {"exchange": "alltoall"}  # which "auto" has not chosen
    if changed:
        return f"use {', '.join(f'{name}={value!r}' for name, value in changed.items())}"
    return "use fewer bits, or another method: `horovod-quant advise` names one"


def _whole(value: Any) -> Any:
    """A float that is a whole number, such as 32e6, as one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@functools.lru_cache(maxsize=4096)
def _fingerprint(name: str, shape: Any, dtype: Any, scheme: Scheme, seed: int) -> tuple[float, ...]:
    return tuple(map(float, signs_of(f"{name} {shape} {dtype} {scheme} {seed} {WIRE_VERSION}")))


def _is_count(name: Any, count: Any) -> bool:
    return isinstance(name, str) and isinstance(count, int) and not isinstance(count, bool) and count >= 0


_NO_PROCESS_SET = (
    "hierarchical: it works only with all workers; remove process_set= from the optimizer and from the compressor, "
    "or use hierarchical=False"
)


def _hierarchy(value: Any) -> bool | int:
    """Python's value of it.

    Raises:
        ValueError: it is neither True nor False nor a number of workers.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)) and 1 <= value <= 2**31:
        return int(value)
    raise ValueError(f"hierarchical={value!r}: use True, False, or the number of workers per node, 1 or more")


def _require_process_set(process_set: Any) -> None:
    if process_set is not None and not hasattr(process_set, "process_set_id"):
        raise ValueError(f"process_set={process_set!r}: use an hvd.ProcessSet, or None")


def _named(named_parameters: Any) -> list[tuple[str, Any]]:
    """The pairs of a name and a parameter.

    Raises:
        ValueError: it is something else, or two parameters have one name.
    """
    use = "use pairs of a name and a parameter, such as model.named_parameters()"
    try:
        pairs = list(named_parameters)
    except TypeError:
        raise ValueError(f"named_parameters={named_parameters!r}: {use}") from None
    if not pairs:
        raise ValueError(
            "named_parameters: it is empty; build the model first, and call model.named_parameters() anew for each use"
        )
    seen: set[str] = set()
    for pair in pairs:
        if not (
            isinstance(pair, (tuple, list))
            and len(pair) == 2
            and isinstance(pair[0], str)
            and hasattr(pair[1], "shape")
        ):
            shown = pair if isinstance(pair, (str, tuple)) else type(pair).__name__
            raise ValueError(f"named_parameters: it contains {shown!r}; {use}")
        if pair[0] in seen:
            raise ValueError(f"named_parameters: {pair[0]!r} appears twice; give each parameter its own name")
        seen.add(pair[0])
    return [(name, parameter) for name, parameter in pairs]
