"""Candidate methods of a tuning session, within a bound of the nmse."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from horovod_quant.analysis.advice import MOST_NMSE as MOST_NMSE
from horovod_quant.analysis.work import resolved, work_of
from horovod_quant.frontends import former_names, methods
from horovod_quant.schemes import Hierarchical, registry
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.schemes.inside import FLOAT32, Inside
from horovod_quant.transports.traffic import ring_allreduce_bytes, sent_bytes

MOST = 6
"""Maximum number of candidates besides no compression. Each takes a dozen training steps to measure."""

_ELEMENTS = 2**20


class Candidate(NamedTuple):
    """A method that `Auto` may choose.

    Attributes:
        name: its name in `horovod_quant.frontends.methods`.
        scheme: its scheme; None for Horovod's allreduce of float32.
        nmse: the value of `Scheme.expected_nmse` for these workers; None where a scheme does not state one.
        bits_sent: bits that a worker sends for each element.
    """

    name: str
    scheme: Scheme | None
    nmse: float | None
    bits_sent: float


NONE = Candidate(methods.NONE, None, 0.0, 64.0)


@functools.lru_cache(maxsize=64)
def find(
    max_nmse: float,
    workers: Workers,
    hierarchical: bool,
    kinds: tuple[type[Scheme], ...],
    on_device: bool = False,
    inside: Inside = FLOAT32,
) -> tuple[Candidate, ...]:
    """Return the candidates within ``max_nmse``, in order of bytes sent.

    Each short name of a scheme contributes its method with the fewest sufficient bits, if it sends less than float32.
    Among methods with the same collectives each scheme has one candidate, and a method that neither sends less nor has
    a smaller nmse than another is left out, unless only the other one needs host memory.

    Args:
        max_nmse: see `Scheme.expected_nmse`.
        workers: the participating workers; the rank does not matter.
        hierarchical: whether reductions are hierarchical.
        kinds: the schemes to choose from, see `usable`.
        on_device: whether candidates must work without arrays in host memory.
        inside: see `Hierarchical`.
    """
    most_bits = ring_allreduce_bytes(32, workers.size)
    kept: list[Candidate] = []
    fitting = _fitting(_families(kinds), max_nmse, workers, hierarchical, on_device, inside)
    for candidate in sorted(fitting, key=_order):
        if candidate.bits_sent < most_bits and not any(_replaces(each, candidate, workers) for each in kept):
            kept.append(candidate)
    return tuple(kept[:MOST])


def any_of(
    max_nmse: float,
    workers: Workers,
    hierarchical: bool,
    kinds: tuple[type[Scheme], ...],
    on_device: bool = False,
) -> Candidate | None:
    """Return one of the methods that `find` chooses from, or None.

    Faster than `find`.
    """
    return next(_fitting(_families(kinds)[::-1], max_nmse, workers, hierarchical, on_device), None)


def usable() -> tuple[type[Scheme], ...]:
    """Return the registered schemes that are unbiased and work with every optimizer."""
    return tuple(kind for kind in registry.registered() if kind.unbiased and kind.own_optimizer is None)


def named(name: str, workers: Workers, hierarchical: bool, inside: Inside = FLOAT32) -> Candidate:
    """Return the method with a name.

    Raises:
        ValueError: there is no such method, or it does not support the workers.
    """
    return _candidate(methods.parse(name), workers, hierarchical, inside)


def possible(
    names: Sequence[str], workers: Workers, hierarchical: bool, inside: Inside = FLOAT32
) -> tuple[list[Candidate], list[str]]:
    """Return the named methods that support the workers, and the refusals.

    Raises:
        ValueError: no method supports them.
    """
    found: list[Candidate] = []
    refused: dict[str, ValueError] = {}
    for name in names:
        try:
            found.append(named(name, workers, hierarchical, inside))
        except ValueError as error:
            refused[name] = error
    if not found:
        raise refused[names[0]]
    return found, [f"{name} ({error})" for name, error in refused.items()]


def check_names(names: Any) -> tuple[str, ...]:
    """Return the full names of methods, in the order given.

    Raises:
        ValueError: ``names`` is no list of names, or one is no method of this package for every optimizer.
    """
    given = list(names) if isinstance(names, Iterable) and not isinstance(names, (str, Mapping)) else []
    if not given or not all(isinstance(name, str) for name in given):
        raise ValueError(f"methods={names!r}: use a list of names, such as ['eden-3', 'qsgd-4'], or None")
    found = []
    for name in given:
        try:
            method = methods.parse(name, for_compressor=True)
        except ValueError as error:
            raise ValueError(f"methods: {error}") from None
        if method.name == methods.NONE:
            raise ValueError("methods: 'none' is always tried; leave it out")
        if method.scheme_class is None or method.own_optimizer is not None:
            why = "is Horovod's own" if method.scheme_class is None else "belongs to an optimizer"
            raise ValueError(
                f"methods: {name!r} {why}; use methods of this package that work with any optimizer"
            )
        found.append(method.name)
    former_names.warn_of_another_meaning(given)
    return tuple(dict.fromkeys(found))


def _families(kinds: tuple[type[Scheme], ...]) -> list[tuple[methods.Method, ...]]:
    return [family for family in methods.every_family() if family[0].scheme_class in kinds]


def _fitting(
    families: Iterable[Iterable[methods.Method]],
    max_nmse: float,
    workers: Workers,
    hierarchical: bool,
    on_device: bool,
    inside: Inside = FLOAT32,
) -> Iterator[Candidate]:
    """Yield the narrowest method of each family within ``max_nmse``."""
    for family in families:
        for method in family:
            scheme = method.scheme()
            if on_device and scheme is not None and scheme.host_requirement() is not None:
                continue
            with suppress(ValueError):  # too few bits for the number of workers
                found = _candidate(method, workers, hierarchical, inside)
                if found.nmse is not None and found.nmse <= max_nmse:
                    yield found
                    break


def _candidate(method: methods.Method, workers: Workers, hierarchical: bool, inside: Inside) -> Candidate:
    scheme = method.scheme()
    assert scheme is not None
    whole = Hierarchical(scheme, inside) if hierarchical else scheme
    resolved(whole, workers)
    nmse = whole.expected_nmse(workers.size, workers.nodes)
    return Candidate(method.name, whole, nmse, bits_sent(whole, workers))


def bits_sent(scheme: Scheme, workers: Workers) -> float:
    """Return the bits sent per element of a large gradient.

    These are one worker's; float32 in a ring has ``64 (n - 1) / n``.
    """
    work = work_of(scheme, (_ELEMENTS,), workers.size, workers.local_size)
    sent = sum(sum(sent_bytes(request, workers.size_of(request.group))) for _, request in work.stages)
    return 8 * sent / _ELEMENTS


def _order(candidate: Candidate) -> tuple[float, bool, float]:
    """Return the sort key: bits, then whether it computes more, then nmse."""
    assert candidate.scheme is not None
    return candidate.bits_sent, inner_of(candidate.scheme).extra_compute, candidate.nmse or 0.0


def _replaces(one: Candidate, other: Candidate, workers: Workers) -> bool:
    """True if a candidate that sends no more makes another one redundant."""
    assert one.scheme is not None
    assert other.scheme is not None
    schemes = (one.scheme, other.scheme)
    wires = [[each.request for each in scheme.for_workers(workers).collectives] for scheme in schemes]
    if wires[0] != wires[1]:
        return False
    if type(inner_of(one.scheme)) is type(inner_of(other.scheme)):
        return True
    if one.scheme.host_requirement() is not None and other.scheme.host_requirement() is None:
        return False
    return (one.nmse or 0.0) <= (other.nmse or 0.0)
