"""Validation, clipping and messages of BinSGDM's optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.hierarchical import inner_of

DEFAULT_BETA = 0.85
"""Best of six values in `scripts/reproduce binsgdm-tuning`."""

SPREAD = (
    "BinSGDM: momentum and scale are split among the workers of each node, because the reduction is hierarchical; call "
    "the optimizer's gather_state() on all workers first"
)
"""Error message for a request for the whole state from one worker."""

WITHOUT_ITS_COMPRESSOR = (
    "BinSGDM: DistributedOptimizer has another compression, so gradients travel without quantization and become bits "
    "afterwards; pass compression=hvq.BinSGDM() to DistributedOptimizer"
)
"""Error message for the optimizer without its compressor."""

_INFINITY = float("inf")


def require_beta(beta: Any) -> None:
    """Raise ValueError unless ``0 <= beta < 1``."""
    if not _is_between(0, beta, 1):
        raise ValueError(f"beta={beta!r}: use a number from 0 up to but not including 1")


def require_same_beta(given: float | None, betas: Iterable[float]) -> None:
    """Raise ValueError if ``given`` differs from the optimizer's ``betas``; None is allowed."""
    found = sorted(set(betas))
    if given is not None and found != [given]:
        raise ValueError(f"beta={given!r}: the optimizer has beta={found}; use the same value for both")


def require_step_sizes(**values: Any) -> None:
    """Raise ValueError unless each is finite and not negative."""
    for name, value in values.items():
        if not _is_between(0, value, _INFINITY):
            raise ValueError(f"{name}={value!r}: use a finite, non-negative number")


def require_clip_norm(clip_norm: Any) -> None:
    """Raise ValueError unless it is None, or finite and positive."""
    if clip_norm is not None and (not _is_between(0, clip_norm, _INFINITY) or clip_norm == 0):
        raise ValueError(f"clip_norm={clip_norm!r}: use a positive, finite number, or None for no limit")


def clipped(kernels: Any, values: Any, clip_norm: float | None) -> Any:
    """Return a worker's flat gradient, clipped to ``clip_norm`` if given."""
    return values if clip_norm is None else kernels.clip(values, clip_norm)


def moves_by_averages(scheme: Scheme) -> bool:
    """True if the scheme returns averages of the workers' bits.

    Factors before the optimizer (a loss scale, clipping, a sum) change the unit of averages, so the largest average's
    magnitude is sent, too.
    """
    return getattr(inner_of(scheme), "server_bits", 1) > 1


def _is_between(low: float, value: Any, high: float) -> bool:
    """True if ``low <= value < high``, and it is a number."""
    if isinstance(value, bool):
        return False
    try:
        return bool(low <= value < high)
    except (TypeError, ValueError):  # a text, or an array of several numbers
        return False
