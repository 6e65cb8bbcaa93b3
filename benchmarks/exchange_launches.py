"""Count kernels and copies of a step on a GPU, for `exchange`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import exchange_cuda
import torch

from horovod_quant.kernels.triton import launching


def count(trial: Any) -> dict[str, Any]:
    """Run one step's communication and count its launches.

    Returns:
        ``triton``: launches of this package's kernels. On a GPU also ``kernels``, ``copies`` (between the memories of
        the host and of the GPU, or within one) and ``gpu_seconds``, from PyTorch's profiler; or ``problem``, why those
        are missing.
    """
    launches = 0
    call = launching.Kernel.__call__

    def counted(kernel: Any, *arguments: Any) -> None:
        nonlocal launches
        launches += 1
        call(kernel, *arguments)

    found: dict[str, Any] = {}
    with patch.object(launching.Kernel, "__call__", counted):
        if exchange_cuda.DEVICE == "cuda":
            found = _profiled(trial)
        else:
            _exchange(trial)
    return {"triton": launches, **found}


def _exchange(trial: Any) -> None:
    trial.prepare()
    trial.run()
    trial.clear()


def _profiled(trial: Any) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    trial.prepare()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        trial.run()
    trial.clear()
    try:
        events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        copies = sum(event.name.startswith(("Memcpy", "Memset")) for event in events)
        seconds = 1e-6 * sum(event.time_range.elapsed_us() for event in events)
        return {"kernels": len(events) - copies, "copies": copies, "gpu_seconds": seconds}
    except Exception as error:  # whatever the profiler of another PyTorch lacks, the other figures are valid
        return {"problem": f"{type(error).__name__}: {error}"}
