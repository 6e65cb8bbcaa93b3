"""Warnings and lines of the log. Some come on one worker alone, so none ends a step: the others would be left in it."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

_logger = logging.getLogger("horovod_quant")


def warn(message: str, stacklevel: int = 1) -> None:
    """As ``warnings.warn`` of a RuntimeWarning; a line of the log where the script makes warnings errors."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)
    except Exception:
        log(logging.WARNING, "%s", message)


def deprecated(message: str, kind: type[Warning] = DeprecationWarning) -> None:
    """A warning about a name that the next version does not have, at the line of the caller outside this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    try:
        warnings.warn(message, kind, stacklevel=level)
    except Exception:  # the script makes warnings errors, which would end one worker's step alone
        log(logging.WARNING, "%s", message)


def _is_inside(module: str) -> bool:
    """Frames of this package, and of the constructors that dataclasses make."""
    return module.partition(".")[0] in (__name__.partition(".")[0], "dataclasses")


def log(level: int, message: str, *arguments: Any) -> None:
    """A line of the logger ``horovod_quant``; none where a handler of the script's raises."""
    try:
        _logger.log(level, message, *arguments, stacklevel=2)
    except Exception:
        return
