"""Kernels for many segments in a few launches and one upload.

A segment is a range of the elements of one tensor. Payloads are int32 words; ``at[i]`` is the offset of segment i.
Norms and codes: the norms of its buckets, then its codes. Rotated codes: the word of the step, if there are elements,
then codes, then scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch

from horovod_quant.kernels.layout import ROW, ceil_div, split_points
from horovod_quant.kernels.triton.arguments import current_device
from horovod_quant.kernels.triton.each import CodeSegments
from horovod_quant.kernels.triton.each_rotated import RotatedSegments
from horovod_quant.kernels.triton.launching import batch


class TritonSegments(CodeSegments, RotatedSegments):
    """Triton kernels for many segments: see the module."""

    def empty(self, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
        # Each begins at a multiple of 16 bytes, for vector loads.
        at = split_points([ceil_div(length, ROW) * ROW for length in lengths])
        memory = torch.empty(at[-1], dtype=torch.float32, device=current_device())
        return [memory[start : start + length] for start, length in zip(at, lengths)]

    def decode_sources(
        self, outs: Sequence[Any], sources: Sequence[Any], decode: Callable[..., Any]
    ) -> Sequence[Any]:
        with batch():
            return super().decode_sources(outs, sources, decode)
