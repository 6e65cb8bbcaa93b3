"""What EDEN sends of a tensor's elements: the step that selected their signs, codes, and the buckets' scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Callable, NamedTuple

import numpy as np

from horovod_quant.kernels.arrays import Part
from horovod_quant.kernels.keys import ALL_ONES, KeyChain, keys_of
from horovod_quant.kernels.layout import code_words, tiles
from horovod_quant.kernels.rotation import rotated_elements
from horovod_quant.schemes.base import split_points
from horovod_quant.schemes.chunks import Segment


class Coder(NamedTuple):
    """Makes and opens what is sent.

    The step is the sender's own count, from which a receiver's differs after a worker has come later, has died in the
    middle of a step, or has missed some after ``hvd.join()``. Where there are no elements, there is no step either.
    """

    kernels: Any
    bits: int
    trellis: bool = False

    def length(self, elements: int) -> int:
        """Their number of words."""
        return _length(self.bits, elements)

    def parts(
        self, elements: int, values: Callable[[], Any], step: Callable[[Any], Any], key: Any, start: int
    ) -> list[Part]:
        """To be assembled, in this order.

        Args:
            elements: how many ``values()`` will be.
            values: computes them, where the kernels of several tensors are collected.
            step: fills the word of the step that ``key`` is of.
        """
        scales: list[Any] = []

        def encode(out: Any) -> Any:
            words, found = self.kernels.encode_rotated(
                values(), self.bits, key, start, out, trellis=self.trellis
            )
            scales.append(found)
            return words

        return [
            *[(1, np.int32, step)] * _step_words(elements),
            (self.code_words(elements), np.int32, encode),
            (tiles(elements), np.float32, lambda out: scales.pop()),
        ]

    def offsets(self, served: Sequence[Sequence[Segment]]) -> list[list[int]]:
        """Where each server's segments are in its piece."""
        return [split_points([self.length(segment.elements) for segment in own]) for own in served]

    def open(self, piece: Any, elements: int) -> tuple[Any, Any]:
        """The codes and scales at the beginning of a piece."""
        start = _step_words(elements)
        end = start + self.code_words(elements)
        return piece[start:end], self.kernels.view(piece[end : self.length(elements)], np.float32)

    def add(
        self, pieces: Sequence[Any], keys: KeyChain, factor: float, elements: int, out: Any, start: int
    ) -> Any:
        """Writes the sum, times a factor, of what the workers, by rank, have at the beginning of their pieces."""
        words, scales = zip(*(self.open(piece, elements) for piece in pieces))
        own_keys = [
            self.kernels.key_of_word(keys, "worker", piece[:1], rank)
            if elements
            else keys.key("worker", 0, rank)
            for rank, piece in enumerate(pieces)
        ]
        return self.kernels.add_rotated(words, scales, self.bits, own_keys, factor, out, start, self.trellis)

    def code_words(self, elements: int) -> int:
        return code_words(rotated_elements(elements), self.bits)

    # Many parts in one call, for kernels that have a Table.

    def encode_each(
        self,
        values: Sequence[Any],
        chains: Sequence[KeyChain],
        stage: str,
        steps: Sequence[int],
        rank: int,
        starts: Sequence[int],
    ) -> Any:
        """What is sent of so many parts, one after another."""
        table, places = self.kernels.Table(values), _places(self.bits, tuple(map(len, values)))
        keys = keys_of(chains, stage, steps, rank)

        def fill(out: Any) -> Any:
            words = np.array(steps, np.uint32).view(np.int32)
            out[places.steps[places.filled]] = words[places.filled]
            return self.kernels.encode_rotated_each(
                table, self.bits, keys, starts, places.words, places.scales, out, self.trellis
            )

        return self.kernels.assemble([(places.length, np.int32, fill)])

    def add_each(
        self,
        pieces: Sequence[Any],
        chains: Sequence[KeyChain],
        stage: str,
        factor: float,
        outs: Sequence[Any],
        starts: Sequence[int],
    ) -> list[int]:
        """Writes the sums, times a factor, of what `encode_each` gave all workers, by rank; the first one's steps."""
        places = _places(self.bits, tuple(map(len, outs)))
        steps = [places.steps_in(piece) for piece in pieces]
        keys = np.stack([keys_of(chains, stage, own, rank) for rank, own in enumerate(steps)], axis=1)
        self.kernels.add_rotated_each(
            pieces, places.words, places.scales, self.bits, keys, factor, outs, starts, trellis=self.trellis
        )
        return steps[0]


class _Places(NamedTuple):
    """Where parts that follow one another have what they consist of.

    Attributes:
        steps, words, scales: the places of a part's step, and of the first of its words and of its scales.
        filled: whether a part has elements, and so a step.
        length: of all parts.
    """

    steps: np.ndarray
    words: np.ndarray
    scales: np.ndarray
    filled: np.ndarray
    length: int

    def steps_in(self, piece: Any) -> list[int]:
        found = np.zeros(len(self.steps), np.int64)
        found[self.filled] = piece[self.steps[self.filled]]
        return (found & ALL_ONES).tolist()


@lru_cache(maxsize=4096)  # every step's parts have the same lengths
def _length(bits: int, elements: int) -> int:
    return _step_words(elements) + code_words(rotated_elements(elements), bits) + tiles(elements)


@lru_cache(maxsize=256)
def _places(bits: int, elements: tuple[int, ...]) -> _Places:
    coder = Coder(None, bits)
    at = np.array(split_points([coder.length(count) for count in elements]), np.int64)
    words = at[:-1] + np.array([_step_words(count) for count in elements], np.int64)
    scales = words + np.array([coder.code_words(count) for count in elements], np.int64)
    return _Places(at[:-1], words, scales, np.array(elements, np.int64) > 0, int(at[-1]))


def _step_words(elements: int) -> int:
    return min(elements, 1)
