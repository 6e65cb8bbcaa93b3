"""Warnings and log messages, which never raise.

An error on one worker alone would block the others.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

_logger = logging.getLogger("horovod_quant")


def warn(message: str, stacklevel: int = 1, kind: type[Warning] = RuntimeWarning) -> None:
    """Warn, or log it instead if the script turns warnings into errors."""
    try:
        warnings.warn(message, kind, stacklevel=stacklevel + 1)
    except Exception:
        log(logging.WARNING, "%s", message)


def deprecated(message: str, kind: type[Warning] = DeprecationWarning) -> None:
    """Warn of a deprecated name at the line of the user's call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warn(message, level, kind)


def _is_inside(module: str) -> bool:
    """True for modules of this package and constructors of dataclasses."""
    return module.partition(".")[0] in (__name__.partition(".")[0], "dataclasses")


def log(level: int, message: str, *arguments: Any) -> None:
    """Log to the logger ``horovod_quant``; ignores errors of the script's handlers."""
    try:
        _logger.log(level, message, *arguments, stacklevel=2)
    except Exception:
        return
