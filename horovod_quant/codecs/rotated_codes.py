"""The codes of EDEN: a random rotation, Lloyd-Max levels, and one scale a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_quant.codecs.base import REDUCER, Codec
from horovod_quant.kernels.layout import code_words, tiles
from horovod_quant.kernels.rotation import rotated_elements
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels

LARGEST_STEP = 2**31 - 1
"""A step counts on from 0 after it: what an int32 word holds."""


@dataclass(frozen=True)
class RotatedCodes(Codec):
    """Codes of rotated elements, which follow a word with the step that selected the rotation.

    The step is a local count of the rank that encodes. The count of a receiver differs after a worker has joined later,
    has failed in the middle of a step, or has missed steps after ``hvd.join()``.

    Args:
        bits: width of a code.
        trellis: whether the codes are trellis-coded.
    """

    bits: int
    trellis: bool = False

    def words(self, elements: int) -> int:
        return min(elements, 1) + code_words(rotated_elements(elements), self.bits) + tiles(elements)

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder, step_words: Any = None) -> Any:
        at = self.offsets(batch.elements)
        if step_words is None:
            batch = batch.with_steps([step & LARGEST_STEP for step in batch.steps])
        return segment_kernels(kernels).encode_rotated(
            self.bits, self.trellis, batch, rounder, at, step_words
        )

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
        return segment_kernels(kernels).decode_rotated(
            self.bits, self.trellis, batch, domain, payloads, at, factor, outs
        )

    def reduce(
        self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch, gather: Codec
    ) -> Any:
        """With the step of the first worker, which every rank that reduces a part of a tensor knows."""
        assert isinstance(gather, RotatedCodes)
        averages = batch.with_values(self.averages(kernels, payloads, at, batch))
        steps = segment_kernels(kernels).step_words(payloads[0], at, batch.elements)
        return gather.encode(kernels, averages, Rounder(REDUCER), steps)
