"""Protocol and common functions of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod_quant.kernels.segments import Batch, Rounder, Segment
from horovod_quant.reductions.requests import Collective, Workers
from horovod_quant.reductions.tensors import BinaryState, Decoded, Exchange, Gradient, TensorInfo


class Reduction(Protocol):
    """Collectives of a scheme, for some number of workers.

    `AllgatherReduce` is the shortest. A batch for `Codec.encode` is made by `whole_batch` or `segments_batch`, one for
    `Codec.decode` by `received_batch`.
    """

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives, in order."""

    def run(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        """Reduce a group of gradients.

        It is a generator of requests, which returns a `Decoded`.
        """

    def received_lengths(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]] | None:
        """Return lengths and dtypes of ``Decoded.received``, see `Scheme.received_lengths`, or None.

        If None, a hierarchical reduction sends averages in float32 within a node.
        """
        return None

    def decode_received(
        self, received: Sequence[Any], tensors: Sequence[TensorInfo], workers: Workers, kernels: Any
    ) -> Decoded:
        """Return the result, from the arrays that any worker has received."""
        name = type(self).__name__
        raise TypeError(f"{name}.received_lengths: define {name}.decode_received as well")


def whole_batch(gradients: Sequence[Gradient]) -> Batch:
    """Return a batch with one segment for each gradient."""
    return Batch(
        tuple([gradient.elements for gradient in gradients]),
        [gradient.start for gradient in gradients],
        [gradient.keys for gradient in gradients],
        [gradient.step for gradient in gradients],
        [gradient.buffer for gradient in gradients],
        [gradient.state for gradient in gradients],
    )


def segments_batch(gradients: Sequence[Gradient], segments: Sequence[Segment], with_values: bool) -> Batch:
    batch = received_batch(gradients, segments)
    local = [gradients[segment.tensor] for segment in segments]
    batch.steps = [gradient.step for gradient in local]
    if with_values:
        parts = [_part(gradient, segment) for gradient, segment in zip(local, segments)]
        batch.values, batch.states = zip(*parts) if parts else ((), ())
    return batch


def _part(gradient: Gradient, segment: Segment) -> tuple[Any, BinaryState | None]:
    """Return a segment's elements and state."""
    values, state = gradient.buffer, gradient.state
    start, stop = segment.start, segment.stop
    if stop - start == values.shape[0]:
        return values, state
    if state is not None:
        state = BinaryState(state.momentum[start:stop], state.scale[start:stop], state.beta)
    return values[start:stop], state


def received_batch(tensors: Sequence[TensorInfo] | Sequence[Gradient], segments: Sequence[Segment]) -> Batch:
    local = [tensors[segment.tensor] for segment in segments]
    return Batch(
        tuple([segment.elements for segment in segments]),
        [tensor.start + segment.start for tensor, segment in zip(local, segments)],
        [tensor.keys for tensor in local],
    )


def worker_rounder(domain: str, workers: Workers, correlated: bool) -> Rounder:
    """Return the rounder of this worker's gradient."""
    return Rounder(domain, workers.rank, workers.size if correlated else 0)
