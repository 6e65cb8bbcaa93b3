"""Warnings of compressors that save no bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from horovod_quant.autotune.candidates import Candidate, bits_sent
from horovod_quant.frontends.policy import Policy
from horovod_quant.kernels import notices
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.transports.traffic import ring_allreduce_bytes

_REMEDIES: Sequence[Mapping[str, str]] = (
    {"exchange": "auto"},
    {"coding": "fixed"},
    {"exchange": "auto", "coding": "fixed"},
    {"exchange": "alltoall"},
    {"exchange": "alltoall", "coding": "fixed"},
)
"""Arguments that may mend a scheme that sends more, the best first."""


def warn_if_it_sends_more(
    policy: Policy, workers: Workers, resolved_for: Workers, is_hierarchical: bool
) -> bool:
    """Warn of the first scheme that sends more than float32.

    Args:
        policy: the policy with the schemes.
        workers: the workers of the reduction.
        resolved_for: the workers for whose number ``exchange="auto"`` chooses.
        is_hierarchical: true if each of the workers is a node.

    Returns:
        True if it has warned.
    """
    if policy.is_off:
        return False
    for scheme in map(inner_of, policy.schemes):
        ratio = _ratio(scheme, workers, resolved_for)
        if scheme.own_optimizer is None and ratio >= 1:
            remedy = _remedy(scheme, workers, resolved_for)
            _warn(type(scheme).__name__, ratio, workers, is_hierarchical, remedy)
            return True
    return False


def warn_of_candidates(candidates: Iterable[Candidate], workers: Workers, is_hierarchical: bool) -> bool:
    """Warn of each candidate that sends more than float32; return True then.

    Args:
        candidates: the candidates of `Auto`, whose argument ``methods`` has their names.
        workers: the workers of the reduction.
        is_hierarchical: true if each of the workers is a node.
    """
    warned = False
    for each in candidates:
        ratio = 0.0 if each.scheme is None else _ratio(inner_of(each.scheme), workers, workers)
        if ratio >= 1:
            _warn(each.name, ratio, workers, is_hierarchical, "leave it out of methods")
            warned = True
    return warned


def _ratio(scheme: Scheme, workers: Workers, resolved_for: Workers) -> float:
    """Return the bytes sent divided by those of float32.

    It is not a number for one worker, and for a scheme of another package that does not tell its collectives.
    """
    if workers.size == 1:
        return math.nan
    try:
        fixed = scheme.for_workers(resolved_for).fixed_length_proxy()
        return bits_sent(fixed, workers) / ring_allreduce_bytes(32, workers.size)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return math.nan


def _warn(name: str, ratio: float, workers: Workers, is_hierarchical: bool, remedy: str) -> None:
    notices.warn(
        f"{name} sends {ratio:.2f} times the bytes of float32 among {workers.size} "
        f"{'nodes' if is_hierarchical else 'workers'}; {remedy}",
        stacklevel=3,
    )


def _remedy(scheme: Scheme, workers: Workers, resolved_for: Workers) -> str:
    """Return the arguments with which a scheme sends less."""
    for changed in _REMEDIES:
        with suppress(TypeError, ValueError):  # the scheme has no such argument or combination
            if _ratio(dataclasses.replace(scheme, **changed), workers, resolved_for) < 1:  # type: ignore[type-var]
                return f"use {', '.join(f'{name}={value!r}' for name, value in changed.items())}"
    return "use fewer bits, or another method: `horovod-quant advise` names one"
