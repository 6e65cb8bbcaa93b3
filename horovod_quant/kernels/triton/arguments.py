"""Validation and conversion of arguments of the backend's functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from horovod_quant.kernels.checks import check_bucket_size, check_code_words, check_norms
from horovod_quant.kernels.keys import Key
from horovod_quant.kernels.triton.launching import INTERPRETED
from horovod_quant.kernels.triton.staging import on_device

KINDS = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
}

TYPES = {
    np.dtype(np.float16): torch.float16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int32): torch.int32,
    np.dtype(bool): torch.bool,
}
"""PyTorch's dtypes, by the numpy dtypes that schemes use."""

_VECTOR_BYTES = 16


def current_device() -> torch.device:
    """Return the device of new arrays.

    This thread's GPU, or the CPU for Triton's interpreter.
    """
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())


def as_tensor(array: Any, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor unchanged.

    Copy a small numpy array of a scheme to the device.
    """
    if isinstance(array, torch.Tensor):
        return array
    return on_device(np.ascontiguousarray(array), device or current_device())


def flat(tensor: Any, name: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a tensor")
    if tensor.device.type == "cpu" and not INTERPRETED:
        raise TypeError(
            f"{name} is in the host's memory; the Triton kernels take tensors on a GPU, unless Triton's interpreter "
            f"runs them (TRITON_INTERPRET=1, set before Triton is imported)"
        )
    if tensor.device.type != "cpu" and INTERPRETED:
        raise TypeError(
            f"{name} is on {tensor.device}; Triton's interpreter takes tensors in the host's memory"
        )
    if tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} has shape {list(tensor.shape)}; it must be flat and contiguous")
    return tensor


def floats(tensor: Any, name: str) -> torch.Tensor:
    tensor = flat(tensor, name)
    if tensor.dtype not in KINDS:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be float32, float16, bfloat16 or float64")
    return tensor


def typed(tensor: Any, dtype: torch.dtype, name: str) -> torch.Tensor:
    tensor = flat(tensor, name)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; it must be {dtype}")
    return tensor


def result(out: torch.Tensor | None, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ``out`` after validation, or a new tensor."""
    if out is None:
        return torch.empty(length, dtype=dtype, device=device)
    out = flat(out, "out")
    if out.dtype != dtype or len(out) != length:
        raise ValueError(f"out is {out.dtype}[{len(out)}]; it must be {dtype}[{length}]")
    return out


def norms_of(norms: Any, elements: int, bucket_size: int, device: torch.device) -> torch.Tensor:
    check_bucket_size(bucket_size)
    check_norms(len(norms), elements, bucket_size)
    return typed(as_tensor(norms, device), torch.float32, "norms")


def codes_of(words: Any, elements: int, bits: int) -> torch.Tensor:
    check_code_words(len(words), elements, bits)
    return typed(words, torch.int32, "words")


def aligned(*tensors: torch.Tensor) -> bool:
    """True if the tensors' addresses are aligned for vector loads and stores."""
    return all(tensor.data_ptr() % _VECTOR_BYTES == 0 for tensor in tensors)


def key_entries(key: Key, start: int) -> Mapping[str, int]:
    if not isinstance(key, Key):
        raise TypeError(
            f"key is a {type(key).__name__}; on a GPU only the kernels of rotations accept this type"
        )
    return {**key._asdict(), "start": start}


def float_entry(value: float) -> int:
    """Return the bits of a number rounded to float32."""
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.int32))
