"""``DistributedDataParallel`` and its communication hooks over ``torch.distributed``, within the backward pass."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import horovod_quant.torch as hvq
from horovod_quant.analysis.models import elements
from horovod_quant.bench.torch_model import Gradients, TorchTrial
from horovod_quant.bench.torch_model import configure as configure
from horovod_quant.bench.variants import DDPS_OWN, Options, Variant
from horovod_quant.transports.traffic import ring_allreduce_bytes

START_POWERSGD = 2  # the minimum: DDP rebuilds its buckets after the first step

workers = SimpleNamespace(
    init=lambda: dist.init_process_group("gloo"),
    rank=dist.get_rank,
    size=dist.get_world_size,
    local_rank=lambda: int(os.environ["LOCAL_RANK"]),
    local_size=lambda: int(os.environ["LOCAL_WORLD_SIZE"]),
    mpi_enabled=lambda: False,
    shutdown=dist.destroy_process_group,
)
"""Process group that ``torchrun`` has started, with Horovod's interface."""

barrier = dist.barrier


def allgather(array: np.ndarray, name: str) -> np.ndarray:
    arrays: list[Any] = [None] * workers.size()
    dist.all_gather_object(arrays, array)
    return np.concatenate(arrays)


# No annotations: this module's are strings, which DDP rejects in a hook.
def bf16_hook(state, bucket):
    """Average a bucket in bfloat16.

    PyTorch's hook of this kind refuses to run on a CPU.
    """
    buffer = bucket.buffer()
    narrow = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    return (
        dist.all_reduce(narrow, async_op=True).get_future().then(lambda done: buffer.copy_(done.value()[0]))
    )


HOOKS: dict[str, Any] = dict(zip(DDPS_OWN, (None, default_hooks.fp16_compress_hook, bf16_hook, 1, 2)))
"""Hooks by name; a number is PowerSGD's rank."""


class Trial(TorchTrial):
    """Model in DDP with one method's hook.

    Buckets have DDP's default sizes.

    PowerSGD has all gradients in one bucket: its later collectives start in callbacks, and those of several buckets in
    an order that differs between the workers, so that Gloo mixes them up and the process aborts.
    """

    def __init__(self, variant: Variant, gradients: Gradients, options: Options) -> None:
        super().__init__(variant, gradients, options)
        hook = None if variant.ours else HOOKS[variant.label]
        self._powersgd: Any = None
        buckets = {}
        if isinstance(hook, int):
            self._powersgd = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=hook, start_powerSGD_iter=START_POWERSGD
            )
            buckets = {"bucket_cap_mb": 4 * elements(gradients.shapes) / 2**20 + 1}
            # It allocates memory in its first reduction, and reuses it from the second on.
            self.warm_up = START_POWERSGD + 3
        # PowerSGD feeds its error back in later steps, so the nmse of one step has no meaning.
        self.has_average = self._powersgd is None and variant.own_optimizer is None
        self._called = DistributedDataParallel(self._model, gradient_as_bucket_view=True, **buckets)
        self._state: Any = None
        self._optimizer: Any = None
        if variant.ours:
            own = variant.own_optimizer
            self._optimizer = None if own is None else getattr(hvq.optim, own)(self._parameters)
            self._state = hvq.ddp.register(self._called, variant.compression(None, hvq), self._optimizer)
        elif self._powersgd is not None:
            self._called.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)
        elif hook is not None:
            self._called.register_comm_hook(None, hook)

    def prepare(self, keep: bool = False) -> None:
        if self._optimizer is not None:
            self._optimizer.zero_grad()  # it makes no step
        super().prepare(keep)

    def bytes_sent(self) -> float:
        """Return the bytes this worker has sent; for PowerSGD, since its start."""
        size = dist.get_world_size()
        if self._powersgd is not None:
            return ring_allreduce_bytes(4 * self._powersgd.total_numel_after_compression, size)
        return self.variant.bytes_sent(self._state, self._exchanges, self._gradients.shapes, size)
