"""QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.

Alistarh, Grubic, Li, Tomioka, Vojnovic. NeurIPS 2017. Each worker quantizes with its own norms; an allgather moves
norms and codes; every worker decodes and adds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from horovod_quant.kernels.arrays import Part
from horovod_quant.kernels.entropy import CorruptPayloadError
from horovod_quant.kernels.layout import buckets, code_words
from horovod_quant.schemes.base import (
    Allgather,
    Collective,
    Decoded,
    Exchange,
    Gradient,
    Scheme,
    Workers,
    ragged_payload,
    require_bucket_size,
    require_choice,
    require_int,
    split_points,
    use_plain_ints,
)

NORMS = ("l2", "max")
CODINGS = ("fixed", "elias", "elias-omega")


@dataclass(frozen=True)
class GatheredScheme(Scheme):
    """What QSGD and NUQSGD share: everything but the levels.

    1. the norm of each bucket, of this worker alone;
    2. stochastic rounding to the levels, packed;
    3. one allgather of a payload that holds norms and codes;
    4. decoding of every worker's codes with its own norms, added in rank order.
    """

    bits: int = 4
    norm: str = "l2"
    bucket_size: int = 1024
    coding: str = "fixed"

    def __post_init__(self) -> None:
        require_choice("norm", self.norm, NORMS)
        require_choice("coding", self.coding, CODINGS)
        require_bucket_size(self.bucket_size)
        use_plain_ints(self, "bits", "bucket_size")

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return (Collective(Allgather, "int32" if self.coding == "fixed" else "uint8"),)

    def norms(self, kernels: Any, values: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Norms of the buckets of one gradient, float32; inf where a bucket is not finite."""
        if self.norm == "max":
            return kernels.bucket_maxima(values, self.bucket_size, out)
        return kernels.norms_of_square_sums(kernels.bucket_square_sums(values, self.bucket_size))

    def exchange(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        if self.coding == "fixed":
            return self._exchange_fixed(gradients, workers, kernels)
        return self._exchange_elias(gradients, workers, kernels)

    def _exchange_fixed(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        _, norm_at, word_at = self._offsets(gradients)
        norms: list[np.ndarray] = []

        def fill_norms(gradient: Gradient, out: Any) -> np.ndarray:
            norms.append(self.norms(kernels, gradient.values, out))
            return norms[-1]

        def fill_words(i: int, out: Any) -> np.ndarray:
            key = gradients[i].keys.key("worker", gradients[i].step, workers.rank)
            return self.encode(kernels, gradients[i].values, norms[i], key, gradients[i].start, out)

        parts: list[Part] = [
            (norm_at[i + 1] - norm_at[i], np.float32, partial(fill_norms, gradient))
            for i, gradient in enumerate(gradients)
        ]
        parts += [
            (word_at[i + 1] - word_at[i], np.int32, partial(fill_words, i)) for i in range(len(gradients))
        ]
        payload = kernels.assemble(parts)
        sizes = [
            4 * (norm_at[i + 1] - norm_at[i] + word_at[i + 1] - word_at[i]) for i in range(len(gradients))
        ]

        # An empty array does not tell how many there are.
        lengths = None if norm_at[-1] else [0] * workers.size
        payloads = yield Allgather(payload, sizes, lengths)

        def write(i: int, factor: float, out: Any) -> Any:
            all_words = [p[norm_at[-1] + word_at[i] : norm_at[-1] + word_at[i + 1]] for p in payloads]
            all_norms = [kernels.view(p[norm_at[i] : norm_at[i + 1]], np.float32) for p in payloads]
            return self.decode(kernels, all_words, all_norms, factor, out)

        return Decoded(len(payloads), write)

    def _exchange_elias(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        code = "omega" if self.coding == "elias-omega" else "gamma"
        norm_counts, norm_at, _ = self._offsets(gradients)

        bodies = yield self._elias_request(gradients, workers, kernels, code)

        opened = [_open_body(other, norm_counts) for other in bodies]

        def write(i: int, factor: float, out: np.ndarray) -> np.ndarray:
            words = [self._elias_words(kernels, streams[i], len(out), code) for _, streams in opened]
            all_norms = [other_norms[norm_at[i] : norm_at[i + 1]] for other_norms, _ in opened]
            return self.decode(kernels, words, all_norms, factor, out)

        return Decoded(len(bodies), write)

    def _elias_request(
        self, gradients: Sequence[Gradient], workers: Workers, kernels: Any, code: str
    ) -> Allgather:
        norm_counts, norm_at, _ = self._offsets(gradients)
        norms = np.empty(norm_at[-1], np.float32)
        streams = []
        for i, gradient in enumerate(gradients):
            own = norms[norm_at[i] : norm_at[i + 1]]
            own[...] = self.norms(kernels, gradient.values, own)
            key = gradient.keys.key("worker", gradient.step, workers.rank)
            words = self.encode(kernels, gradient.values, own, key, gradient.start)
            stream = kernels.elias_encode_codes(words, self.bits, gradient.elements, code, words.nbytes)
            streams.append(words.view(np.uint8) if stream is None else stream)
            del words, stream  # before the next tensor's are made
        lengths = np.array([len(stream) for stream in streams], "<i8")
        parts = [8 + 4 * norm_counts[i] + len(streams[i]) for i in range(len(gradients))]
        payload = ragged_payload(lengths.view(np.uint8), norms.view(np.uint8), *streams)
        return Allgather(payload, parts, ragged=True)

    def _elias_words(self, kernels: Any, stream: np.ndarray, elements: int, code: str) -> np.ndarray:
        """Packed codes from a stream; one as long as they are is not Elias coding but the codes themselves."""
        if len(stream) == 4 * code_words(elements, self.bits):
            return stream.copy().view(np.int32)
        return kernels.elias_decode_codes(stream, elements, self.bits, code)

    def _offsets(self, gradients: Sequence[Gradient]) -> tuple[list[int], list[int], list[int]]:
        norm_counts = [buckets(gradient.elements, self.bucket_size) for gradient in gradients]
        word_counts = [code_words(gradient.elements, self.bits) for gradient in gradients]
        return norm_counts, split_points(norm_counts), split_points(word_counts)

    def encode(self, kernels, values, norms, key, start=0, out=None) -> np.ndarray:
        raise TypeError(f"{type(self).__name__} defines no levels")

    def decode(self, kernels, words, norms, factor, out) -> np.ndarray:
        raise TypeError(f"{type(self).__name__} defines no levels")


@dataclass(frozen=True)
class QSGD(GatheredScheme):
    """QSGD (``norm="l2"``) and QSGDinf (``norm="max"``) with ``2^(bits-1) - 1`` uniform levels.

    Args:
        bits: width of a code, 2 to 16: a sign and a magnitude.
        norm: ``"l2"`` or ``"max"``, of each bucket of each worker.
        bucket_size: elements that share a norm, a multiple of 32.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __post_init__(self) -> None:
        require_int("bits", self.bits, 2, 16)
        super().__post_init__()

    def encode(self, kernels, values, norms, key, start=0, out=None):
        return kernels.encode_uniform_codes(values, norms, self.bucket_size, self.bits, key, start, out)

    def decode(self, kernels, words, norms, factor, out):
        return kernels.decode_uniform_codes(words, norms, self.bucket_size, self.bits, factor, out)


def _open_body(body: np.ndarray, norm_counts: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Norms and code streams of one worker's Elias payload."""
    tensors, norm_bytes = len(norm_counts), 4 * sum(norm_counts)
    if len(body) < 8 * tensors + norm_bytes:
        raise CorruptPayloadError(f"corrupt payload: {len(body)} bytes do not hold the lengths and norms")
    lengths = body[: 8 * tensors].copy().view("<i8").tolist()
    norms = body[8 * tensors : 8 * tensors + norm_bytes].copy().view(np.float32)
    if min(lengths, default=0) < 0 or 8 * tensors + norm_bytes + sum(lengths) != len(body):
        raise CorruptPayloadError(f"corrupt payload: streams of {lengths} bytes in {len(body)} bytes")
    at = [8 * tensors + norm_bytes + offset for offset in split_points(lengths)]
    return norms, [body[at[i] : at[i + 1]] for i in range(tensors)]
