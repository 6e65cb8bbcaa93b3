"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from horovod_quant.kernels.layout import TILE
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels, split_points


class Codec(ABC):
    """A frozen dataclass that encodes segments of tensors as words.

    The payload of a segment depends on the segment alone, so payloads can be cut wherever segments end.
    docs/new-scheme.md says how to write a codec.

    Attributes:
        dtype: of a payload.
        domain: of the random bits with which workers round their gradients.
        of_sums: true if a reducer sends sums over the workers, and not averages.
    """

    dtype: Any = "int32"
    domain: ClassVar[str] = "worker"
    of_sums: ClassVar[bool] = False

    @property
    def align(self) -> int:
        """Segments begin at multiples of this number of elements."""
        return TILE

    @abstractmethod
    def words(self, elements: int) -> int:
        """Length of the payload of a segment."""

    @abstractmethod
    def encode(self, kernels: Any, batch: Batch, rounder: Rounder) -> Any:
        """The payloads of all segments, one after another, segment i with ``words(batch.elements[i])`` words.

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
        """Write the sums over the payloads, in their order, times a factor; return what the kernels return.

        Args:
            kernels: the backend.
            payloads: of the ranks 0, 1, ... that have encoded these segments.
            at: where each segment begins in every payload.
            batch: the segments, without values and steps.
            domain: of the rounder that has encoded them.
            factor: number by which sums are multiplied.
            outs: for each segment a flat floating-point array, or a `BufferView`; ``as_array`` makes the array.
        """

    def reduce(
        self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch, gather: Codec
    ) -> Any:
        """The payload of ``gather`` for the averages over the payloads of all workers."""
        averages = self.averages(kernels, payloads, at, batch)
        return gather.encode(kernels, batch.with_values(averages), Rounder(REDUCER))

    def averages(
        self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch
    ) -> Sequence[Any]:
        """The averages over the payloads of all workers, a float32 array for each segment."""
        outs = segment_kernels(kernels).empty(batch.elements)
        return self.decode(kernels, payloads, at, batch, self.domain, 1.0 / len(payloads), outs)

    def offsets(self, elements: tuple[int, ...]) -> tuple[int, ...]:
        """Where the payload of each segment begins, and the length of all."""
        return _offsets(self, elements)


REDUCER = "server"
"""Domain of the random bits of a rank that rounds averages. All ranks draw the same bits there, so the result does not
depend on which rank reduces what.
"""


@lru_cache(maxsize=512)  # the segments of every step have the same lengths
def _offsets(codec: Codec, elements: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(split_points([codec.words(count) for count in elements]))
