"""Parallel compilation of a reduction's kernels, before their first launch.

Triton compiles a kernel when it is first launched: a training's first step would wait for one after another.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import torch

from horovod_quant.kernels import notices
from horovod_quant.kernels.triton import launching

Variant = tuple[launching.Kernel, tuple[tuple[str, Any], ...]]
"""A kernel with constants, pairs of names and values: what Triton compiles."""


def variants_of(call: Callable[[], Any]) -> set[Variant]:
    return {(kernel, tuple(constants.items())) for kernel, _, constants in launching.capture(call)}


def compile_kernels_of(call: Callable[[], Any], name: str, device: torch.device) -> None:
    """Compile the kernels that a call would launch, instead of launching them.

    Triton also keeps them on disk, for later processes.

    Args:
        call: launches kernels, and reads none of their results on the host.
        name: for the log.
        device: the GPU.
    """
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    table, owners = MockTensor(torch.int64), MockTensor(torch.int32)

    def compile_variant(variant: Variant) -> None:
        kernel, constants = variant
        with launching.on(device):  # the current device is each thread's own
            kernel.function.warmup(table, owners, grid=(1,), **dict(constants), **kernel.options)

    begin = time.perf_counter()
    variants = variants_of(call)
    launching.fix_cache_keys()
    with launching.on(device):
        driver.active.get_current_target()  # made here, not by several threads at a time
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_variant, variants))
    notices.log(
        logging.INFO, "horovod_quant: %s: %d kernels compiled, or loaded from Triton's cache on disk, in %.1f s",
        name, len(variants), time.perf_counter() - begin,
    )  # fmt: skip
