"""The compressors that go into ``hvd.DistributedOptimizer(compression=...)``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any, Callable, NamedTuple

import torch

from horovod_quant import nodes
from horovod_quant.frontend import (
    BaseCompressor,
    BinSGDMArguments,
    GlobalQSGDArguments,
    NUQSGDArguments,
    QSGDArguments,
    clipped,
    unnamed,
)
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.schemes.base import BinaryState, Gradient, Scheme
from horovod_quant.torch import memory as memories
from horovod_quant.torch import optim
from horovod_quant.torch.exchange import OpenState, Submission
from horovod_quant.torch.horovod_call import (
    HorovodCall,
    ParameterFinder,
    handles_of,
    identify,
    require_horovod,
)
from horovod_quant.torch.memory import Memory
from horovod_quant.torch.schedule import Schedule
from horovod_quant.traffic import ring_allreduce_bytes

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Unchanged(NamedTuple):
    """Context of a gradient that Horovod reduces itself, in a copy, where it cannot take it as it is."""

    destination: torch.Tensor


class _Carried(NamedTuple):
    """Context of a gradient that this plugin exchanges, while Horovod reduces its carrier."""

    submission: Submission
    schedule: Schedule
    signs: tuple[float, ...]
    call: HorovodCall


class Compressor(BaseCompressor):
    """A compressor for ``hvd.DistributedOptimizer``, ``hvd.allreduce`` and ``hvd.grouped_allreduce``.

    Args:
        scheme: the scheme and its arguments.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.
        kernels: ``"auto"``, ``"native"`` or ``"numpy"``; or ``"triton"`` for gradients on a GPU, which ``"auto"`` takes
            for them, where Triton is installed, except with Elias coding.
        **common: see `horovod_quant.frontend.BaseCompressor`.

    Raises:
        ValueError: an argument is out of range.
        ImportError: Horovod is missing, or was built without PyTorch.
    """

    _unbound = (*BaseCompressor._unbound, "_finder", "_direct", "_chains", "_steps", "_checked")

    def __init__(self, scheme: Scheme, **common: Any) -> None:
        require_horovod()
        super().__init__(scheme, **common)

    def _check_kernels(self) -> None:
        memories.check(self._kernels, self.policy.schemes)

    def _name_parameters(self, named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        self._finder = None if named_parameters is None else ParameterFinder(named_parameters)
        if self._finder is not None:
            self.policy.check_names(name for name, _ in self._finder.named)

    def _bind(self) -> None:
        self._direct: dict[str, Schedule] = {}
        self._chains: dict[str, KeyChain] = {}
        self._steps: dict[str, int] = {}
        self._checked: Any = (
            weakref.WeakKeyDictionary()
        )  # optimizer or process set: its size when last checked

    def _exchange_counts(self) -> dict[str, int]:
        return dict(self._steps)

    def _resume_at(self, counts: dict[str, int]) -> None:
        self._steps = counts

    # ---- what Horovod calls ----------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Takes a gradient; returns what Horovod shall reduce, and a context for `decompress`.

        Raises:
            TypeError: the tensor is not of a floating-point type.
            ValueError: an argument does not fit the number of workers, the parameters' names or the operation.
        """
        call = self._call_for(tensor)
        process_set = call.process_set
        name = call.name if call.name is not None else unnamed(tensor.shape)
        size = process_set.size()
        self._check(call, name, tensor, size)
        self._traffic.expect(name, ring_allreduce_bytes(4 * tensor.numel(), size))
        scheme = self.policy.scheme_for(name, tensor.numel())
        destination = tensor if call.optimizer is not None else torch.empty_like(tensor)
        if scheme is None:
            return self._pass_through(tensor, destination, name, size)
        return self._submit(tensor, destination, name, scheme, call, size)

    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Takes what Horovod reduced and the context; returns the reduced gradient in its own dtype and shape.

        Raises:
            RuntimeError: the workers meant different gradients.
        """
        if ctx is None:
            return output
        if isinstance(ctx, _Unchanged):
            return ctx.destination.copy_(output)
        group = ctx.schedule.finish(ctx.submission)
        factor = self._factor(ctx.submission.name, ctx.signs, output.tolist())
        group.deliver(ctx.submission.index, factor)
        ctx.schedule.factor = factor
        for kept, used in ctx.submission.state_copies:
            kept.copy_(used)
        if isinstance(ctx.call.optimizer, optim.BinSGDM):
            ctx.call.optimizer.mark_exchanged(ctx.call.parameter)
        return ctx.submission.destination

    # ---- compress, step by step ------------------------------------------------------------------------------

    def _call_for(self, tensor: torch.Tensor) -> HorovodCall:
        call = identify(tensor, depth=3)
        if call is None:
            call = (self._finder or ParameterFinder(())).call(tensor, self._own_process_set())
        elif self._finder is not None and call.parameter is not None:
            call = call._replace(name=self._finder.name_of(tensor, call.parameter) or call.name)
        self._check_process_set(call.process_set)
        return call

    def _basics(self) -> Any:
        from horovod.torch import mpi_ops

        return mpi_ops._basics

    def _own_process_set(self) -> Any:
        from horovod.torch.mpi_ops import global_process_set

        return global_process_set if self._process_set is None else self._process_set

    def _check(self, call: HorovodCall, name: str, tensor: torch.Tensor, size: int) -> None:
        from horovod.torch.mpi_ops import Adasum, Average, Sum

        self._check_operation(call.op, (Average, Sum), Adasum)
        self._check_dtype(name, tensor.dtype, _FLOATS)
        if call.optimizer is None and tensor.requires_grad:
            raise ValueError(
                f"{name}: autograd cannot go through a quantized allreduce; detach the tensor, or leave compression "
                f"out of this call"
            )
        self._check_optimizer(call)
        if self._checked.get(call.optimizer or call.process_set) != size:
            self._check_workers(size)
            if call.optimizer is not None and self._finder is None:
                self.policy.check_names(call.optimizer._parameter_names.values())
            self._checked[call.optimizer or call.process_set] = size

    def _check_optimizer(self, call: HorovodCall) -> None:
        if isinstance(call.optimizer, optim.BinSGDM):
            raise ValueError(
                f"compression={type(self).__name__}(...): the optimizer BinSGDM goes with compression=hvq.BinSGDM()"
            )

    def _pass_through(
        self, tensor: torch.Tensor, destination: torch.Tensor, name: str, size: int
    ) -> tuple[torch.Tensor, Any]:
        sent = tensor
        if tensor.dtype is torch.bfloat16:  # Horovod reduces no bfloat16
            sent = tensor.to(torch.float32)
        if not _is_reduced_there(sent.device):
            sent = sent.cpu()
        if not sent.is_contiguous():
            sent = sent.contiguous()
        self._traffic.count(name, ring_allreduce_bytes(sent.numel() * sent.element_size(), size))
        return sent, None if sent is tensor else _Unchanged(destination)

    def _submit(
        self,
        tensor: torch.Tensor,
        destination: torch.Tensor,
        name: str,
        scheme: Scheme,
        call: HorovodCall,
        size: int,
    ) -> tuple[torch.Tensor, Any]:
        schedule = self._schedule(call, name, tensor.device)
        make = functools.partial(self._submission, call, name, scheme, schedule.memory)
        submission = schedule.submit(name, functools.partial(make, tensor), make)
        submission.destination = destination

        signs = self._signs(name, tuple(tensor.shape), tensor.dtype, scheme)
        dtype = tensor.dtype if call.grouped and tensor.dtype is not torch.bfloat16 else torch.float32
        carrier = _carrier(signs, dtype).clone()
        if call.grouped and tensor.is_cuda and _is_reduced_there(tensor.device):
            # A group's tensors must be on one device.
            carrier = carrier.pin_memory().to(tensor.device, non_blocking=True)
        carrier_bytes = carrier.numel() * carrier.element_size()
        self._traffic.count(name, ring_allreduce_bytes(carrier_bytes, size))
        return carrier, _Carried(submission, schedule, signs, call)

    def _schedule(self, call: HorovodCall, name: str, device: torch.device) -> Schedule:
        """The schedule of the optimizer that calls; it lives as long as the optimizer."""
        if call.optimizer is None:
            schedules: Any = self._direct
            key: Any = name.rpartition(".")[0] if call.grouped else name
        else:
            schedules, key = vars(call.optimizer).setdefault("_horovod_quant_schedules", {}), self
        if key not in schedules:
            if call.optimizer is not None:
                devices = {parameter.device for parameter in call.optimizer._parameter_names}
                device = device if len(devices) == 1 else torch.device("cpu")
            names = [key] if call.optimizer is None else call.optimizer._parameter_names.values()
            schedules[key] = Schedule(
                call.process_set,
                functools.partial(self._nodes, call.process_set),
                memories.choose(self._kernels, device, self.policy.schemes),
                self.group_bytes,
                self.overlap and call.optimizer is not None,
                0 if call.optimizer is None else len(names),
                tuple
                if call.optimizer is None
                else functools.partial(handles_of, weakref.ref(call.optimizer)),
                self._traffic.count,
                min(names),
                self._arguments(),
            )
        return schedules[key]

    def _nodes(self, process_set: Any) -> nodes.Nodes:
        if not self.hierarchical:
            return nodes.flat(process_set)
        import horovod.torch as hvd
        from horovod.torch import mpi_ops

        def gather(own: list[int]) -> list[list[int]]:
            return hvd.allgather(torch.tensor([own]), name="horovod_quant.nodes").tolist()

        return nodes.find(hvd, self._basics(), self.hierarchical, mpi_ops._handle_map, gather)

    def _submission(
        self, call: HorovodCall, name: str, scheme: Scheme, memory: Memory, tensor: torch.Tensor | None = None
    ) -> Submission:
        """A submission of ``tensor``, by default of the parameter's gradient as Horovod will find it."""
        if tensor is None:
            gradient = call.parameter.grad
            tensor = torch.zeros_like(call.parameter) if gradient is None else gradient.to_dense()
        values = memory.taken(tensor)
        if name not in self._chains:
            self._chains[name] = KeyChain(self.seed, name)
        step, open_state = self._state(call, name, memory)
        return Submission(
            Gradient(self._taken(call, values, memory), self._chains[name], step), scheme, open_state
        )

    def _taken(self, call: HorovodCall, values: Any, memory: Memory) -> Any:
        """What the scheme gets for a gradient."""
        return values

    def _state(
        self, call: HorovodCall, name: str, memory: Memory
    ) -> tuple[int, Callable[[int, int, Any], OpenState] | None]:
        """The number of the gradient's exchange, and what gives its state, if it has one."""
        step = self._steps.get(name, 0)
        self._steps[name] = step + 1
        return step, None


@functools.lru_cache(maxsize=4096)
def _carrier(signs: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor((1.0, *signs), dtype=dtype)


def _is_reduced_there(device: torch.device) -> bool:
    """Whether Horovod gets tensors on the device as they are; one that was built for CPUs takes none on a GPU."""
    import horovod.torch as hvd

    return device.type == "cpu" or (bool(hvd.cuda_built()) and not memories.is_staging_asked_for())


class QSGD(QSGDArguments, Compressor):
    __doc__ = QSGDArguments.__doc__


class NUQSGD(NUQSGDArguments, Compressor):
    __doc__ = NUQSGDArguments.__doc__


class GlobalQSGD(GlobalQSGDArguments, Compressor):
    __doc__ = GlobalQSGDArguments.__doc__


class BinSGDM(BinSGDMArguments, Compressor):
    """BinSGDM's 1-bit exchange, for the optimizer `horovod_quant.torch.optim.BinSGDM`.

    Momentum and scale are the optimizer's state; the optimizer's ``beta`` counts.

    Args:
        beta: None, or the optimizer's ``beta`` once more, to have it checked.
        **common: see `Compressor`.
    """

    def _check_optimizer(self, call: HorovodCall) -> None:
        if not isinstance(call.optimizer, optim.BinSGDM):
            given = (
                "no optimizer" if call.optimizer is None else f"the optimizer {type(call.optimizer).__name__}"
            )
            raise ValueError(
                f"compression=BinSGDM(): it needs the optimizer of the same name, and was used with {given}; use "
                f"hvd.DistributedOptimizer(horovod_quant.torch.optim.BinSGDM(model.parameters(), lr=...), ...)"
            )
        self._check_beta(group["beta"] for group in call.optimizer.param_groups)

    def _state(
        self, call: HorovodCall, name: str, memory: Memory
    ) -> tuple[int, Callable[[int, int, Any], OpenState] | None]:
        step = call.optimizer.count_update(call.parameter)
        return step, functools.partial(self._open_state, call, memory)

    def _taken(self, call: HorovodCall, values: Any, memory: Memory) -> Any:
        with memory.working():
            return clipped(memory.kernels, values, call.optimizer.clip_norm_of(call.parameter))

    def _open_state(
        self, call: HorovodCall, memory: Memory, start: int, stop: int, process_set: Any
    ) -> OpenState:
        held = call.optimizer.held_state(call.parameter, start, stop, process_set)
        momentum, scale = held.momentum.to(memory.device), held.scale.to(memory.device)
        in_place = momentum is held.momentum
        copies = () if in_place else ((held.momentum, momentum), (held.scale, scale))
        return BinaryState(memory.flat(momentum), memory.flat(scale), held.beta), copies
