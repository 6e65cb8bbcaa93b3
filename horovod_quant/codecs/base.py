"""Base class of codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from horovod_quant.kernels.layout import TILE, split_points
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels


class Codec(ABC):
    """A frozen dataclass that encodes segments of tensors as words.

    The payload of a segment depends on the segment alone, so payloads can be split wherever segments end.
    docs/new-scheme.md describes how to write a codec.

    Attributes:
        dtype: the dtype of a payload.
        domain: the domain of the random bits with which workers round their gradients.
        of_sums: True if a reducer sends sums over the workers, not averages.
    """

    dtype: Any = "int32"
    domain: ClassVar[str] = "worker"
    of_sums: ClassVar[bool] = False

    @property
    def align(self) -> int:
        """Number of elements whose multiples are starts of segments."""
        return TILE

    @abstractmethod
    def words(self, elements: int) -> int:
        """Length of the payload of a segment."""

    @abstractmethod
    def encode(self, kernels: Any, batch: Batch, rounder: Rounder) -> Any:
        """Return the payloads of all segments, concatenated.

        Segment i has ``words(batch.elements[i])`` words.

        ``batch.values`` may be `BufferView` objects: see `Batch`. There may be no segments.
        """

    @abstractmethod
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
        """Write the sums over the payloads, in order, times a factor.

        Return the kernels' results.

        Args:
            kernels: the backend.
            payloads: the payloads of the ranks 0, 1, ... that have encoded these segments.
            at: the offset of each segment in every payload.
            batch: the segments, without values and steps.
            domain: the domain of the rounder that has encoded them.
            factor: number by which sums are multiplied.
            outs: for each segment a flat floating-point array, or a `BufferView`; ``as_array`` converts it to one.
        """

    def reduce(
        self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch, gather: Codec
    ) -> Any:
        """Encode the averages over all workers' payloads with the codec ``gather``."""
        averages = self.averages(kernels, payloads, at, batch)
        return gather.encode(kernels, batch.with_values(averages), Rounder(REDUCER))

    def averages(
        self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch
    ) -> Sequence[Any]:
        """Return the averages over all workers' payloads, float32, per segment."""
        outs = segment_kernels(kernels).empty(batch.elements)
        return self.decode(kernels, payloads, at, batch, self.domain, 1.0 / len(payloads), outs)

    def offsets(self, elements: tuple[int, ...]) -> tuple[int, ...]:
        """Return the offset of each segment's payload, and the total length."""
        return _offsets(self, elements)


REDUCER = "server"
"""Domain of the random bits with which a reducer rounds averages.

All ranks draw the same bits in it, so the result does not depend on which rank reduces a shard.
"""


@lru_cache(maxsize=512)  # the segments of every step have the same lengths
def _offsets(codec: Codec, elements: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(split_points([codec.words(count) for count in elements]))
