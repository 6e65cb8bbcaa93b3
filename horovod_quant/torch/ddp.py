"""Quantized gradients for ``DistributedDataParallel``, without Horovod.

import horovod_quant.torch as hvq
state = hvq.ddp.register(ddp_model, hvq.QSGD(bits=4))
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import torch
import torch.distributed as dist

from horovod_quant.torch import optim
from horovod_quant.torch.averaging import Averager, Bucket, HookState, Member, require_usable
from horovod_quant.torch.binsgdm import BinSGDMCompressor, HookedParameter
from horovod_quant.torch.compressor import FLOATS, Compressor
from horovod_quant.torch.driver import Driver
from horovod_quant.torch.parameter_names import named_parameters, unwrapped


class State(HookState):
    """State of `hook` for a model.

    Create one on every worker of the model's process group.

    Args:
        ddp_model: the model, wrapped in ``DistributedDataParallel``.
        compression: a compressor, such as ``hvq.QSGD(bits=4)``, with the same arguments on all workers. Gradients have
            the names of ``ddp_model.module.named_parameters()``, or of its ``named_parameters=``. DDP's buckets are the
            groups, so its ``group_bytes`` and ``overlap`` have no effect. Counting continues from the compressor's
            counts, for example after ``load_state_dict()``.
        optimizer: the model's ``hvq.optim.BinSGDM``, for ``hvq.BinSGDM()``, which reduces gradients to bits that only
            this optimizer can use.

    Attributes:
        compression: the compressor.

    Raises:
        ValueError: an argument is out of range, or does not fit the model or the other workers' arguments.
        TypeError: a gradient's type cannot be quantized.
    """

    def __init__(
        self,
        ddp_model: torch.nn.parallel.DistributedDataParallel,
        compression: Compressor,
        optimizer: optim.BinSGDM | None = None,
    ) -> None:
        _require_model(ddp_model)
        require_usable(compression, "ddp")
        self.compression = compression
        finder = compression._finder
        if finder is not None:
            finder.match(unwrapped(ddp_model).parameters())
        everything = named_parameters(ddp_model, None if finder is None else finder.named)
        ignored = {
            id(each)
            for name, each in ddp_model.module.named_parameters()
            if name in ddp_model.parameters_to_ignore
        }
        named = {
            name: each for name, each in everything.items() if each.requires_grad and id(each) not in ignored
        }
        _require_floats(compression, named)
        _require_optimizer(compression, optimizer, ddp_model, named)
        self._optimizer = optimizer
        compression._warn_if_nothing_is_compressed({name: each.numel() for name, each in named.items()})
        device = next((each.device for each in named.values()), torch.device("cpu"))
        shapes = {name: tuple(each.shape) for name, each in named.items()}
        self._model = weakref.ref(ddp_model)
        # DDP may also reduce parameters that have been frozen since it was constructed.
        self._names = {id(each): (weakref.ref(each), name) for name, each in everything.items()}
        self._buckets: dict[int, _DDPBucket] = {}
        averager = Averager(compression, ddp_model.process_group, device, shapes, everything)
        averager.warn_if_it_sends_more(compression, bool(compression.hierarchical))
        self._averager = averager
        self._driver = Driver(averager.groups, device)

    def __getstate__(self) -> dict[str, Any]:
        """Return the compressor and its counts.

        Neither thread nor process group can be copied.
        """
        return {"compression": self.compression, "counts": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.compression = state["compression"]
        self._averager = self._optimizer = None
        self.compression.load_state_dict(state["counts"])

    def _average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Submit a DDP bucket to be averaged in place."""
        averager = self._attached()
        if not isinstance(bucket, dist.GradBucket):
            raise TypeError(
                "ddp: torch.compile handed over gradients without their bucket; leave optimize_ddp='python_reducer' "
                "out of torch._dynamo.config"
            )
        if not getattr(self._model(), "_divide_by_initial_world_size", True):
            raise ValueError(
                "ddp: join(divide_by_initial_world_size=False) is not supported, since DDP does not tell a hook the "
                "number of remaining workers; leave the argument out"
            )
        self._driver.guard.require_sound()
        buffer = bucket.buffer()
        try:
            job = self._job(averager, bucket, buffer)
        except Exception as problem:
            job = _raising(problem)  # the thread tells the other workers
        return self._driver.submit(job, buffer)

    def _job(self, averager: Averager, bucket: Any, buffer: torch.Tensor) -> Callable[[], None]:
        """Return what the thread runs for a bucket."""
        if buffer.is_sparse:
            for parameter in bucket.parameters():
                averager.uncounted.add(self._name_of(parameter))
            return lambda: _average_sparse(averager, buffer)
        parameters = bucket.parameters()
        known = self._buckets.get(bucket.index())
        if known is None or known.identities != list(map(id, parameters)):
            if known is not None:
                self._buckets.clear()  # DDP has rebuilt them: the others would keep the old ones' memory alive
            members = list(map(self._member, parameters))
            known = self._buckets[bucket.index()] = _DDPBucket(averager.bucket(members), parameters)
        gradients = known.gradients_in(buffer)
        memory = averager.memory(buffer.device)
        averager.count(known.bucket)
        return lambda: averager.average(known.bucket, gradients, memory)

    def _member(self, parameter: torch.Tensor) -> Member:
        name, hooked = self._name_of(parameter), None
        if self._optimizer is not None:
            assert isinstance(self.compression, BinSGDMCompressor)
            hooked = HookedParameter(self.compression, self._optimizer, parameter, name)
        return Member(name, parameter.numel(), hooked=hooked)

    def _name_of(self, parameter: torch.Tensor) -> str:
        reference, name = self._names.get(id(parameter), (None, ""))
        if reference is None or reference() is not parameter:
            raise RuntimeError(
                f"ddp: a gradient of shape {list(parameter.shape)} belongs to no parameter that the model had when the "
                f"hook was registered; register it on a new DistributedDataParallel after changing parameters"
            )
        return name


class _DDPBucket:
    """Cached layout of a DDP bucket.

    Attributes:
        bucket: the scheme of each gradient.
        identities: the ``id()`` of each parameter.
    """

    def __init__(self, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> None:
        self.bucket = bucket
        self.identities = list(map(id, parameters))
        self._elements = [each.numel() * (2 if each.is_complex() else 1) for each in parameters]
        self._layouts = list(map(_layout, parameters))
        self._dtype = parameters[0].dtype
        self._buffer: torch.Tensor | None = None
        self._gradients: list[torch.Tensor] = []

    def gradients_in(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients as views of the buffer.

        The same list for the same buffer. ``bucket.gradients()`` would drop their strides.
        """
        last = self._buffer
        if last is not None and last.data_ptr() == buffer.data_ptr() and last.dtype is buffer.dtype:
            return self._gradients
        if sum(self._elements) != buffer.numel():
            raise RuntimeError(
                f"ddp: a DDP bucket has {buffer.numel()} elements, unlike its parameters; this version of PyTorch "
                f"({torch.__version__}) has another bucket layout"
            )
        gradients = [
            part.as_strided(*layout) if layout else part
            for part, layout in zip(buffer.split(self._elements), self._layouts)
        ]
        # A wrapper of this hook has made a buffer of another dtype for this step alone.
        self._buffer, self._gradients = (buffer, gradients) if buffer.dtype is self._dtype else (None, [])
        return gradients


def _layout(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return the gradient's shape and strides in DDP.

    They are the parameter's, if these leave no gaps. A flat gradient has none.
    """
    if parameter.is_contiguous() or parameter.is_complex():
        return ()
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape)):
        if size > 1 and stride != expected:
            return ()
        expected *= size
    return parameter.shape, parameter.stride()


# DDP requires the argument name `bucket`, and rejects string annotations, which this module's annotations are.
def hook(state, bucket):
    """The communication hook: ``ddp_model.register_comm_hook(hvq.ddp.State(ddp_model, compression), hvq.ddp.hook)``.

    Args:
        state: the model's state.
        bucket: DDP's bucket, whose gradients are averaged in place.
    """
    return state._average(bucket)


def register(
    ddp_model: torch.nn.parallel.DistributedDataParallel,
    compression: Compressor,
    optimizer: optim.BinSGDM | None = None,
) -> State:
    """Average a model's gradients with a compressor.

    To be called on all workers of the model's process group.

    Args:
        ddp_model: the model, wrapped in ``DistributedDataParallel``, before its first backward pass.
        compression, optimizer: see `State`.

    Returns:
        The state: `State.stats` has the bytes sent, and `State.state_dict` belongs in checkpoints.

    Raises:
        ValueError, TypeError: see `State`.
        RuntimeError: the model has a hook already.
    """
    state = State(ddp_model, compression, optimizer)
    ddp_model.register_comm_hook(state, hook)
    return state


def _raising(problem: Exception) -> Callable[[], None]:
    def job() -> None:
        raise problem

    return job


def _average_sparse(averager: Averager, buffer: torch.Tensor) -> None:
    """Average a sparse gradient without compression.

    Other workers do not know its rows.
    """
    total = averager.sum(buffer).div_(averager.groups.workers.size)
    if total is not buffer:  # the buffer is on a GPU
        buffer.copy_(total)


def _require_model(ddp_model: Any) -> None:
    if not isinstance(ddp_model, torch.nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"ddp_model={type(ddp_model).__name__}(...): wrap the model in "
            f"torch.nn.parallel.DistributedDataParallel first, and give that"
        )
    if getattr(ddp_model, "mixed_precision", None) is not None:
        raise ValueError(
            "ddp: DistributedDataParallel(mixed_precision=...) registers another hook, and a model can have only one; "
            "leave it out, and use torch.autocast"
        )
    if any(hasattr(each, "_in_backward_optimizers") for each in ddp_model.module.parameters()):
        raise ValueError(
            "ddp: an optimizer that steps in the backward pass registers another hook, and a model can have only one; "
            "leave _apply_optimizer_in_backward out"
        )


def _require_optimizer(
    compression: Compressor,
    optimizer: Any,
    ddp_model: torch.nn.parallel.DistributedDataParallel,
    named: Mapping[str, torch.Tensor],
) -> None:
    """Raise ValueError unless the optimizer suits the compressor."""
    if not isinstance(compression, BinSGDMCompressor):
        if optimizer is not None:
            raise ValueError(
                f"ddp: optimizer={type(optimizer).__name__}(...) is for compression=hvq.BinSGDM(); leave it out"
            )
        return
    compression._check_optimizer(optimizer)
    for name, parameter in named.items():
        is_compressed = compression.policy.scheme_for(name, parameter.numel()) is not None
        if is_compressed and not optimizer.has(parameter):
            raise ValueError(
                f"ddp: {name} is not among the optimizer's parameters; construct the optimizer from "
                f"model.parameters(), or add exclude={name!r} to the compressor"
            )
    if ddp_model.find_unused_parameters and ddp_model.gradient_as_bucket_view:
        raise ValueError(
            "ddp: with find_unused_parameters=True and gradient_as_bucket_view=True a parameter that no worker uses "
            "gets bits as its gradient; leave one of them out with hvq.BinSGDM()"
        )


def _require_floats(compression: Compressor, named: Mapping[str, torch.Tensor]) -> None:
    for name, parameter in named.items():
        chosen = compression.policy.scheme_for(name, parameter.numel())
        if chosen is not None and parameter.dtype not in FLOATS:
            raise TypeError(
                f"{name}: a gradient of dtype {parameter.dtype} cannot be quantized; add exclude={name!r} to the "
                f"compressor"
            )
