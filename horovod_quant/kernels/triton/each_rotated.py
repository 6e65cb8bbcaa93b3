"""Rotations of many segments in one call, see `horovod_quant.kernels.triton.each`.

The steps that select signs stay on the device: `StepWords` has their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod_quant.kernels.formats import RotatedFormat
from horovod_quant.kernels.keys import ALL_ONES, RngKey
from horovod_quant.kernels.layout import TILE
from horovod_quant.kernels.rotation import rotated_elements, rotated_words
from horovod_quant.kernels.segment_offsets import keys_of_batch, rotated_offsets, starts_of_batch
from horovod_quant.kernels.segments import Batch, Rounder
from horovod_quant.kernels.triton import arrays, rotated
from horovod_quant.kernels.triton.arguments import float_entry, typed
from horovod_quant.kernels.triton.each import CodeSegments, copy_words
from horovod_quant.kernels.triton.launching import batch
from horovod_quant.kernels.triton.table import (
    SegmentTable,
    before,
    launch,
    launch_groups,
    range_of,
    steps_of,
)

_BYTES = 4
_KEY_ENTRIES = 6  # see `rotated._entries_of`
_CHAIN = RngKey(0, "")


class StepWords(NamedTuple):
    """Addresses of the segments' steps, and their memory."""

    addresses: np.ndarray
    payload: torch.Tensor


class TritonSegments(CodeSegments):
    """Kernels for many segments in a few launches and one upload.

    `CodeSegments` has the other methods than those for rotated codes.
    """

    def encode_rotated(
        self, codec: RotatedFormat, segments: Batch, rounder: Rounder, at: Any, step_words: Any = None
    ) -> torch.Tensor:
        bits, table = codec.bits, segments.table_by(SegmentTable)
        out = torch.empty(at[-1], dtype=torch.int32, device=table.device)
        filled, words_at, scales_at = rotated_offsets(bits, at, table.elements, len(out))
        columns = {
            "source": table.addresses,
            "target": out.data_ptr() + _BYTES * words_at,
            "scale": out.data_ptr() + _BYTES * scales_at,
            "start": starts_of_batch(segments, len(table)),
        }
        steps_at = out.data_ptr() + _BYTES * (words_at - filled)
        with batch():
            if step_words is None:
                _write_steps(segments.steps, steps_at, filled, out)
                keys = _keys_of_numbers(keys_of_batch(segments, rounder))
            else:
                counts = filled.astype(np.int64)
                copy_words(step_words.addresses, steps_at, counts, (step_words.payload, out))
                keys = _keys_of_words(segments.chains, rounder.domain, step_words.addresses, rounder.rank)
            if codec.trellis:
                _encode_to_trellis(table, bits, keys, columns, out)
            else:
                _rotate(table, bits, False, columns, [out], keys)
        return out

    def step_words(self, payload: torch.Tensor, at: Sequence[int], elements: Sequence[int]) -> StepWords:
        """Return the addresses of a payload's steps, for kernels alone."""
        offsets = np.array(at[: len(elements)], np.int64)
        return StepWords(payload.data_ptr() + _BYTES * offsets, payload)

    def decode_rotated(
        self,
        codec: RotatedFormat,
        segments: Batch,
        domain: str,
        payloads: Sequence[torch.Tensor],
        at: Sequence[int],
        factor: Any,
        outs: Sequence[Any],
    ) -> Sequence[Any]:
        if not payloads:
            raise ValueError("no payloads to decode")
        table, workers = SegmentTable(outs, "out"), len(payloads)
        bits, trellis = codec.bits, codec.trellis
        _, words_at, scales_at = rotated_offsets(bits, at, table.elements, min(map(len, payloads)))
        pointers = np.empty((len(table), workers, 2 + _KEY_ENTRIES), np.int64)
        for rank, payload in enumerate(payloads):
            base = typed(payload, torch.int32, "payloads").data_ptr()
            pointers[:, rank, 0] = base + _BYTES * words_at
            pointers[:, rank, 1] = base + _BYTES * scales_at
            steps = self.step_words(payload, at, segments.elements)
            pointers[:, rank, 2:] = _keys_of_words(segments.chains, domain, steps.addresses, rank)
        columns = {
            "target": table.addresses,
            "start": starts_of_batch(segments, len(table)),
            "factor": float_entry(factor),
        }
        with batch():
            launch_groups(table, table.groups, ("add", bits, trellis, workers),
                          lambda out: rotated.add_rotated(
                              [payloads[0][: rotated_words(1, bits)]] * workers,
                              [payloads[0][:1].view(torch.float32)] * workers, bits,
                              [_CHAIN.key("", 0)] * workers, 1.0, out, trellis=trellis,
                          ),
                          columns, payloads, [table],
                          pointers.reshape(len(table), workers * (2 + _KEY_ENTRIES)))  # fmt: skip
        return outs


def _keys_of_numbers(keys: np.ndarray) -> np.ndarray:
    """Return the table entries of keys on the host.

    ``keys`` is uint32 ``[gradients, fields of Key]``.
    """
    keys = keys.astype(np.uint64)
    found = np.zeros((len(keys), _KEY_ENTRIES), np.int64)
    found[:, 0] = (keys[:, 0] | keys[:, 1] << np.uint64(32)).view(np.int64)
    found[:, 3:] = keys[:, 2:5]
    return found


def _keys_of_words(chains: Sequence[RngKey], domain: str, addresses: np.ndarray, rank: int) -> np.ndarray:
    """Return the table entries of keys whose steps are on the device."""
    found = np.zeros((len(chains), _KEY_ENTRIES), np.int64)
    found[:, 0] = np.array([chain.state(domain) for chain in chains], np.uint64).view(np.int64)
    found[:, 1] = addresses
    found[:, 2] = rank
    return found


def _write_steps(steps: Sequence[int], targets: np.ndarray, filled: np.ndarray, out: torch.Tensor) -> None:
    """Write the steps of the segments flagged in ``filled``."""
    if not filled.any():
        return
    (step,) = steps_of("step", lambda: arrays.step_word(0, out[:1]))
    numbers = np.array(steps, np.int64) & ALL_ONES
    launch(step, tuple(filled.astype(int).tolist()), {"target": targets, "number": numbers}, out.device, [],
           [(targets, targets + _BYTES * filled)], kept=out)  # fmt: skip


def _rotate(table, bits, trellis, columns, written, keys):
    return launch_groups(table, table.groups, ("rotate", bits, trellis),
                         lambda x: rotated.encode_rotated(x, bits, _CHAIN.key("", 0), trellis=trellis),
                         columns, [table], written, keys)  # fmt: skip


def _encode_to_trellis(
    table: SegmentTable,
    bits: int,
    keys: np.ndarray,
    columns: Mapping[str, np.ndarray],
    out: torch.Tensor,
) -> None:
    """Encode by two launches, with the coordinates in memory between them."""
    coordinates = table.words(_coordinates, bits)
    tile_at = before(table.counts(TILE))
    z = torch.empty(int(coordinates.sum()), dtype=torch.float32, device=table.device)
    units = torch.empty(int(table.counts(TILE).sum()), dtype=torch.float32, device=table.device)
    squares = torch.empty(len(units), dtype=torch.float64, device=table.device)
    z_at = z.data_ptr() + _BYTES * before(coordinates)
    scratch = {"norms": units.data_ptr() + _BYTES * tile_at, "squares": squares.data_ptr() + 8 * tile_at}
    rotating = {"source": columns["source"], "target": z_at, "start": columns["start"], **scratch}
    rounding = {"source": z_at, "target": columns["target"], "scale": columns["scale"], **scratch}
    between = (z, units, squares)
    for quantize in _rotate(table, bits, True, rotating, between, keys):
        launch(quantize, tuple(coordinates.tolist()), rounding, table.device,
               [range_of(one) for one in between], [range_of(out)], kept=(*between, out))  # fmt: skip


def _coordinates(elements: int, bits: int) -> int:
    return rotated_elements(elements)
