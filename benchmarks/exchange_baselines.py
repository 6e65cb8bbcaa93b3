"""PyTorch's DistributedDataParallel and its hooks, over ``torch.distributed`` with Gloo: for `exchange`.

DDP finishes its exchange within the backward pass. Its settings are its own but for ``gradient_as_bucket_view``, which
saves it a copy of all gradients; `horovod_quant.bench.torch_trial.Model` hands both it and Horovod the same gradients.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from horovod_quant.analysis.models import elements
from horovod_quant.bench.network import address_of
from horovod_quant.bench.rounds import Bench
from horovod_quant.bench.torch_trial import Gradients, Model
from horovod_quant.bench.variants import Options, Variant
from horovod_quant.transports.traffic import ring_allreduce_bytes

START_POWERSGD = 2  # the least that it takes: DDP arranges its buckets anew after the first exchange


def connect(bench: Bench) -> None:
    """Makes a process group of Horovod's workers, on the interface that Horovod uses."""
    if dist.is_initialized():
        return
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("HOROVOD_GLOO_IFACE")
    interface = interface or next(iter(bench.counter.names), None)
    own = None if interface is None else address_of(interface)
    if interface is None or own is None:
        raise SystemExit("the baselines cannot tell which network interface to use: set GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store, port = None, 0
    if bench.rank == 0:
        store = dist.TCPStore(own, 0, bench.size, is_master=True, wait_for_workers=False)
        port = store.port
    address, port_text = bench.gather_texts(f"{own} {port}")[0].split()
    if store is None:
        store = dist.TCPStore(address, int(port_text), bench.size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=bench.rank, world_size=bench.size)


def powersgd(rank: int) -> powerSGD_hook.PowerSGDState:
    """The state of PyTorch's hook, for a model in one bucket.

    The hook's later collectives start in callbacks, and those of several buckets in an order that differs between the
    workers: within one group Gloo mixes them up, and the process aborts. A group for each bucket brings so many
    threads that 4 workers on 2 cores stall for seconds.
    """
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=START_POWERSGD
    )


class Trial:
    """A model within DDP."""

    warm_up = START_POWERSGD + 3  # PowerSGD allocates in its first exchange, and reuses from the second on

    def __init__(self, variant: Variant, gradients: Gradients, options: Options) -> None:
        self.variant = variant
        hook = HOOKS[variant.label]
        self._powersgd = powersgd(hook) if isinstance(hook, int) else None
        # PowerSGD sends what it has left out before, so that one exchange's result alone has no error.
        self.has_average = self._powersgd is None
        self._gradients = gradients
        self._model = Model(gradients.shapes, options.backward)
        self._parameters = list(self._model.parameters())
        one_bucket = (
            {} if self._powersgd is None else {"bucket_cap_mb": 4 * elements(gradients.shapes) / 2**20 + 1}
        )
        self._ddp = DistributedDataParallel(self._model, gradient_as_bucket_view=True, **one_bucket)
        self._width = 2 if hook is default_hooks.fp16_compress_hook else 4
        if self._powersgd is not None:
            self._ddp.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)
        elif hook is not None:
            self._ddp.register_comm_hook(None, hook)
        self._loss: Any = None
        self._elements_sent = 0.0

    def prepare(self, keep: bool = False) -> None:
        """Fills the gradients, and runs the forward pass."""
        self._gradients.give(self._parameters)
        self._loss = self._ddp(torch.zeros((), requires_grad=True))

    def run(self) -> None:
        """What is measured."""
        self._model.begin = time.perf_counter()
        self._loss.backward()

    def averages(self) -> list[np.ndarray]:
        """The gradients after an exchange."""
        return [parameter.grad.numpy() for parameter in self._parameters]

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._elements_sent += elements(self._gradients.shapes)

    def bytes_sent(self) -> float:
        """By this worker, in all exchanges; PowerSGD's without those before it started."""
        powersgd = self._powersgd
        sent = self._elements_sent if powersgd is None else powersgd.total_numel_after_compression
        return ring_allreduce_bytes(self._width * sent, dist.get_world_size())


HOOKS: dict[str, Any] = {
    "ddp": None,
    "ddp-fp16": default_hooks.fp16_compress_hook,
    "ddp-powersgd-1": 1,
    "ddp-powersgd-2": 2,
}
"""A hook, or PowerSGD's rank."""
