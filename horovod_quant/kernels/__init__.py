"""Kernels: pure functions on arrays, bit-identical in all backends.

``reference`` (numpy) is the specification, ``native`` (C++) the fast backend.
"""

from __future__ import annotations

import os
from types import ModuleType

from horovod_quant.kernels import native, native_library, notices, reference

BACKENDS = {"numpy": reference, "native": native}

OWN_OF_FRAMEWORKS = ("tensorflow", "triton")
"""Backends for a framework's tensors, which only its compressors select; numpy arrays do not need them."""

VARIABLE = "HOROVOD_QUANT_KERNELS"
"""Environment variable that overrides ``kernels="auto"``."""

_warned = False


def requested(name: str) -> tuple[str, str]:
    """Return the name of the requested backend, and the request for messages."""
    value = os.environ.get(VARIABLE)
    return (value, f"{VARIABLE}={value}") if name == "auto" and value else (name, f"kernels={name!r}")


def get(name: str = "auto") -> ModuleType:
    """Return a backend by name; ``"auto"`` selects the fastest one available.

    The environment variable HOROVOD_QUANT_KERNELS overrides ``"auto"``.

    Raises:
        ValueError: ``name`` is not a backend.
        ImportError: ``"native"`` was requested by name and cannot be loaded.
    """
    wanted, request = requested(name)
    if name == "auto" and wanted in ("auto", *OWN_OF_FRAMEWORKS):
        return fastest()
    if not isinstance(wanted, str) or wanted not in BACKENDS:
        raise ValueError(f"{request}: no such backend; use 'auto' or one of {sorted(BACKENDS)}")
    if wanted == "native":
        native_library.load()
    return BACKENDS[wanted]


def fastest() -> ModuleType:
    """Return the fastest available backend; warns once if it is numpy."""
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
    """Return a line with the ``"auto"`` backend for host memory, and why."""
    wanted, _ = requested("auto")
    if wanted not in ("auto", "native", *OWN_OF_FRAMEWORKS):
        return f"{wanted} kernels, requested by {VARIABLE}"
    problem = _native_problem()
    if problem is None:
        library = native_library.loaded()
        has = ", ".join(library.available)
        return f"native kernels with {library.instruction_set} (this processor has {has})"
    return f"numpy kernels, much slower than the native ones: {problem}"
