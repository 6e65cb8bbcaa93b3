"""QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding.

Alistarh, Grubic, Li, Tomioka, Vojnovic. NeurIPS 2017. Each worker quantizes with its own norms, an allgather
distributes norms and codes, and every worker decodes and adds all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import lcm
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np

from horovod_quant.analysis.bounds import uniform_levels
from horovod_quant.analysis.rounding import gaussian_error
from horovod_quant.kernels.arrays import Part, no_part
from horovod_quant.kernels.keys import keys_of
from horovod_quant.kernels.layout import TILE, buckets, code_words
from horovod_quant.schemes.base import (
    JOINT,
    Allgather,
    Alltoall,
    Collective,
    Decoded,
    Exchange,
    Extent,
    Gradient,
    Rounding,
    Scheme,
    Workers,
    checked,
    ragged_payload,
    require_bucket_size,
    require_choice,
    require_int,
    split_points,
    use_plain_ints,
    worker_key,
    worker_keys,
)
from horovod_quant.schemes.chunks import Segment, chunks_of
from horovod_quant.schemes.elias_streams import open_body, stream_bounds
from horovod_quant.schemes.norms_and_codes import Places, add_each, encode_each, norms_first, part_by_part
from horovod_quant.schemes.registry import register

Norm = Literal["l2", "max"]
Coding = Literal["fixed", "elias", "elias-omega"]
Route = Literal["allgather", "alltoall", "auto"]
ALLGATHER: Final = "allgather"
ALLTOALL: Final = "alltoall"
AUTO: Final = "auto"

MOST_GATHERED = 4
"""The most workers for which an allgather moves at most twice the bytes of an alltoall and an allgather of chunks.

By the alpha-beta model: ``(n - 1) P`` against ``2 (n - 1) / n P`` for payloads of P bytes.
"""


@dataclass(frozen=True)
class GatheredScheme(Scheme):
    """What QSGD and NUQSGD have in common: everything except the levels.

    1. Each worker computes the norms of its own buckets.
    2. It rounds stochastically to the levels and packs the codes. With ``rounding="joint"`` the random bits make the
       workers' errors partly cancel, although each worker's own distribution stays the same.
    3. One allgather distributes a payload of norms and codes.
    4. Each worker decodes every worker's codes with that worker's norms, and adds them in rank order.

    With ``exchange="alltoall"``, for many workers, steps 3 to 5 are:

    3. An alltoall sends all workers' norms and codes of a chunk to the worker that serves the chunk.
    4. The server decodes and averages them, and rounds the average in the same way.
    5. An allgather distributes the servers' norms and codes.

    This is unbiased as well, but the second rounding adds an error that does not shrink with the number of workers.
    """

    bits: int = 4
    norm: Norm = "l2"
    bucket_size: int = 1024
    coding: Coding = "fixed"
    exchange: Route = ALLGATHER
    rounding: Rounding = JOINT

    unbiased = True
    levels: ClassVar[str]

    def __post_init__(self) -> None:
        require_choice("norm", self.norm, get_args(Norm))
        require_choice("coding", self.coding, get_args(Coding))
        require_choice("exchange", self.exchange, get_args(Route))
        require_choice("rounding", self.rounding, get_args(Rounding))
        require_bucket_size(self.bucket_size)
        use_plain_ints(self, "bits", "bucket_size")
        if self.exchange == ALLTOALL and self.coding != "fixed":
            raise ValueError(
                f"coding={self.coding!r}: an alltoall needs pieces of known length; use coding='fixed' or an allgather"
            )

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """For ``exchange="auto"``, those used with many workers."""
        gathered = Collective(Allgather, "int32" if self.coding == "fixed" else "uint8")
        if self.exchange == ALLGATHER or self.coding != "fixed":
            return (gathered,)
        return (Collective(Alltoall, "int32"), gathered)

    def for_workers(self, workers: Workers) -> Scheme:
        """With ``exchange="auto"``: an alltoall where an allgather would move more than twice the bytes."""
        if self.exchange != AUTO:
            return self
        few = workers.size <= MOST_GATHERED or self.coding != "fixed"
        return replace(self, exchange=ALLGATHER if few else ALLTOALL)

    def of_known_lengths(self) -> Scheme:
        """With ``coding="elias"``: codes of fixed width; Elias codes exceed their bytes by at most 8 per stream."""
        return replace(self, coding="fixed")

    def host_requirement(self) -> str | None:
        return super().host_requirement() if self.coding == "fixed" else f"coding={self.coding!r}"

    def levels_left(self, workers: int, hosts: int) -> int:
        return (1 << (self.bits - 1)) - 1

    def relative_error(self, workers: int, hosts: int) -> float:
        """The same for any even number of workers: their errors average out, as such gradients do."""
        # The server of a chunk rounds the average once more.
        again = self.exchange == ALLTOALL
        return gaussian_error(self.grid(), self.norm, self.bucket_size, self.rounding, workers, again)

    def grid(self) -> np.ndarray:
        """The levels, from 0 to 1."""
        raise TypeError(f"{type(self).__name__} defines no levels")

    def norms(self, kernels: Any, values: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Norms of the buckets of one gradient, float32; inf where a bucket is not finite."""
        if self.norm == "max":
            return kernels.bucket_maxima(values, self.bucket_size, out)
        return kernels.norms_of_square_sums(kernels.bucket_square_sums(values, self.bucket_size))

    def norms_each(self, kernels: Any, table: Any) -> np.ndarray:
        """Those of all gradients, one after another."""
        if self.norm == "max":
            return kernels.bucket_maxima_each(table, self.bucket_size)
        return kernels.norms_of_square_sums(kernels.bucket_square_sums_each(table, self.bucket_size))

    def begin(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        if self.exchange == AUTO:
            return self.for_workers(workers).begin(gradients, workers, kernels)
        if self.exchange == ALLTOALL:
            return self._exchange_chunks(gradients, workers, kernels)
        if self.coding == "fixed":
            return self._exchange_fixed(gradients, workers, kernels)
        return self._exchange_elias(gradients, workers, kernels)

    def received_parts(self, elements: Sequence[int], workers: Workers) -> Sequence[tuple[int, Any]] | None:
        """All workers' norms and codes, or the servers'."""
        if self.exchange == AUTO:
            return self.for_workers(workers).received_parts(elements, workers)
        if self.exchange == ALLTOALL:
            return [(at[-1], np.int32) for _, at in self._served(elements, workers)]
        words = sum(self._length(count) for count in elements)
        if self.coding == "fixed":
            return [(words, np.int32)] * workers.size
        streams = sum(len(stream_bounds(count)) for count in elements)
        return [(4 * words + 8 * streams, np.uint8)] * workers.size

    def opened(
        self, received: Sequence[Any], extents: Sequence[Extent], workers: Workers, kernels: Any
    ) -> Decoded:
        if self.exchange == AUTO:
            return self.for_workers(workers).opened(received, extents, workers, kernels)
        elements = [extent.elements for extent in extents]
        if self.exchange == ALLTOALL:
            return self._opened_chunks(received, elements, workers, kernels)
        if self.coding == "fixed":
            return self._opened_fixed(received, elements, kernels)
        return self._opened_elias(received, elements, kernels)

    def _exchange_fixed(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        if hasattr(kernels, "Table"):
            keys, starts = worker_keys(gradients, workers, self.rounding), [each.start for each in gradients]
            values = [gradient.held for gradient in gradients]
            payload = encode_each(self, kernels, values, keys, starts, self._norms_first(values))
        else:
            payload = kernels.assemble(self._whole_parts(gradients, workers, kernels))
        sizes = [4 * self._length(gradient.elements) for gradient in gradients]
        # An empty array does not tell how many there are.
        lengths = None if sum(sizes) else [0] * workers.size
        payloads = yield from checked(Allgather(payload, sizes, lengths), workers)
        return self.opened(payloads, [gradient.extent for gradient in gradients], workers, kernels)

    def _whole_parts(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> list[Part]:
        """All gradients' norms, and then their codes."""
        norm_at, word_at = self._offsets([gradient.elements for gradient in gradients])
        norms: list[np.ndarray] = []

        def fill_norms(gradient: Gradient, out: Any) -> np.ndarray:
            norms.append(self.norms(kernels, gradient.values, out))
            return norms[-1]

        def fill_words(i: int, out: Any) -> np.ndarray:
            key = worker_key(gradients[i], workers, self.rounding)
            return self.encode(kernels, gradients[i].values, norms[i], key, gradients[i].start, out)

        parts: list[Part] = [
            (norm_at[i + 1] - norm_at[i], np.float32, partial(fill_norms, gradient))
            for i, gradient in enumerate(gradients)
        ]
        return parts + [
            (word_at[i + 1] - word_at[i], np.int32, partial(fill_words, i)) for i in range(len(gradients))
        ]

    def _opened_fixed(self, payloads: Sequence[Any], elements: Sequence[int], kernels: Any) -> Decoded:
        norm_at, word_at = self._offsets(elements)

        def write(i: int, factor: float, out: Any) -> Any:
            all_words = [p[norm_at[-1] + word_at[i] : norm_at[-1] + word_at[i + 1]] for p in payloads]
            all_norms = [kernels.view(p[norm_at[i] : norm_at[i + 1]], np.float32) for p in payloads]
            return self.decode(kernels, all_words, all_norms, factor, out)

        def write_all(factor: float, outs: Sequence[Any]) -> None:
            add_each(self, kernels, payloads, self._norms_first(outs), factor, outs)

        at_once = write_all if hasattr(kernels, "Table") else None
        return Decoded(len(payloads), write, write_all=at_once, received=payloads)

    def _exchange_chunks(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        elements = [gradient.elements for gradient in gradients]
        served, offsets = zip(*self._served(elements, workers))
        splits = [at[-1] for at in offsets]
        sizes = [4 * self._length(count) for count in elements]

        at_once = hasattr(kernels, "Table")
        segments = [segment for own in served for segment in own]
        sent = (self._sent_at_once if at_once else self._sent)(gradients, segments, workers, kernels)
        received = yield from checked(Alltoall(sent, splits, sizes), workers)

        own = served[workers.rank]
        averaged = (self._averaged_at_once if at_once else self._averaged)(gradients, own, received, kernels)
        shares = [size / workers.size for size in sizes]
        gathered = yield from checked(Allgather(averaged, shares, splits), workers)
        return self.opened(gathered, [gradient.extent for gradient in gradients], workers, kernels)

    def _served(self, elements: Sequence[int], workers: Workers) -> list[tuple[Sequence[Segment], list[int]]]:
        """What each server serves, and where it is in the pieces that go to it and come from it."""
        chunks = chunks_of(elements, workers.size, lcm(self.bucket_size, TILE))
        served = [chunks.segments(server) for server in range(workers.size)]
        return [(own, split_points([self._length(segment.elements) for segment in own])) for own in served]

    def _opened_chunks(
        self, gathered: Sequence[Any], elements: Sequence[int], workers: Workers, kernels: Any
    ) -> Decoded:
        @cache
        def collected() -> list[list]:
            """Each gradient's norms and codes, by servers."""
            found: list[list] = [[] for _ in elements]
            for (own, starts), piece in zip(self._served(elements, workers), gathered):
                for segment, at in zip(own, starts):
                    found[segment.gradient].append(self._open(piece[at:], segment.elements, kernels))
            return found

        def write(i: int, factor: float, out: Any) -> Any:
            found = collected()
            norms = kernels.concatenate([np.zeros(0, np.float32), *(own for own, _ in found[i])])
            words = kernels.concatenate([np.zeros(0, np.int32), *(own for _, own in found[i])])
            return self.decode(kernels, [words], [norms], factor * workers.size, out)

        def write_all(factor: float, outs: Sequence[Any]) -> None:
            for (own, _), piece in zip(self._served(elements, workers), gathered):
                parts = [outs[segment.gradient][segment.start : segment.stop] for segment in own]
                add_each(self, kernels, [piece], self._part_by_part(parts), factor * workers.size, parts)

        at_once = write_all if hasattr(kernels, "Table") else None
        return Decoded(workers.size, write, write_all=at_once, received=gathered)

    def _sent_at_once(
        self, gradients: Sequence[Gradient], segments: Sequence[Segment], workers: Workers, kernels: Any
    ) -> Any:
        """This worker's norms and codes of segments, one after another."""
        values = [gradients[each.gradient].held[each.start : each.stop] for each in segments]
        keys = worker_keys(gradients, workers, self.rounding)[[each.gradient for each in segments]]
        starts = [gradients[each.gradient].start + each.start for each in segments]
        return encode_each(self, kernels, values, keys, starts, self._part_by_part(values))

    def _averaged_at_once(
        self, gradients: Sequence[Gradient], own: Sequence[Segment], received: Sequence[Any], kernels: Any
    ) -> Any:
        """Norms and codes of the averages of everybody's norms and codes of a chunk."""
        bounds = split_points([segment.elements for segment in own])
        total = kernels.target(bounds[-1])
        averages = [total[low:high] for low, high in zip(bounds, bounds[1:])]
        places = self._part_by_part(averages)
        add_each(self, kernels, received, places, 1.0 / len(received), averages)
        of = [gradients[segment.gradient] for segment in own]
        # Every worker would draw the same bits here, so the result does not depend on who serves what.
        keys = keys_of([each.keys for each in of], "server", [each.step for each in of])
        starts = [each.start + segment.start for each, segment in zip(of, own)]
        return encode_each(self, kernels, averages, keys, starts, places)

    def _sent(
        self, gradients: Sequence[Gradient], segments: Sequence[Segment], workers: Workers, kernels: Any
    ) -> Any:
        """As `_sent_at_once`."""
        norms, words = [], []
        for gradient in gradients:
            key = worker_key(gradient, workers, self.rounding)
            norms.append(self.norms(kernels, gradient.values, None))
            words.append(self.encode(kernels, gradient.values, norms[-1], key, gradient.start))
        parts = [
            part
            for segment in segments
            for part in self._parts(
                segment.elements,
                norms[segment.gradient][segment.start // self.bucket_size :],
                words[segment.gradient][code_words(segment.start, self.bits) :],
            )
        ]
        return kernels.assemble([*parts, no_part(np.int32)])

    def _averaged(
        self, gradients: Sequence[Gradient], own: Sequence[Segment], received: Sequence[Any], kernels: Any
    ) -> Any:
        """As `_averaged_at_once`."""
        parts: list[Part] = []
        for segment, at in zip(own, split_points([self._length(segment.elements) for segment in own])):
            gradient = gradients[segment.gradient]
            norms, words = zip(*(self._open(piece[at:], segment.elements, kernels) for piece in received))
            average = self.decode(kernels, words, norms, 1.0 / len(words), kernels.target(segment.elements))
            key = gradient.keys.key("server", gradient.step)
            new_norms = self.norms(kernels, average, None)
            new_words = self.encode(kernels, average, new_norms, key, gradient.start + segment.start)
            parts += self._parts(segment.elements, new_norms, new_words)
        return kernels.assemble([*parts, no_part(np.int32)])

    def _length(self, elements: int) -> int:
        """Words of the norms and codes of some elements."""
        return buckets(elements, self.bucket_size) + code_words(elements, self.bits)

    def _parts(self, elements: int, norms: np.ndarray, words: np.ndarray) -> list[Part]:
        """The norms and codes of some elements, from arrays that begin with them."""
        norm_count, word_count = buckets(elements, self.bucket_size), code_words(elements, self.bits)
        return [
            (norm_count, np.float32, lambda out: norms[:norm_count]),
            (word_count, np.int32, lambda out: words[:word_count]),
        ]

    def _open(self, piece: np.ndarray, elements: int, kernels: Any) -> tuple[np.ndarray, np.ndarray]:
        """Undoes `_parts`."""
        norm_count = buckets(elements, self.bucket_size)
        return kernels.view(piece[:norm_count], np.float32), piece[norm_count : self._length(elements)]

    def _exchange_elias(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Exchange:
        bodies = yield from checked(self._elias_request(gradients, workers, kernels), workers)
        return self.opened(bodies, [gradient.extent for gradient in gradients], workers, kernels)

    def _opened_elias(self, bodies: Sequence[Any], elements: Sequence[int], kernels: Any) -> Decoded:
        norm_at, _ = self._offsets(elements)
        stream_at = split_points([len(stream_bounds(count)) for count in elements])
        opened = [open_body(other, norm_at[-1], stream_at[-1]) for other in bodies]

        def write(i: int, factor: float, out: np.ndarray) -> np.ndarray:
            own = slice(stream_at[i], stream_at[i + 1])
            words = [self._elias_words(kernels, streams[own], len(out)) for _, streams in opened]
            all_norms = [other_norms[norm_at[i] : norm_at[i + 1]] for other_norms, _ in opened]
            return self.decode(kernels, words, all_norms, factor, out)

        return Decoded(len(bodies), write, received=bodies)

    def _elias_request(self, gradients: Sequence[Gradient], workers: Workers, kernels: Any) -> Allgather:
        norm_at, _ = self._offsets([gradient.elements for gradient in gradients])
        norms = np.empty(norm_at[-1], np.float32)
        streams: list[list[np.ndarray]] = []
        for i, gradient in enumerate(gradients):
            own = norms[norm_at[i] : norm_at[i + 1]]
            own[...] = self.norms(kernels, gradient.values, own)
            key = worker_key(gradient, workers, self.rounding)
            words = self.encode(kernels, gradient.values, own, key, gradient.start)
            streams.append(self._elias_streams(kernels, words, gradient.elements))
            del words  # before the next tensor's are made
        lengths = np.array([len(stream) for own in streams for stream in own], "<i8")
        parts = [
            4 * (norm_at[i + 1] - norm_at[i]) + sum(8 + len(stream) for stream in own)
            for i, own in enumerate(streams)
        ]
        payload = ragged_payload(
            lengths.view(np.uint8), norms.view(np.uint8), *(stream for own in streams for stream in own)
        )
        return Allgather(payload, parts, ragged=True)

    def _elias_streams(self, kernels: Any, words: np.ndarray, elements: int) -> list[np.ndarray]:
        """A tensor's streams, each of whole tiles; packed codes themselves where a stream would not be shorter."""
        streams = []
        for start, stop in stream_bounds(elements):
            own = words[code_words(start, self.bits) : code_words(stop, self.bits)]
            stream = kernels.elias_encode_codes(own, self.bits, stop - start, self._code, own.nbytes)
            streams.append(own.view(np.uint8) if stream is None else stream)
        return streams

    def _elias_words(self, kernels: Any, streams: Sequence[np.ndarray], elements: int) -> np.ndarray:
        """Undoes `_elias_streams`."""
        words = np.empty(code_words(elements, self.bits), np.int32)
        for stream, (start, stop) in zip(streams, stream_bounds(elements)):
            own = words[code_words(start, self.bits) : code_words(stop, self.bits)]
            if len(stream) == own.nbytes:
                own.view(np.uint8)[...] = stream
            else:
                kernels.elias_decode_codes(stream, stop - start, self.bits, self._code, own)
        return words

    @property
    def _code(self) -> str:
        """The Elias code's name among the kernels."""
        return "omega" if self.coding == "elias-omega" else "gamma"

    def _offsets(self, elements: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where each gradient's norms, and codes, begin among those of all."""
        norms = split_points([buckets(count, self.bucket_size) for count in elements])
        return norms, split_points([code_words(count, self.bits) for count in elements])

    def _norms_first(self, arrays: Sequence[Any]) -> Places:
        return norms_first(tuple(map(len, arrays)), self.bucket_size, self.bits)

    def _part_by_part(self, arrays: Sequence[Any]) -> Places:
        return part_by_part(tuple(map(len, arrays)), self.bucket_size, self.bits)

    def encode(self, kernels, values, norms, key, start=0, out=None) -> np.ndarray:
        raise TypeError(f"{type(self).__name__} defines no levels")

    def decode(self, kernels, words, norms, factor, out) -> np.ndarray:
        raise TypeError(f"{type(self).__name__} defines no levels")

    # `encode` and `decode` for the gradients of a table, with kernels that have one.

    def encode_each(self, kernels, table, norms, *keys_and_places):
        return kernels.encode_codes_each(
            self.levels, table, norms, self.bucket_size, self.bits, *keys_and_places
        )

    def decode_each(self, kernels, pieces, words_at, norms, norms_at, factor, outs):
        places = (pieces, words_at, norms, norms_at)
        kernels.decode_codes_each(self.levels, *places, self.bucket_size, self.bits, factor, outs)


@register
@dataclass(frozen=True)
class QSGD(GatheredScheme):
    """QSGDinf (``norm="max"``) and the paper's QSGD (``norm="l2"``) with ``2^(bits-1) - 1`` uniform levels.

    The defaults are what docs/results.md recommends. Method names such as ``qsgdinf-4`` mean buckets of 1,024 elements.

    Args:
        bits: width of a code, 2 to 16: a sign and a magnitude.
        norm: ``"max"`` or ``"l2"``, computed per bucket and worker. The l2 norm needs 8 bits: 4 give too few levels.
        bucket_size: number of elements that share a norm, a multiple of 32. A norm below 2^-96 counts as 0. An element
            or norm outside float32's range turns the bucket into NaN.
        coding: ``"fixed"`` width, ``"elias"`` (gamma) or ``"elias-omega"``.
        exchange: ``"allgather"``, ``"alltoall"``, or ``"auto"``: an alltoall for more than `MOST_GATHERED` workers.
        rounding: how the workers round their gradients. ``"joint"``: the workers' random numbers sum to a constant.
            Where gradients differ, half of the sum's error remains (more where most elements are smaller than the
            distance between levels); where an even number n of gradients are equal, 1 / n of it. ``"independent"``:
            each worker draws its own numbers, as in the paper.

    Raises:
        ValueError: an argument is out of range.
    """

    norm: Norm = "max"
    bucket_size: int = 256

    presets = {
        "qsgd": {"norm": "l2", "bucket_size": 1024},
        "qsgdinf": {"norm": "max", "bucket_size": 1024},
        "qsgd-alltoall": {"norm": "l2", "bucket_size": 1024, "exchange": "alltoall"},
        "qsgdinf-alltoall": {"norm": "max", "bucket_size": 1024, "exchange": "alltoall"},
    }
    compared = ("qsgdinf-4",)
    levels = "uniform"

    def __post_init__(self) -> None:
        require_int("bits", self.bits, 2, 16)
        super().__post_init__()

    def grid(self):
        return uniform_levels((1 << (self.bits - 1)) - 1)

    def encode(self, kernels, values, norms, key, start=0, out=None):
        return kernels.encode_uniform_codes(values, norms, self.bucket_size, self.bits, key, start, out)

    def decode(self, kernels, words, norms, factor, out):
        return kernels.decode_uniform_codes(words, norms, self.bucket_size, self.bits, factor, out)
