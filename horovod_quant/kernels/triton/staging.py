"""Upload of tables to the GPU by one copy from pinned memory.

A *slot* is pinned memory with device memory of the same size. It is used for the tables of a batch, uploaded on the
current stream, and released when the batch has been launched there, which an event records. It is reused when that
event has completed: the copy has then read the pinned memory, and the kernels have read the device memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_EVEN = 2  # tables begin at multiples of 2 numbers, 16 bytes, for which kernels are compiled
_LEAST = 512  # minimum numbers of a slot
_MOST_SLOTS = 64  # maximum slots of a size: then the host waits

_kept = threading.local()


class Uploaded:
    """Tables in the memory of a device.

    Attributes:
        offsets: the offset of each table, in numbers.
    """

    def __init__(
        self, memory: torch.Tensor, address: int, offsets: Sequence[int], slot: _Slot | None
    ) -> None:
        self._memory, self._address, self._slot = memory, address, slot
        self.offsets = offsets

    def address(self, number: int) -> int:
        return self._address + 8 * self.offsets[number]

    def tensor(self, number: int) -> torch.Tensor:
        return self._memory[self.offsets[number] :]

    def release(self) -> None:
        """Release the slot.

        To be called when all kernels that read it have been launched on the same stream.
        """
        if self._slot is not None:
            self._slot.release()


class _Slot:
    def __init__(self, numbers: int, device: torch.device) -> None:
        self._pinned = torch.empty(numbers, dtype=torch.int64, pin_memory=True)
        self.array = self._pinned.numpy()
        self.memory = torch.empty(numbers, dtype=torch.int64, device=device)
        self.address = self.memory.data_ptr()
        self._event = torch.cuda.Event()
        self._is_taken = False

    def is_free(self) -> bool:
        return not self._is_taken and self._event.query()

    def wait(self) -> bool:
        """Wait until it is free.

        Return False if the present batch is using it.
        """
        if self._is_taken:
            return False
        self._event.synchronize()
        return True

    def take(self) -> None:
        self._is_taken = True

    def upload(self) -> None:
        self.memory.copy_(self._pinned, non_blocking=True)

    def release(self) -> None:
        self._event.record()
        self._is_taken = False


def upload(tables: Sequence[np.ndarray], device: torch.device, stream: int) -> Uploaded:
    """Copy all tables to the device at once, without waiting.

    It runs on the current stream, with the handle ``stream``.
    """
    offsets, end = [], 0
    for table in tables:
        offsets.append(end)
        end += len(table) + len(table) % _EVEN
    if device.type == "cpu" or not tables:
        array = np.empty(end, np.int64)
        _write(array, tables, offsets)
        memory = torch.from_numpy(array)
        return Uploaded(memory, memory.data_ptr(), offsets, None)
    slot = _free_slot(max(_LEAST, 1 << (end - 1).bit_length()), device, stream)
    slot.take()
    _write(slot.array, tables, offsets)
    slot.upload()
    return Uploaded(slot.memory, slot.address, offsets, slot)


def _write(array: np.ndarray, tables: Sequence[np.ndarray], offsets: Sequence[int]) -> None:
    for table, offset in zip(tables, offsets):
        array[offset : offset + len(table)] = table


def _free_slot(numbers: int, device: torch.device, stream: int) -> _Slot:
    """Return a free slot of this thread and stream.

    Its device memory belongs to the stream.
    """
    rings: dict[Any, deque[_Slot]] = _kept.__dict__.setdefault("rings", {})
    ring = rings.setdefault((device, stream, numbers), deque())
    if ring and (ring[0].is_free() or (len(ring) >= _MOST_SLOTS and ring[0].wait())):
        ring.rotate(-1)
        return ring[-1]
    slot = _Slot(numbers, device)
    ring.append(slot)
    return slot


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device without waiting."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
