"""Warnings and lines of the log. Some come on one worker alone, so none ends a step: the others would be left in it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

_logger = logging.getLogger("horovod_quant")


def warn(message: str, stacklevel: int = 1) -> None:
    """As ``warnings.warn`` of a RuntimeWarning; a line of the log where the script makes warnings errors."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)
    except Exception:
        log(logging.WARNING, "%s", message)


def log(level: int, message: str, *arguments: Any) -> None:
    """A line of the logger ``horovod_quant``; none where a handler of the script's raises."""
    try:
        _logger.log(level, message, *arguments, stacklevel=2)
    except Exception:
        return
