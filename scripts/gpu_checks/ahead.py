"""Compile kernels ahead of their first launch, into Triton's cache on disk.

It takes several processes. They need no GPU: a replacement of Triton's driver states for which one to compile. A later
launch of the same kernel, with the same constants and options, finds the result in the cache.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from horovod_quant.kernels.triton import launching


class Variant(NamedTuple):
    """A kernel to compile.

    Attributes:
        module, name: of its function.
        constants: pairs of names and values.
        options: pairs, of `horovod_quant.kernels.triton.launching.Kernel`.
    """

    module: str
    name: str
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


def variant_of(kernel: Any, constants: Mapping[str, Any]) -> Variant:
    function = kernel.function.fn
    return Variant(
        function.__module__, function.__name__, tuple(constants.items()), tuple(kernel.options.items())
    )


def compile_all(variants: Collection[Variant], capability: int, processes: int) -> list[float]:
    """Compile for a GPU of this compute capability (90 for 9.0).

    Returns:
        The seconds that each variant took; those of one that is in the cache are few.
    """
    context = multiprocessing.get_context("spawn")
    work = [(each, capability) for each in sorted(variants, key=repr)]
    with context.Pool(max(1, min(processes, len(work)))) as pool:
        return pool.map(_compile, work, chunksize=1)


def _compile(work: tuple[Variant, int]) -> float:
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    variant, capability = work
    begin = time.perf_counter()
    driver.set_active(_Driver(capability))
    launching.fix_cache_keys()
    function = getattr(importlib.import_module(variant.module), variant.name)
    table, owners = MockTensor(torch.int64), MockTensor(torch.int32)
    function.warmup(table, owners, grid=(1,), **dict(variant.constants), **dict(variant.options))
    return time.perf_counter() - begin


class _Driver:
    """A replacement of Triton's driver that suffices to compile."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)
