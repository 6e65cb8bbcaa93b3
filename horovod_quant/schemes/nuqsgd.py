"""NUQSGD: Provably Communication-efficient Data-parallel SGD via Nonuniform Quantization.

Ramezani-Kebrya, Faghri, Markov, Aksenov, Alistarh, Roy. JMLR 22, 2021. QSGD's exchange with exponential levels
``0, 2^-s, ..., 1/2, 1``.
"""

from __future__ import annotations

from dataclasses import dataclass

from horovod_quant.codecs.levels import exponential_levels
from horovod_quant.schemes.base import require_int
from horovod_quant.schemes.qsgd import GatheredScheme
from horovod_quant.schemes.registry import register


@register
@dataclass(frozen=True)
class NUQSGD(GatheredScheme):
    """NUQSGD: ``2^(bits-1) - 1`` non-zero exponential levels, so s = ``2^(bits-1) - 2``.

    Args:
        bits: width of a code, 2 to 8: a sign and a level index. (8 bits reach down to 2^-126, the smallest normal
            float; more would add levels that no gradient uses.)
        norm: ``"l2"`` or ``"max"``, computed per bucket and worker.
        bucket_size: number of elements that share a norm, a multiple of 32. A norm below 2^-96 counts as 0. An element
            or norm outside float32's range turns the bucket into NaN.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.
        exchange, rounding: see `horovod_quant.schemes.QSGD`. With unequally spaced levels joint rounding cancels less:
            0.6 to 0.75 of the error remains where gradients differ.

    Raises:
        ValueError: an argument is out of range.
    """

    presets = {"nuqsgd": {"norm": "l2"}, "nuqsgd-alltoall": {"norm": "l2", "exchange": "alltoall"}}
    compared = ("nuqsgd-4",)
    levels = "exponential"

    def __post_init__(self) -> None:
        require_int("bits", self.bits, 2, 8)
        super().__post_init__()

    def grid(self):
        return exponential_levels((1 << (self.bits - 1)) - 2)
