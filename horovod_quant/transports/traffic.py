"""Bytes that a worker sends in a collective, by the formulas of the alpha-beta model."""

from __future__ import annotations

from horovod_quant.schemes.base import Allgather, Allreduce, Alltoall, CustomAllreduce, Request


def ring_allreduce_bytes(payload: float, size: int) -> float:
    """Return the bytes that each of ``size`` workers sends in a ring allreduce of ``payload`` bytes."""
    return 2 * (size - 1) / size * payload


def sent_bytes(request: Request, size: int) -> list[float]:
    """Return the bytes that one worker sends for a request, for each gradient of the group."""
    factor: int | float
    if isinstance(request, (Allreduce, CustomAllreduce)):
        factor = ring_allreduce_bytes(1, size)
    elif isinstance(request, Allgather):
        factor = size - 1
    elif isinstance(request, Alltoall):
        factor = (size - 1) / size
    else:
        raise TypeError(f"not a request: {request!r}")
    return [factor * part for part in request.parts]
