"""Base class of compressors for PyTorch and TensorFlow."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from horovod_quant import kernels as kernel_backends
from horovod_quant.frontends import no_gain, nodes, step_counts, switch
from horovod_quant.frontends.arguments import (
    GROUP_BYTES,
    MIN_ELEMENTS,
    CompressorClass,
    hierarchy_of,
    named_pairs,
    require_process_set,
    scheme_of,
    whole_number,
)
from horovod_quant.frontends.compressor_classes import refuse_unknown
from horovod_quant.frontends.policy import Policy
from horovod_quant.frontends.stats import Stats, TrafficCounter
from horovod_quant.kernels import notices
from horovod_quant.kernels.keys import RngKey
from horovod_quant.reductions.agreement import WIRE_VERSION, signs_of
from horovod_quant.schemes import Hierarchical, registry
from horovod_quant.schemes.base import (
    UNEVEN_HOSTS,
    Scheme,
    Workers,
    argument_names,
    require_bool,
    require_int,
    require_number,
)
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.schemes.inside import FLOAT32, Inside, require_inside


@functools.lru_cache(maxsize=4096)
def gradient_fingerprint(name: str, shape: Any, dtype: Any, scheme: Scheme, seed: int) -> tuple[float, ...]:
    """Return a gradient's fingerprint, the same on all workers.

    Its numbers are +1 and -1.
    """
    return tuple(map(float, signs_of(f"{name} {shape} {dtype} {scheme} {seed} {WIRE_VERSION}")))


class BaseCompressor(metaclass=CompressorClass):
    """Base of compressors, with their common arguments and statistics.

    Horovod asks it to compress each gradient. The compressor quantizes the gradient, reduces it over Horovod's
    collectives, and gives Horovod a small *control tensor* to reduce instead: ``[1, +-1 x 16]``. The reduced first
    element shows the factor (average or sum, pre- and postscaling, joined workers). The other numbers are a fingerprint
    of the gradient, which shows whether all workers reduce the same one.

    Args:
        scheme: a scheme with its arguments, such as ``schemes.QSGD(bits=4)`` or a custom one; or the name of a
            method, such as ``"qsgd-4-l2"``.
        min_elements: minimum elements of a gradient to compress; Horovod reduces smaller ones uncompressed.
        exclude: names or shell-style patterns of gradients to leave to Horovod, uncompressed; None for none.
        overrides: different arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: seed of the random rounding, the same on all workers.
        kernels: ``"auto"`` or the name of a backend.
        named_parameters: (name, parameter) pairs that name the gradients; by default they have Horovod's names.
        process_set: the process set that reduces the gradients; by default the optimizer's.
        hierarchical: whether the workers of each host first average among themselves, by default in full precision,
            so that only hosts average quantized gradients. A number N instead of True makes N consecutive ranks a
            node, regardless of hosts. Works only with all workers, not with a process set or elastic training.
        inside: how gradients travel to the workers of a host that average them, with ``hierarchical``: as
            ``"float32"``; as ``"float16"``, rounded to nearest; or, with ``8``, as the unbiased codes of
            ``QSGD(bits=8)``.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether collectives run during the backward pass.
        nmse_every: `stats` measures the nmse of the averages on a sample every this number of steps; 0 for never. Only
            for gradients of an optimizer or tape, and not of BinSGDM, whose collectives compute no average. All workers
            must take the same number of steps.
        nmse_share: size of the sample: a share of each gradient's elements, at least 1,024 of them.

    Raises:
        ValueError: an argument is out of range, or, with ``hierarchical`` after ``hvd.init()``, the hosts have
            different numbers of workers.
        RuntimeError: with ``hierarchical`` after ``hvd.init()``, its process sets are missing and cannot be added.
        TypeError: an argument is unknown.
        ImportError: Horovod is missing, or was built without the framework.
    """

    own_optimizer: str | None = None
    """Required ``own_optimizer`` of the schemes; see `Scheme`."""

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
        scheme = scheme_of(scheme)
        if scheme.own_optimizer != self.own_optimizer:
            raise ValueError(
                f"scheme={scheme!r}: it belongs to the optimizer {scheme.own_optimizer}; use "
                f"hvq.{type(scheme).__name__}(...)"
            )
        group_bytes = whole_number(group_bytes)
        require_int("seed", seed, 0, 2**63 - 1)
        require_int("group_bytes", group_bytes, 1, 2**62)
        require_bool("overlap", overlap)
        require_int("nmse_every", nmse_every, 0, 2**62)
        require_number("nmse_share", nmse_share, 0, 1)
        require_process_set(process_set)
        hierarchical, inside = hierarchy_of(hierarchical, process_set), require_inside(inside)
        if hierarchical:
            scheme = Hierarchical(scheme, inside)
        elif inside != FLOAT32:
            raise ValueError(f"inside={inside!r}: it is for hierarchical reductions; add hierarchical=True")
        self.policy = Policy(scheme, min_elements, exclude, overrides)
        self.policy.check_workers(2)  # with one worker Horovod calls nothing that would raise this
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
        self._attach(process_set, None if named_parameters is None else named_pairs(named_parameters))
        if hierarchical and self._is_initialized():  # otherwise at the first reduction
            self._check_workers(self._basics().size())
            nodes.require_process_sets(self._basics(), hierarchical)

    def _basics(self) -> Any:
        """Return Horovod's functions that need no framework."""
        raise NotImplementedError

    def _is_initialized(self) -> bool:
        """True if Horovod knows its workers."""
        return self._basics().is_initialized()

    def _check_workers(self, size: int) -> None:
        """Raise ValueError if the arguments do not support these workers or nodes."""
        local_size = self._local_size()
        self.policy.check_workers(size, local_size)
        basics = self._basics()
        if basics.is_initialized() and basics.rank() == 0:
            self._warn_if_it_sends_more(size // local_size, bool(self.hierarchical))

    def _deciding(self, workers: Workers) -> Workers:
        """Return the workers for whose number ``exchange="auto"`` chooses."""
        return workers

    def _check_kernels(self) -> None:
        kernel_backends.get(self._kernels)

    def _attach(self, process_set: Any, named_parameters: Sequence[tuple[str, Any]] | None) -> None:
        """Create the attributes of this process and its Horovod session."""
        self.policy.is_off = switch.is_off(self.own_optimizer)
        lasting = set(vars(self))
        self._process_set = process_set
        self._traffic = TrafficCounter()
        # The largest count of the names that have been forgotten. Other names start from it: a name used anew would
        # otherwise repeat its random bits.
        self._first_step = 0
        self._steps: dict[str, int] = {}  # number of reductions, by name
        self._chains: dict[str, RngKey] = {}
        self._checked: Any = (
            weakref.WeakKeyDictionary()
        )  # optimizer or process set: its size when last checked
        self._name_parameters(named_parameters)
        self._bind()
        self._attached = {*vars(self), "_attached"} - lasting

    def _name_parameters(self, named_parameters: Sequence[tuple[str, Any]] | None) -> None:
        """Store the names of the gradients."""
        raise NotImplementedError

    def _bind(self) -> None:
        """Create the attributes of a frontend."""
        raise NotImplementedError

    _in_copies: tuple[str, ...] = ()
    """Names of attributes made by `_attach` that copies keep."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, except those that `_attach` has made."""
        left_out = self._attached.difference(self._in_copies)
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: state[name] for name in self._in_copies}
        vars(self).update({name: value for name, value in state.items() if name not in kept})
        self._attach(None, None)
        vars(self).update(kept)

    def stats(self) -> Stats:
        """Return this worker's bytes sent, and those of float32, by parameter."""
        found = self._traffic.stats()
        return found._replace(uncounted=tuple(self._uncounted(found.parameters)))

    def _uncounted(self, counted: Mapping[str, Any]) -> Iterable[str]:
        """Return names of gradients that Horovod has reduced without this compressor."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of reductions of each gradient, by name.

        Only the seed and these counts determine the random bits. Of direct allreduces the last 1,024 names are kept;
        "forgotten" is the count from which other names start, once there are more.

        The state is the same on all workers of the same steps. Save it with a checkpoint and load it into a new
        compressor with the same arguments: training then continues with the same random bits as without the
        interruption.
        """
        return step_counts.saved(self._exchange_counts(), self._first_step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: ``state`` is something else.
            RuntimeError: TensorFlow's graphs already contain the counts; load before the first reduction.
        """
        self._resume_at(*step_counts.read(state))

    def _arguments(self) -> dict[str, str]:
        """Return the arguments that all workers must share, see `horovod_quant.reductions.agreement`."""
        policy = self.policy
        values = {
            **self._choosing_arguments(),
            switch.VARIABLE: int(policy.is_off),
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
            values["nmse_every"] = f"{self.nmse_every}, nmse_share={self.nmse_share}"
        return {argument: str(value) for argument, value in values.items()}

    def _choosing_arguments(self) -> dict[str, Any]:
        """Return the arguments that choose schemes, with the class as "compression"."""
        inner = inner_of(self.policy.scheme)
        own = {argument: getattr(inner, argument) for argument in argument_names(inner)}
        return {"compression": type(inner).__name__, **own}

    def __repr__(self) -> str:
        """Return the constructor call, without ``named_parameters`` and ``process_set``."""
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
        return dict(self._steps)

    def _resume_at(self, counts: dict[str, int], first_step: int) -> None:
        self._steps, self._first_step = counts, first_step

    def _local_size(self) -> int:
        """Return the number of workers of a node, 1 without a hierarchy.

        Raises:
            ValueError: nodes have different numbers of workers.
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
            raise ValueError(UNEVEN_HOSTS)
        return self._basics().local_size()

    def _warn_if_nothing_is_compressed(self, elements: Mapping[str, int]) -> None:
        """Warn once if none of these gradients is compressed.

        ``elements`` are by name.
        """
        policy = self.policy
        if self._said_nothing_is_compressed or policy.is_off or policy.compresses_any(elements):
            return
        if elements:
            self._said_nothing_is_compressed = True
            notices.warn(
                f"{type(self).__name__} compresses nothing: each of the model's {len(elements)} gradients has fewer "
                f"than min_elements={policy.min_elements} elements (the largest has {max(elements.values())}), or is "
                f"excluded",
                stacklevel=2,
            )

    def _warn_if_it_sends_more(self, size: int, are_nodes: bool) -> None:
        """Warn once if a scheme sends more than float32 among workers.

        To be called on the first worker.
        """
        if not self._said_it_sends_more:
            workers = Workers(0, size)
            self._said_it_sends_more = no_gain.warn_if_it_sends_more(
                self.policy, workers, self._deciding(workers), are_nodes
            )

    def _factor(self, name: str, expected: Sequence[float], output: Sequence[float]) -> float:
        """Return the factor of Horovod's sums, from the reduced control tensor.

        Raises:
            RuntimeError: the workers meant different gradients.
        """
        first, *rest = output
        if [sign * first for sign in expected] != rest:
            raise RuntimeError(self._disagreement(name))
        return first

    def _disagreement(self, name: str) -> str:
        return (
            f"{name}: the workers did not send the same gradient here; check that all of them use the same "
            f"model, and {type(self).__name__} with the same arguments"
        )
