"""The operators' switch: with ``HOROVOD_QUANT_DISABLE=1`` every compressor leaves all gradients to Horovod."""

from __future__ import annotations

import logging
import os

from horovod_quant.kernels import notices

VARIABLE = "HOROVOD_QUANT_DISABLE"

_logged = False


def is_off() -> bool:
    """True if compression is switched off; the first time it is logged.

    Workers that differ in it get Horovod's error about mismatched shapes in the first step.

    Raises:
        ValueError: the variable has another value than 0 or 1.
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
    return value == "1"
