"""Kernels for many segments in a few launches and one upload.

A segment is a range of the elements of one tensor. Payloads are int32 words; ``at[i]`` is the offset of segment i.
Norms and codes: the norms of its buckets, then its codes. Rotated codes: the word of the step, if there are elements,
then codes, then scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import torch

from horovod_quant.kernels.layout import ROW, TILE, ceil_div, sum_words
from horovod_quant.kernels.segment_offsets import code_offsets, keys_of_batch, rotated_offsets
from horovod_quant.kernels.segments import Batch, Rounder, SegmentKernels, split_points
from horovod_quant.kernels.triton import arrays, each, each_bits, each_rotated
from horovod_quant.kernels.triton.arguments import current_device
from horovod_quant.kernels.triton.launching import batch
from horovod_quant.kernels.triton.table import SegmentTable, before, counts_of


class TritonSegments(SegmentKernels):
    """Triton kernels for many segments: see the module.

    A ``batch`` here has ``values``, ``elements``, ``starts``, ``chains``, ``steps`` and a ``table``. A ``rounder`` has
    ``domain``, ``rank`` and ``size``: it selects the random bits.

    Args:
        kernels: the backend.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def empty(self, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return arrays for temporary float32 results."""
        # Each begins at a multiple of 16 bytes, for vector loads.
        at = split_points([ceil_div(length, ROW) * ROW for length in lengths])
        memory = torch.empty(at[-1], dtype=torch.float32, device=current_device())
        return [memory[start : start + length] for start, length in zip(at, lengths)]

    def decode_sources(
        self, outs: Sequence[Any], sources: Sequence[Any], decode: Callable[..., Any]
    ) -> Sequence[Any]:
        """Decode several sources into ``outs`` in one batch."""
        with batch():
            for source in sources:
                decode(source, [outs[one.tensor][one.start : one.stop] for one in source[2]])
        return outs

    def encode_codes(
        self, levels: str, norm: str, bucket_size: int, bits: int, segments: Batch, rounder: Rounder, at: Any
    ) -> torch.Tensor:
        table, keys = _table(segments), keys_of_batch(segments, rounder)
        out = torch.empty(at[-1], dtype=torch.int32, device=table.device)
        norms_at, words_at = code_offsets(tuple(at), segments.elements, bucket_size)
        with batch():
            if norm == "max":
                norms = out.view(torch.float32)
                each.bucket_maxima_each(table, bucket_size, norms, norms_at)
            else:
                sums = each.bucket_square_sums_each(table, bucket_size)
                found, counts = each.norms_of_square_sums_each(sums), table.counts(bucket_size)
                norms = out.view(torch.float32)
                each.copy_each(found, before(counts), norms, norms_at, counts)
            each.encode_codes_each(
                levels, table, norms, norms_at, bucket_size, bits, keys, segments.starts, words_at, out
            )
        return out

    def decode_codes(
        self,
        levels: str,
        bucket_size: int,
        bits: int,
        payloads: Sequence[torch.Tensor],
        at: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        elements = tuple([out.shape[0] for out in outs])
        norms_at, words_at = code_offsets(tuple(at), elements, bucket_size)
        with batch():
            each.decode_codes_each(levels, payloads, words_at, norms_at, bucket_size, bits, factor, outs)
        return outs

    def encode_rotated(
        self, bits: int, trellis: bool, segments: Batch, rounder: Rounder, at: Any, step_words: Any = None
    ) -> torch.Tensor:
        """Encode rotated codes.

        The steps are those in ``step_words``, a result of `step_words`, if given.
        """
        table = _table(segments)
        filled, words_at, scales_at = rotated_offsets(tuple(at), segments.elements, bits)
        out = torch.empty(at[-1], dtype=torch.int32, device=table.device)
        with batch():
            if step_words is None:
                each_rotated.write_steps(segments.steps, out, words_at - filled, filled)
                keys = each_rotated.keys_of_numbers(keys_of_batch(segments, rounder))
            else:
                each_rotated.copy_steps(step_words, out, words_at - filled, filled)
                keys = each_rotated.keys_of_words(
                    segments.chains, rounder.domain, step_words.addresses, rounder.rank
                )
            each_rotated.encode_rotated_each(
                table, bits, keys, segments.starts, words_at, scales_at, out, trellis
            )
        return out

    def step_words(
        self, payload: torch.Tensor, at: Sequence[int], elements: Sequence[int]
    ) -> each_rotated.StepWords:
        """Return the addresses of a payload's steps, for kernels alone."""
        offsets = np.array(at[: len(elements)], np.int64)
        return each_rotated.StepWords(payload.data_ptr() + 4 * offsets, payload)

    def decode_rotated(
        self,
        bits: int,
        trellis: bool,
        segments: Batch,
        domain: str,
        payloads: Sequence[torch.Tensor],
        at: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        """Decode the sum of payloads.

        Rank r of the domain has encoded payload r.
        """
        _, words_at, scales_at = rotated_offsets(tuple(at), segments.elements, bits)
        keys = [
            each_rotated.keys_of_words(
                segments.chains, domain, self.step_words(payload, at, segments.elements).addresses, rank
            )
            for rank, payload in enumerate(payloads)
        ]
        with batch():
            each_rotated.add_rotated_each(
                payloads, words_at, scales_at, bits, keys, factor, outs, segments.starts, trellis
            )
        return outs

    # ---- sums: all norms in one array, and all digits in another, with one word at its end that is 1

    def norms(self, norm: str, bucket_size: int, segments: Batch) -> torch.Tensor:
        """Return all segments' norms, concatenated.

        They are maxima, float32, or with ``"l2"`` sums of squares, float64.
        """
        compute = each.bucket_maxima_each if norm == "max" else each.bucket_square_sums_each
        with batch():
            return compute(_table(segments), bucket_size)

    def encode_sums(
        self,
        bucket_size: int,
        levels: int,
        width: int,
        segments: Batch,
        rounder: Rounder,
        norms: torch.Tensor,
        norm_at: Sequence[int],
    ) -> torch.Tensor:
        """Encode the digits of all segments, concatenated, and the word."""
        table = _table(segments)
        words = int(table.words(sum_words, width).sum())
        out = torch.empty(words + 1, dtype=torch.int32, device=table.device)
        with batch():
            arrays.step_word(1, out[words:])
            each.encode_uniform_sum_each(
                table,
                norms,
                bucket_size,
                levels,
                width,
                keys_of_batch(segments, rounder),
                segments.starts,
                out[:words],
            )
        return out

    def decode_sums(
        self,
        bucket_size: int,
        levels: int,
        width: int,
        words: torch.Tensor,
        word_at: Sequence[int],
        norms: torch.Tensor,
        norm_at: Sequence[int],
        segments: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
        table: Any = None,
    ) -> Sequence[Any]:
        """Write the sums of these segments, by their numbers, times a factor."""
        which = list(segments)
        with batch():
            each.decode_uniform_sum_each(
                words,
                np.array(word_at, np.int64)[which],
                norms,
                np.array(norm_at, np.int64)[which],
                bucket_size,
                levels,
                width,
                factor,
                outs,
                table if isinstance(table, SegmentTable) else None,
            )
        return outs

    # ---- one bit: the payload of a segment is its bits, in whole tiles, and then a flag for each tile

    def binarize(self, segments: Batch, rounder: Rounder, at: Any) -> torch.Tensor:
        """Update the states, and encode the payloads at offsets ``at[i]``."""
        momenta, scales, betas = zip(*segments.states) if segments.states else ((), (), ())
        table, words_at = _table(segments), np.array(at, np.int64)[:-1]
        counts = table.counts(TILE)
        out = torch.empty(at[-1], dtype=torch.int32, device=table.device)
        with batch():
            flags = each_bits.binarize_each(
                table,
                momenta,
                scales,
                betas,
                keys_of_batch(segments, rounder),
                segments.starts,
                words_at,
                out,
            )
            each_bits.pack_flags_each(flags, counts, out, words_at + ROW * counts)
        return out

    def vote(
        self, payloads: Sequence[torch.Tensor], segments: Batch, rounder: Rounder, at: Sequence[int]
    ) -> torch.Tensor:
        """Encode one bit per element, drawn from the average over the payloads."""
        words_at = np.array(at, np.int64)[: len(segments.elements)]
        counts = counts_of(segments.elements, TILE)
        out = torch.empty(at[-1], dtype=torch.int32, device=payloads[0].device)
        keys = keys_of_batch(segments, rounder)
        with batch():
            each_bits.vote_each(payloads, words_at, counts, keys, segments.starts, out)
            each_bits.any_bits_each(payloads, words_at + ROW * counts, -(-counts // ROW), out)
        return out

    def decode_signs(
        self, payload: torch.Tensor, segments: Batch, at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        """Write plus or minus the factor, and NaN to the flagged tiles."""
        table = SegmentTable(outs, "out")
        with batch():
            each_bits.decode_signs_each(payload, np.array(at, np.int64)[: len(table)], factor, table)
        return outs


def _table(segments: Batch) -> SegmentTable:
    if segments.table is None:
        segments.table = SegmentTable(segments.values)
    return segments.table
