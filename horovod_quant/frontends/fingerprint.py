"""Fingerprint of a gradient, by which workers detect different gradients."""

from __future__ import annotations

import functools
from typing import Any

from horovod_quant.reductions.agreement import WIRE_VERSION, signs_of
from horovod_quant.schemes.base import Scheme


@functools.lru_cache(maxsize=4096)
def fingerprint(name: str, shape: Any, dtype: Any, scheme: Scheme, seed: int) -> tuple[float, ...]:
    """Return the fingerprint of the properties that all workers must share.

    Its numbers are +1 and -1.
    """
    return tuple(map(float, signs_of(f"{name} {shape} {dtype} {scheme} {seed} {WIRE_VERSION}")))
