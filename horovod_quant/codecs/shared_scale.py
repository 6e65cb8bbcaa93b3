"""Codec of Global-QSGD's uniform levels: integers on a shared scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_quant.kernels.formats import SumFormat, Sums
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels


@dataclass(frozen=True)
class SharedScaleSums(SumFormat):
    """Signed digits on norms that all workers share.

    Its arguments are those of `SumFormat`.
    """

    domain = "worker"

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder, norms: Any) -> Any:
        """Return all tensors' digits, and a word counting active workers."""
        return segment_kernels(kernels).encode_sums(self, batch, rounder, norms)

    def decode(
        self, kernels: Any, sums: Sums, tensors: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        """Write the sums of some of the tensors times a factor."""
        return segment_kernels(kernels).decode_sums(self, sums, tensors, factor, outs)
