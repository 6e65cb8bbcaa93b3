"""IEEE 754 float arithmetic where a framework has disabled part of it.

TensorFlow's threads flush subnormal numbers to zero. The kernels' results are defined without that.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_ROOM = 512  # for an fenv_t, which has 32 bytes on x86-64 and 8 on aarch64


def _libm() -> ctypes.CDLL | None:
    try:
        libm = ctypes.CDLL("libm.so.6")
        return libm if libm.fegetenv and libm.fesetenv else None
    except (OSError, AttributeError):
        return None


_LIBM = _libm()


@contextlib.contextmanager
def ieee_arithmetic() -> Iterator[None]:
    """Round to nearest and keep subnormal numbers in this thread.

    Restores its settings at the end.
    """
    if _LIBM is None:
        yield
        return
    kept = ctypes.create_string_buffer(_ROOM)
    _LIBM.fegetenv(kept)
    _LIBM.fesetenv(_DEFAULT_ENVIRONMENT)
    try:
        yield
    finally:
        _LIBM.fesetenv(kept)
