"""A release of Horovod whose optimizer calls compressors from a function unknown to the package. Run by worker.py."""

from __future__ import annotations

from typing import Any, Callable

import horovod.torch as hvd
import torch
from horovod.torch.optimizer import _DistributedOptimizer
from torch_harness import METHODS, base_optimizer, message_of, net, net_loss, train_and_compare
from torch_scenarios import clean, finish  # noqa: F401 (part of a module of scenarios)

import horovod_quant.torch as hvq


def _reduce(self: Any, parameter: torch.Tensor) -> tuple[Any, Any]:
    """As Horovod's own, which calls its argument otherwise."""
    tensor, ctx = self._compression.compress(parameter.grad)
    return hvd.allreduce_async_(tensor, name=self._parameter_names[parameter], op=self.op), ctx


def start() -> int:
    hvd.init()
    torch.set_num_threads(1)
    _DistributedOptimizer._allreduce_grad_async = _reduce
    return hvd.rank()


def asks_for_names(make: Callable[..., Any]) -> None:
    """Before any collective, so that training can go on."""
    model, compressor = net(), make()
    assert hvd.DistributedOptimizer(
        base_optimizer(compressor, model.parameters()), model.named_parameters(), compression=compressor
    )
    message = message_of(net_loss(model, 0).backward, RuntimeError)
    assert "cannot tell which parameter this gradient belongs to" in message
    assert "Give the compressor named_parameters=model.named_parameters()" in message


def is_content_with_names(make: Callable[..., Any]) -> None:
    model = net()
    compressor = make(named_parameters=model.named_parameters())
    if not isinstance(compressor, hvq.BinSGDM):  # which needs its optimizer, whoever calls
        train_and_compare(compressor, model=model, steps=3)


MAKERS = METHODS
