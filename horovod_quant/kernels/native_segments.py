"""C++ kernels for many segments in one call.

A call costs more than the work on a small segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_quant.kernels import native_each
from horovod_quant.kernels.arrays import aligned_empty, with_nan_tiles
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.kernels.keys import ALL_ONES, keys_of
from horovod_quant.kernels.layout import tiles
from horovod_quant.kernels.native_each import SegmentTable
from horovod_quant.kernels.segment_offsets import flag_offsets, keys_of_batch, rotated_offsets
from horovod_quant.kernels.segments import Batch, Rounder, SegmentKernels


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
        native_each.scale_each(_table(batch), 1.0, parts)
        return whole

    def scale(self, arrays: Sequence[Any], factor: Any, outs: Sequence[Any]) -> Sequence[Any]:
        native_each.scale_each(SegmentTable(arrays), factor, outs)
        return outs

    def encode_codes(
        self, levels: str, norm: str, bucket_size: int, bits: int, batch: Batch, rounder: Rounder, at: Any
    ) -> Any:
        first = np.array(at[: len(batch.elements)], np.int64)
        keys, out = keys_of_batch(batch, rounder), aligned_empty(at[-1], np.int32)
        return native_each.encode_norms_and_codes_each(
            levels, norm, _table(batch), bucket_size, bits, keys, batch.starts, first, out
        )

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
        first = np.array(at[: len(outs)], np.int64)
        counts = np.array([-(-out.shape[0] // bucket_size) for out in outs], np.int64)
        norms = [payload.view(np.float32) for payload in payloads]
        native_each.decode_codes_each(
            levels, payloads, first + counts, norms, first, bucket_size, bits, factor, outs
        )
        return outs

    def encode_rotated(
        self, bits: int, trellis: bool, batch: Batch, rounder: Rounder, at: Any, step_words: Any = None
    ) -> Any:
        steps = batch.steps if step_words is None else step_words
        filled, words_at, scales_at = rotated_offsets(tuple(at), batch.elements, bits)
        keys = keys_of(batch.chains, rounder.domain, steps, rounder.rank)
        out = aligned_empty(at[-1], np.int32)
        out[words_at[filled] - 1] = np.array(steps, np.uint32).view(np.int32)[filled]
        return native_each.encode_rotated_each(
            _table(batch), bits, keys, batch.starts, words_at, scales_at, out, trellis
        )

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
        keys = np.stack(
            [
                keys_of(batch.chains, domain, self.step_words(payload, at, batch.elements), rank)
                for rank, payload in enumerate(payloads)
            ],
            axis=1,
        )
        native_each.add_rotated_each(
            payloads, words_at, scales_at, bits, keys, factor, outs, batch.starts, trellis=trellis
        )
        return outs

    def norms(self, norm: str, bucket_size: int, batch: Batch) -> Any:
        if norm == "max":
            return native_each.bucket_maxima_each(_table(batch), bucket_size)
        return native_each.bucket_square_sums_each(_table(batch), bucket_size)

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
        table = _table(batch)
        out = aligned_empty(table.sum_words(width) + 1, np.int32)
        out[-1] = 1
        native_each.encode_uniform_sum_each(
            table, norms, bucket_size, levels, width, keys_of_batch(batch, rounder), batch.starts, out[:-1]
        )
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
        native_each.decode_uniform_sum_each(
            words[: word_at[-1]], norms, bucket_size, levels, width, factor, outs, table
        )
        return outs

    def binarize(self, batch: Batch, rounder: Rounder, at: Any) -> Any:
        momenta, scales, betas = zip(*batch.states) if batch.states else ((), (), ())
        words_at, tile_words, tile_bits = flag_offsets(tuple(at), batch.elements)
        out = aligned_empty(at[-1], np.int32)
        flags = native_each.binarize_each(
            _table(batch), momenta, scales, betas, keys_of_batch(batch, rounder), batch.starts, words_at, out
        )
        out[tile_words] = 0
        if flags.any():
            np.bitwise_or.at(out, tile_words, np.where(flags, tile_bits, 0).astype(np.int32))
        return out

    def vote(self, payloads: Sequence[Any], batch: Batch, rounder: Rounder, at: Sequence[int]) -> Any:
        words_at, tile_words, _ = flag_offsets(tuple(at), batch.elements)
        counts = np.array([tiles(count) for count in batch.elements], np.int64)
        out = aligned_empty(at[-1], np.int32)
        native_each.vote_each(payloads, words_at, counts, keys_of_batch(batch, rounder), batch.starts, out)
        flags = payloads[0][tile_words]
        for payload in payloads[1:]:
            flags |= payload[tile_words]
        out[tile_words] = flags
        return out

    def decode_signs(
        self, payload: Any, batch: Batch, at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        if len(outs) == 1:
            return super().decode_signs(payload, batch, at, factor, outs)
        words_at, tile_words, tile_bits = flag_offsets(tuple(at), batch.elements)
        native_each.decode_signs_each(payload, words_at, factor, outs)
        flags = (payload[tile_words] & tile_bits) != 0
        if flags.any():
            ends = np.cumsum([tiles(count) for count in batch.elements]).tolist()
            for out, count, end in zip(outs, batch.elements, ends):
                with_nan_tiles(as_array(out), flags[end - tiles(count) : end])
        return outs


def _table(batch: Batch) -> SegmentTable:
    if batch.table is None:
        batch.table = SegmentTable(batch.values)
    return batch.table
