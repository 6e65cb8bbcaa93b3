"""GPUs of PyTorch's workers, and what Horovod supports on them."""

from __future__ import annotations

import os
from typing import Any

import torch

from horovod_quant.torch.memory import STAGING


def gpu_problem() -> str | None:
    """Return why PyTorch has no GPU, with the remedy.

    Returns None if it has one.
    """
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} is built without CUDA; scripts/setup --gpu=host makes an environment with "
            "a CUDA build"
        )
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU; nvidia-smi shows whether there is one, CUDA_VISIBLE_DEVICES can hide it"
    return None


def take_gpu(hvd: Any) -> None:
    """Select this worker's GPU.

    If a host has fewer GPUs than workers, workers share them; then NCCL must not get the tensors.
    """
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    if hvd.nccl_built() and _is_shared(hvd):
        os.environ[STAGING] = "1"


def _is_shared(hvd: Any) -> bool:
    return hvd.local_size() > torch.cuda.device_count()


def reduction_problem(hvd: Any) -> str | None:
    """Return why Horovod cannot reduce GPU tensors here, or None.

    This package's methods do not need it: they then pass Horovod tensors in host memory.
    """
    remedy = "scripts/setup --gpu=host builds one that copies to the host"
    if not hvd.cuda_built():
        return f"not available with this Horovod, built without CUDA: it accepts no GPU tensors; {remedy}"
    if hvd.nccl_built() and _is_shared(hvd):
        return f"not available with this Horovod, built with NCCL, which refuses two workers on one GPU; {remedy}"
    return None
