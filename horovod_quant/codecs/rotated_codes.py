"""Codec of EDEN: random rotation, Lloyd-Max levels, scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horovod_quant.codecs.base import REDUCER, Codec
from horovod_quant.kernels import rotation, trellis
from horovod_quant.kernels.formats import RotatedFormat
from horovod_quant.kernels.layout import tiles
from horovod_quant.kernels.rotation import rotated_words
from horovod_quant.kernels.segments import Batch, Rounder, segment_kernels

LARGEST_STEP = 2**31 - 1
"""Maximum int32 word, after which a payload's step wraps to 0."""


@dataclass(frozen=True)
class RotatedCodes(RotatedFormat, Codec):
    """A step word that selects the rotation, and codes.

    The step is a local count of the encoding rank. A receiver's count may differ: after a worker has joined later, has
    failed in the middle of a step, or has missed steps after ``hvd.join()``. Its arguments are those of
    `RotatedFormat`.
    """

    def words(self, elements: int) -> int:
        return min(elements, 1) + rotated_words(elements, self.bits) + tiles(elements)

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder, step_words: Any = None) -> Any:
        at = self.offsets(batch.elements)
        if step_words is None:
            batch = batch.with_steps([step & LARGEST_STEP for step in batch.steps])
        return segment_kernels(kernels).encode_rotated(self, batch, rounder, at, step_words)

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
        return segment_kernels(kernels).decode_rotated(self, batch, domain, payloads, at, factor, outs)

    def reduce(
        self, kernels: Any, payloads: Sequence[Any], at: Sequence[int], batch: Batch, gather: Codec
    ) -> Any:
        """Encode the averages with the first worker's step.

        All reducers of a tensor know it.
        """
        assert isinstance(gather, RotatedCodes)
        averages = batch.with_values(self.averages(kernels, payloads, at, batch))
        steps = segment_kernels(kernels).step_words(payloads[0], at, batch.elements)
        return gather.encode(kernels, averages, Rounder(REDUCER), steps)


def eden_variance_factor(bits: int, with_trellis: bool = False) -> float:
    """Return EDEN's nmse for one vector: ``D / (1 - D)``.

    It is ``E||Q(v) - v||^2 / ||v||_2^2``. The expectation is over the rotations, for every vector v. With z the rotated
    vector, q its levels and the scale ``||v||^2 / <z, q>`` the squared error is ``||v||^4 ||q||^2 / <z, q>^2 -
    ||v||^2``. The coordinates of z are nearly independent and normally distributed, and Lloyd-Max levels have ``E z q =
    E q^2 = 1 - D``. So do a trellis's levels, which are also the means of their cells. It is less accurate for vectors
    shorter than a bucket.

    Args:
        bits: width of a code, 1 to 4.
        with_trellis: True for the levels of `horovod_quant.kernels.trellis`. A bucket shorter than 1,024 then has a
            larger value, up to the one without a trellis.

    Returns:
        A ratio of variances, without unit.

    Raises:
        ValueError: ``bits`` is out of range.

    Source: EDEN (Vargaftik et al., ICML 2022), the error with optimal levels; for one bit DRIVE (Vargaftik et al.,
    NeurIPS 2021), with its ``pi / 2 - 1``.
    """
    distortions = trellis.DISTORTIONS if with_trellis else rotation.DISTORTIONS
    if bits not in distortions:
        raise ValueError(f"bits={bits!r}: use 1 to 4")
    return distortions[bits] / (1 - distortions[bits])


def eden_nmse(
    bits: int, server_bits: int | None = None, ratio: float = 1.0, with_trellis: bool = False
) -> float:
    """Return EDEN's nmse ``E||estimate - average||^2 / ||average||^2``.

    It is ``a v_scatter``, or ``a v_scatter + v_gather (1 + a v_scatter)`` with a second rounding. v is
    `eden_variance_factor` and a the ratio. The workers' errors are independent, so ``a v_scatter`` of them remains; the
    reducer rounds its result, including these errors.

    Args:
        bits: bits of the workers' codes.
        server_bits: bits of the reducer's second rounding; None for an allgather, which has none.
        ratio: the workers' mean ``||g_i||^2``, divided by n times ``||average||^2``: 1 for uncorrelated gradients, 1/n
            where they are equal, and ``1 / (1 + (n - 1) rho)`` where they share a fraction rho of their energy.
        with_trellis: whether both codes are trellis-coded.

    Returns:
        A ratio of variances, without unit.

    Raises:
        ValueError: an argument is out of range.

    Source: EDEN (ICML 2022) for the first part; derived in this docstring.
    """
    if not ratio > 0:
        raise ValueError(f"ratio={ratio!r} must be positive")
    workers = ratio * eden_variance_factor(bits, with_trellis)
    if server_bits is None:
        return workers
    return workers + eden_variance_factor(server_bits, with_trellis) * (1 + workers)
