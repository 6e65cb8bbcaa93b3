"""Norms, codes, sums and single bits of many segments in one call.

numpy builds the launch tables. Each launch is bit-identical to one call per segment of the function of `functions`,
which also determines its programs and constants: `table.steps_of`. Offsets (``..._at``) are in 4-byte elements of the
array next to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np
import torch

from horovod_quant.kernels.checks import check_bucket_size
from horovod_quant.kernels.formats import CodeFormat, SumFormat, Sums
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, TILE, ceil_div, code_words, split_points, sum_words
from horovod_quant.kernels.segment_offsets import (
    check_offsets,
    code_offsets,
    counts_of,
    keys_of_batch,
    starts_of_batch,
)
from horovod_quant.kernels.segments import Batch, Rounder, SegmentKernels
from horovod_quant.kernels.triton import arrays, functions
from horovod_quant.kernels.triton.arguments import current_device, float_entry, typed
from horovod_quant.kernels.triton.launching import batch
from horovod_quant.kernels.triton.table import (
    SegmentTable,
    before,
    launch,
    launch_groups,
    range_of,
    steps_of,
    table_of,
)

_KEY = Key(1, 2)
_BYTES = 4
_VECTOR = 15


class CodeSegments(SegmentKernels):
    """Methods for temporary results, norms and codes, sums, and single bits."""

    def empty(self, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
        # Each begins at a multiple of 16 bytes, for vector loads.
        at = split_points([ceil_div(length, ROW) * ROW for length in lengths])
        memory = torch.empty(at[-1], dtype=torch.float32, device=current_device())
        return [memory[start : start + length] for start, length in zip(at, lengths)]

    def decode_sources(
        self, outs: Sequence[Any], sources: Sequence[Any], decode: Callable[..., Any]
    ) -> Sequence[Any]:
        with batch():
            return super().decode_sources(outs, sources, decode)

    def encode_codes(self, codec: CodeFormat, segments: Batch, rounder: Rounder, at: Any) -> torch.Tensor:
        bits, bucket_size, table = codec.bits, codec.bucket_size, segments.table_by(SegmentTable)
        out = torch.empty(at[-1], dtype=torch.int32, device=table.device)
        norms = out.view(torch.float32)
        norms_at, words_at = code_offsets(codec, at, table.elements, len(out))
        columns = {
            "source": table.addresses,
            "norms": out.data_ptr() + _BYTES * norms_at,
            "target": out.data_ptr() + _BYTES * words_at,
            **keys_and_starts(segments, rounder, len(table)),
        }
        encode = functions.encode_exponential if codec.is_exponential else functions.encode_uniform_codes
        with batch():
            if codec.norm == "max":
                bucket_norms(codec.norm, table, bucket_size, norms, norms_at)
            else:
                counts = words_at - norms_at
                found = arrays.norms_of_square_sums(bucket_norms(codec.norm, table, bucket_size))
                sources = found.data_ptr() + _BYTES * before(counts)
                copy_words(sources, columns["norms"], counts, (found, out))
            launch_groups(table, table.groups, (encode, bucket_size, bits),
                          lambda x: encode(x, norms[:1], bucket_size, bits, _KEY),
                          columns, [table, norms], [out])  # fmt: skip
        return out

    def decode_codes(
        self, codec: CodeFormat, payloads: Sequence[Any], at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        bits, bucket_size = codec.bits, codec.bucket_size
        if not payloads:
            raise ValueError("no payloads to decode")
        table, workers = SegmentTable(outs, "out"), len(payloads)
        norms_at, words_at = code_offsets(codec, at, table.elements, min(map(len, payloads)))
        bases = np.array([typed(one, torch.int32, "payloads").data_ptr() for one in payloads], np.int64)
        pointers = np.empty((len(table), 2 * workers), np.int64)
        pointers[:, 0::2] = bases + _BYTES * words_at[:, None]
        pointers[:, 1::2] = bases + _BYTES * norms_at[:, None]
        decode = functions.decode_exponential if codec.is_exponential else functions.decode_uniform_codes
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
            return bucket_norms(norm, segments.table_by(SegmentTable), bucket_size)

    def encode_sums(self, codec: SumFormat, segments: Batch, rounder: Rounder, norms: Any) -> torch.Tensor:
        codec.check()
        bucket_size, levels, width = codec.bucket_size, codec.levels, codec.width
        table = segments.table_by(SegmentTable)
        counts, words = table.counts(bucket_size), table.words(sum_words, width)
        if len(norms) != counts.sum():
            raise ValueError(f"norms: {len(norms)} norms for {counts.sum()} buckets")
        out = torch.empty(int(words.sum()) + 1, dtype=torch.int32, device=table.device)
        columns = {
            "source": table.addresses,
            "norms": typed(norms, torch.float32, "norms").data_ptr() + _BYTES * before(counts),
            "target": out.data_ptr() + _BYTES * before(words),
            **keys_and_starts(segments, rounder, len(table)),
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
        self, codec: SumFormat, sums: Sums, tensors: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        codec.check()
        bucket_size, levels, width = codec.bucket_size, codec.levels, codec.width
        table, words, norms = table_of(outs, sums.table), sums.words, sums.norms
        norms_at, words_at = (np.array(at, np.int64)[list(tensors)] for at in codec.offsets(sums.elements))
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

    # ---- single bits

    def binarize(self, segments: Batch, rounder: Rounder, at: Any) -> torch.Tensor:
        table = segments.table_by(SegmentTable)
        momenta, scales, betas = zip(*segments.states) if segments.states else ((), (), ())
        m, b = _state(momenta, table, "momenta"), _state(scales, table, "scales")
        words_at, counts = np.array(at, np.int64)[:-1], table.counts(TILE)
        out = torch.empty(at[-1], dtype=torch.int32, device=table.device)
        check_offsets("words", words_at, ROW * counts + -(-counts // ROW), len(out))
        broken = torch.empty(int(counts.sum()), dtype=torch.bool, device=table.device)
        given = np.array(betas, np.float64)
        columns = {
            "source": table.addresses,
            "momentum": m.addresses,
            "scale": b.addresses,
            "target": out.data_ptr() + _BYTES * words_at,
            "broken": broken.data_ptr() + before(counts),
            "factor": given.astype(np.float32).view(np.int32),
            "second_factor": (1.0 - given).astype(np.float32).view(np.int32),
            **keys_and_starts(segments, rounder, len(table)),
        }
        with batch():
            for group in table.aligned_groups:
                states_aligned = not ((group.of(m.addresses) | group.of(b.addresses)) & _VECTOR).any()
                state = torch.empty(2, dtype=torch.float32, device=table.device)
                local = state[:1] if states_aligned else state[1:]
                launch_groups(table, [group], ("binarize", states_aligned),
                              lambda x: functions.binarize(x, local, local, 0.5, _KEY),  # noqa: B023
                              columns, [table], [m, b, out, broken])  # fmt: skip
            if len(broken):
                (step,) = steps_of("pack flags", lambda: arrays.pack_flags(broken[:1]))
                flags = {"source": columns["broken"], "target": columns["target"] + _BYTES * ROW * counts}
                launch(step, tuple(counts.tolist()), flags, out.device, [range_of(broken)], [range_of(out)],
                       kept=(broken, out))  # fmt: skip
        return out

    def vote(
        self, payloads: Sequence[torch.Tensor], segments: Batch, rounder: Rounder, at: Sequence[int]
    ) -> torch.Tensor:
        if not payloads:
            raise ValueError("no payloads to vote")
        payloads = [typed(payload, torch.int32, "payloads") for payload in payloads]
        words_at = np.array(at, np.int64)[: len(segments.elements)]
        counts = counts_of(segments.elements, TILE)
        flags_at, flag_counts = words_at + ROW * counts, -(-counts // ROW)
        out = torch.empty(at[-1], dtype=torch.int32, device=payloads[0].device)
        check_offsets("words", words_at, ROW * counts + flag_counts, min(map(len, [*payloads, out])))
        if not counts.any():
            return out
        keys = keys_and_starts(segments, rounder, len(counts))
        (vote,) = steps_of(
            ("vote", len(payloads)), lambda: functions.vote([payload[:ROW] for payload in payloads], _KEY)
        )
        (any_bits,) = steps_of(
            ("any bits", len(payloads)), lambda: arrays.any_bits([one[:1] for one in payloads], out[:1])
        )
        bases = np.array([one.data_ptr() for one in payloads], np.int64)
        read, written = list(map(range_of, payloads)), [range_of(out)]
        with batch():
            for step, elements, offsets, columns in (
                (vote, 32 * ROW * counts, words_at, keys),
                (any_bits, flag_counts, flags_at, {}),
            ):
                columns = {"target": out.data_ptr() + _BYTES * offsets, **columns}
                pointers = bases + _BYTES * offsets[:, None]
                launch(step, tuple(elements.tolist()), columns, out.device, read, written, pointers,
                       (payloads, out))  # fmt: skip
        return out

    def decode_signs(
        self, payload: torch.Tensor, segments: Batch, at: Sequence[int], factor: Any, outs: Sequence[Any]
    ) -> Sequence[Any]:
        table = SegmentTable(outs, "out")
        words_at, counts = np.array(at, np.int64)[: len(table)], table.counts(TILE)
        check_offsets("words", words_at, ROW * counts + -(-counts // ROW), len(payload))
        source = typed(payload, torch.int32, "payload").data_ptr() + _BYTES * words_at
        columns = {
            "source": source,
            "broken": source + _BYTES * ROW * counts,
            "target": table.addresses,
            "factor": float_entry(factor),
        }
        with batch():
            launch_groups(table, table.aligned_groups, ("signs",),
                          lambda out: functions.decode_signs(payload[:ROW], 1.0, out, payload),
                          columns, [payload], [table])  # fmt: skip
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
    counts = table.counts(bucket_size)
    if out is None:
        out = torch.empty(int(counts.sum()), dtype=dtype, device=table.device)
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


def keys_and_starts(segments: Batch, rounder: Rounder, count: int) -> dict[str, np.ndarray]:
    """Return the table columns of keys and starts."""
    keys = keys_of_batch(segments, rounder)
    columns = {name: keys[:, i] for i, name in enumerate(Key._fields)}
    return {**columns, "start": starts_of_batch(segments, count)}


def _state(arrays: Sequence[Any], gradients: SegmentTable, name: str) -> SegmentTable:
    state = SegmentTable(arrays, name)
    if state.elements != gradients.elements or any(group.kind != "float32" for group in state.groups):
        raise ValueError(f"{name}: they must be float32 and as long as the gradients")
    return state
