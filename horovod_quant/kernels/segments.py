"""Kernels for many segments in one call.

A segment is a range of one tensor's elements. `SegmentKernels` loops over the kernels of a backend for one segment. It
defines how these kernels compose a payload, which a codec from outside this package does in its methods. A backend
whose calls cost more than the work on a small segment overrides its methods (`horovod_quant.kernels.native_segments`),
with bit-identical results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np

from horovod_quant.kernels.arrays import Part, no_part
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.formats import CodeFormat, RotatedFormat, SumFormat, Sums
from horovod_quant.kernels.keys import Key, RngKey
from horovod_quant.kernels.layout import ROW, buckets, ceil_div, code_words, split, sum_words, tiles
from horovod_quant.kernels.rotation import rotated_words

_Table = TypeVar("_Table")


class Segment(NamedTuple):
    """A range of elements of one of a call's tensors."""

    tensor: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


class Rounder(NamedTuple):
    """Domain and worker of a rounding.

    With tensor and step they select the random bits.

    Attributes:
        domain: the purpose of the rounding, e.g. ``"worker"`` for the gradient of a worker.
        rank: the worker's rank; 0 where every worker must draw the same bits.
        size: number of workers whose rounding is correlated; 0 for independent rounding.
    """

    domain: str
    rank: int = 0
    size: int = 0

    def key(self, chain: RngKey, step: Any) -> Key:
        if self.size:
            return chain.correlated(self.domain, step, self.rank, self.size)
        return chain.key(self.domain, step, self.rank)


@dataclass(eq=False)
class Batch:
    """Segments for one call of a kernel, with their random keys.

    Attributes:
        elements: length of each segment.
        starts: index of the first element of each segment in its tensor.
        chains: the keys of each tensor.
        steps: the count of each tensor's steps.
        values: the elements of each segment, an array or a `BufferView`; ``as_array`` converts these for kernels that
            need arrays. Empty where not needed.
        states: BinSGDM's momentum, scale and beta of each segment; empty where not needed.
        table: a backend's data about the values, kept between its kernels.
    """

    elements: tuple[int, ...]
    starts: Sequence[int]
    chains: Sequence[RngKey]
    steps: Sequence[Any] = ()
    values: Sequence[Any] = ()
    states: Sequence[Any] = ()
    table: Any = None

    def with_steps(self, steps: Sequence[Any]) -> Batch:
        return Batch(self.elements, self.starts, self.chains, steps, self.values)

    def with_values(self, values: Sequence[Any]) -> Batch:
        return Batch(self.elements, self.starts, self.chains, self.steps, values)

    def table_by(self, make: Callable[[Sequence[Any]], _Table]) -> _Table:
        if self.table is None:
            self.table = make(self.values)
        return self.table


Source = tuple[Any, Sequence[int], Sequence[Segment]]
"""Payloads, segments' offsets in them, and segments; their tensors are numbered as results."""


class SegmentKernels:
    """Loops over a backend's kernels for one segment.

    Args:
        kernels: the backend.

    Attributes:
        wants_views: True if it needs only addresses of values (`BufferView`), so that creating arrays is wasted work.
    """

    wants_views = False

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def empty(self, lengths: Sequence[int]) -> Sequence[Any]:
        """Return arrays for temporary float32 results."""
        return [self._kernels.empty(length) for length in lengths]

    def decode_sources(
        self, outs: Sequence[Any], sources: Sequence[Source], decode: Callable[..., Any]
    ) -> Sequence[Any]:
        """Decode sources into ``outs``.

        Calls ``decode(source, parts of the outs)`` for each source.
        """
        for source in sources:
            decode(source, [outs[segment.tensor][segment.start : segment.stop] for segment in source[2]])
        return outs

    def pack(self, lengths: Sequence[int], decode: Callable[[Sequence[Any]], Sequence[Any]]) -> Any:
        """Return a float32 array whose parts ``decode`` writes."""
        whole = self._kernels.empty(sum(lengths))
        decode(split(whole, lengths))
        return whole

    def convert(self, batch: Batch, dtype: str) -> Any:
        """Return all elements, concatenated, as ``"float32"`` or ``"float16"``."""
        kernels = self._kernels
        convert = kernels.to_float32 if dtype == "float32" else kernels.to_float16
        parts: list[Part] = [
            (count, np.dtype(dtype), partial(convert, as_array(values)))
            for count, values in zip(batch.elements, batch.values)
        ]
        return kernels.pack([*parts, no_part(np.dtype(dtype))])

    def scale(self, arrays: Sequence[Any], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
        """Write each array times a factor."""
        return [
            self._kernels.scale([as_array(array)], factor, as_array(out)) for array, out in zip(arrays, outs)
        ]

    # ---- norms and codes: the payload of a segment is its norms, and then its codes

    def encode_codes(self, codec: CodeFormat, batch: Batch, rounder: Rounder, at: Any) -> Any:
        """Encode the payloads of all segments, at offsets ``at[i]``.

        ``at[-1]`` is the total length.
        """
        kernels, bucket_size, bits = self._kernels, codec.bucket_size, codec.bits
        encode = kernels.encode_exponential if codec.is_exponential else kernels.encode_uniform_codes
        norms: dict[int, Any] = {}

        def fill_norms(i: int, out: Any) -> Any:
            values = as_array(batch.values[i])
            if codec.norm == "max":
                found = kernels.bucket_maxima(values, bucket_size, out)
            else:
                found = kernels.norms_of_square_sums(kernels.bucket_square_sums(values, bucket_size))
            norms[i] = found
            return found

        def fill_words(i: int, out: Any) -> Any:
            key = rounder.key(batch.chains[i], batch.steps[i])
            return encode(
                as_array(batch.values[i]), norms.pop(i), bucket_size, bits, key, batch.starts[i], out
            )

        parts: list[Any] = []
        for i, count in enumerate(batch.elements):
            parts.append((buckets(count, bucket_size), np.float32, partial(fill_norms, i)))
            parts.append((code_words(count, bits), np.int32, partial(fill_words, i)))
        return kernels.pack([*parts, no_part(np.int32)])

    def decode_codes(
        self, codec: CodeFormat, payloads: Sequence[Any], at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        """Write the payloads' sum of each segment, times a factor.

        Payloads are added in order; segment i begins at ``at[i]``.
        """
        kernels, bucket_size, bits = self._kernels, codec.bucket_size, codec.bits
        decode = kernels.decode_exponential if codec.is_exponential else kernels.decode_uniform_codes
        results = []
        for out, start in zip(outs, at):
            elements = out.shape[0]
            middle = start + buckets(elements, bucket_size)
            end = middle + code_words(elements, bits)
            norms = [kernels.view(payload[start:middle], np.float32) for payload in payloads]
            words = [payload[middle:end] for payload in payloads]
            results.append(decode(words, norms, bucket_size, bits, factor, as_array(out)))
        return results

    # ---- rotated codes: the payload of a segment is the word of its step, its codes, and its scales

    def encode_rotated(
        self, codec: RotatedFormat, batch: Batch, rounder: Rounder, at: Any, step_words: Any = None
    ) -> Any:
        """Encode rotated codes, as `encode_codes`.

        The steps are those in ``step_words``, a result of `step_words`, if given.
        """
        kernels = self._kernels
        scales: dict[int, Any] = {}

        def fill_words(i: int, out: Any) -> Any:
            chain = batch.chains[i]
            if step_words is None:
                key = rounder.key(chain, batch.steps[i])
            elif not batch.elements[i]:  # an empty segment has no step word
                key = chain.key(rounder.domain, 0, rounder.rank)
            else:
                key = kernels.key_of_word(chain, rounder.domain, step_words[i], rounder.rank)
            values = as_array(batch.values[i])
            words, scales[i] = kernels.encode_rotated(
                values, codec.bits, key, batch.starts[i], out, trellis=codec.trellis
            )
            return words

        def fill_step(i: int, out: Any) -> Any:
            return kernels.step_word(batch.steps[i], out) if step_words is None else step_words[i]

        def fill_scales(i: int, out: Any) -> Any:
            return scales.pop(i)

        parts: list[Any] = []
        for i, count in enumerate(batch.elements):
            if count:
                parts.append((1, np.int32, partial(fill_step, i)))
            parts.append((rotated_words(count, codec.bits), np.int32, partial(fill_words, i)))
            parts.append((tiles(count), np.float32, partial(fill_scales, i)))
        return kernels.pack([*parts, no_part(np.int32)])

    def step_words(self, payload: Any, at: Sequence[int], elements: Sequence[int]) -> Sequence[Any]:
        """Return the steps in a payload, for `encode_rotated`."""
        return [payload[start : start + 1] for start in at[: len(elements)]]

    def decode_rotated(
        self,
        codec: RotatedFormat,
        batch: Batch,
        domain: str,
        payloads: Sequence[Any],
        at: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        """Decode as `decode_codes`; rank r of the domain has encoded payload r."""
        kernels, bits = self._kernels, codec.bits
        results = []
        for i, (out, start) in enumerate(zip(outs, at)):
            elements = batch.elements[i]
            first = start + min(elements, 1)
            middle = first + rotated_words(elements, bits)
            end = middle + tiles(elements)
            chain = batch.chains[i]
            keys = [
                kernels.key_of_word(chain, domain, payload[start:first], rank)
                if elements
                else chain.key(domain, 0, rank)
                for rank, payload in enumerate(payloads)
            ]
            scales = [kernels.view(payload[middle:end], np.float32) for payload in payloads]
            words = [payload[first:middle] for payload in payloads]
            rest = (factor, as_array(out), batch.starts[i], codec.trellis)
            if len(payloads) == 1:
                results.append(kernels.decode_rotated(words[0], scales[0], bits, keys[0], *rest))
            else:
                results.append(kernels.add_rotated(words, scales, bits, keys, *rest))
        return results

    # ---- sums: all norms in one array, and all digits in another, with one word at its end that is 1

    def norms(self, norm: str, bucket_size: int, batch: Batch) -> Any:
        """Return all segments' norms, concatenated.

        They are maxima, float32, or with ``"l2"`` sums of squares, float64.
        """
        kernels = self._kernels
        compute = kernels.bucket_maxima if norm == "max" else kernels.bucket_square_sums
        dtype = np.float32 if norm == "max" else np.float64
        parts: list[Part] = [
            (buckets(count, bucket_size), dtype, partial(compute, as_array(values), bucket_size))
            for count, values in zip(batch.elements, batch.values)
        ]
        return kernels.pack([*parts, no_part(dtype)])

    def encode_sums(self, codec: SumFormat, batch: Batch, rounder: Rounder, norms: Any) -> Any:
        """Encode the digits of all segments, concatenated, and the word.

        ``norms`` are those of all segments.
        """
        norm_at, _ = codec.offsets(batch.elements)

        def fill(i: int, out: Any) -> Any:
            key = rounder.key(batch.chains[i], batch.steps[i])
            local = norms[norm_at[i] : norm_at[i + 1]]
            arguments = (codec.bucket_size, codec.levels, codec.width, key, batch.starts[i], out)
            return self._kernels.encode_uniform_sum(as_array(batch.values[i]), local, *arguments)

        parts: list[Any] = [
            (sum_words(count, codec.width), np.int32, partial(fill, i))
            for i, count in enumerate(batch.elements)
        ]
        return self._kernels.pack([*parts, (1, np.int32, lambda out: np.ones(1, np.int32))])

    def decode_sums(
        self, codec: SumFormat, sums: Sums, tensors: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        """Write the sums of these tensors, by their numbers, times a factor."""
        norm_at, word_at = codec.offsets(sums.elements)
        results = []
        for i, out in zip(tensors, outs):
            words = sums.words[word_at[i] : word_at[i + 1]]
            norms = sums.norms[norm_at[i] : norm_at[i + 1]]
            arguments = (codec.bucket_size, codec.levels, codec.width, factor, as_array(out))
            results.append(self._kernels.decode_uniform_sum(words, norms, *arguments))
        return results

    # ---- one bit: the payload of a segment is its bits, in whole tiles, and then a flag for each tile

    def binarize(self, batch: Batch, rounder: Rounder, at: Any) -> Any:
        """Update the states, and encode the payloads at offsets ``at[i]``."""
        kernels = self._kernels
        flags: dict[int, Any] = {}

        def fill_words(i: int, out: Any) -> Any:
            momentum, scale, beta = batch.states[i]
            key = rounder.key(batch.chains[i], batch.steps[i])
            words, flags[i] = kernels.binarize(
                as_array(batch.values[i]),
                as_array(momentum),
                as_array(scale),
                beta,
                key,
                batch.starts[i],
                out,
            )
            return words

        def fill_flags(i: int, out: Any) -> Any:
            return kernels.pack_flags(flags.pop(i))

        parts: list[Any] = []
        for i, count in enumerate(batch.elements):
            parts.append((ROW * tiles(count), np.int32, partial(fill_words, i)))
            parts.append((ceil_div(tiles(count), ROW), np.int32, partial(fill_flags, i)))
        return kernels.pack([*parts, no_part(np.int32)])

    def vote(self, payloads: Sequence[Any], batch: Batch, rounder: Rounder, at: Sequence[int]) -> Any:
        """Encode one bit per element, drawn from the average over the payloads."""
        kernels = self._kernels

        def fill_words(i: int, out: Any) -> Any:
            part = slice(at[i], at[i] + ROW * tiles(batch.elements[i]))
            key = rounder.key(batch.chains[i], batch.steps[i])
            return kernels.vote([payload[part] for payload in payloads], key, batch.starts[i], out)

        parts: list[Any] = []
        for i, count in enumerate(batch.elements):
            parts.append((ROW * tiles(count), np.int32, partial(fill_words, i)))
            parts.append(any_flags(payloads, at[i] + ROW * tiles(count), count))
        return kernels.pack([*parts, no_part(np.int32)])

    def decode_signs(
        self, payload: Any, batch: Batch, at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        """Write plus or minus the factor, and NaN to the flagged tiles."""
        kernels = self._kernels
        results = []
        for elements, start, out in zip(batch.elements, at, outs):
            middle = start + ROW * tiles(elements)
            flags = kernels.unpack_flags(
                payload[middle : middle + ceil_div(tiles(elements), ROW)], tiles(elements)
            )
            signs = kernels.decode_signs(payload[start:middle], factor, as_array(out))
            results.append(kernels.with_nan_tiles(signs, flags))
        return results


def any_flags(payloads: Sequence[Any], start: int, elements: int) -> Part:
    """Return the part with the union of all payloads' flags."""
    length = ceil_div(tiles(elements), ROW)

    def fill(out: Any) -> Any:
        found = payloads[0][start : start + length]
        for payload in payloads[1:]:
            found = found | payload[start : start + length]
        return found

    return length, np.int32, fill


def segment_kernels(kernels: Any) -> SegmentKernels:
    """Return a backend's kernels for many segments."""
    found = getattr(kernels, "segments", None)
    return SegmentKernels(kernels) if found is None else found
