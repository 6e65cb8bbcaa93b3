"""Codec of unquantized float32 or float16 numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_quant.codecs.base import Codec
from horovod_quant.kernels.layout import split
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels


@dataclass(frozen=True)
class Floats(Codec):
    """One float for each element.

    Args:
        dtype: ``"float32"``, or ``"float16"``, which rounds to nearest, and to infinity from 65,520 on.
    """

    dtype: str

    def words(self, elements: int) -> int:
        return elements

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder) -> Any:
        return segment_kernels(kernels).convert(batch, self.dtype)

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
        """Write the values of a single payload times a factor."""
        (payload,) = payloads
        arrays = [payload[start : start + count] for start, count in zip(at, batch.elements)]
        return segment_kernels(kernels).scale(arrays, factor, outs)

    def averages(
        self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch
    ) -> Sequence[Any]:
        """Return the averages over payloads of exactly these segments."""
        if self.dtype != "float32":
            payloads = [_as_float32(kernels, payload) for payload in payloads]
        return split(kernels.mean(payloads), batch.elements)


def _as_float32(kernels: Any, array: Any) -> Any:
    batch = Batch((array.shape[0],), (0,), (), (), (array,))
    return segment_kernels(kernels).convert(batch, "float32")
