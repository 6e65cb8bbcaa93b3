"""Named ranges of computation and waits for ``torch.profiler`` or, with ``emit_nvtx``, Nsight."""

from __future__ import annotations

import contextlib
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
    return torch.profiler.record_function(name if stage is None else f"{name} stage {stage}")
