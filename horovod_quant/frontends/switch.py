"""Operators' switch: ``HOROVOD_QUANT_DISABLE=1`` leaves all gradients to Horovod."""

from __future__ import annotations

import logging
import os

from horovod_quant.kernels import notices

VARIABLE = "HOROVOD_QUANT_DISABLE"

_logged = False


def is_off(own_optimizer: str | None = None) -> bool:
    """True if compression is switched off, which is logged once.

    Workers that differ in it get an error in the first step: Horovod's about mismatched shapes, or that of workers with
    other arguments.

    Args:
        own_optimizer: the optimizer that cannot step without the compressor, or None.

    Raises:
        ValueError: the variable has another value than 0 or 1.
        RuntimeError: compression is switched off, and there is such an optimizer.
    """
    global _logged
    value = os.environ.get(VARIABLE, "0").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={value!r}: use 1 to leave all gradients to Horovod, or 0")
    if value == "1" and not _logged:
        _logged = True
        notices.log(
            logging.WARNING, "horovod_quant: %s=1: Horovod reduces all gradients, uncompressed", VARIABLE
        )
    if value == "1" and own_optimizer is not None:
        raise RuntimeError(
            f"{VARIABLE}=1: the optimizer {own_optimizer} steps by the bits that its compressor sends; "
            f"train with another optimizer, or unset the variable"
        )
    return value == "1"
