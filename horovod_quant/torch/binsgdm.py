"""Compressor of BinSGDM (Peng et al., published as Birder, NeurIPS 2023).

``optim.py`` has its optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import torch

from horovod_quant.frontends.binsgdm import clipped, moves_by_averages, require_beta, require_same_beta
from horovod_quant.kernels.buffer_view import as_array
from horovod_quant.schemes.base import LOCAL, BinaryState, Gradient, Scheme
from horovod_quant.torch import optim
from horovod_quant.torch.buckets import in_pass
from horovod_quant.torch.compressor import Compressor
from horovod_quant.torch.exchange import OpenState, PendingTensor
from horovod_quant.torch.memory import Memory
from horovod_quant.transports.torch_distributed import Connection, Groups


class _HorovodSum(NamedTuple):
    """Sum in place over a process set."""

    process_set: Any

    def __call__(self, whole: torch.Tensor, name: str) -> None:
        import horovod.torch as hvd

        hvd.allreduce_(whole, op=hvd.Sum, name=name, process_set=self.process_set)


class _Sum(NamedTuple):
    """Sum in place over a connection's workers."""

    connection: Connection

    def __call__(self, whole: torch.Tensor, name: str) -> None:
        self.connection.allreduce_(whole)


class BinSGDMCompressor(Compressor):
    """Compressor for the optimizer `horovod_quant.torch.optim.BinSGDM`, whose state is momentum and scale.

    Args:
        beta: None, or the optimizer's ``beta``, to check that they agree; the optimizer's value is used.
    """

    own_optimizer = optim.BinSGDM.__name__

    def __init__(self, scheme: Scheme | str, beta: float | None = None, **common: Any) -> None:
        if beta is not None:
            require_beta(beta)
        self.beta = beta
        super().__init__(scheme, **common)

    def _check_optimizer(self, optimizer: Any) -> None:
        if not isinstance(optimizer, optim.BinSGDM):
            given = "no optimizer" if optimizer is None else f"the optimizer {type(optimizer).__name__}"
            raise ValueError(
                f"compression=BinSGDM(): it needs the optimizer of the same name, but was used with {given}; give "
                f"hvd.DistributedOptimizer, or hvq.ddp.register as optimizer=, a "
                f"horovod_quant.torch.optim.BinSGDM(model.parameters(), lr=...)"
            )
        require_same_beta(self.beta, (group["beta"] for group in optimizer.param_groups))

    def _check_step(self, call: Any) -> None:
        super()._check_step(call)
        if not in_pass() and call.optimizer.is_exchanged(call.parameter):
            raise RuntimeError(
                f"{call.name}: synchronize() has reduced this gradient already, which now holds the workers' bits; "
                f"put the step() after it into `with optimizer.skip_synchronize():`, or call zero_grad() before "
                f"another gradient"
            )

    def _next_step(self, call: Any) -> int:
        return call.optimizer.next_update(call.parameter)

    def _count(self, call: Any, step: int) -> None:
        call.optimizer.count_update(call.parameter)

    def _opener(
        self, call: Any, memory: Memory, sum_over: Callable[[Any], Any] = _HorovodSum
    ) -> Callable[[int, int, Any], OpenState]:
        seen: tuple[Any, ...] = ()
        view: Any = None

        def open_state(start: int, stop: int, others: Any) -> OpenState:
            nonlocal seen, view
            add = None if others is None else sum_over(others)
            stored = call.optimizer.stored_state(call.parameter, start, stop, add)
            momentum, scale, beta = stored
            if momentum.device != memory.device:
                momentum, scale = momentum.to(memory.device), scale.to(memory.device)
                copies = (stored.momentum, momentum), (stored.scale, scale)
                return BinaryState(memory.flat(momentum), memory.flat(scale), beta), copies
            # A script may replace a tensor, or its memory; a view takes longer to make than to compare.
            present = id(momentum), id(scale), momentum.data_ptr(), scale.data_ptr(), beta
            if present != seen:
                view = BinaryState(memory.taken(momentum, None), memory.taken(scale, None), beta)
                seen = present
            return view, ()

        return open_state

    def _taken(self, call: Any, values: Any, memory: Memory) -> Any:
        clip_norm = call.optimizer.clip_norm_of(call.parameter)
        if clip_norm is None:
            return values
        memory.catch_up()
        with memory.working():
            return clipped(memory.kernels, as_array(values), clip_norm)

    def _also_carried(self, call: Any, tensor: torch.Tensor) -> tuple[float, ...]:
        """Return 1 if there is a gradient.

        Horovod creates zeros where no backward pass has reached a parameter.
        """
        return (float(in_pass() or bool(tensor.any())),)

    def _delivered(self, call: Any, pending: PendingTensor, sums: Sequence[float]) -> None:
        if sums[-1] == 0.0:  # no worker has a gradient: any bits would move the parameter
            pending.destination.zero_()
        largest = None
        if moves_by_averages(pending.scheme):
            # The first element of the control tensor was 1: now it is Horovod's factor.
            largest = optim.largest_magnitude(pending.destination) / sums[0]
        call.optimizer.mark_exchanged(call.parameter, moves=sums[-1] != 0.0, largest=largest)


class HookedParameter:
    """Parameter whose gradient a hook of DDP reduces to bits.

    Args:
        compression: the compressor.
        optimizer: the parameter's optimizer.
        parameter: the parameter.
        name: the gradient's name.
    """

    def __init__(
        self, compression: BinSGDMCompressor, optimizer: optim.BinSGDM, parameter: torch.Tensor, name: str
    ) -> None:
        self.optimizer, self.parameter = optimizer, parameter
        self._compression, self._name = compression, name
        self._memory: Memory | None = None
        self._values: Any = None
        self._copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def count(self) -> int:
        """Count an update and return its number, from 0.

        Raises:
            RuntimeError: the gradient holds bits, to which a backward pass has added.
        """
        if self.optimizer.is_exchanged(self.parameter):
            raise RuntimeError(
                f"{self._name}: an earlier backward pass has reduced this gradient, which holds the workers' bits; use "
                f"ddp_model.no_sync() for all backward passes of a step but the last, or call the optimizer's step() "
                f"or zero_grad() before another one"
            )
        return self.optimizer.count_update(self.parameter)

    def open(self, gradient: Gradient, scheme: Scheme, groups: Groups, memory: Memory) -> None:
        """Give a gradient its values and state for a reduction."""
        if memory is not self._memory:
            self._memory = memory
            self._open_state = self._compression._opener(self, memory, _Sum)
        self._values = gradient.buffer
        gradient.buffer = self._compression._taken(self, self._values, memory)
        start, stop = scheme.owned(self._name, gradient.elements, groups.workers)
        with memory.working():  # it may copy the state
            gradient.state, self._copies = self._open_state(start, stop, groups.connections.get(LOCAL))

    def close(self, gradient: Gradient, scheme: Scheme, destination: torch.Tensor) -> None:
        """Record a reduced gradient with the optimizer."""
        for kept, used in self._copies:
            kept.copy_(used)
        largest = optim.largest_magnitude(destination) if moves_by_averages(scheme) else None
        self.optimizer.mark_exchanged(self.parameter, moves=None, largest=largest)
        gradient.buffer, gradient.state = self._values, None
        self._values, self._copies = None, ()
