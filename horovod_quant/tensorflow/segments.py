"""Kernels for many segments of immutable tensors: decoding returns new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import tensorflow as tf

from horovod_quant.kernels.segments import Batch, Rounder, SegmentKernels, Source


class FlatVariable:
    """Consecutive elements of a variable of any shape.

    Args:
        variable: the variable.
        start, stop: the range of elements; all by default.
    """

    def __init__(self, variable: tf.Variable, start: int = 0, stop: int | None = None) -> None:
        self.variable = variable
        self.start = start
        self.stop = variable.shape.num_elements() if stop is None else stop

    @property
    def shape(self) -> tuple[int]:
        return (self.stop - self.start,)

    def __getitem__(self, part: slice) -> FlatVariable:
        start, stop, _ = part.indices(self.stop - self.start)
        return FlatVariable(self.variable, self.start + start, self.start + stop)

    def values(self) -> tf.Tensor:
        return tf.reshape(self.variable, [-1])[self.start : self.stop]


class TensorFlowSegments(SegmentKernels):
    """Loops over the operations for one segment, on TensorFlow tensors."""

    def decode_sources(
        self,
        outs: Sequence[tf.TensorSpec],
        sources: Sequence[Source],
        decode: Callable[[Source, Sequence[tf.TensorSpec]], Sequence[tf.Tensor]],
    ) -> list[tf.Tensor]:
        pieces: list[dict[int, tf.Tensor]] = [{} for _ in outs]
        for source in sources:
            segments = source[2]
            specs = [tf.TensorSpec([each.elements], outs[each.tensor].dtype) for each in segments]
            for segment, piece in zip(segments, decode(source, specs)):
                pieces[segment.tensor][segment.start] = piece
        return [
            self._kernels.concatenate([tf.zeros([0], out.dtype), *(own[start] for start in sorted(own))])
            for out, own in zip(outs, pieces)
        ]

    def pack(
        self, lengths: Sequence[int], decode: Callable[[Sequence[tf.TensorSpec]], Sequence[tf.Tensor]]
    ) -> tf.Tensor:
        results = decode([tf.TensorSpec([length], tf.float32) for length in lengths])
        return self._kernels.concatenate([tf.zeros([0], tf.float32), *results])

    def binarize(self, batch: Batch, rounder: Rounder, at: Any) -> tf.Tensor:
        """Binarize, and assign each variable once before returning words.

        The states are `FlatVariable` objects.
        """
        kernels = self._kernels
        updated: dict[int, tuple[tf.Variable, list[tf.Tensor]]] = {}
        parts = [tf.zeros([0], tf.int32)]
        for i in range(len(batch.elements)):
            momentum, scale, beta = batch.states[i]
            key = rounder.key(batch.chains[i], batch.steps[i])
            words, flags, *values = kernels.binarized(
                batch.values[i], momentum.values(), scale.values(), beta, key, batch.starts[i]
            )
            for own, value in zip((momentum, scale), values):
                updated.setdefault(id(own.variable), (own.variable, []))[1].append(value)
            parts += [words, kernels.pack_flags(flags)]
        assigned = [
            variable.assign(tf.reshape(tf.concat(own, 0), variable.shape), read_value=False)
            for variable, own in updated.values()
        ]
        with tf.control_dependencies(assigned):
            return tf.identity(kernels.concatenate(parts))
