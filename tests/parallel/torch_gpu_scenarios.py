"""Exchanges of gradients on a GPU, or of the host's under Triton's interpreter. Run by worker.py, with
HOROVOD_QUANT_KERNELS=triton where there is no GPU.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import checked_streams
import horovod.torch as hvd
import torch
from scenario_table import ON_DEVICES, TORCH_GPU_VARIANTS
from torch_harness import (
    DEVICE,
    METHODS,
    VARIANTS,
    assert_ends_without_step,
    groups_of,
    message_of,
    net,
    net_without_small_tensors,
    train_and_compare,
)
from torch_scenarios import clean, direct_calls, finish, nan_on_one_rank, workers_that_join  # noqa: F401
from turns import EVERY_CASE

import horovod_quant.torch as hvq
from horovod_quant.kernels import triton
from horovod_quant.torch.device import DeviceMemory

STEPS = 3 if EVERY_CASE else 2
"""Exchanges overlap from the second one on."""


def start() -> int:
    hvd.init(process_sets=hvq.hierarchical_process_sets())
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    if hvd.size() == 1:
        os.environ["HOROVOD_ELASTIC"] = (
            "1"  # or Horovod's optimizer registers no hooks, and compresses nothing
        )
    if os.environ.get("CHECKED_STREAMS") == "1":
        checked_streams.install()
    return hvd.rank()


def overlapped(make: Any) -> None:
    """Exchanges start and end in the backward pass, in more than one group."""
    optimizers: list[Any] = []

    def assert_overlapped() -> None:
        assert len(groups_of(optimizers[-1])) > 1
        assert_ends_without_step(optimizers[-1])

    train_and_compare(
        make(group_bytes=8192),
        before=lambda optimizer, step: optimizers.append(optimizer),
        between=assert_overlapped,
        steps=STEPS,
    )


def grouped_by_horovod(make: Any) -> None:
    train_and_compare(make(), num_groups=2)


def short_types(make: Any) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        train_and_compare(make(), model=net(dtype), steps=1)


def hierarchical(make: Any) -> None:
    if hvd.size() > 1:  # one worker has hooks under elastic training alone, which refuses this
        train_and_compare(make(hierarchical=True))


def ranks_with_other_kernels(make: Any) -> None:
    """The bits of a rank with a GPU are those of one without."""
    train_and_compare(make(kernels="triton" if hvd.rank() == 0 else "native"), steps=STEPS)


def read_before_results_come(make: Any) -> None:
    """Results replace gradients that the script's stream may still read."""
    model, norms = net_without_small_tensors().to(DEVICE), list[torch.Tensor]()
    train_and_compare(
        make(),
        model=model,
        steps=STEPS,
        between=lambda: norms.extend(p.grad.norm() for p in model.parameters() if p.grad is not None),
    )


def interrupted_while_decoding(make: Any) -> None:
    """A signal handler's exception comes before kernels are launched, or before the caller's stream waits for them."""
    for owner, name in ((triton.launching._Batch, "launch"), (DeviceMemory, "hand_over")):
        optimizers: list[Any] = []

        def interrupt(owner: Any = owner, name: str = name, optimizers: Any = optimizers) -> None:
            assert_ends_without_step(optimizers[-1])
            with patch.object(owner, name, side_effect=InterruptedError("a signal")):
                assert message_of(optimizers[-1].synchronize, InterruptedError) == "a signal"

        train_and_compare(
            make(),
            model=net_without_small_tensors().to(DEVICE),
            before=lambda optimizer, step: optimizers.append(optimizer),  # noqa: B023
            between=interrupt,
            steps=STEPS,
        )


def join_early(make: Any) -> None:
    workers_that_join(make, outputs=60)


MAKERS = {name: {**METHODS, **VARIANTS}[name] for name in (*ON_DEVICES, *TORCH_GPU_VARIANTS)}
