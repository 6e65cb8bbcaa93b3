"""What Horovod reduces in place of a gradient: a small tensor, which the gradient's route uses again in each step."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch


class ControlTensor:
    """One gradient's, in the host's memory.

    Its memory is used again as soon as what came back in it has been read; else, as when a step was given up, another
    takes its place, and Horovod keeps the one that it works on.

    Args:
        dtype: of the control tensor, float32 or float64.
    """

    __slots__ = (
        "_answer", "_bytes", "_dtype", "_fresh", "_is_out", "_length", "_numbers", "_read", "_tensor",
    )  # fmt: skip

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensor: torch.Tensor | None = None
        self._bytes = memoryview(b"")
        self._numbers: tuple[float, ...] | None = None
        self._fresh, self._length = b"", 0
        self._is_out = False
        self._read = b""
        self._answer: tuple[float, Sequence[float]] | None = None

    def filled(self, numbers: tuple[float, ...]) -> torch.Tensor:
        """The tensor that holds 1 and the numbers, for Horovod to reduce in place."""
        if numbers != self._numbers:
            self._fresh, self._length = _contents(numbers, self._dtype)
            self._numbers = numbers
        tensor = self._tensor
        if tensor is None or self._is_out or len(self._bytes) != len(self._fresh):
            tensor = self._tensor = torch.empty(self._length, dtype=self._dtype, device="cpu")
            self._bytes = memoryview(tensor.numpy()).cast("B")
        self._is_out = True
        self._bytes[:] = self._fresh
        return tensor

    def answer(self, output: torch.Tensor) -> tuple[float, Sequence[float]] | None:
        """What was found in the same bits before; None where it is yet to be found. The memory may be used again."""
        if output is not self._tensor:
            return None
        self._is_out = False
        return self._answer if self._bytes == self._read else None

    def learn(self, output: torch.Tensor, answer: tuple[float, Sequence[float]]) -> None:
        """Notes what was found, and was sound."""
        if output is self._tensor:
            self._read, self._answer = bytes(self._bytes), answer


@functools.lru_cache(maxsize=4096)
def _contents(numbers: tuple[float, ...], dtype: torch.dtype) -> tuple[bytes, int]:
    """The bytes of a fresh control tensor, and its number of elements."""
    tensor = torch.tensor((1.0, *numbers), dtype=dtype, device="cpu")
    return tensor.numpy().tobytes(), tensor.numel()
