"""Launches of a kernel for many tensors at once.

A kernel's work on one tensor is a `Job`, on many tensors `Rows`. Outside a `batch` they are launched immediately.
Inside, they are collected, and those with the same kernel and constants become one launch, after all that they depend
on. A launch gets a table of its tensors' addresses and sizes, and, for each of its programs, the number of its tensor.

Nothing here waits for the GPU: the tables of a batch are copied from pinned memory, together, on the current stream,
where the kernels run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

import numpy as np
import torch
import triton
from triton import knobs

from horovod_quant.kernels.triton import staging, whole
from horovod_quant.kernels.triton.jobs import Job, Rows, joined, table_of
from horovod_quant.kernels.triton.ranges import Ranges
from horovod_quant.kernels.triton.staging import on_device

INTERPRETED = not isinstance(whole.copy_words, triton.runtime.JITFunction)
"""True if kernels run in Triton's interpreter, in host memory (TRITON_INTERPRET=1)."""

OPTIONS = {"enable_fp_fusion": False}
"""Options of every launch: ``a * b + c`` must be rounded twice, as in all backends."""

MAX_ELEMENTS = 2**31 - 1

_ALIGNMENT = 16  # alignment that Triton assumes in a kernel compiled for such addresses


def run(kernel: Kernel, job: Job, **constants: Any) -> None:
    """Launch a job, in a batch together with others of its kind.

    Jobs of a kind have the same kernel and constants.
    """
    if not job.elements:
        return
    if job.elements > MAX_ELEMENTS:
        raise ValueError(
            f"a tensor of {job.elements} elements; the Triton kernels take {MAX_ELEMENTS} at most"
        )
    captured = getattr(_open, "captured", None)
    if captured is not None:
        captured.append((kernel, job, constants))
        return
    current = getattr(_open, "batch", None)
    if current is None:
        launch_all([Launch(kernel, constants, job.device, [job])])
    else:
        current.add(kernel, job, constants)


def capture(call: Callable[[], Any]) -> list[tuple[Kernel, Any, Mapping[str, Any]]]:
    """Record the kernels that a call in this thread would launch.

    Each with its job, or None for rows, and constants. Only PyTorch's own run.
    """
    found: list[tuple[Kernel, Any, Mapping[str, Any]]] = []
    outer, _open.captured = getattr(_open, "captured", None), found
    try:
        call()
    finally:
        _open.captured = outer
    return found


def run_rows(kernel: Kernel, rows: Rows, constants: Mapping[str, Any]) -> None:
    """Launch rows, as `run` launches a job."""
    if not rows.layout.total:
        return
    captured = getattr(_open, "captured", None)
    if captured is not None:
        captured.append((kernel, None, constants))
        return
    current = getattr(_open, "batch", None)
    if current is None:
        launch_all([Launch(kernel, constants, rows.device, rows=[rows])])
    else:
        current.add_rows(kernel, rows, constants)


def run_call(call: Callable[[], Any], device: torch.device) -> None:
    """Call PyTorch operations in order within the batch."""
    current = getattr(_open, "batch", None)
    if current is None:
        call()
    else:
        current.add_call(call, device)


@contextlib.contextmanager
def batch() -> Iterator[None]:
    """Collect this thread's jobs, and launch them at the end.

    No effect within another batch. Until then or `settle`, only other jobs may read the jobs' results.
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
    """Launch the collected jobs if one reads or writes the tensors."""
    current = getattr(_open, "batch", None)
    if current is not None and any(current.concerns(tensor) for tensor in tensors):
        current.launch()


_open = threading.local()


class Launch:
    """Independent jobs (single ones, or rows), or a call of PyTorch.

    Attributes:
        jobs, rows: what it launches: one of the two is empty.
        uploaded: the tables on the device, and the number of the jobs' one.
    """

    def __init__(
        self,
        launcher: Callable[[Launch, Mapping[str, Any]], None],
        constants: Mapping[str, Any],
        device: torch.device,
        jobs: Sequence[Job] = (),
        rows: Sequence[Rows] = (),
    ) -> None:
        self.launcher = launcher
        self.constants = constants
        self.device = device
        self.uploaded: Any = None
        self.is_barrier = not isinstance(launcher, Kernel)
        self.jobs, self.rows = list(jobs), list(rows)
        self._read, self._written = Ranges(), Ranges()

    def is_of(self, kernel: Kernel, constants: Mapping[str, Any], device: torch.device) -> bool:
        return self.launcher is kernel and self.constants == constants and self.device == device

    def takes_rows(self, rows: Rows) -> bool:
        return not self.jobs and not any(rows.meets(one) for one in self.rows)

    def add(self, job: Job, ranges: Sequence[tuple[int, int, bool]]) -> None:
        self.jobs.append(job)
        for low, high, written in ranges:
            (self._written if written else self._read).add(low, high)

    def concerns(self, low: int, high: int, written: bool) -> bool:
        """True if an access to these addresses must keep its order.

        Always True for rows, which are not searched.
        """
        return bool(
            self.is_barrier
            or self.rows
            or self._written.meets(low, high)
            or (written and self._read.meets(low, high))
        )

    def programs(self) -> tuple[int, ...]:
        """Return the number of programs of each tensor."""
        if len(self.rows) == 1:
            return self.rows[0].layout.programs
        return tuple(
            [count for rows in self.rows for count in rows.layout.programs]
            or [job.programs for job in self.jobs]
        )

    def table(self) -> np.ndarray:
        if not self.rows:
            return table_of(self.jobs)
        tables = [rows.table() for rows in self.rows]
        return joined(tables, list(map(len, self.rows)), [rows.layout.total for rows in self.rows])


class _Batch:
    def __init__(self) -> None:
        self._launches: list[Launch] = []

    def add(self, kernel: Kernel, job: Job, constants: Mapping[str, Any]) -> None:
        """Add a job to the first launch after all its dependences."""
        ranges, earliest, launches = job.ranges(), 0, self._launches
        for number in range(len(launches) - 1, -1, -1):
            concerns = launches[number].concerns
            if any(concerns(*each) for each in ranges):
                earliest = number + 1
                break
        device = job.device
        for launch in launches[earliest:]:
            if launch.is_of(kernel, constants, device) and not launch.rows:
                break
        else:
            launch = Launch(kernel, constants, device)
            launches.append(launch)
        launch.add(job, ranges)

    def add_rows(self, kernel: Kernel, rows: Rows, constants: Mapping[str, Any]) -> None:
        """Add rows to the last launch, or after it."""
        last = self._launches[-1] if self._launches else None
        if last is None or not (last.is_of(kernel, constants, rows.device) and last.takes_rows(rows)):
            last = Launch(kernel, constants, rows.device)
            self._launches.append(last)
        last.rows.append(rows)

    def add_call(self, call: Callable[[], Any], device: torch.device) -> None:
        self._launches.append(Launch(lambda jobs, constants: call(), {}, device))

    def concerns(self, tensor: torch.Tensor) -> bool:
        low = tensor.data_ptr()
        high = low + tensor.numel() * tensor.element_size()
        return any(launch.concerns(low, high, written=True) for launch in self._launches)

    def launch(self) -> None:
        launches, self._launches = self._launches, []
        launch_all(launches)


def launch_all(launches: Sequence[Launch]) -> None:
    """Launch in order, with one upload for successive launches on a device."""
    for device, group in itertools.groupby(launches, lambda each: each.device):
        successive = list(group)
        collected = [each for each in successive if not each.is_barrier]
        with on(device):
            uploaded = staging.upload([each.table() for each in collected], device, stream_of(device))
            for number, each in enumerate(collected):
                each.uploaded = (uploaded, number)
            try:
                for each in successive:
                    each.launcher(each, each.constants)
            finally:
                uploaded.release()


# ---- kernels -----------------------------------------------------------------------------------------------------


_kernels: list[Kernel] = []


@functools.lru_cache(maxsize=1)
def fix_cache_keys() -> None:
    """Compute all kernels' cache keys in a fixed order.

    Triton's keys on disk depend on the order.
    """
    if not INTERPRETED:
        for kernel in sorted(_kernels, key=lambda each: (each.function.__module__, each.function.__name__)):
            kernel.function.cache_key  # noqa: B018


_interpreting = threading.Lock()
"""Lock for Triton's interpreter, which patches its module while a kernel runs."""


class Kernel:
    """A Triton kernel with a table, tensors' numbers, and constants as arguments.

    Triton binds and inspects a launch's arguments to find the compiled kernel, in 20 to 50 us of host code. Here the
    key is known: constants, the device, and two addresses that are multiples of 16. The first launch uses Triton's path
    and returns the compiled kernel; later ones call its launcher. All other cases use Triton's path.

    Attributes:
        options: options of its compilation.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        self.function = function
        self.options = {**OPTIONS, **options}
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]] | None] = {}
        _kernels.append(self)

    def __call__(self, jobs: Launch, constants: Mapping[str, Any]) -> None:
        """Launch on the current device, which has the table."""
        (uploaded, number), device = jobs.uploaded, jobs.device
        stream = stream_of(device)
        owners = _owners(jobs.programs(), device, stream)
        if device.type != "cuda":
            table = uploaded.tensor(number)
            with _interpreting:
                self.function[(owners.total,)](table, owners.tensor, **constants, **self.options)
            return
        fix_cache_keys()
        addresses = uploaded.address(number), owners.address
        key = (device_index(device), *constants.items())
        found, is_usual = self._compiled.get(key), _is_usual(addresses)
        if found is not None and is_usual:
            kernel, values = found
            try:
                kernel.run(
                    owners.total, 1, 1, stream, kernel.function, kernel.packed_metadata, None, None, None, *addresses,
                    *values,
                )  # fmt: skip
                return
            except TypeError:  # raised before a launch: this Triton's launchers take other arguments
                self._compiled[key] = None
        table = uploaded.tensor(number)
        compiled = self.function[(owners.total,)](table, owners.tensor, **constants, **self.options)
        if is_usual and key not in self._compiled:
            self._compiled[key] = self._prepared(compiled, constants)

    def _prepared(self, kernel: Any, constants: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]] | None:
        """Return the compiled kernel and its constants in order.

        Returns None if only Triton's path works.
        """
        names = getattr(self.function, "arg_names", None)
        if hasattr(kernel, "result"):
            kernel = kernel.result()
        has_all = all(hasattr(kernel, name) for name in ("run", "function", "packed_metadata"))
        if not has_all or names is None or set(names[2:]) != set(constants):
            return None
        return kernel, tuple([constants[name] for name in names[2:]])


def _is_usual(addresses: tuple[int, int]) -> bool:
    """True for aligned addresses, without a profiler's hook for launches."""
    runtime = knobs.runtime
    return not (
        addresses[0] % _ALIGNMENT
        or addresses[1] % _ALIGNMENT
        or getattr(runtime.launch_enter_hook, "calls", None)
        or getattr(runtime.launch_exit_hook, "calls", None)
    )


class _Owners:
    """Device array with the number of each program's tensor."""

    def __init__(self, programs: Sequence[int], device: torch.device) -> None:
        self.tensor = on_device(np.repeat(np.arange(len(programs), dtype=np.int32), programs), device)
        self.address = self.tensor.data_ptr()
        self.total = sum(programs)


@functools.lru_cache(maxsize=4096)
def _owners(programs: tuple[int, ...], device: torch.device, stream: int) -> _Owners:
    """Return the cached array for these sizes and this stream."""
    return _Owners(programs, device)


def stream_of(device: torch.device) -> int:
    """Return the handle of the current stream."""
    if device.type != "cuda":
        return 0
    return triton.runtime.driver.active.get_current_stream(device_index(device))


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def on(device: torch.device) -> Any:
    """Return a context in which a GPU is the current one."""
    is_current = device.type != "cuda" or device_index(device) == torch.cuda.current_device()
    return _NO_CONTEXT if is_current else torch.cuda.device(device)


_NO_CONTEXT = contextlib.nullcontext()
