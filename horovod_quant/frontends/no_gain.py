"""Warnings of compressors that save no bytes."""

from __future__ import annotations

from collections.abc import Mapping

from horovod_quant.autotune.candidates import bits_sent
from horovod_quant.frontends.policy import Policy
from horovod_quant.kernels import notices
from horovod_quant.schemes.base import Scheme, Workers
from horovod_quant.schemes.hierarchical import inner_of
from horovod_quant.transports.traffic import ring_allreduce_bytes


def warn_if_it_sends_more(
    policy: Policy, workers: Workers, resolved_for: Workers, is_hierarchical: bool
) -> bool:
    """Warn of the first scheme that sends more than float32; return True then.

    Args:
        policy: the policy with the schemes.
        workers: the workers of the reduction.
        resolved_for: the workers for whose number ``exchange="auto"`` chooses.
        is_hierarchical: true if each of the workers is a node.
    """
    if policy.is_off or workers.size == 1:
        return False
    for scheme in map(inner_of, policy.schemes):
        if scheme.own_optimizer is not None:
            continue
        try:
            resolved = scheme.for_workers(resolved_for)
            fixed = resolved.fixed_length_proxy()
            ratio = bits_sent(fixed, workers) / ring_allreduce_bytes(32, workers.size)
        except (AttributeError, NotImplementedError, TypeError, ValueError):  # another package's
            continue
        if ratio >= 1:
            notices.warn(
                f"{type(scheme).__name__} sends {ratio:.2f} times the bytes of float32 among "
                f"{workers.size} {'nodes' if is_hierarchical else 'workers'}; {_remedy(scheme, resolved)}",
                stacklevel=2,
            )
            return True
    return False


def _remedy(scheme: Scheme, resolved: Scheme) -> str:
    """Return the arguments with which a scheme sends less."""
    found = {"exchange": "auto", "coding": "fixed"}
    changed = {name: value for name, value in found.items() if getattr(scheme, name, value) != value}
    if not changed and getattr(resolved, "exchange", None) == "allgather":
        changed = {"exchange": "alltoall"}  # "auto" has not chosen it
    if changed:
        return f"use {', '.join(f'{name}={value!r}' for name, value in changed.items())}"
    return "use fewer bits, or another method: `horovod-quant advise` names one"


def warn_if_nothing_is_compressed(name: str, policy: Policy, elements: Mapping[str, int]) -> bool:
    """Warn if a policy compresses no gradient; return True if it has warned.

    Args:
        name: name of the compressor's class.
        policy: policy of the compressor.
        elements: number of elements of each gradient, by name.
    """
    if not elements or policy.is_off or policy.compresses_any(elements):
        return False
    notices.warn(
        f"{name} compresses nothing: each of the model's {len(elements)} gradients has fewer than "
        f"min_elements={policy.min_elements} elements (the largest has {max(elements.values())}), or is excluded",
        stacklevel=3,
    )
    return True
