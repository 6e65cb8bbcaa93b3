"""C++ kernels for many segments in one call (native_each.h).

A call costs more than the work on a small segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant.kernels.arrays import address, aligned_empty, with_nan_tiles
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.checks import check_bucket_size, check_range
from horovod_quant.kernels.keys import ALL_ONES, Key, keys_of
from horovod_quant.kernels.layout import ROW, TILE, tiles
from horovod_quant.kernels.native_arguments import MAX_LEVELS, validated
from horovod_quant.kernels.native_library import call
from horovod_quant.kernels.native_table import Outs, SegmentTable, addresses, check_offsets
from horovod_quant.kernels.segment_offsets import flag_offsets, keys_of_batch, rotated_offsets
from horovod_quant.kernels.segments import Batch, Rounder, SegmentKernels

_MOST_BITS = {"uniform": 16, "exponential": 8}
_DECODERS = {"uniform": "decode_uniform_codes_each", "exponential": "decode_exponential_each"}
_NORM_KINDS = {"max": 1, "l2": 2}  # NormKind of native_encoders.h


class NativeSegments(SegmentKernels):
    """Kernels that process all segments in one call of the library."""

    wants_views = True

    def empty(self, lengths: Sequence[int]) -> Sequence[Any]:
        ends = np.cumsum(lengths, dtype=np.int64).tolist()
        memory = np.empty(ends[-1] if ends else 0, np.float32)
        return [memory[end - length : end] for end, length in zip(ends, lengths)]

    def convert(self, batch: Batch, dtype: str) -> Any:
        ends = np.cumsum(batch.elements, dtype=np.int64).tolist()
        whole = aligned_empty(ends[-1] if ends else 0, np.dtype(dtype))
        parts = [whole[end - count : end] for count, end in zip(batch.elements, ends)]
        _scale(_table(batch), 1.0, parts)
        return whole

    def scale(self, arrays: Sequence[Any], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
        _scale(SegmentTable(arrays), factor, outs)
        return outs

    def encode_codes(
        self, levels: str, norm: str, bucket_size: int, bits: int, batch: Batch, rounder: Rounder, at: Any
    ) -> Any:
        check_range("bits", bits, 2, _MOST_BITS[levels])
        check_bucket_size(bucket_size)
        table, out = _table(batch), aligned_empty(at[-1], np.int32)
        keys, starts = keys_of_batch(batch, rounder), _starts(batch, table.count)
        first = np.array(at[: table.count], np.int64)
        _check_codes(table, bucket_size, bits, first, len(out))
        call(
            "encode_norms_and_codes_each", table.count, table.data, table.types, table.counts,
            levels == "exponential", _NORM_KINDS[norm], bucket_size, bits, address(keys), address(starts),
            address(first), address(out),
        )  # fmt: skip
        return out

    def decode_codes(
        self,
        levels: str,
        bucket_size: int,
        bits: int,
        payloads: Sequence[Any],
        at: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        if len(outs) == 1:  # building a table is slower
            return super().decode_codes(levels, bucket_size, bits, payloads, at, factor, outs)
        check_range("bits", bits, 2, _MOST_BITS[levels])
        check_bucket_size(bucket_size)
        pieces, results = _received(payloads), Outs(outs)
        table, first = results.table, np.array(at[: len(outs)], np.int64)
        norm_counts = _check_codes(table, bucket_size, bits, first, min(map(len, pieces)))
        norms, words = addresses(pieces, first), addresses(pieces, first + norm_counts)
        units = np.empty(16 * len(pieces), np.float32)
        call(
            _DECODERS[levels], table.count, address(words), address(norms), len(pieces), table.counts,
            bucket_size, bits, factor, address(units), table.data, table.types,
        )  # fmt: skip
        results.done()
        return outs

    def encode_rotated(
        self, bits: int, trellis: bool, batch: Batch, rounder: Rounder, at: Any, step_words: Any = None
    ) -> Any:
        steps = batch.steps if step_words is None else step_words
        filled, words_at, scales_at = rotated_offsets(tuple(at), batch.elements, bits)
        table, out = _table(batch), aligned_empty(at[-1], np.int32)
        keys = keys_of(batch.chains, rounder.domain, steps, rounder.rank)
        starts = _starts(batch, table.count)
        _check_rotated(table, bits, words_at, scales_at, len(out))
        out[words_at[filled] - 1] = np.array(steps, np.uint32).view(np.int32)[filled]
        words, scales = addresses([out], words_at), addresses([out], scales_at)
        call(
            "encode_rotated_each", table.count, table.data, table.types, table.counts, bits, trellis,
            address(keys), address(starts), address(words), address(scales),
        )  # fmt: skip
        return out

    def step_words(self, payload: Any, at: Sequence[int], elements: Sequence[int]) -> Sequence[Any]:
        filled = np.array(elements, np.int64) > 0
        found = np.zeros(len(filled), np.int64)
        found[filled] = payload[np.array(at[: len(filled)], np.int64)[filled]]
        return (found & ALL_ONES).tolist()

    def decode_rotated(
        self,
        bits: int,
        trellis: bool,
        batch: Batch,
        domain: str,
        payloads: Sequence[Any],
        at: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        if len(outs) == 1:
            return super().decode_rotated(bits, trellis, batch, domain, payloads, at, factor, outs)
        _, words_at, scales_at = rotated_offsets(tuple(at), batch.elements, bits)
        pieces, results = _received(payloads), Outs(outs)
        table = results.table
        starts = _starts(batch, table.count)
        _check_rotated(table, bits, words_at, scales_at, min(map(len, pieces)))
        keys = np.empty((table.count, len(pieces), len(Key._fields)), np.uint32)
        for rank, piece in enumerate(pieces):
            keys[:, rank] = keys_of(batch.chains, domain, self.step_words(piece, at, batch.elements), rank)
        words, scales = addresses(pieces, words_at), addresses(pieces, scales_at)
        call(
            "add_rotated_each", table.count, address(words), address(scales), len(pieces), table.counts, bits,
            trellis, factor, address(keys), address(starts), table.data, table.types,
        )  # fmt: skip
        results.done()
        return outs

    def norms(self, norm: str, bucket_size: int, batch: Batch) -> Any:
        maxima, square_sums = ("bucket_maxima_each", np.float32), ("bucket_square_sums_each", np.float64)
        kernel, dtype = maxima if norm == "max" else square_sums
        table = _table(batch)
        out = aligned_empty(table.buckets(bucket_size), dtype)
        call(kernel, table.count, table.data, table.types, table.counts, bucket_size, address(out))
        return out

    def encode_sums(
        self,
        bucket_size: int,
        levels: int,
        width: int,
        batch: Batch,
        rounder: Rounder,
        norms: Any,
        norm_at: Sequence[int],
    ) -> Any:
        check_range("levels", levels, 1, MAX_LEVELS)
        table = _table(batch)
        norms = table.norms(norms, bucket_size)
        keys, starts = keys_of_batch(batch, rounder), _starts(batch, table.count)
        out = aligned_empty(table.sum_words(width) + 1, np.int32)
        out[-1] = 1
        call(
            "encode_uniform_sum_each", table.count, table.data, table.types, table.counts, address(norms),
            bucket_size, levels, address(keys), address(starts), width, address(out),
        )  # fmt: skip
        return out

    def decode_sums(
        self,
        bucket_size: int,
        levels: int,
        width: int,
        words: Any,
        word_at: Sequence[int],
        norms: Any,
        norm_at: Sequence[int],
        segments: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
        table: Any = None,
    ) -> Sequence[Any]:
        if len(segments) < len(word_at) - 1 or list(segments) != list(range(len(segments))):
            return super().decode_sums(
                bucket_size, levels, width, words, word_at, norms, norm_at, segments, factor, outs
            )
        check_range("levels", levels, 1, MAX_LEVELS)
        results = Outs(outs, table)
        table = results.table
        norms, words = table.norms(norms, bucket_size), words[: word_at[-1]]
        if len(words) != table.sum_words(width):
            raise ValueError(f"words: {len(words)} words cannot hold all digits of {width} bits")
        words = validated(words, np.int32, "words")
        call(
            "decode_uniform_sum_each", table.count, address(words), address(norms), table.counts, bucket_size,
            levels, width, factor, table.data, table.types,
        )  # fmt: skip
        results.done()
        return outs

    def binarize(self, batch: Batch, rounder: Rounder, at: Any) -> Any:
        momenta, scales, betas = zip(*batch.states) if batch.states else ((), (), ())
        table, m, b = _table(batch), Outs(momenta, name="momenta"), Outs(scales, name="scales")
        if len(batch.states) != table.count:
            raise ValueError(f"{len(batch.states)} states of {table.count} gradients")
        m.table.check_state_of(table)
        b.table.check_state_of(table)
        given = np.array(betas, np.float64)
        keep, take = given.astype(np.float32), (1.0 - given).astype(np.float32)
        keys, starts = keys_of_batch(batch, rounder), _starts(batch, table.count)
        words_at, tile_words, tile_bits = flag_offsets(tuple(at), batch.elements)
        out, flags = aligned_empty(at[-1], np.int32), np.empty(table.buckets(TILE), bool)
        check_offsets("words", words_at, ROW * -(-table.lengths // TILE), len(out))
        words = addresses([out], words_at)
        call(
            "binarize_each", table.count, table.data, table.types, table.counts, m.table.data, b.table.data,
            address(keep), address(take), address(keys), address(starts), address(words), address(flags),
        )  # fmt: skip
        m.done()
        b.done()
        out[tile_words] = 0
        if flags.any():
            np.bitwise_or.at(out, tile_words, np.where(flags, tile_bits, 0).astype(np.int32))
        return out

    def vote(self, payloads: Sequence[Any], batch: Batch, rounder: Rounder, at: Sequence[int]) -> Any:
        words_at, tile_words, _ = flag_offsets(tuple(at), batch.elements)
        counts = np.array([tiles(count) for count in batch.elements], np.int64)
        out = aligned_empty(at[-1], np.int32)
        keys, starts = keys_of_batch(batch, rounder), _starts(batch, len(counts))
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
        [piece], results = _received([payload]), Outs(outs)
        table = results.table
        check_offsets("words", words_at, ROW * -(-table.lengths // TILE), len(piece))
        words = addresses([piece], words_at)
        call("decode_signs_each", table.count, address(words), table.counts, factor, table.data, table.types)
        results.done()
        flags = (piece[tile_words] & tile_bits) != 0
        if flags.any():
            ends = np.cumsum([tiles(count) for count in batch.elements]).tolist()
            for out, count, end in zip(outs, batch.elements, ends):
                with_nan_tiles(as_array(out), flags[end - tiles(count) : end])
        return outs


def _table(batch: Batch) -> SegmentTable:
    if batch.table is None:
        batch.table = SegmentTable(batch.values)
    return batch.table


def _starts(batch: Batch, count: int) -> np.ndarray:
    """Return the starts of a batch's segments, one for each key."""
    if not len(batch.starts) == len(batch.chains) == len(batch.elements) == count:
        raise ValueError(
            f"{len(batch.starts)} starts, {len(batch.chains)} chains and {len(batch.elements)} lengths "
            f"of {count} gradients"
        )
    return np.array(batch.starts, np.int64)


def _received(payloads: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the workers' payloads, validated; copies have to outlive the call."""
    if not len(payloads):
        raise ValueError("no payloads to decode")
    return [validated(payload, np.int32, "payloads") for payload in payloads]


def _check_codes(
    table: SegmentTable, bucket_size: int, bits: int, first: np.ndarray, room: int
) -> np.ndarray:
    """Check the payloads' offsets; return each segment's number of norms."""
    norm_counts = -(-table.lengths // bucket_size)
    check_offsets("payloads", first, norm_counts + table.code_words(bits), room)
    return norm_counts


def _check_rotated(
    table: SegmentTable, bits: int, words_at: np.ndarray, scales_at: np.ndarray, room: int
) -> None:
    check_offsets("words", words_at, table.rotated_words(bits), room)
    check_offsets("scales", scales_at, -(-table.lengths // TILE), room)


def _scale(table: SegmentTable, factor: float, outs: Sequence[np.ndarray]) -> None:
    """Write elements in float32 times a factor to floating-point arrays."""
    results = Outs(outs)
    if not np.array_equal(results.table.lengths, table.lengths):
        raise ValueError(f"out: arrays of {results.table.lengths} elements for {table.lengths}")
    call(
        "scale_each", table.count, table.data, table.types, table.counts, factor, results.table.data,
        results.table.types,
    )  # fmt: skip
    results.done()
