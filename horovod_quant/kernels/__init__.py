"""Kernels: pure functions on arrays, the same set in each backend, the same bits from each.

``reference`` (numpy) is the specification, ``native`` (C++) the fast one.
"""

from __future__ import annotations

import os
from types import ModuleType

from horovod_quant.kernels import native, native_library, notices, reference

BACKENDS = {"numpy": reference, "native": native}

OWN_OF_FRAMEWORKS = ("tensorflow", "triton")
"""Kernels for tensors where they are, which the framework's compressors know; numpy's arrays do without them."""

_warned = False


def get(name: str = "auto") -> ModuleType:
    """The backend called ``name``; ``"auto"`` takes the fastest that works here.

    The environment variable HOROVOD_QUANT_KERNELS says what ``"auto"`` means.

    Raises:
        ValueError: ``name`` is not a backend.
        ImportError: ``"native"`` was asked for by name and cannot be loaded.
    """
    if name == "auto":
        name = os.environ.get("HOROVOD_QUANT_KERNELS") or "auto"
        if name in ("auto", *OWN_OF_FRAMEWORKS):
            return fastest()
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"kernels={name!r}: no such backend; use 'auto' or one of {sorted(BACKENDS)}")
    if name == "native":
        native_library.load()
    return BACKENDS[name]


def fastest() -> ModuleType:
    """The fastest backend that works here; warns, once, where it is numpy's."""
    global _warned
    problem = _native_problem()
    if problem is None:
        return native
    if not _warned:
        _warned = True
        notices.warn(f"horovod_quant uses its slow numpy kernels: {problem}", stacklevel=3)
    return reference


def _native_problem() -> str | None:
    try:
        native_library.load()
    except native_library.NativeKernelsUnavailable as error:
        return str(error)
    return None


def describe() -> str:
    """Which backend ``"auto"`` stands for, for arrays in the host's memory, and why, in a line."""
    wanted = os.environ.get("HOROVOD_QUANT_KERNELS") or "auto"
    if wanted not in ("auto", "native", *OWN_OF_FRAMEWORKS):
        return f"{wanted} kernels, requested by HOROVOD_QUANT_KERNELS"
    problem = _native_problem()
    if problem is None:
        has = ", ".join(native_library.available_instruction_sets())
        return f"native kernels with {native_library.instruction_set()} (this processor has {has})"
    return f"numpy kernels, much slower than the native ones: {problem}"
