"""Codec of QSGD and NUQSGD: norms, signs and levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from horovod_quant.codecs.base import Codec
from horovod_quant.codecs.rounding_error import gaussian_nmse, level_set
from horovod_quant.kernels.formats import CodeFormat
from horovod_quant.kernels.layout import TILE, buckets, code_words
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels


@dataclass(frozen=True)
class NormsAndCodes(CodeFormat, Codec):
    """Stochastic rounding to levels between 0 and a bucket's norm.

    Its arguments are those of `CodeFormat`.
    """

    @property
    def align(self) -> int:
        return lcm(self.bucket_size, TILE)

    def words(self, elements: int) -> int:
        return buckets(elements, self.bucket_size) + code_words(elements, self.bits)

    def nmse(self, workers: int = 1, rounding: str = "independent") -> float:
        """Nmse that rounding adds to independent Gaussian gradients' average, see `gaussian_nmse`."""
        grid = level_set(self.levels, (1 << (self.bits - 1)) - 1)
        return gaussian_nmse(grid, self.norm, self.bucket_size, rounding, workers)

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder) -> Any:
        return segment_kernels(kernels).encode_codes(self, batch, rounder, self.offsets(batch.elements))

    def decode(
        self,
        kernels: Any,
        payloads: Sequence[Any],
        at: Sequence[int],
        batch: Batch,
        domain: str,
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        return segment_kernels(kernels).decode_codes(self, payloads, at, factor, outs)
