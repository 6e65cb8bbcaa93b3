"""The kernels of single bits for many gradients in one call, see `horovod_quant.kernels.triton.each`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.layout import ROW, TILE
from horovod_quant.kernels.triton import arrays, functions
from horovod_quant.kernels.triton.arguments import float_entry, typed
from horovod_quant.kernels.triton.each import keys_and_starts, range_of
from horovod_quant.kernels.triton.table import Table, before, elements_of, launch, steps_of

_KEY = Key(1, 2)
_BYTES = 4


def binarize_each(
    table: Table,
    momenta: Sequence[Any],
    scales: Sequence[Any],
    betas: Sequence[float],
    keys: np.ndarray,
    starts: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``keys`` is uint32 ``[gradients, fields of Key]``. Returns all gradients' words, and flags of their tiles."""
    if not len(momenta) == len(scales) == len(betas) == len(table):
        raise ValueError(
            f"{len(momenta)} momenta, {len(scales)} scales and {len(betas)} betas, of {len(table)} gradients"
        )
    m, b = _state(momenta, table, "momenta"), _state(scales, table, "scales")
    counts = table.counts(TILE)
    words = torch.empty(ROW * int(counts.sum()), dtype=torch.int32, device=table.device)
    broken = torch.empty(int(counts.sum()), dtype=torch.bool, device=table.device)
    given = np.array(betas, np.float64)
    columns = {
        "source": table.addresses,
        "momentum": m.addresses,
        "scale": b.addresses,
        "target": words.data_ptr() + _BYTES * ROW * before(counts),
        "broken": broken.data_ptr() + before(counts),
        "factor": given.astype(np.float32).view(np.int32),
        "second_factor": (1.0 - given).astype(np.float32).view(np.int32),
        **keys_and_starts(keys, starts, len(table)),
    }
    for group in table.groups:
        states_aligned = not ((group.of(m.addresses) | group.of(b.addresses)) & 15).any()
        x = table.longest(group)[:1]
        state = x.new_empty(1 + 4, dtype=torch.float32)
        own = state[:1] if states_aligned else state[1:2]
        (step,) = steps_of(
            ("binarize", group[:2], states_aligned),
            lambda: functions.binarize(x, own, own, 0.5, _KEY),  # noqa: B023
        )
        selected = {name: group.of(column) for name, column in columns.items()}
        launch(step, elements_of(table, group), selected, table.device, [table.range],
               [m.range, b.range, range_of(words), range_of(broken)], kept=(table, m, b, words, broken))  # fmt: skip
    return words, broken


def _state(arrays: Sequence[Any], gradients: Table, name: str) -> Table:
    state = Table(arrays, name)
    if state.elements != gradients.elements or any(group.kind != "float32" for group in state.groups):
        raise ValueError(f"{name}: they must be float32 and as long as the gradients")
    return state


def vote_each(
    words: Sequence[torch.Tensor], tile_counts: Sequence[int], keys: np.ndarray, starts: Sequence[int]
) -> torch.Tensor:
    """``words``: the workers', each of all gradients; ``keys`` is uint32 ``[gradients, fields of Key]``."""
    counts = np.array(tile_counts, np.int64)
    length = ROW * int(counts.sum())
    if not words or any(len(own) != length for own in words) or (counts < 0).any():
        raise ValueError(
            f"words of lengths {[len(own) for own in words]}; {len(counts)} gradients have {length}"
        )
    words = [typed(own, torch.int32, "words") for own in words]
    out = torch.empty(length, dtype=torch.int32, device=words[0].device)
    if not length:
        return out
    offsets = _BYTES * ROW * before(counts)
    columns = {"target": out.data_ptr() + offsets, **keys_and_starts(keys, starts, len(counts))}
    bases = np.array([own.data_ptr() for own in words], np.int64)
    (step,) = steps_of(
        ("vote", len(words)), lambda: functions.vote([own[:ROW] for own in words], _KEY)
    )  # fmt: skip
    elements = tuple((32 * ROW * counts).tolist())
    launch(step, elements, columns, out.device, [range_of(own) for own in words], [range_of(out)],
           bases + offsets[:, None], kept=(words, out))  # fmt: skip
    return out


def decode_signs_each(
    words: torch.Tensor, magnitude: float, outs: Sequence[Any], table: Table | None = None
) -> None:
    """``table`` is used if it is that of ``outs``."""
    table = table if table is not None and table.kept is outs else Table(outs, "out")
    counts = table.counts(TILE)
    if len(words) != ROW * counts.sum():
        raise ValueError(f"words: {len(words)} words are not the bits of {counts.sum()} tiles")
    words = typed(words, torch.int32, "words")
    columns = {
        "source": words.data_ptr() + _BYTES * ROW * before(counts),
        "target": table.addresses,
        "factor": float_entry(magnitude),
    }
    for group in table.groups:
        out = table.longest(group)[:1]
        (step,) = steps_of(
            ("signs", group[:2]), lambda: functions.decode_signs(words[:ROW], 1.0, out)  # noqa: B023
        )  # fmt: skip
        selected = {name: group.of(column) for name, column in columns.items()}
        launch(step, elements_of(table, group), selected, table.device, [range_of(words)], [table.range],
               kept=(table, words))  # fmt: skip


def with_nan_tiles_each(outs: Sequence[Any], broken: torch.Tensor, table: Table | None = None) -> None:
    """`arrays.with_nan_tiles` of each, whose tiles' flags follow one another; the host need not know of any."""
    table = table if table is not None and table.kept is outs else Table(outs, "out")
    counts = table.counts(TILE)
    if len(broken) != counts.sum():
        raise ValueError(f"broken: {len(broken)} flags of {counts.sum()} tiles")
    broken = typed(broken, torch.bool, "broken")
    columns = {"target": table.addresses, "broken": broken.data_ptr() + before(counts)}
    for group in table.groups:
        out = table.longest(group)[:1]
        (step,) = steps_of(
            ("nan tiles", group[:2]),
            lambda: arrays.with_nan_tiles(out, broken),  # noqa: B023
        )
        selected = {name: group.of(column) for name, column in columns.items()}
        launch(step, elements_of(table, group), selected, table.device, [range_of(broken)], [table.range],
               kept=(table, broken))  # fmt: skip
