"""C++ kernels for many segments in one call (native_each.h).

A call costs more than the work on a small segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant.kernels.arrays import address, aligned_empty, with_nan_tiles
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.checks import check_bucket_size
from horovod_quant.kernels.formats import CodeFormat, RotatedFormat, SumFormat, Sums, norm_offsets
from horovod_quant.kernels.keys import ALL_ONES, Key, keys_of
from horovod_quant.kernels.layout import ROW, TILE, split
from horovod_quant.kernels.native_arguments import SegmentTable, addresses, validated
from horovod_quant.kernels.native_library import call
from horovod_quant.kernels.segment_offsets import (
    check_offsets,
    code_offsets,
    counts_of,
    flag_offsets,
    keys_of_batch,
    rotated_offsets,
    starts_of_batch,
)
from horovod_quant.kernels.segments import Batch, Rounder, SegmentKernels

_DECODERS = {"uniform": "decode_uniform_codes_each", "exponential": "decode_exponential_each"}
_NORM_KINDS = {"max": 1, "l2": 2}  # NormKind of native_encoders.h


class NativeSegments(SegmentKernels):
    """Kernels that process all segments in one call of the library."""

    wants_views = True

    def empty(self, lengths: Sequence[int]) -> Sequence[Any]:
        return split(np.empty(sum(lengths), np.float32), lengths)

    def convert(self, batch: Batch, dtype: str) -> Any:
        whole = aligned_empty(sum(batch.elements), np.dtype(dtype))
        _scale(batch.table_by(SegmentTable), 1.0, split(whole, batch.elements))
        return whole

    def scale(self, arrays: Sequence[Any], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
        _scale(SegmentTable(arrays), factor, outs)
        return outs

    def encode_codes(self, codec: CodeFormat, batch: Batch, rounder: Rounder, at: Any) -> Any:
        table, out = batch.table_by(SegmentTable), aligned_empty(at[-1], np.int32)
        keys, starts = keys_of_batch(batch, rounder), starts_of_batch(batch, table.count)
        first, _ = code_offsets(codec, at, table.elements, len(out))
        call(
            "encode_norms_and_codes_each", *table.gradients, codec.is_exponential,
            _NORM_KINDS[codec.norm], codec.bucket_size, codec.bits, address(keys), address(starts),
            address(first), address(out),
        )  # fmt: skip
        return out

    def decode_codes(
        self, codec: CodeFormat, payloads: Sequence[Any], at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        if len(outs) == 1:  # building a table is slower
            return super().decode_codes(codec, payloads, at, factor, outs)
        pieces, table = _received(payloads), _results(outs)
        norms_at, words_at = code_offsets(codec, at, table.elements, min(map(len, pieces)))
        norms, words = addresses(pieces, norms_at), addresses(pieces, words_at)
        units = np.empty(16 * len(pieces), np.float32)
        call(
            _DECODERS[codec.levels], table.count, address(words), address(norms), len(pieces), table.counts,
            codec.bucket_size, codec.bits, factor, address(units), table.data, table.types,
        )  # fmt: skip
        table.done()
        return outs

    def encode_rotated(
        self, codec: RotatedFormat, batch: Batch, rounder: Rounder, at: Any, step_words: Any = None
    ) -> Any:
        steps = batch.steps if step_words is None else step_words
        table, out = batch.table_by(SegmentTable), aligned_empty(at[-1], np.int32)
        keys = keys_of(batch.chains, rounder.domain, steps, rounder.rank)
        starts = starts_of_batch(batch, table.count)
        filled, words_at, scales_at = rotated_offsets(codec.bits, at, table.elements, len(out))
        out[words_at[filled] - 1] = np.array(steps, np.uint32).view(np.int32)[filled]
        words, scales = addresses([out], words_at), addresses([out], scales_at)
        call(
            "encode_rotated_each", *table.gradients, codec.bits, codec.trellis, address(keys),
            address(starts), address(words), address(scales),
        )  # fmt: skip
        return out

    def step_words(self, payload: Any, at: Sequence[int], elements: Sequence[int]) -> Sequence[Any]:
        filled = np.array(elements, np.int64) > 0
        found = np.zeros(len(filled), np.int64)
        found[filled] = payload[np.array(at[: len(filled)], np.int64)[filled]]
        return (found & ALL_ONES).tolist()

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
        if len(outs) == 1:
            return super().decode_rotated(codec, batch, domain, payloads, at, factor, outs)
        pieces, table = _received(payloads), _results(outs)
        starts = starts_of_batch(batch, table.count)
        _, words_at, scales_at = rotated_offsets(codec.bits, at, table.elements, min(map(len, pieces)))
        keys = np.empty((table.count, len(pieces), len(Key._fields)), np.uint32)
        for rank, piece in enumerate(pieces):
            keys[:, rank] = keys_of(batch.chains, domain, self.step_words(piece, at, batch.elements), rank)
        words, scales = addresses(pieces, words_at), addresses(pieces, scales_at)
        call(
            "add_rotated_each", table.count, address(words), address(scales), len(pieces), table.counts,
            codec.bits, codec.trellis, factor, address(keys), address(starts), table.data, table.types,
        )  # fmt: skip
        table.done()
        return outs

    def norms(self, norm: str, bucket_size: int, batch: Batch) -> Any:
        maxima, square_sums = ("bucket_maxima_each", np.float32), ("bucket_square_sums_each", np.float64)
        kernel, dtype = maxima if norm == "max" else square_sums
        check_bucket_size(bucket_size)
        table = batch.table_by(SegmentTable)
        out = aligned_empty(norm_offsets(table.elements, bucket_size)[-1], dtype)
        call(kernel, *table.gradients, bucket_size, address(out))
        return out

    def encode_sums(self, codec: SumFormat, batch: Batch, rounder: Rounder, norms: Any) -> Any:
        codec.check()
        table = batch.table_by(SegmentTable)
        norm_at, word_at = codec.offsets(table.elements)
        norms = _checked_norms(norms, norm_at[-1])
        keys, starts = keys_of_batch(batch, rounder), starts_of_batch(batch, table.count)
        out = aligned_empty(word_at[-1] + 1, np.int32)
        out[-1] = 1
        call(
            "encode_uniform_sum_each", *table.gradients, address(norms), codec.bucket_size, codec.levels,
            address(keys), address(starts), codec.width, address(out),
        )  # fmt: skip
        return out

    def decode_sums(
        self, codec: SumFormat, sums: Sums, tensors: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        if len(tensors) < len(sums.elements) or list(tensors) != list(range(len(tensors))):
            return super().decode_sums(codec, sums, tensors, factor, outs)
        codec.check()
        table = sums.table
        if table is None or not table.is_of(outs):
            table = _results(outs)
        norm_at, word_at = codec.offsets(table.elements)
        norms = _checked_norms(sums.norms, norm_at[-1])
        if len(sums.words) < word_at[-1]:
            raise ValueError(f"words: {len(sums.words)} words cannot hold all digits of {codec.width} bits")
        words = validated(sums.words[: word_at[-1]], np.int32, "words")
        call(
            "decode_uniform_sum_each", table.count, address(words), address(norms), table.counts,
            codec.bucket_size, codec.levels, codec.width, factor, table.data, table.types,
        )  # fmt: skip
        table.done()
        return outs

    def binarize(self, batch: Batch, rounder: Rounder, at: Any) -> Any:
        momenta, scales, betas = zip(*batch.states) if batch.states else ((), (), ())
        table, m, b = batch.table_by(SegmentTable), _results(momenta, "momenta"), _results(scales, "scales")
        if len(batch.states) != table.count:
            raise ValueError(f"{len(batch.states)} states of {table.count} gradients")
        m.check_state_of(table)
        b.check_state_of(table)
        given = np.array(betas, np.float64)
        keep, take = given.astype(np.float32), (1.0 - given).astype(np.float32)
        keys, starts = keys_of_batch(batch, rounder), starts_of_batch(batch, table.count)
        words_at, tile_words, tile_bits = flag_offsets(tuple(at), batch.elements)
        tile_counts = counts_of(table.elements, TILE)
        out, flags = aligned_empty(at[-1], np.int32), np.empty(tile_counts.sum(), bool)
        check_offsets("words", words_at, ROW * tile_counts, len(out))
        words = addresses([out], words_at)
        call(
            "binarize_each", *table.gradients, m.data, b.data, address(keep), address(take),
            address(keys), address(starts), address(words), address(flags),
        )  # fmt: skip
        m.done()
        b.done()
        out[tile_words] = 0
        if flags.any():
            np.bitwise_or.at(out, tile_words, np.where(flags, tile_bits, 0).astype(np.int32))
        return out

    def vote(self, payloads: Sequence[Any], batch: Batch, rounder: Rounder, at: Sequence[int]) -> Any:
        words_at, tile_words, _ = flag_offsets(tuple(at), batch.elements)
        counts = counts_of(batch.elements, TILE)
        out = aligned_empty(at[-1], np.int32)
        keys, starts = keys_of_batch(batch, rounder), starts_of_batch(batch, len(counts))
        pieces = _received(payloads)
        check_offsets("words", words_at, ROW * counts, min(map(len, [out, *pieces])))
        words, results = addresses(pieces, words_at), addresses([out], words_at)
        call(
            "vote_each", len(counts), address(counts), address(words), len(pieces), address(keys),
            address(starts), address(results),
        )  # fmt: skip
        flags = pieces[0][tile_words]
        for piece in pieces[1:]:
            flags |= piece[tile_words]
        out[tile_words] = flags
        return out

    def decode_signs(
        self, payload: Any, batch: Batch, at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        if len(outs) == 1:
            return super().decode_signs(payload, batch, at, factor, outs)
        words_at, tile_words, tile_bits = flag_offsets(tuple(at), batch.elements)
        [piece], table = _received([payload]), _results(outs)
        check_offsets("words", words_at, ROW * counts_of(table.elements, TILE), len(piece))
        words = addresses([piece], words_at)
        call("decode_signs_each", table.count, address(words), table.counts, factor, table.data, table.types)
        table.done()
        flags = (piece[tile_words] & tile_bits) != 0
        if flags.any():
            for out, local in zip(outs, split(flags, counts_of(batch.elements, TILE).tolist())):
                with_nan_tiles(as_array(out), local)
        return outs


def _results(outs: Sequence[Any], name: str = "out") -> SegmentTable:
    return SegmentTable(outs, name, is_written=True)


def _received(payloads: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the workers' payloads, validated; copies have to outlive the call."""
    if not len(payloads):
        raise ValueError("no payloads to decode")
    return [validated(payload, np.int32, "payloads") for payload in payloads]


def _checked_norms(norms: np.ndarray, count: int) -> np.ndarray:
    if len(norms) != count:
        raise ValueError(f"norms: {len(norms)} norms for {count} buckets")
    return validated(norms, np.float32, "norms")


def _scale(table: SegmentTable, factor: float, outs: Sequence[np.ndarray]) -> None:
    """Write elements in float32 times a factor to floating-point arrays."""
    results = _results(outs)
    if not np.array_equal(results.lengths, table.lengths):
        raise ValueError(f"out: arrays of {results.lengths} elements for {table.lengths}")
    call("scale_each", *table.gradients, factor, results.data, results.types)
    results.done()
