"""Elias coding of `NormsAndCodes`: streams of bytes of variable length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_quant.codecs.norms_and_codes import NormsAndCodes
from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.kernels.layout import buckets, code_words, split
from horovod_quant.kernels.segments import Batch, Rounder

STREAM_ELEMENTS = 2**28
"""Maximum elements in an Elias stream: whole tiles; `entropy` can count up to 2× this number."""


class Body:
    """A payload, split into the norms and streams of each tensor.

    Raises:
        CorruptPayloadError: lengths in it contradict its own.
    """

    def __init__(self, body: np.ndarray, codec: EliasCodes, elements: Sequence[int]) -> None:
        counts = [len(stream_bounds(count)) for count in elements]
        norm_counts = [buckets(count, codec.fixed.bucket_size) for count in elements]
        norms, streams = open_body(body, sum(norm_counts), sum(counts))
        self.norms = split(norms, norm_counts)
        self.streams = split(streams, counts)


@dataclass(frozen=True)
class EliasCodes:
    """The codes of another codec, each as an Elias code.

    A payload is the length of each stream (8 bytes), the norms of all tensors, and the streams. A stream has the packed
    codes instead where these are not longer.

    Args:
        fixed: the codec of a fixed width.
        code: ``"gamma"`` or ``"omega"``.
    """

    fixed: NormsAndCodes
    code: str

    domain = NormsAndCodes.domain

    def most_bytes(self, elements: Sequence[int]) -> int:
        """Return the approximate maximum length of a payload."""
        streams = sum(len(stream_bounds(count)) for count in elements)
        return 4 * sum(map(self.fixed.words, elements)) + 8 * streams

    def encode(self, kernels: Any, batch: Batch, rounder: Rounder) -> tuple[list[np.ndarray], list[int]]:
        """Return the payload's parts, uint8, and each tensor's bytes."""
        norms, streams = [], []
        for i, count in enumerate(batch.elements):
            alone = Batch((count,), batch.starts[i : i + 1], batch.chains[i : i + 1], batch.steps[i : i + 1])
            payload = self.fixed.encode(kernels, alone.with_values(batch.values[i : i + 1]), rounder)
            norm_count = buckets(count, self.fixed.bucket_size)
            norms.append(payload[:norm_count].copy())
            streams.append(self._streams(kernels, payload[norm_count:], count))
            del payload  # release it before the next tensor's payload is allocated
        lengths = np.array([len(stream) for local in streams for stream in local], "<i8")
        sizes = [
            4 * len(one) + sum(8 + len(stream) for stream in local) for one, local in zip(norms, streams)
        ]
        all_norms = np.concatenate([np.zeros(0, np.int32), *norms])
        parts = [stream for local in streams for stream in local]
        return [lengths.view(np.uint8), all_norms.view(np.uint8), *parts], sizes

    def decode(self, kernels: Any, bodies: Sequence[Body], i: int, factor: Any, out: Any) -> Any:
        """Write the sum over the payloads of tensor i, times a factor."""
        payloads = []
        for body in bodies:
            norms = body.norms[i].view(np.int32)
            payload = np.empty(self.fixed.words(len(out)), np.int32)
            payload[: len(norms)] = norms
            self._fill_words(kernels, body.streams[i], len(out), payload[len(norms) :])
            payloads.append(payload)
        batch = Batch((len(out),), (), ())
        return self.fixed.decode(kernels, payloads, [0], batch, self.domain, factor, [out])[0]

    def _streams(self, kernels: Any, words: np.ndarray, elements: int) -> list[np.ndarray]:
        bits = self.fixed.bits
        streams = []
        for start, stop in stream_bounds(elements):
            part = words[code_words(start, bits) : code_words(stop, bits)]
            stream = kernels.elias_encode_codes(part, bits, stop - start, self.code, part.nbytes)
            streams.append(part.view(np.uint8) if stream is None else stream)
        return streams

    def _fill_words(
        self, kernels: Any, streams: Sequence[np.ndarray], elements: int, words: np.ndarray
    ) -> None:
        bits = self.fixed.bits
        for stream, (start, stop) in zip(streams, stream_bounds(elements)):
            part = words[code_words(start, bits) : code_words(stop, bits)]
            if len(stream) == part.nbytes:
                part.view(np.uint8)[...] = stream
            else:
                kernels.elias_decode_codes(stream, stop - start, bits, self.code, part)


def stream_bounds(elements: int) -> list[tuple[int, int]]:
    """Return the ranges of a tensor's elements that share an Elias stream."""
    starts = range(0, max(elements, 1), STREAM_ELEMENTS)
    return [(start, min(start + STREAM_ELEMENTS, elements)) for start in starts]


def open_body(body: np.ndarray, norm_count: int, streams: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the norms and the streams of a payload.

    Raises:
        CorruptPayloadError: the lengths in it contradict its length.
    """
    norms_end = 8 * streams + 4 * norm_count
    if len(body) < norms_end:
        raise CorruptPayloadError(f"corrupt payload: {len(body)} bytes do not hold the lengths and norms")
    lengths = body[: 8 * streams].copy().view("<i8").tolist()
    norms = body[8 * streams : norms_end].copy().view(np.float32)
    if min(lengths, default=0) < 0 or norms_end + sum(lengths) != len(body):
        raise CorruptPayloadError(f"corrupt payload: streams of {lengths} bytes in {len(body)} bytes")
    return norms, split(body[norms_end:], lengths)
