"""Addresses and lengths of many tensors as numpy arrays."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from horovod_quant.kernels.buffer_view import BufferView, as_array
from horovod_quant.kernels.segment_offsets import counts_of, lengths_of
from horovod_quant.kernels.triton.arguments import KINDS, current_device
from horovod_quant.kernels.triton.jobs import Rows, layout_of
from horovod_quant.kernels.triton.launching import INTERPRETED, MAX_ELEMENTS, Kernel, capture, run_rows

_KINDS_OF_SPANS = {
    np.dtype(np.float32): "float32",
    np.dtype(np.float16): "float16",
    np.dtype(np.uint16): "bfloat16",
    np.dtype(np.float64): "float64",
}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
_VECTOR = 15

Step = tuple[Kernel, int, Mapping[str, Any], frozenset]
"""Launch: the kernel, elements per program, constants, and names of entries."""


class Group(NamedTuple):
    """Tensors of one type (for some kernels of one alignment).

    Attributes:
        kind: the type.
        aligned: True only if all begin at multiples of 16 bytes.
        which: numbers of the tensors; None for all.
    """

    kind: str
    aligned: bool
    which: np.ndarray | None

    def of(self, column: Any) -> Any:
        return column if self.which is None or np.ndim(column) == 0 else column[self.which]


class SegmentTable:
    """Contiguous tensors of floating-point types, or a `BufferView` of each.

    Attributes:
        addresses, lengths: int64 arrays.
        elements: the lengths as a tuple.
        groups: the tensors by type.
        aligned_groups: the tensors by type and alignment, for kernels that load or store vectors.
        device: the tensors' device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | BufferView], name: str = "x") -> None:
        self.kept = tensors
        self._name = name
        self.device = current_device()
        if tensors and all(type(each) is BufferView for each in tensors):
            addresses = [each.address for each in tensors]
            self.elements = tuple([each.shape[0] for each in tensors])
            kinds = [_KINDS_OF_SPANS[each.dtype] for each in tensors]
        else:
            plain = list(map(as_array, tensors))
            addresses, kinds = self._inspected(plain)
            self.elements = tuple([each.numel() for each in plain])
        self.addresses = np.array(addresses, np.int64)
        self.lengths = np.array(self.elements, np.int64)
        most = self.lengths.max(initial=0)
        if most > MAX_ELEMENTS:
            raise ValueError(f"a tensor of {most} elements; the Triton kernels take {MAX_ELEMENTS} at most")
        self.aligned_groups = self._filled(_groups(kinds, self.addresses & _VECTOR))
        self.groups = self.aligned_groups
        if len(self.groups) > 1:
            self.groups = self._filled(_groups(kinds, np.ones_like(self.addresses)))
        widths = [_BYTES[group.kind] for group in self.groups]  # tensors without elements need none
        if len(widths) > 1:
            widths = [_BYTES[kind] for kind in kinds]
        self.sizes = self.lengths * np.array(widths or 1, np.int64)

    def _filled(self, groups: Sequence[Group]) -> list[Group]:
        return [group for group in groups if group.of(self.lengths).any()]

    def _inspected(self, tensors: Sequence[Any]) -> tuple[list[int], list[str]]:
        if not all(isinstance(each, torch.Tensor) for each in tensors):
            raise TypeError(f"{self._name}: not all are tensors")
        if not all(each.is_contiguous() for each in tensors):
            raise ValueError(f"{self._name}: not all tensors are contiguous")
        devices = {each.get_device() for each in tensors}
        if len(devices) > 1 or (devices and INTERPRETED != (devices == {-1})):
            where = sorted({str(each.device) for each in tensors})
            raise TypeError(f"{self._name}: tensors on {', '.join(where)}; the kernels take those of one GPU")
        if devices:
            self.device = tensors[0].device
        kinds = [KINDS.get(each.dtype, "") for each in tensors]
        if not all(kinds):
            wrong = tensors[kinds.index("")].dtype
            raise TypeError(
                f"{self._name} has dtype {wrong}; it must be float32, float16, bfloat16 or float64"
            )
        return [each.data_ptr() for each in tensors], kinds

    def __len__(self) -> int:
        return len(self.elements)

    def counts(self, unit: int) -> np.ndarray:
        """Return the number of units that each tensor's elements fill."""
        return counts_of(self.elements, unit)

    def words(self, function: Callable[[int, int], int], width: int) -> np.ndarray:
        """Return the values of a function of `layout` for all tensors."""
        return lengths_of(function, self.elements, width)

    def longest(self, group: Group) -> Any:
        """Return the tensor of a group with the most elements, flat."""
        number = int(group.of(self.lengths).argmax())
        return as_array(self.kept[number if group.which is None else int(group.which[number])]).reshape(-1)


def table_of(outs: Sequence[Any], table: Any) -> SegmentTable:
    """Return the table of ``outs``: ``table``, if it describes exactly these tensors."""
    may_be = isinstance(table, SegmentTable) and len(table) == len(outs)
    return table if may_be and all(map(operator.is_, table.kept, outs)) else SegmentTable(outs, "out")


def _groups(kinds: Sequence[str], unaligned: np.ndarray) -> list[Group]:
    if not kinds:
        return []
    if kinds.count(kinds[0]) == len(kinds):
        if not unaligned.any():
            return [Group(kinds[0], True, None)]
        if unaligned.all():
            return [Group(kinds[0], False, None)]
    found: dict[tuple[str, bool], list[int]] = {}
    for i, (kind, offset) in enumerate(zip(kinds, unaligned.tolist())):
        found.setdefault((kind, not offset), []).append(i)
    return [Group(*one, np.array(numbers)) for one, numbers in found.items()]


def before(counts: np.ndarray) -> np.ndarray:
    """Return the offset of each part, from the parts' lengths."""
    return np.cumsum(counts) - counts


_steps: dict[Any, list[Step]] = {}


def steps_of(key: Any, call: Callable[[], Any]) -> list[Step]:
    """Return the launches of the function for one tensor.

    They are recorded by one call for each key. So program sizes and constants always equal those of that function.
    """
    found = _steps.get(key)
    if found is None:
        found = _steps[key] = [
            (launcher, job.per_program, constants, frozenset(job.entries))
            for launcher, job, constants in capture(call)
        ]
    return found


def launch(
    step: Step,
    elements: tuple[int, ...],
    columns: Mapping[str, Any],
    device: torch.device,
    read: Sequence[tuple[Any, Any]],
    written: Sequence[tuple[Any, Any]],
    pointers: np.ndarray | None = None,
    kept: Any = None,
) -> None:
    """Launch over tensors with these numbers of elements and these columns."""
    kernel, per_program, constants, names = step
    if names != columns.keys():
        raise AssertionError(f"{kernel.function.__name__} takes {sorted(names)}, not {sorted(columns)}")
    layout = layout_of(elements, per_program, 0 if pointers is None else pointers.shape[1])
    run_rows(kernel, Rows(layout, columns, device, read, written, pointers, kept), constants)


def launch_groups(
    table: SegmentTable,
    groups: Sequence[Group],
    key: tuple[Any, ...],
    call: Callable[[Any], Any],
    columns: Mapping[str, Any],
    read: Sequence[SegmentTable | torch.Tensor],
    written: Sequence[SegmentTable | torch.Tensor],
    pointers: np.ndarray | None = None,
) -> list[Step]:
    """Launch a function's first kernel once for each group.

    Args:
        key: what the function's launches depend on, beside the group's type and alignment.
        call: calls the function for a tensor of one element.

    Returns:
        The function's other launches for the last group.
    """
    ranges = list(map(range_of, read)), list(map(range_of, written))
    others: list[Step] = []
    for group in groups:
        first, *others = steps_of((*key, group[:2]), lambda: call(table.longest(group)[:1]))  # noqa: B023
        elements = table.elements
        if group.which is not None:
            elements = tuple([elements[i] for i in group.which.tolist()])
        selected = {name: group.of(column) for name, column in columns.items()}
        launch(first, elements, selected, table.device, *ranges, group.of(pointers), (read, written))
    return others


def range_of(memory: SegmentTable | torch.Tensor) -> tuple[Any, Any]:
    """Return first addresses and ends: a tensor's, or those of a table."""
    if isinstance(memory, SegmentTable):
        return memory.addresses, memory.addresses + memory.sizes
    low = memory.data_ptr()
    return low, low + memory.numel() * memory.element_size()
