"""The methods that are worth a trial among some number of workers: of the registry's, those that keep an error."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
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
"""Candidates beside none. Each takes a dozen steps of a training to measure."""

_ELEMENTS = 2**20


class Candidate(NamedTuple):
    """A method that may be taken.

    Attributes:
        name: as `horovod_quant.frontends.methods` has it.
        scheme: None for Horovod's own allreduce of float32.
        nmse: what `Scheme.expected_nmse` states for these workers; None where a scheme does not.
        bits_sent: by a worker for an element.
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
    """Those whose nmse is expected to be no more than ``max_nmse``, with the fewest bytes first.

    Of each of a scheme's short names the fewest bits that do, where they send less than float32 would. Of methods whose
    collectives are the same ones, a scheme has one candidate, and a method that sends no less and is no better than
    another has none; unless the other alone needs the host's memory, where gradients may not be.

    Args:
        max_nmse: see `Scheme.expected_nmse`.
        workers: who take part; the rank does not matter.
        hierarchical: whether exchanges are hierarchical.
        kinds: the schemes to choose from, see `usable`.
        on_device: whether they have to do without arrays of the host's memory.
        inside: see `Hierarchical`.
    """
    fitting = [
        found
        for family in _families(kinds)
        for found in _narrowest(family, max_nmse, workers, hierarchical, on_device, inside)
    ]
    most_bits = ring_allreduce_bytes(32, workers.size)
    kept: list[Candidate] = []
    for candidate in sorted(fitting, key=lambda each: (each.bits_sent, _takes_longer(each), _nmse(each))):
        alike = [each for each in kept if _wire(each, workers) == _wire(candidate, workers)]
        if candidate.bits_sent < most_bits and not any(_replaces(each, candidate) for each in alike):
            kept.append(candidate)
    return tuple(kept[:MOST])


def any_of(
    max_nmse: float,
    workers: Workers,
    hierarchical: bool,
    kinds: tuple[type[Scheme], ...],
    on_device: bool = False,
) -> Candidate | None:
    """One of those that `find` chooses from; None if there is none. It takes less time."""
    fitting = (
        found
        for family in _families(kinds)[::-1]
        for found in _narrowest(family, max_nmse, workers, hierarchical, on_device)
    )
    return next(fitting, None)


def usable() -> tuple[type[Scheme], ...]:
    """The registered schemes that are unbiased, and go with every optimizer."""
    return tuple(kind for kind in registry.registered() if kind.unbiased and kind.own_optimizer is None)


def named(
    names: Iterable[str], workers: Workers, hierarchical: bool, inside: Inside = FLOAT32
) -> list[Candidate]:
    """The methods of these names.

    Raises:
        ValueError: there is no such method, or it cannot serve the workers.
    """
    found = []
    for name in names:
        scheme = methods.parse(name).scheme()
        assert scheme is not None
        found.append(_candidate(name, scheme, workers, hierarchical, inside))
    return found


def check_names(names: Any) -> tuple[str, ...]:
    """The full names of methods, in the order given.

    Raises:
        ValueError: it is something else, or one of them is no method of this package for every optimizer.
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


def _families(kinds: tuple[type[Scheme], ...]) -> list[methods.Family]:
    return [family for family in methods.every_family() if family.members[0].scheme_class in kinds]


def _narrowest(
    family: methods.Family,
    max_nmse: float,
    workers: Workers,
    hierarchical: bool,
    on_device: bool,
    inside: Inside = FLOAT32,
) -> Iterator[Candidate]:
    """Of a short name's methods the one with the fewest bits that has an error as small, if one has."""
    for method in family.members:
        scheme = method.scheme()
        assert scheme is not None
        if on_device and scheme.host_requirement() is not None:
            continue
        with suppress(ValueError):  # too narrow for so many
            found = _candidate(method.name, scheme, workers, hierarchical, inside)
            if found.nmse is not None and found.nmse <= max_nmse:
                yield found
                return


def _candidate(name: str, scheme: Scheme, workers: Workers, hierarchical: bool, inside: Inside) -> Candidate:
    whole = Hierarchical(scheme, inside) if hierarchical else scheme
    resolved(whole, workers)
    nmse = whole.expected_nmse(workers.size, workers.nodes)
    return Candidate(name, whole, nmse, bits_sent(whole, workers))


def bits_sent(scheme: Scheme, workers: Workers) -> float:
    """By a worker, for an element of a large gradient; float32 by Horovod's own ring takes ``64 (n - 1) / n``."""
    work = work_of(scheme, [_ELEMENTS], workers.size, workers.local_size)
    sent = sum(sum(sent_bytes(request, workers.size_of(request.group))) for _, request in work.stages)
    return 8 * sent / _ELEMENTS


def _wire(candidate: Candidate, workers: Workers) -> list[type]:
    """What its exchange is made of."""
    assert candidate.scheme is not None
    return [each.request for each in candidate.scheme.for_workers(workers).collectives]


def _replaces(one: Candidate, other: Candidate) -> bool:
    """Whether a candidate that sends no more by the same collectives makes another one needless."""
    if _kind(one) is _kind(other):
        return True
    return _nmse(one) <= _nmse(other) and (_needs_host(other) or not _needs_host(one))


def _kind(candidate: Candidate) -> type[Scheme]:
    assert candidate.scheme is not None
    return type(inner_of(candidate.scheme))


def _takes_longer(candidate: Candidate) -> bool:
    assert candidate.scheme is not None
    return inner_of(candidate.scheme).extra_compute


def _needs_host(candidate: Candidate) -> bool:
    assert candidate.scheme is not None
    return candidate.scheme.host_requirement() is not None


def _nmse(candidate: Candidate) -> float:
    return float("inf") if candidate.nmse is None else candidate.nmse
