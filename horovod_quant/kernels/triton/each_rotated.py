"""Rotations of many gradients in one call, see `horovod_quant.kernels.triton.each`.

The steps that select signs stay on the device: `StepWords` has their addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from horovod_quant.kernels.checks import check_range
from horovod_quant.kernels.keys import ALL_ONES, RngKey
from horovod_quant.kernels.layout import TILE, code_words
from horovod_quant.kernels.rotation import rotated_elements
from horovod_quant.kernels.triton import arrays, rotated
from horovod_quant.kernels.triton.arguments import float_entry, typed
from horovod_quant.kernels.triton.each import check_offsets, copy_addresses
from horovod_quant.kernels.triton.table import SegmentTable, before, launch, launch_groups, range_of, steps_of

_BYTES = 4
_KEY_ENTRIES = 6  # see `rotated._entries_of`
_CHAIN = RngKey(0, "")


class StepWords(NamedTuple):
    """Addresses of the gradients' steps, and their memory."""

    addresses: np.ndarray
    payload: torch.Tensor


def keys_of_numbers(keys: np.ndarray) -> np.ndarray:
    """Return the table entries of keys on the host.

    ``keys`` is uint32 ``[gradients, fields of Key]``.
    """
    keys = keys.astype(np.uint64)
    found = np.zeros((len(keys), _KEY_ENTRIES), np.int64)
    found[:, 0] = (keys[:, 0] | keys[:, 1] << np.uint64(32)).view(np.int64)
    found[:, 3:] = keys[:, 2:5]
    return found


def keys_of_words(chains: Sequence[RngKey], domain: str, addresses: np.ndarray, rank: int) -> np.ndarray:
    """Return the table entries of keys whose steps are on the device."""
    found = np.zeros((len(chains), _KEY_ENTRIES), np.int64)
    found[:, 0] = np.array([chain.state(domain) for chain in chains], np.uint64).view(np.int64)
    found[:, 1] = addresses
    found[:, 2] = rank
    return found


def write_steps(steps: Sequence[int], out: torch.Tensor, at: np.ndarray, filled: np.ndarray) -> None:
    """Write each step to ``out[at[i]]``, for the gradients flagged in ``filled``."""
    if not filled.any():
        return
    (step,) = steps_of("step", lambda: arrays.step_word(0, out[:1]))
    targets = out.data_ptr() + _BYTES * at
    numbers = np.array(steps, np.int64) & ALL_ONES
    launch(step, tuple(filled.astype(int).tolist()), {"target": targets, "number": numbers}, out.device, [],
           [(targets, targets + _BYTES * filled)], kept=out)  # fmt: skip


def copy_steps(steps: StepWords, out: torch.Tensor, at: np.ndarray, filled: np.ndarray) -> None:
    """Copy each step to ``out[at[i]]``."""
    counts = filled.astype(np.int64)
    copy_addresses(steps.addresses, out.data_ptr() + _BYTES * at, counts, (steps.payload, out))


def encode_rotated_each(
    table: SegmentTable,
    bits: int,
    keys: np.ndarray,
    starts: Sequence[int],
    words_at: np.ndarray,
    scales_at: np.ndarray,
    out: torch.Tensor,
    trellis: bool = False,
) -> torch.Tensor:
    """Encode rotated codes of gradients.

    Gradient i's words begin at ``out[words_at[i]]``, its scales, the bits of float32, at ``out[scales_at[i]]``.
    ``keys`` are entries of `keys_of_numbers` or `keys_of_words`.
    """
    coordinates = _check(table, bits, words_at, scales_at, len(out))
    base = typed(out, torch.int32, "out").data_ptr()
    columns = {
        "source": table.addresses,
        "target": base + _BYTES * words_at,
        "scale": base + _BYTES * scales_at,
        "start": np.array(starts, np.int64),
    }
    if trellis:
        _encode_to_trellis_each(table, bits, keys, columns, coordinates, out)
        return out
    _rotate(table, bits, trellis, columns, [out], keys)
    return out


def _rotate(table, bits, trellis, columns, written, keys):
    return launch_groups(table, table.groups, ("rotate", bits, trellis),
                         lambda x: rotated.encode_rotated(x, bits, _CHAIN.key("", 0), trellis=trellis),
                         columns, [table], written, keys)  # fmt: skip


def _encode_to_trellis_each(
    table: SegmentTable,
    bits: int,
    keys: np.ndarray,
    columns: Mapping[str, np.ndarray],
    coordinates: np.ndarray,
    out: torch.Tensor,
) -> None:
    """Encode by two launches, with the coordinates in memory between them."""
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


def add_rotated_each(
    pieces: Sequence[torch.Tensor],
    words_at: np.ndarray,
    scales_at: np.ndarray,
    bits: int,
    keys: Sequence[np.ndarray],
    factor: float,
    outs: Sequence[Any],
    starts: Sequence[int],
    trellis: bool = False,
) -> None:
    """Decode the sum of the workers' rotated codes.

    Their pieces have the layout of `encode_rotated_each`. ``keys`` are each worker's entries.
    """
    if not 0 < len(pieces) == len(keys):
        raise ValueError(f"{len(pieces)} pieces and {len(keys)} workers' keys")
    table, workers = SegmentTable(outs, "out"), len(pieces)
    _check(table, bits, words_at, scales_at, min(map(len, pieces)))
    bases = np.array([typed(piece, torch.int32, "pieces").data_ptr() for piece in pieces], np.int64)
    pointers = np.empty((len(table), workers, 2 + _KEY_ENTRIES), np.int64)
    pointers[:, :, 0] = bases + _BYTES * words_at[:, None]
    pointers[:, :, 1] = bases + _BYTES * scales_at[:, None]
    for rank, worker_keys in enumerate(keys):
        pointers[:, rank, 2:] = worker_keys
    pointers = pointers.reshape(len(table), workers * (2 + _KEY_ENTRIES))
    columns = {"target": table.addresses, "start": np.array(starts, np.int64), "factor": float_entry(factor)}
    launch_groups(table, table.groups, ("add", bits, trellis, workers),
                  lambda out: rotated.add_rotated(
                      [pieces[0][: code_words(rotated_elements(1), bits)]] * workers,
                      [pieces[0][:1].view(torch.float32)] * workers, bits,
                      [_CHAIN.key("", 0)] * workers, 1.0, out, trellis=trellis,
                  ),
                  columns, pieces, [table], pointers)  # fmt: skip


def _check(
    table: SegmentTable, bits: int, words_at: np.ndarray, scales_at: np.ndarray, room: int
) -> np.ndarray:
    """Validate offsets, and return the numbers of coordinates."""
    check_range("bits", bits, 1, 4)
    check_offsets("words", words_at, table.words(_rotated_words, bits), room)
    check_offsets("scales", scales_at, table.counts(TILE), room)
    return table.words(_coordinates, bits)


def _rotated_words(elements: int, bits: int) -> int:
    return code_words(rotated_elements(elements), bits)


def _coordinates(elements: int, bits: int) -> int:
    return rotated_elements(elements)
