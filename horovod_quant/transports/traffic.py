"""Bytes that a worker sends, by the alpha-beta model."""

from __future__ import annotations

from horovod_quant.schemes.base import Allgather, Allreduce, Alltoall, CustomAllreduce, Request


def ring_allreduce_bytes(payload: float, size: int) -> float:
    """Return the bytes each worker sends in a ring allreduce.

    ``payload`` is in bytes, ``size`` the number of workers.
    """
    return 2 * (size - 1) / size * payload


def sent_bytes(request: Request, size: int) -> list[float]:
    """Return the bytes sent for a request, for each gradient."""
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
