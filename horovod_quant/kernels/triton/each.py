"""Kernels for many gradients in one call, as in `native_each`.

numpy builds the launch tables. Each is bit-identical to one call per gradient of the function without ``_each``, which
also determines its programs and constants: `table.steps_of`. Offsets (``..._at``) are in 4-byte elements of the array
next to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels.checks import check_bucket_size, check_range
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import TILE, code_words, sum_words
from horovod_quant.kernels.triton import arrays, functions
from horovod_quant.kernels.triton.arguments import float_entry, typed
from horovod_quant.kernels.triton.launching import MAX_ELEMENTS, run_call
from horovod_quant.kernels.triton.table import (
    SegmentTable,
    before,
    launch,
    launch_groups,
    steps_of,
    table_of,
    total_buckets,
)

_KEY = Key(1, 2)
_BYTES = 4
_FIELDS = Key._fields
_MOST_BITS = {"uniform": 16, "exponential": 8}


def keys_and_starts(keys: np.ndarray, starts: Sequence[int], count: int) -> dict[str, np.ndarray]:
    """Return the table columns of keys and starts.

    ``keys`` is uint32 ``[gradients, fields of Key]``.
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


# ---- norms -------------------------------------------------------------------------------------------------------


def bucket_maxima_each(
    table: SegmentTable, bucket_size: int, out: torch.Tensor | None = None, at: np.ndarray | None = None
) -> torch.Tensor:
    """Return all gradients' maxima, concatenated.

    With ``out`` it writes them there, from ``at[i]`` on for gradient i.
    """
    return _norms_each(functions.bucket_maxima, table, bucket_size, torch.float32, out, at)


def bucket_square_sums_each(table: SegmentTable, bucket_size: int) -> torch.Tensor:
    return _norms_each(functions.bucket_square_sums, table, bucket_size, torch.float64, None, None)


def _norms_each(function, table, bucket_size, dtype, out, at):
    check_bucket_size(bucket_size)
    _check_table(table)
    if out is None:
        out = torch.empty(total_buckets(table, bucket_size), dtype=dtype, device=table.device)
    counts = table.counts(bucket_size)
    at = before(counts) if at is None else at
    check_offsets("norms", at, counts, len(out))
    targets = out.data_ptr() + out.element_size() * at
    columns = {"source": table.addresses, "target": targets}
    for group in table.aligned_groups:
        # All tensors longer than a bucket use the same kernel; see `functions._norm_bucket_size`.
        longest = int(group.of(table.lengths).max())
        size = min(max(longest, TILE) - 1, bucket_size).bit_length()
        launch_groups(table, [group], (function, bucket_size, size),
                      lambda _: function(table.longest(group), bucket_size),  # noqa: B023
                      columns, [table], [out])  # fmt: skip
    return out


def norms_of_square_sums_each(sums: torch.Tensor) -> torch.Tensor:
    """Compute `arrays.norms_of_square_sums` in order within the batch."""
    norms = torch.empty(len(sums), dtype=torch.float32, device=sums.device)
    run_call(lambda: norms.copy_(sums.sqrt()), sums.device)
    return norms


def copy_each(
    source: torch.Tensor, source_at: np.ndarray, out: torch.Tensor, at: np.ndarray, counts: np.ndarray
) -> None:
    """Copy ranges of 4-byte words."""
    check_offsets("words", source_at, counts, len(source))
    check_offsets("words", at, counts, len(out))
    copy_addresses(
        source.data_ptr() + _BYTES * source_at, out.data_ptr() + _BYTES * at, counts, (source, out)
    )


def copy_addresses(
    sources: np.ndarray, targets: np.ndarray, counts: np.ndarray, kept: Sequence[torch.Tensor]
) -> None:
    if not counts.any():
        return
    one = kept[-1]
    (step,) = steps_of("copy", lambda: arrays.copy(one[:1], one[:1]))
    columns = {"source": sources, "target": targets}
    read, written = [(sources, sources + _BYTES * counts)], [(targets, targets + _BYTES * counts)]
    launch(step, tuple(counts.tolist()), columns, one.device, read, written, kept=kept)


# ---- uniform sums ------------------------------------------------------------------------------------------------


def encode_uniform_sum_each(
    table: SegmentTable,
    norms: torch.Tensor,
    bucket_size: int,
    levels: int,
    width: int,
    keys: np.ndarray,
    starts: Sequence[int],
    out: torch.Tensor,
) -> torch.Tensor:
    check_range("levels", levels, 1, functions.MAX_LEVELS)
    check_range("width", width, 1, 16)
    _check_table(table)
    norms, norm_at = _norms(norms, table, bucket_size), before(table.counts(bucket_size))
    words = table.words(sum_words, width)
    if len(out) != words.sum():
        raise ValueError(f"out has {len(out)} words; it must have {words.sum()}")
    columns = {
        "source": table.addresses,
        "norms": norms.data_ptr() + _BYTES * norm_at,
        "target": typed(out, torch.int32, "out").data_ptr() + _BYTES * before(words),
        **keys_and_starts(keys, starts, len(table)),
    }
    launch_groups(table, table.groups, ("encode sum", bucket_size, levels, width),
                  lambda x: functions.encode_uniform_sum(x, norms[:1], bucket_size, levels, width, _KEY),
                  columns, [table, norms], [out])  # fmt: skip
    return out


def decode_uniform_sum_each(
    words: torch.Tensor,
    words_at: np.ndarray,
    norms: torch.Tensor,
    norms_at: np.ndarray,
    bucket_size: int,
    levels: int,
    width: int,
    factor: float,
    outs: Sequence[Any],
    table: SegmentTable | None = None,
) -> None:
    """Decode sums of integers to gradients.

    ``table`` is reused if it describes ``outs``.
    """
    check_range("levels", levels, 1, functions.MAX_LEVELS)
    check_range("width", width, 1, 16)
    check_bucket_size(bucket_size)
    table = table_of(outs, table)
    _check_table(table)
    counts = table.words(sum_words, width)
    check_offsets("words", words_at, counts, len(words))
    check_offsets("norms", norms_at, table.counts(bucket_size), len(norms))
    columns = {
        "source": typed(words, torch.int32, "words").data_ptr() + _BYTES * words_at,
        "norms": typed(norms, torch.float32, "norms").data_ptr() + _BYTES * norms_at,
        "target": table.addresses,
        "factor": float_entry(factor),
    }
    launch_groups(table, table.groups, ("decode sum", bucket_size, levels, width),
                  lambda out: functions.decode_uniform_sum(
                      words[: sum_words(1, width)], norms[:1], bucket_size, levels, width, 1.0, out
                  ),
                  columns, [words, norms], [table])  # fmt: skip


def _norms(norms: torch.Tensor, table: SegmentTable, bucket_size: int) -> torch.Tensor:
    check_bucket_size(bucket_size)
    if len(norms) != total_buckets(table, bucket_size):
        raise ValueError(f"norms: {len(norms)} norms for {total_buckets(table, bucket_size)} buckets")
    return typed(norms, torch.float32, "norms")


# ---- norms and codes ---------------------------------------------------------------------------------------------


def encode_codes_each(
    levels: str,
    table: SegmentTable,
    norms: torch.Tensor,
    norms_at: np.ndarray,
    bucket_size: int,
    bits: int,
    keys: np.ndarray,
    starts: Sequence[int],
    words_at: np.ndarray,
    out: torch.Tensor,
) -> torch.Tensor:
    """Encode codes of gradients.

    Gradient i's norms begin at ``norms[norms_at[i]]``, its words at ``out[words_at[i]]``.
    """
    check_range("bits", bits, 2, _MOST_BITS[levels])
    check_bucket_size(bucket_size)
    _check_table(table)
    check_offsets("norms", norms_at, table.counts(bucket_size), len(norms))
    check_offsets("words", words_at, table.words(code_words, bits), len(out))
    columns = {
        "source": table.addresses,
        "norms": typed(norms, torch.float32, "norms").data_ptr() + _BYTES * norms_at,
        "target": typed(out, torch.int32, "out").data_ptr() + _BYTES * words_at,
        **keys_and_starts(keys, starts, len(table)),
    }
    encode = functions.encode_exponential if levels == "exponential" else functions.encode_uniform_codes
    launch_groups(table, table.groups, (encode, bucket_size, bits),
                  lambda x: encode(x, norms[:1], bucket_size, bits, _KEY),
                  columns, [table, norms], [out])  # fmt: skip
    return out


def decode_codes_each(
    levels: str,
    pieces: Sequence[torch.Tensor],
    words_at: np.ndarray,
    norms_at: np.ndarray,
    bucket_size: int,
    bits: int,
    factor: float,
    outs: Sequence[Any],
) -> None:
    """Decode the sum of the workers' codes of each gradient.

    In each worker's piece gradient i's norms, the bits of float32, begin at ``norms_at[i]``.
    """
    check_range("bits", bits, 2, _MOST_BITS[levels])
    check_bucket_size(bucket_size)
    if not pieces:
        raise ValueError("no pieces to decode")
    table = SegmentTable(outs, "out")
    _check_table(table)
    check_offsets("words", words_at, table.words(code_words, bits), min(map(len, pieces)))
    check_offsets("norms", norms_at, table.counts(bucket_size), min(map(len, pieces)))
    bases = np.array([typed(piece, torch.int32, "pieces").data_ptr() for piece in pieces], np.int64)
    pointers = np.empty((len(table), 2 * len(pieces)), np.int64)
    pointers[:, 0::2] = bases + _BYTES * words_at[:, None]
    pointers[:, 1::2] = bases + _BYTES * norms_at[:, None]
    decode = functions.decode_exponential if levels == "exponential" else functions.decode_uniform_codes
    columns = {"target": table.addresses, "factor": float_entry(factor)}
    launch_groups(table, table.groups, (decode, bucket_size, bits, len(pieces)),
                  lambda out: decode(
                      [pieces[0][: code_words(1, bits)]] * len(pieces),
                      [pieces[0][:1].view(torch.float32)] * len(pieces), bucket_size, bits, 1.0, out
                  ),
                  columns, pieces, [table], pointers)  # fmt: skip
