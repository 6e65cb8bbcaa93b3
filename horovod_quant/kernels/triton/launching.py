"""Many tensors, one launch.

What a kernel shall do with one tensor is a `Job`. Outside a `batch` a job is launched at once. Inside, jobs are
collected, and those that share a kernel and its constants become one launch, after all that they depend on. A launch
gets a table of its tensors' addresses and sizes, and, for each of its programs, the number of its tensor.

Nothing here waits for the GPU: tables travel from pinned memory on the current stream, where the kernels run.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Union

import numpy as np
import torch
import triton

from horovod_quant.kernels.layout import ceil_div
from horovod_quant.kernels.triton import whole
from horovod_quant.kernels.triton.columns import NAMES
from horovod_quant.kernels.triton.ranges import Ranges

INTERPRETED = not isinstance(whole.copy_words, triton.runtime.JITFunction)
"""Whether kernels run in Triton's interpreter, on tensors in the host's memory (TRITON_INTERPRET=1)."""

OPTIONS = {"enable_fp_fusion": False}
"""Of every launch. ``a * b + c`` must be rounded twice, as everywhere else."""

MAX_ELEMENTS = 2**31 - 1

Entry = Union[int, torch.Tensor]


class Job(NamedTuple):
    """One tensor's part of a launch.

    ``entries`` are its columns of the table by their names, where a tensor stands for its address; ``pointers`` are its
    list of further entries. ``written`` names the columns of the tensors that the kernel writes.
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
        """Its tensors, and whether each is written."""
        for name, entry in self.entries.items():
            if isinstance(entry, torch.Tensor):
                yield entry, name in self.written
        for entry in self.pointers:
            if isinstance(entry, torch.Tensor):
                yield entry, False


Launcher = Callable[[Sequence[Job], Mapping[str, Any]], None]


def run(launcher: Launcher, job: Job, **constants: Any) -> None:
    """Has ``launcher`` called with the job, and with others that have the same constants."""
    if not job.elements:
        return
    if job.elements > MAX_ELEMENTS:
        raise ValueError(
            f"a tensor of {job.elements} elements; the Triton kernels take {MAX_ELEMENTS} at most"
        )
    current = getattr(_open, "batch", None)
    if current is None:
        launcher([job], constants)
    else:
        current.add(launcher, job, constants)


@contextlib.contextmanager
def batch() -> Iterator[None]:
    """Collects the jobs of this thread, and launches them in the end. Inside another batch it does nothing.

    What the jobs write must be read by other jobs alone, until then or `settle`.
    """
    if getattr(_open, "batch", None) is not None:
        yield
        return
    _open.batch = _Batch()
    try:
        yield
        _open.batch.launch()
    finally:
        _open.batch = None


def settle(tensors: Sequence[torch.Tensor]) -> None:
    """Launches the jobs collected so far, if one of them writes or reads what the tensors hold."""
    current = getattr(_open, "batch", None)
    if current is not None and any(current.concerns(tensor) for tensor in tensors):
        current.launch()


_open = threading.local()


class _Launch:
    """Jobs that do not depend on each other."""

    def __init__(self, launcher: Launcher, constants: Mapping[str, Any], device: torch.device) -> None:
        self.launcher = launcher
        self.constants = constants
        self.device = device
        self.jobs: list[Job] = []
        self._read, self._written = Ranges(), Ranges()

    def is_of(self, launcher: Launcher, constants: Mapping[str, Any], device: torch.device) -> bool:
        return self.launcher is launcher and self.constants == constants and self.device == device

    def add(self, job: Job) -> None:
        self.jobs.append(job)
        for tensor, written in job.tensors():
            (self._written if written else self._read).add(*_addresses(tensor))

    def concerns(self, tensor: torch.Tensor, written: bool) -> bool:
        """Whether it matters if the tensor is read, or written, before the launch or after it."""
        addresses = _addresses(tensor)
        return self._written.meets(*addresses) or (written and self._read.meets(*addresses))


class _Batch:
    def __init__(self) -> None:
        self._launches: list[_Launch] = []

    def add(self, launcher: Launcher, job: Job, constants: Mapping[str, Any]) -> None:
        """Puts the job into the first launch of its kind behind all that it depends on."""
        earliest = 0
        for number, launch in enumerate(self._launches):
            if any(launch.concerns(tensor, written) for tensor, written in job.tensors()):
                earliest = number + 1
        for launch in self._launches[earliest:]:
            if launch.is_of(launcher, constants, job.device):
                break
        else:
            launch = _Launch(launcher, constants, job.device)
            self._launches.append(launch)
        launch.add(job)

    def concerns(self, tensor: torch.Tensor) -> bool:
        return any(launch.concerns(tensor, written=True) for launch in self._launches)

    def launch(self) -> None:
        launches, self._launches = self._launches, []
        for launch in launches:
            launch.launcher(launch.jobs, launch.constants)


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    low = tensor.data_ptr()
    return low, low + tensor.numel() * tensor.element_size()


# ---- kernels -----------------------------------------------------------------------------------------------------


class Kernel:
    """A Triton kernel whose first two arguments are a table and the tensors' numbers; the others are constants."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, jobs: Sequence[Job], constants: Mapping[str, Any]) -> None:
        device = jobs[0].device
        programs = tuple(job.programs for job in jobs)
        with _on(device):
            table = on_device(_table(jobs), device)
            self.function[(sum(programs),)](
                table, _owners(programs, device, _stream(device)), **constants, **OPTIONS
            )


def _table(jobs: Sequence[Job]) -> np.ndarray:
    rows: list[int] = []
    lists: list[int] = []
    first_block, end = 0, len(NAMES) * len(jobs)
    for job in jobs:
        entries = dict(job.entries, elements=job.elements, first_block=first_block, pointers=end + len(lists))
        rows += [_number(entries.get(name, 0)) for name in NAMES]
        lists += map(_number, job.pointers)
        first_block += job.programs
    return np.array(rows + lists, np.int64)


def _number(entry: Entry) -> int:
    return entry.data_ptr() if isinstance(entry, torch.Tensor) else entry


@functools.lru_cache(maxsize=4096)
def _owners(programs: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    """The number of each program's tensor. Kept, because a group's sizes stay; for each stream its own."""
    return on_device(np.repeat(np.arange(len(programs), dtype=np.int32), programs), device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array's elements in the device's memory, without waiting for them."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
