"""Argument checks that all backends share."""

from __future__ import annotations

from horovod_quant.kernels.layout import ROW


def check_bucket_size(bucket_size: int) -> None:
    if bucket_size < ROW or bucket_size % ROW:
        raise ValueError(f"bucket_size={bucket_size}: use a multiple of {ROW}")


def check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: use {low} to {high}")
