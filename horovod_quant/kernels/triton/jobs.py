"""Work for kernels before it is a launch's table.

A `Job` is one tensor's part of a launch. `Rows` are many tensors' part, with numpy arrays as columns, so that a tensor
costs a fraction of a job.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import numpy as np
import torch

from horovod_quant.kernels.layout import ceil_div
from horovod_quant.kernels.triton.columns import INDEX

Entry = Union[int, torch.Tensor]

WIDTH = len(INDEX)
_FIRST_BLOCK, _ELEMENTS, _POINTERS = (INDEX[name] for name in ("first_block", "elements", "pointers"))


class Job(NamedTuple):
    """One tensor's part of a launch.

    ``entries`` are its columns of the table by name, with tensors for their addresses; ``pointers`` are its list of
    further entries. ``written`` has the names of the columns with tensors that the kernel writes.
    """

    elements: int
    per_program: int
    entries: Mapping[str, Entry]
    written: Sequence[str] = ("target",)
    pointers: Sequence[Entry] = ()

    @property
    def programs(self) -> int:
        return ceil_div(self.elements, self.per_program)

    @property
    def device(self) -> torch.device:
        return next(self.tensors())[0].device

    def tensors(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield its tensors, each with a flag: True if it is written."""
        for name, entry in self.entries.items():
            if isinstance(entry, torch.Tensor):
                yield entry, name in self.written
        for entry in self.pointers:
            if isinstance(entry, torch.Tensor):
                yield entry, False

    def ranges(self) -> list[tuple[int, int, bool]]:
        """Return its tensors' half-open address ranges, flagged True if written."""
        found = []
        for tensor, written in self.tensors():
            low = tensor.data_ptr()
            found.append((low, low + tensor.numel() * tensor.element_size(), written))
        return found


class Layout:
    """Cached layout of many tensors in a launch.

    It follows from their lengths and a program's size; see `layout_of`.

    Attributes:
        programs: the number of programs of each tensor.
        rows: a table's rows with the known columns.
    """

    def __init__(self, elements: tuple[int, ...], per_program: int, pointers: int = 0) -> None:
        lengths = np.array(elements, np.int64)
        counts = -(-lengths // per_program)
        self.programs: tuple[int, ...] = tuple(counts.tolist())
        self.total = sum(self.programs)
        self.rows = np.zeros((len(elements), WIDTH), np.int64)
        self.rows[:, _ELEMENTS] = lengths
        self.rows[:, _FIRST_BLOCK] = np.cumsum(counts) - counts
        self.rows[:, _POINTERS] = WIDTH * len(elements) + pointers * np.arange(len(elements))


layout_of = functools.lru_cache(maxsize=1024)(Layout)


@dataclass(eq=False)
class Rows:
    """Many tensors' part of a launch.

    Args:
        layout: the tensors' layout.
        columns: the table's columns, by name: a number for each tensor, or one for all.
        read, written: the address ranges that the kernel reads and writes: pairs of arrays, first and end.
        device: the tensors' device.
        pointers: each tensor's list of further entries, ``[tensors, entries]``.
        kept: tensors that must not be freed before the launch.
    """

    layout: Layout
    columns: Mapping[str, Any]
    device: torch.device
    read: Sequence[tuple[Any, Any]]
    written: Sequence[tuple[Any, Any]]
    pointers: np.ndarray | None = None
    kept: Any = None

    def __len__(self) -> int:
        return len(self.layout.programs)

    def meets(self, other: Rows) -> bool:
        """True if the order of the two matters."""
        return _overlap(self.written, [*other.written, *other.read]) or _overlap(self.read, other.written)

    def table(self) -> np.ndarray:
        rows = self.layout.rows.copy()
        for name, column in self.columns.items():
            rows[:, INDEX[name]] = column
        flat = rows.reshape(-1)
        return flat if self.pointers is None else np.concatenate([flat, self.pointers.reshape(-1)])


def table_of(jobs: Sequence[Job]) -> np.ndarray:
    rows: list[int] = []
    lists: list[int] = []
    first_block, end = 0, WIDTH * len(jobs)
    for job in jobs:
        row = [0] * WIDTH
        for name, entry in job.entries.items():
            row[INDEX[name]] = entry.data_ptr() if isinstance(entry, torch.Tensor) else entry
        row[_ELEMENTS], row[_FIRST_BLOCK], row[_POINTERS] = job.elements, first_block, end + len(lists)
        rows += row
        for entry in job.pointers:
            lists.append(entry.data_ptr() if isinstance(entry, torch.Tensor) else entry)
        first_block += job.programs
    return np.array(rows + lists, np.int64)


def joined(tables: Sequence[np.ndarray], counts: Sequence[int], programs: Sequence[int]) -> np.ndarray:
    """Concatenate tables of launches, and adjust their offsets."""
    if len(tables) == 1:
        return tables[0]
    rows, lists, first_block, listed = [], [], 0, 0
    for table, count, blocks in zip(tables, counts, programs):
        entries = table[: count * WIDTH].reshape(count, WIDTH).copy()
        entries[:, _FIRST_BLOCK] += first_block
        entries[:, _POINTERS] += WIDTH * (sum(counts) - count) + listed
        rows.append(entries.reshape(-1))
        lists.append(table[count * WIDTH :])
        first_block += blocks
        listed += len(lists[-1])
    return np.concatenate(rows + lists)


def _overlap(one: Sequence[tuple[Any, Any]], other: Sequence[tuple[Any, Any]]) -> bool:
    if not one or not other:
        return False
    lows, highs = _sorted(one)
    other_lows, other_highs = _sorted(other)
    # Two sets overlap if a range that begins before the other's end ends after its beginning. Ranges of one set may
    # overlap each other, so the largest end so far counts.
    before = np.searchsorted(lows, other_highs, "left")
    furthest = np.concatenate([[-1], np.maximum.accumulate(highs)])
    return bool((furthest[before] > other_lows).any())


def _sorted(ranges: Sequence[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
    lows = np.concatenate([np.atleast_1d(np.asarray(low, np.int64)) for low, _ in ranges])
    highs = np.concatenate([np.atleast_1d(np.asarray(high, np.int64)) for _, high in ranges])
    lows, highs = lows[highs > lows], highs[highs > lows]
    order = np.argsort(lows, kind="stable")
    return lows[order], highs[order]
