"""Norms, codes and sums of many segments in one call.

numpy builds the launch tables. Each launch is bit-identical to one call per segment of the function of `functions`,
which also determines its programs and constants: `table.steps_of`. Offsets (``..._at``) are in 4-byte elements of the
array next to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels.checks import check_bucket_size, check_range
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import TILE, code_words, sum_words
from horovod_quant.kernels.segment_offsets import code_offsets, keys_of_batch
from horovod_quant.kernels.segments import Batch, Rounder, SegmentKernels
from horovod_quant.kernels.triton import arrays, functions
from horovod_quant.kernels.triton.arguments import float_entry, typed
from horovod_quant.kernels.triton.launching import MAX_ELEMENTS, batch, run_call
from horovod_quant.kernels.triton.table import (
    SegmentTable,
    before,
    launch,
    launch_groups,
    steps_of,
    table_of,
    table_of_values,
    total_buckets,
)

_KEY = Key(1, 2)
_BYTES = 4
_FIELDS = Key._fields
_MOST_BITS = {"uniform": 16, "exponential": 8}


class CodeSegments(SegmentKernels):
    """Methods for norms and codes, and for sums."""

    def encode_codes(
        self, levels: str, norm: str, bucket_size: int, bits: int, segments: Batch, rounder: Rounder, at: Any
    ) -> torch.Tensor:
        check_range("bits", bits, 2, _MOST_BITS[levels])
        check_bucket_size(bucket_size)
        table, keys = table_of_values(segments), keys_of_batch(segments, rounder)
        counts = table.counts(bucket_size)
        out = torch.empty(at[-1], dtype=torch.int32, device=table.device)
        norms = out.view(torch.float32)
        norms_at, words_at = code_offsets(tuple(at), segments.elements, bucket_size)
        check_offsets("words", words_at, table.words(code_words, bits), len(out))
        columns = {
            "source": table.addresses,
            "norms": out.data_ptr() + _BYTES * norms_at,
            "target": out.data_ptr() + _BYTES * words_at,
            **keys_and_starts(keys, segments.starts, len(table)),
        }
        encode = functions.encode_exponential if levels == "exponential" else functions.encode_uniform_codes
        with batch():
            if norm == "max":
                bucket_norms(norm, table, bucket_size, norms, norms_at)
            else:
                check_offsets("norms", norms_at, counts, len(out))
                sums = bucket_norms(norm, table, bucket_size)
                found = torch.empty(len(sums), dtype=torch.float32, device=sums.device)
                run_call(lambda: found.copy_(sums.sqrt()), sums.device)
                sources = found.data_ptr() + _BYTES * before(counts)
                copy_words(sources, columns["norms"], counts, (found, out))
            launch_groups(table, table.groups, (encode, bucket_size, bits),
                          lambda x: encode(x, norms[:1], bucket_size, bits, _KEY),
                          columns, [table, norms], [out])  # fmt: skip
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
        check_range("bits", bits, 2, _MOST_BITS[levels])
        check_bucket_size(bucket_size)
        if not payloads:
            raise ValueError("no payloads to decode")
        table, workers = SegmentTable(outs, "out"), len(payloads)
        _check_table(table)
        norms_at, words_at = code_offsets(tuple(at), table.elements, bucket_size)
        check_offsets("words", words_at, table.words(code_words, bits), min(map(len, payloads)))
        check_offsets("norms", norms_at, table.counts(bucket_size), min(map(len, payloads)))
        bases = np.array([typed(one, torch.int32, "payloads").data_ptr() for one in payloads], np.int64)
        pointers = np.empty((len(table), 2 * workers), np.int64)
        pointers[:, 0::2] = bases + _BYTES * words_at[:, None]
        pointers[:, 1::2] = bases + _BYTES * norms_at[:, None]
        decode = functions.decode_exponential if levels == "exponential" else functions.decode_uniform_codes
        columns = {"target": table.addresses, "factor": float_entry(factor)}
        with batch():
            launch_groups(table, table.groups, (decode, bucket_size, bits, workers),
                          lambda out: decode(
                              [payloads[0][: code_words(1, bits)]] * workers,
                              [payloads[0][:1].view(torch.float32)] * workers, bucket_size, bits, 1.0, out
                          ),
                          columns, payloads, [table], pointers)  # fmt: skip
        return outs

    # ---- sums

    def norms(self, norm: str, bucket_size: int, segments: Batch) -> torch.Tensor:
        with batch():
            return bucket_norms(norm, table_of_values(segments), bucket_size)

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
        check_range("levels", levels, 1, functions.MAX_LEVELS)
        check_range("width", width, 1, 16)
        check_bucket_size(bucket_size)
        table = table_of_values(segments)
        _check_table(table)
        if len(norms) != total_buckets(table, bucket_size):
            raise ValueError(f"norms: {len(norms)} norms for {total_buckets(table, bucket_size)} buckets")
        words = table.words(sum_words, width)
        out = torch.empty(int(words.sum()) + 1, dtype=torch.int32, device=table.device)
        norms_at = before(table.counts(bucket_size))
        columns = {
            "source": table.addresses,
            "norms": typed(norms, torch.float32, "norms").data_ptr() + _BYTES * norms_at,
            "target": out.data_ptr() + _BYTES * before(words),
            **keys_and_starts(keys_of_batch(segments, rounder), segments.starts, len(table)),
        }
        with batch():
            arrays.step_word(1, out[-1:])
            launch_groups(table, table.groups, ("encode sum", bucket_size, levels, width),
                          lambda x: functions.encode_uniform_sum(
                              x, norms[:1], bucket_size, levels, width, _KEY
                          ),
                          columns, [table, norms], [out[:-1]])  # fmt: skip
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
        check_range("levels", levels, 1, functions.MAX_LEVELS)
        check_range("width", width, 1, 16)
        check_bucket_size(bucket_size)
        table, which = table_of(outs, table), list(segments)
        _check_table(table)
        words_at, norms_at = np.array(word_at, np.int64)[which], np.array(norm_at, np.int64)[which]
        check_offsets("words", words_at, table.words(sum_words, width), len(words))
        check_offsets("norms", norms_at, table.counts(bucket_size), len(norms))
        columns = {
            "source": typed(words, torch.int32, "words").data_ptr() + _BYTES * words_at,
            "norms": typed(norms, torch.float32, "norms").data_ptr() + _BYTES * norms_at,
            "target": table.addresses,
            "factor": float_entry(factor),
        }
        with batch():
            launch_groups(table, table.groups, ("decode sum", bucket_size, levels, width),
                          lambda out: functions.decode_uniform_sum(
                              words[: sum_words(1, width)], norms[:1], bucket_size, levels, width, 1.0, out
                          ),
                          columns, [words, norms], [table])  # fmt: skip
        return outs


def bucket_norms(
    norm: str,
    table: SegmentTable,
    bucket_size: int,
    out: torch.Tensor | None = None,
    at: np.ndarray | None = None,
) -> torch.Tensor:
    """Return `SegmentKernels.norms`.

    With ``out`` it writes them there, from ``at[i]`` on for segment i.
    """
    function, dtype = functions.bucket_maxima, torch.float32
    if norm != "max":
        function, dtype = functions.bucket_square_sums, torch.float64
    check_bucket_size(bucket_size)
    _check_table(table)
    if out is None:
        out = torch.empty(total_buckets(table, bucket_size), dtype=dtype, device=table.device)
    counts = table.counts(bucket_size)
    at = before(counts) if at is None else at
    check_offsets("norms", at, counts, len(out))
    columns = {"source": table.addresses, "target": out.data_ptr() + out.element_size() * at}
    for group in table.aligned_groups:
        # All tensors longer than a bucket use the same kernel; see `functions._norm_bucket_size`.
        longest = int(group.of(table.lengths).max())
        size = min(max(longest, TILE) - 1, bucket_size).bit_length()
        launch_groups(table, [group], (function, bucket_size, size),
                      lambda _: function(table.longest(group), bucket_size),  # noqa: B023
                      columns, [table], [out])  # fmt: skip
    return out


def copy_words(
    sources: np.ndarray, targets: np.ndarray, counts: np.ndarray, kept: Sequence[torch.Tensor]
) -> None:
    """Copy ranges of 4-byte words, from and to addresses."""
    if not counts.any():
        return
    one = kept[-1]
    (step,) = steps_of("copy", lambda: arrays.copy(one[:1], one[:1]))
    columns = {"source": sources, "target": targets}
    read, written = [(sources, sources + _BYTES * counts)], [(targets, targets + _BYTES * counts)]
    launch(step, tuple(counts.tolist()), columns, one.device, read, written, kept=kept)


def keys_and_starts(keys: np.ndarray, starts: Sequence[int], count: int) -> dict[str, np.ndarray]:
    """Return the table columns of keys and starts.

    ``keys`` is uint32 ``[segments, fields of Key]``.
    """
    first = np.array(starts, np.int64)
    if keys.shape != (count, len(_FIELDS)) or first.shape != (count,):
        raise ValueError(f"keys are {list(keys.shape)} and starts {list(first.shape)}, of {count} gradients")
    return {**{name: keys[:, i] for i, name in enumerate(_FIELDS)}, "start": first}


def check_offsets(what: str, offsets: np.ndarray, lengths: np.ndarray, room: int) -> None:
    if offsets.shape != lengths.shape or (
        len(offsets) and (int(offsets.min()) < 0 or int((offsets + lengths).max()) > room)
    ):
        raise ValueError(f"offsets of {len(lengths)} gradients' {what}: not all within {room} words")


def _check_table(table: SegmentTable) -> None:
    if max(table.elements, default=0) > MAX_ELEMENTS:
        raise ValueError(
            f"a tensor of {max(table.elements)} elements; the Triton kernels take {MAX_ELEMENTS} at most"
        )
