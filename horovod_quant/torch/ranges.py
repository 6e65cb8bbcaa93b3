"""Named ranges of computation and waits for ``torch.profiler`` or, with ``emit_nvtx``, Nsight."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

_NOTHING = contextlib.nullcontext()
_PREFIX = "horovod_quant."


def named_range(
    what: str, group: str, scheme: Any = None, stage: int | None = None
) -> AbstractContextManager[Any]:
    """Return a range named "horovod_quant.WHAT GROUP SCHEME stage N".

    Negligible cost without a profiler.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    name = f"{_PREFIX}{what} {group.removeprefix(_PREFIX)}"
    if scheme is not None:
        name += f" {type(scheme).__name__}"
    if stage is not None:
        name += f" stage {stage}"
    # ``emit_nvtx`` makes ranges of the thread that has called it, which is not the progress thread.
    is_recorded = torch._C._autograd._profiler_type().name != "NONE"
    if is_recorded or not torch.cuda.is_available():
        return torch.profiler.record_function(name)
    return _with_nvtx(name)


@contextlib.contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()
