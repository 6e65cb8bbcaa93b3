"""Names for what computes and what waits, in a trace of ``torch.profiler`` or, with ``emit_nvtx``, of Nsight."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler

_NOTHING = contextlib.nullcontext()


def named_range(what: str, scheme: Any, group: str, stage: int | None = None) -> AbstractContextManager[Any]:
    """Return a range named "horovod_quant.WHAT SCHEME GROUP stage N"; costs next to nothing without a profiler."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    at = "" if stage is None else f" stage {stage}"
    return torch.profiler.record_function(f"horovod_quant.{what} {type(scheme).__name__} {group}{at}")
