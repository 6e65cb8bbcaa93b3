"""The compressors that go into ``hvd.DistributedOptimizer(compression=...)``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from horovod_quant import kernels as kernel_backends
from horovod_quant import schemes
from horovod_quant.kernels.keys import KeyChain
from horovod_quant.policy import Policy
from horovod_quant.schemes.base import BinaryState, Gradient, Scheme, require_int
from horovod_quant.stats import Stats, TrafficCounter
from horovod_quant.torch import optim
from horovod_quant.torch.exchange import Submission, carrier_signs, flat_array
from horovod_quant.torch.horovod_call import HorovodCall, ParameterFinder, identify, require_horovod
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
    destination: torch.Tensor
    signs: tuple[float, ...]
    call: HorovodCall


class Compressor:
    """A compressor for ``hvd.DistributedOptimizer``, ``hvd.allreduce`` and ``hvd.grouped_allreduce``.

    Horovod asks to compress each gradient. The compressor exchanges the gradient itself, quantized, over Horovod's
    own collectives, and hands Horovod a small *carrier* instead: ``[1, +-1 x 16]``. What Horovod makes of its first
    element tells the factor (average or sum, pre- and postscaling, workers that have joined), and the signs, which
    depend on the gradient's name, tell whether all workers mean the same gradient.

    Args:
        scheme: the scheme and its arguments.
        min_elements: smaller gradients go through Horovod unchanged.
        exclude: names or shell-style patterns of gradients that go through Horovod unchanged.
        overrides: other arguments of the scheme for names or patterns, e.g. ``{"head.*": {"bits": 8}}``.
        seed: of the random rounding; the same on all workers.
        kernels: ``"auto"`` or the name of a backend.
        named_parameters: names for the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        process_set: where the gradients are reduced; by default what the optimizer says.
        group_bytes: bytes of gradients that share collectives.
        overlap: whether exchanges run during the backward pass, from an optimizer's second step on. Without it they
            start when the pass is over.

    Raises:
        ValueError: an argument is out of range.
        ImportError: Horovod is missing, or was built without PyTorch.
    """

    def __init__(
        self,
        scheme: Scheme,
        *,
        min_elements: int = 1024,
        exclude: str | Sequence[str] = (),
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        kernels: str = "auto",
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        process_set: Any = None,
        group_bytes: int = 32 * 2**20,
        overlap: bool = True,
    ) -> None:
        require_horovod()
        require_int("seed", seed, 0, 2**63 - 1)
        require_int("group_bytes", group_bytes, 1, 2**62)
        self.policy = Policy(scheme, min_elements, exclude, overrides)
        self.seed = seed
        self.group_bytes = group_bytes
        self.overlap = overlap
        self._kernels = kernels
        self._process_set = process_set
        kernel_backends.get(kernels)
        self._finder = None if named_parameters is None else ParameterFinder(named_parameters)
        if self._finder is not None:
            self.policy.check_names(name for name, _ in self._finder.named)
        self._bind()

    def _bind(self) -> None:
        self._traffic = TrafficCounter()
        self._direct: dict[str, Schedule] = {}
        self._chains: dict[str, KeyChain] = {}
        self._steps: dict[str, int] = {}
        self._checked: Any = (
            weakref.WeakKeyDictionary()
        )  # optimizer or process set: its size when last checked

    def __getstate__(self) -> dict[str, Any]:
        unbound = ("_finder", "_process_set", "_traffic", "_direct", "_chains", "_steps", "_checked")
        return {name: value for name, value in self.__dict__.items() if name not in unbound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _finder=None, _process_set=None)
        self._bind()

    def stats(self) -> Stats:
        """Bytes that this worker has sent, for each parameter and in total, and what float32 would have sent."""
        return self._traffic.stats()

    # ---- what Horovod calls ----------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Takes a gradient; returns what Horovod shall reduce, and a context for `decompress`.

        Raises:
            TypeError: the tensor is not of a floating-point type.
            ValueError: an argument does not fit the number of workers, the parameters' names or the operation.
        """
        call = self._call_for(tensor)
        process_set = call.process_set
        name = call.name if call.name is not None else "unnamed." + "x".join(map(str, tensor.shape))
        self._check(call, name, tensor)
        size = process_set.size()
        self._traffic.expect(name, ring_allreduce_bytes(4 * tensor.numel(), size))
        scheme = self.policy.scheme_for(name, tensor.numel())
        destination = tensor if call.optimizer is not None else torch.empty_like(tensor)
        if scheme is None:
            return self._pass_through(tensor, destination, name, size)
        return self._submit(tensor, destination, name, scheme, call)

    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Takes what Horovod reduced and the context; returns the reduced gradient in its own dtype and shape.

        Raises:
            RuntimeError: the workers meant different gradients.
        """
        if ctx is None:
            return output
        if isinstance(ctx, _Unchanged):
            return ctx.destination.copy_(output)
        decoded = ctx.schedule.finish(ctx.submission)
        factor = self._factor(output, ctx) / decoded.active
        destination = ctx.destination
        direct = destination.is_contiguous() and destination.device.type == "cpu"
        target = destination if direct else torch.empty(destination.shape, dtype=destination.dtype)
        decoded.write(ctx.submission.index, factor, flat_array(target))
        for kept, used in ctx.submission.state_copies:
            kept.copy_(used)
        if isinstance(ctx.call.optimizer, optim.BinSGDM):
            ctx.call.optimizer.mark_exchanged(ctx.call.parameter)
        return destination if direct else destination.copy_(target)

    # ---- compress, step by step ------------------------------------------------------------------------------

    def _call_for(self, tensor: torch.Tensor) -> HorovodCall:
        call = identify(tensor, depth=3)
        if call is None:
            call = (self._finder or ParameterFinder(())).call(tensor, self._own_process_set())
        elif self._finder is not None and call.parameter is not None:
            call = call._replace(name=self._finder.name_of(tensor, call.parameter) or call.name)
        if self._process_set is not None and call.process_set is not self._process_set:
            raise ValueError(
                f"process_set={self._process_set}: Horovod reduces over {call.process_set}; give both the same"
            )
        return call

    def _own_process_set(self) -> Any:
        from horovod.torch.mpi_ops import global_process_set

        return global_process_set if self._process_set is None else self._process_set

    def _check(self, call: HorovodCall, name: str, tensor: torch.Tensor) -> None:
        from horovod.torch.mpi_ops import Adasum, Average, Sum

        if call.op is not None and call.op not in (Average, Sum):
            shown = "Adasum" if call.op == Adasum else repr(call.op)
            raise ValueError(f"op={shown}: {type(self).__name__} works with op=hvd.Average and op=hvd.Sum")
        if tensor.dtype not in _FLOATS:
            raise TypeError(
                f"{name}: a gradient of dtype {tensor.dtype} cannot be quantized; use float16, bfloat16, float32 or "
                f"float64, or leave compression out of this call"
            )
        if call.optimizer is None and tensor.requires_grad:
            raise ValueError(
                f"{name}: autograd cannot go through a quantized allreduce; detach the tensor, or leave compression "
                f"out of this call"
            )
        self._check_optimizer(call)
        size = call.process_set.size()
        if self._checked.get(call.optimizer or call.process_set) != size:
            self.policy.check_workers(size)
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
        if not sent.is_contiguous():
            sent = sent.contiguous()
        self._traffic.count(name, ring_allreduce_bytes(sent.numel() * sent.element_size(), size))
        return sent, None if sent is tensor else _Unchanged(destination)

    def _submit(
        self, tensor: torch.Tensor, destination: torch.Tensor, name: str, scheme: Scheme, call: HorovodCall
    ) -> tuple[torch.Tensor, Any]:
        schedule = self._schedule(call, name)
        make = functools.partial(self._submission, call, name, scheme)
        submission = schedule.submit(name, functools.partial(make, tensor), make)

        signs = carrier_signs(f"{name} {tuple(tensor.shape)} {tensor.dtype} {scheme} {self.seed}")
        dtype = tensor.dtype if call.grouped and tensor.dtype is not torch.bfloat16 else torch.float32
        carrier = torch.tensor((1.0, *signs), dtype=dtype, device=tensor.device)
        carrier_bytes = carrier.numel() * carrier.element_size()
        self._traffic.count(name, ring_allreduce_bytes(carrier_bytes, call.process_set.size()))
        return carrier, _Carried(submission, schedule, destination, signs, call)

    def _schedule(self, call: HorovodCall, name: str) -> Schedule:
        """The schedule of the optimizer that calls; it lives as long as the optimizer."""
        if call.optimizer is None:
            schedules: Any = self._direct
            key: Any = name.rpartition(".")[0] if call.grouped else name
        else:
            schedules, key = vars(call.optimizer).setdefault("_horovod_quant_schedules", {}), self
        if key not in schedules:
            operations = len(call.optimizer._parameter_names) if call.optimizer is not None else 0
            schedules[key] = Schedule(
                call.process_set,
                kernel_backends.get(self._kernels),
                self.group_bytes,
                self.overlap and call.optimizer is not None,
                operations,
                self._traffic.count,
            )
        return schedules[key]

    def _submission(
        self, call: HorovodCall, name: str, scheme: Scheme, tensor: torch.Tensor | None = None
    ) -> Submission:
        """A submission of ``tensor``, by default of the parameter's gradient as Horovod will find it."""
        if tensor is None:
            gradient = call.parameter.grad
            tensor = torch.zeros_like(call.parameter) if gradient is None else gradient.to_dense()
        values = flat_array(tensor.detach().to("cpu").contiguous())
        if name not in self._chains:
            self._chains[name] = KeyChain(self.seed, name)
        state, step, copies = self._state(call, name)
        return Submission(Gradient(values, self._chains[name], step, state), scheme, copies)

    def _state(self, call: HorovodCall, name: str) -> tuple[BinaryState | None, int, tuple]:
        """The gradient's state, the number of its exchange, and state to copy back afterwards."""
        step = self._steps.get(name, 0)
        self._steps[name] = step + 1
        return None, step, ()

    def _factor(self, output: torch.Tensor, ctx: _Carried) -> float:
        first, *rest = output.tolist()
        if [sign * first for sign in ctx.signs] != rest:
            raise RuntimeError(
                f"{ctx.submission.name}: the workers did not exchange the same gradient here; check that all of them "
                f"have the same model, and {type(self).__name__} the same arguments"
            )
        return first


class _GatheredCompressor(Compressor):
    _scheme: type[schemes.QSGD] | type[schemes.NUQSGD]

    def __init__(
        self,
        bits: int = 4,
        norm: str = "l2",
        *,
        bucket_size: int = 1024,
        coding: str = "fixed",
        **common: Any,
    ) -> None:
        super().__init__(self._scheme(bits, norm, bucket_size, coding), **common)


class QSGD(_GatheredCompressor):
    """QSGD (``norm="l2"``) and QSGDinf (``norm="max"``): each worker's own norm, uniform levels, an allgather.

    Args:
        bits, norm, bucket_size, coding: see `horovod_quant.schemes.QSGD`.
        **common: see `Compressor`.
    """

    _scheme = schemes.QSGD


class NUQSGD(_GatheredCompressor):
    """NUQSGD: each worker's own norm, exponential levels, an allgather.

    Args:
        bits, norm, bucket_size, coding: see `horovod_quant.schemes.NUQSGD`.
        **common: see `Compressor`.
    """

    _scheme = schemes.NUQSGD


class GlobalQSGD(Compressor):
    """Global-QSGD: one scale for all workers, integers summed by allreduce.

    Args:
        bits, norm, levels, bucket_size: see `horovod_quant.schemes.GlobalQSGD`.
        **common: see `Compressor`.
    """

    def __init__(
        self,
        bits: int = 8,
        norm: str = "max",
        levels: str = "uniform",
        *,
        bucket_size: int = 1024,
        **common: Any,
    ) -> None:
        super().__init__(schemes.GlobalQSGD(bits, norm, levels, bucket_size), **common)


class BinSGDM(Compressor):
    """BinSGDM's 1-bit exchange, for the optimizer `horovod_quant.torch.optim.BinSGDM`.

    Momentum and scale are the optimizer's state; the optimizer's ``beta`` counts.

    Args:
        beta: None, or the optimizer's ``beta`` once more, to have it checked.
        **common: see `Compressor`.
    """

    def __init__(self, beta: float | None = None, **common: Any) -> None:
        if beta is not None:
            optim.require_beta(beta)
        self.beta = beta
        super().__init__(schemes.BinSGDM(), **common)

    def _check_optimizer(self, call: HorovodCall) -> None:
        if not isinstance(call.optimizer, optim.BinSGDM):
            given = (
                "no optimizer" if call.optimizer is None else f"the optimizer {type(call.optimizer).__name__}"
            )
            raise ValueError(
                f"compression=BinSGDM(): it needs the optimizer of the same name, and was used with {given}; use "
                f"hvd.DistributedOptimizer(horovod_quant.torch.optim.BinSGDM(model.parameters(), lr=...), ...)"
            )
        betas = {group["beta"] for group in call.optimizer.param_groups}
        if self.beta is not None and betas != {self.beta}:
            raise ValueError(
                f"beta={self.beta!r}: the optimizer has beta={sorted(betas)}; give both the same"
            )

    def _state(self, call: HorovodCall, name: str) -> tuple[BinaryState | None, int, tuple]:
        held = call.optimizer.binary_state(call.parameter)
        momentum, scale = held.momentum.cpu(), held.scale.cpu()
        on_cpu = momentum is held.momentum
        copies = () if on_cpu else ((held.momentum, momentum), (held.scale, scale))
        state = BinaryState(flat_array(momentum), flat_array(scale), held.beta)
        return state, held.step, copies
