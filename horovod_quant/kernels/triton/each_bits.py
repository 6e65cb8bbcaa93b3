"""Kernels of single bits for many gradients in one call, see `horovod_quant.kernels.triton.each`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, TILE
from horovod_quant.kernels.triton import arrays, functions
from horovod_quant.kernels.triton.arguments import float_entry, typed
from horovod_quant.kernels.triton.each import check_offsets, keys_and_starts
from horovod_quant.kernels.triton.table import SegmentTable, before, launch, launch_groups, range_of, steps_of

_KEY = Key(1, 2)
_BYTES = 4
_VECTOR = 15


def binarize_each(
    table: SegmentTable,
    momenta: Sequence[Any],
    scales: Sequence[Any],
    betas: Sequence[float],
    keys: np.ndarray,
    starts: Sequence[int],
    words_at: np.ndarray,
    out: torch.Tensor,
) -> torch.Tensor:
    """Update states and draw bits, gradient i's words from ``out[words_at[i]]`` on.

    Return all tiles' flags. ``keys`` is uint32 ``[gradients, fields of Key]``.
    """
    if not len(momenta) == len(scales) == len(betas) == len(table):
        raise ValueError(
            f"{len(momenta)} momenta, {len(scales)} scales and {len(betas)} betas, of {len(table)} gradients"
        )
    m, b = _state(momenta, table, "momenta"), _state(scales, table, "scales")
    counts = table.counts(TILE)
    check_offsets("words", words_at, ROW * counts, len(out))
    broken = torch.empty(int(counts.sum()), dtype=torch.bool, device=table.device)
    given = np.array(betas, np.float64)
    columns = {
        "source": table.addresses,
        "momentum": m.addresses,
        "scale": b.addresses,
        "target": typed(out, torch.int32, "out").data_ptr() + _BYTES * words_at,
        "broken": broken.data_ptr() + before(counts),
        "factor": given.astype(np.float32).view(np.int32),
        "second_factor": (1.0 - given).astype(np.float32).view(np.int32),
        **keys_and_starts(keys, starts, len(table)),
    }
    for group in table.aligned_groups:
        states_aligned = not ((group.of(m.addresses) | group.of(b.addresses)) & _VECTOR).any()
        state = torch.empty(2, dtype=torch.float32, device=table.device)
        local = state[:1] if states_aligned else state[1:]
        launch_groups(table, [group], ("binarize", states_aligned),
                      lambda x: functions.binarize(x, local, local, 0.5, _KEY),  # noqa: B023
                      columns, [table], [m, b, out, broken])  # fmt: skip
    return broken


def _state(arrays: Sequence[Any], gradients: SegmentTable, name: str) -> SegmentTable:
    state = SegmentTable(arrays, name)
    if state.elements != gradients.elements or any(group.kind != "float32" for group in state.groups):
        raise ValueError(f"{name}: they must be float32 and as long as the gradients")
    return state


def pack_flags_each(flags: torch.Tensor, tile_counts: np.ndarray, out: torch.Tensor, at: np.ndarray) -> None:
    """Pack the concatenated flags of the gradients' tiles.

    Gradient i's words begin at ``out[at[i]]``.
    """
    check_offsets("flags", at, -(-tile_counts // ROW), len(out))
    if not len(flags):
        return
    (step,) = steps_of("pack flags", lambda: arrays.pack_flags(flags[:1]))
    columns = {
        "source": typed(flags, torch.bool, "flags").data_ptr() + before(tile_counts),
        "target": out.data_ptr() + _BYTES * at,
    }
    launch(step, tuple(tile_counts.tolist()), columns, out.device, [range_of(flags)], [range_of(out)],
           kept=(flags, out))  # fmt: skip


def vote_each(
    payloads: Sequence[torch.Tensor],
    words_at: np.ndarray,
    tile_counts: np.ndarray,
    keys: np.ndarray,
    starts: Sequence[int],
    out: torch.Tensor,
) -> None:
    """Draw bits from the averages of the workers' bits.

    In the workers' payloads, and in ``out``, gradient i's words begin at ``words_at[i]``. ``keys`` is uint32
    ``[gradients, fields of Key]``.
    """
    if not payloads:
        raise ValueError("no payloads to vote")
    check_offsets("words", words_at, ROW * tile_counts, min(map(len, [*payloads, out])))
    if not tile_counts.any():
        return
    payloads = [typed(payload, torch.int32, "payloads") for payload in payloads]
    columns = {
        "target": out.data_ptr() + _BYTES * words_at,
        **keys_and_starts(keys, starts, len(tile_counts)),
    }
    (step,) = steps_of(
        ("vote", len(payloads)), lambda: functions.vote([payload[:ROW] for payload in payloads], _KEY)
    )
    elements = tuple((32 * ROW * tile_counts).tolist())
    launch(step, elements, columns, out.device, [range_of(payload) for payload in payloads], [range_of(out)],
           _in_each(payloads, words_at), kept=(payloads, out))  # fmt: skip


def any_bits_each(
    payloads: Sequence[torch.Tensor], at: np.ndarray, counts: np.ndarray, out: torch.Tensor
) -> None:
    """Write the bitwise or of the payloads' words.

    Reads and writes the same ranges of the payloads and ``out``.
    """
    check_offsets("words", at, counts, min(map(len, [*payloads, out])))
    if not counts.any():
        return
    (step,) = steps_of(
        ("any bits", len(payloads)), lambda: arrays.any_bits([one[:1] for one in payloads], out[:1])
    )
    columns = {"target": out.data_ptr() + _BYTES * at}
    launch(step, tuple(counts.tolist()), columns, out.device, [range_of(one) for one in payloads],
           [range_of(out)], _in_each(payloads, at), kept=(payloads, out))  # fmt: skip


def _in_each(payloads: Sequence[torch.Tensor], at: np.ndarray) -> np.ndarray:
    return np.array([one.data_ptr() for one in payloads], np.int64) + _BYTES * at[:, None]


def decode_signs_each(
    payload: torch.Tensor,
    words_at: np.ndarray,
    magnitude: float,
    table: SegmentTable,
) -> None:
    """Decode bits to plus or minus the magnitude, flagged tiles to NaN.

    Gradient i's words, and then those of its flags, begin at ``payload[words_at[i]]``.
    """
    counts = table.counts(TILE)
    check_offsets("words", words_at, ROW * counts + -(-counts // ROW), len(payload))
    source = typed(payload, torch.int32, "payload").data_ptr() + _BYTES * words_at
    columns = {
        "source": source,
        "broken": source + _BYTES * ROW * counts,
        "target": table.addresses,
        "factor": float_entry(magnitude),
    }
    launch_groups(table, table.aligned_groups, ("signs",),
                  lambda out: functions.decode_signs(payload[:ROW], 1.0, out, payload),
                  columns, [payload], [table])  # fmt: skip
