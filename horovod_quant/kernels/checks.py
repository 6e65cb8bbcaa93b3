"""Argument checks that all backends share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_quant.kernels.layout import ROW, buckets, code_words, sum_words

MAX_LEVELS = 2**15 - 1


def check_bucket_size(bucket_size: int) -> None:
    if bucket_size < ROW or bucket_size % ROW:
        raise ValueError(f"bucket_size={bucket_size}: use a multiple of {ROW}")


def check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value}: use {low} to {high}")


def check_norms(count: int, elements: int, bucket_size: int) -> None:
    needed = buckets(elements, bucket_size)
    if count < needed:
        raise ValueError(
            f"norms: {count} norms for {elements} elements in buckets of {bucket_size}; {needed} are needed"
        )


def check_code_words(count: int, elements: int, bits: int) -> None:
    if count < code_words(elements, bits):
        raise ValueError(f"words: {count} words cannot hold {elements} codes of {bits} bits")


def check_sum_words(count: int, elements: int, width: int) -> None:
    if count != sum_words(elements, width):
        raise ValueError(f"words: {count} words cannot hold {elements} digits of {width} bits")


def check_votes(words: Sequence[Any]) -> None:
    lengths = [len(one) for one in words]
    if len(set(lengths)) != 1 or lengths[0] % ROW:
        raise ValueError(f"words of lengths {lengths}; they must be the same multiple of {ROW}")


def check_pairs(words: Sequence[Any], norms: Sequence[Any]) -> None:
    if not 0 < len(words) == len(norms):
        raise ValueError(f"{len(words)} workers' words and {len(norms)} workers' norms")
