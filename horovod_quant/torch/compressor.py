"""Compressors for ``hvd.DistributedOptimizer(compression=...)``."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable, Literal

import torch

from horovod_quant.frontends import nodes
from horovod_quant.frontends.calls import check_dtype, check_operation, check_process_set
from horovod_quant.frontends.frontend import BaseCompressor, gradient_fingerprint
from horovod_quant.frontends.groups import Member
from horovod_quant.frontends.policy import Policy
from horovod_quant.frontends.stats import OTHER_NAMES, Repeated, Stats
from horovod_quant.kernels.keys import RngKey
from horovod_quant.schemes.base import Gradient, Scheme
from horovod_quant.torch import memory as memories
from horovod_quant.torch import optim
from horovod_quant.torch.buckets import Buckets, DirectBuckets
from horovod_quant.torch.caller import (
    Call,
    DirectCall,
    OptimizerCall,
    ParameterFinder,
    asking_optimizer,
    identify,
)
from horovod_quant.torch.collectives import require_all
from horovod_quant.torch.control import numbers_of
from horovod_quant.torch.exchange import OpenState, PendingTensor, version_of
from horovod_quant.torch.measured import ErrorSampler
from horovod_quant.torch.memory import Memory
from horovod_quant.torch.tensor_plan import TensorPlan, known_plan, remember
from horovod_quant.torch.uncompiled import compiling, uncompiled
from horovod_quant.torch.unnamed import number_unnamed_operations
from horovod_quant.transports.traffic import ring_allreduce_bytes

Kernels = Literal["auto", "native", "numpy", "triton"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of gradients that can be quantized."""


class Compressor(BaseCompressor):
    """A compressor for ``hvd.DistributedOptimizer``, ``hvd.allreduce`` and ``hvd.grouped_allreduce``.

    Args:
        named_parameters: names of the gradients, e.g. ``model.named_parameters()``; by default Horovod's own.
        overlap: whether collectives run during the backward pass. Otherwise they start when the pass is over.
        kernels: ``"auto"``, ``"native"``, ``"numpy"``, or ``"triton"`` for gradients on a GPU. For these ``"auto"``
            chooses Triton if it is installed, except with Elias coding, ``GlobalQSGD(rotate=True)`` and schemes that
            are ``host_only``, or if an optimizer's parameters are on several devices.
        **common: see `horovod_quant.frontends.frontend.BaseCompressor`.

    Raises:
        ValueError: an argument is out of range.
    """

    _in_copies = ("_finder",)

    def __init__(self, scheme: Scheme | str, *, kernels: Kernels = "auto", **common: Any) -> None:
        super().__init__(scheme, kernels=kernels, **common)

    def _check_kernels(self) -> None:
        memories.check(self._kernels, self.policy.schemes)

    def _name_parameters(self, named_parameters: Sequence[tuple[str, torch.Tensor]] | None) -> None:
        self._finder: ParameterFinder | None = None
        if named_parameters is not None:
            self._finder = ParameterFinder(named_parameters)
            self.policy.check_names(name for name, _ in named_parameters)
            for name, parameter in named_parameters:
                # DDP averages excluded gradients of all dtypes.
                needs_float = parameter.requires_grad and not self.policy.excludes(name)
                if needs_float and not is_integral(parameter.dtype):
                    check_dtype(name, parameter.dtype, FLOATS)
            self._warn_if_nothing_is_compressed({name: each.numel() for name, each in named_parameters})

    def _bind(self) -> None:
        if "horovod.torch.mpi_ops" in sys.modules:  # DDP and FSDP2 do without
            number_unnamed_operations()
        self._sampler = ErrorSampler(self.nmse_every, self.nmse_share)
        self._resume_at({}, 0)

    def stats(self) -> Stats:
        """Return bytes sent and their float32 equivalent, per parameter and in total."""
        return super().stats()._replace(seconds_waited=self._traffic.seconds_waited, nmse=self._sampler.nmse)

    def _uncounted(self, counted: Mapping[str, Any]) -> Iterable[str]:
        given = {} if self._finder is None else {id(each): name for name, each in self._finder.named}
        for optimizer in list(self._checked):
            for parameter, name in getattr(optimizer, "_parameter_names", {}).items():
                name = given.get(id(parameter), name)
                if parameter in optimizer._requires_update and name not in counted:
                    yield name

    def _resume_at(self, counts: dict[str, int], first_step: int) -> None:
        super()._resume_at(counts, first_step)
        self._direct = DirectBuckets(first_step)

    # ---- what Horovod calls ----------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor that Horovod reduces instead, and a context.

        The context is for `decompress`. Integers and booleans are returned unchanged for every operation, as with
        ``hvd.Compression.fp16``; `stats` does not count them.

        Raises:
            TypeError: the tensor has another dtype that cannot be quantized, such as a complex one.
            ValueError: an argument does not fit the number of workers, the parameters' names or the operation.
        """
        if compiling() is not None:
            return uncompiled(Compressor.compress, self, tensor)
        optimizer, parameter = asking_optimizer()
        if optimizer is not None:
            plan = known_plan(optimizer, parameter, tensor, (self, self.policy))
            if plan is not None and not plan.call.grouped:
                return self._send_again(tensor, plan)
        if is_integral(tensor.dtype):
            return tensor, None
        return self._compress(tensor, self._call_for(tensor), self.policy)

    def _compress(self, tensor: torch.Tensor, call: Call, policy: Policy | None) -> tuple[torch.Tensor, Any]:
        """Compress by a policy, or leave all gradients to Horovod (None)."""
        if isinstance(call, OptimizerCall):
            plan = known_plan(call.optimizer, call.parameter, tensor, (self, policy))
            if plan is not None and plan.call.grouped == call.grouped:
                return self._send_again(tensor, plan)
        plan = self._new_plan(tensor, call, policy)
        return self._send(tensor, plan) if plan.is_direct else self._send_again(tensor, plan)

    def decompress(self, output: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the reduced gradient with the dtype and shape of the input.

        Args:
            output: what Horovod reduced.
            ctx: the context that `compress` returned.

        Raises:
            RuntimeError: the workers reduced different gradients.
        """
        if compiling() is not None:
            return uncompiled(Compressor.decompress, self, output, ctx)
        if ctx is None:
            return output
        if not isinstance(ctx, PendingTensor):
            return ctx.copy_(output, non_blocking=True)
        begin = time.perf_counter()
        try:
            return self._finish(output, ctx)
        finally:
            self._traffic.seconds_waited += time.perf_counter() - begin

    def _finish(self, output: torch.Tensor | None, pending: PendingTensor) -> torch.Tensor:
        """Wait for the reduced gradient and decode it.

        An exception, such as one raised by a signal handler, may interrupt this anywhere. If the script then
        synchronizes again, Horovod calls this again without an output, because it has already passed the output on.
        """
        plan, fingerprint = pending.plan, pending.fingerprint
        buckets = plan.buckets
        assert buckets is not None
        if pending is plan.spare:
            assert isinstance(plan.call, OptimizerCall)
            return plan.call.parameter.grad
        buckets.close(pending)
        if output is None:
            output = pending.control_tensor  # Horovod reduced in place
        answer = plan.control_tensor.answer(output)
        if answer is None:
            sums: Sequence[float] = numbers_of(output)
            try:
                answer = self._factor(pending.name, fingerprint, sums[: 1 + len(fingerprint)]), sums
            except RuntimeError as error:
                buckets.fail(pending, error)
                raise
            plan.control_tensor.learn(output, answer)
        factor, sums = answer
        try:
            group = buckets.finish(pending)
        except ValueError as error:  # about the sizes of received arrays
            raise RuntimeError(f"{self._disagreement(pending.name)} ({error})") from error
        group.deliver(pending.index, factor)
        for kept, used in pending.state_copies:
            kept.copy_(used)
        self._delivered(plan.call, pending, sums)
        buckets.delivered(pending, factor)
        destination = pending.destination
        if self._sampler and not plan.is_direct and self.own_optimizer is None:
            self._sampler.compare(plan.call, sums[0], destination)
        plan.spare = pending
        pending.empty()
        return destination

    # ---- compress, step by step ------------------------------------------------------------------------------

    def _call_for(self, tensor: torch.Tensor) -> Call:
        call = identify(tensor)
        if call is None:
            call = (self._finder or ParameterFinder(())).direct_call(tensor, self._own_process_set())
        elif self._finder is not None and isinstance(call, OptimizerCall):
            call.name = self._finder.name_of(call) or call.name
        check_process_set(self._process_set, call.process_set, bool(self.hierarchical))
        return call

    def _basics(self) -> Any:
        from horovod.torch import mpi_ops

        return mpi_ops._basics

    def _is_initialized(self) -> bool:
        # DDP and FSDP2 need no Horovod: unless a program imports it, it is not initialized.
        return "horovod.torch.mpi_ops" in sys.modules and super()._is_initialized()

    def _own_process_set(self) -> Any:
        from horovod.torch.mpi_ops import global_process_set

        return global_process_set if self._process_set is None else self._process_set

    def _check(self, call: Call, tensor: torch.Tensor, size: int) -> None:
        from horovod.torch.mpi_ops import Adasum, Average, Sum

        check_operation(self, call.op, (Average, Sum), Adasum)
        check_dtype(call.name, tensor.dtype, FLOATS)
        if isinstance(call, DirectCall) and tensor.requires_grad:
            raise ValueError(
                f"{call.name}: autograd cannot differentiate a quantized allreduce; detach the tensor, or leave "
                f"compression out of this call"
            )
        self._check_optimizer(getattr(call, "optimizer", None))
        if self._checked.get(call.caller) != size:
            self._check_workers(size)
            if isinstance(call, OptimizerCall) and self._finder is None:
                self.policy.check_names(call.optimizer._parameter_names.values())
                self._warn_if_nothing_is_compressed(self._elements(call))
            self._checked[call.caller] = size

    def _elements(self, call: OptimizerCall) -> dict[str, int]:
        """Return the numbers of elements of an optimizer's gradients, by name."""
        return {name: parameter.numel() for name, parameter in self._named(call)}

    def _named(self, call: OptimizerCall) -> list[tuple[str, torch.Tensor]]:
        """Parameters whose gradients an optimizer's steps reduce, with their names in policies."""
        given = {} if self._finder is None else {id(p): name for name, p in self._finder.named}
        return [(given.get(id(p), name), p) for name, p in call.expected()]

    def _check_optimizer(self, optimizer: Any) -> None:
        """Raise ValueError if this method cannot work with the calling optimizer.

        ``optimizer`` is None if no optimizer calls.
        """
        if isinstance(optimizer, optim.BinSGDM):
            raise ValueError(
                f"compression={type(self).__name__}(...): the optimizer BinSGDM needs compression=hvq.BinSGDM()"
            )

    def _check_step(self, call: Any) -> None:
        """Raise an error if a step cannot begin with this gradient."""
        self._check_optimizer(call.caller)

    def _buckets(
        self, call: Call, tensor: torch.Tensor, policy: Policy, scheme: Scheme | None
    ) -> Buckets | None:
        """Return the buckets of an optimizer and policy, or a direct call.

        An optimizer's buckets live as long as it does. A direct call that compresses nothing has none.
        """
        if isinstance(call, DirectCall):
            by_process_set = self._direct.used(call.label, self._forget)
            if scheme is None:
                return None
            number = call.process_set.process_set_id
            if number not in by_process_set:
                by_process_set[number] = self._new_buckets(call, tensor, policy)
            return by_process_set[number]
        buckets = vars(call.optimizer).setdefault("_horovod_quant_buckets", {})
        if policy not in buckets:
            buckets[policy] = self._new_buckets(call, tensor, policy, **self._expectations(call, policy))
        return buckets[policy]

    def _new_buckets(self, call: Call, tensor: torch.Tensor, policy: Policy, **expectations: Any) -> Buckets:
        return Buckets(
            call.process_set,
            functools.partial(self._nodes, call.process_set),
            memories.choose(self._kernels, call.device(tensor), policy.schemes),
            self._traffic,
            call.label,
            self._arguments(),
            self.group_bytes,
            **expectations,
        )

    def _expectations(self, call: OptimizerCall, policy: Policy) -> dict[str, Any]:
        """Arguments of `Buckets` that are known before an optimizer's first step."""
        named = self._named(call)
        parameters = dict(named)
        gathers = not getattr(call.optimizer, "sparse_as_dense", False)

        def is_sparse(name: str) -> bool:
            gradient = parameters[name].grad
            return gathers and gradient is not None and gradient.is_sparse

        return {
            "overlap": self.overlap,
            "expected": [
                Member(name, scheme, p.numel() * p.element_size())
                for name, p in reversed(named)
                if (scheme := policy.scheme_for(name, p.numel())) is not None
            ],
            "operations": len(named),
            "is_under_way": call.is_under_way,
            "is_sparse": is_sparse,
        }

    def _forget(self, of: str) -> None:
        """Drop the state of a name that was not used recently."""
        for name in self._traffic.merge(of, OTHER_NAMES):
            count = self._steps.pop(name, 0)
            self._direct.first_step = max(self._direct.first_step, count)
            self._first_step = max(self._first_step, count)
            self._chains.pop(name, None)

    def _nodes(self, process_set: Any, ranks: Sequence[int] | None = None) -> nodes.Nodes:
        if not self.hierarchical:
            return nodes.flat(process_set)
        import horovod.torch as hvd
        from horovod.torch import mpi_ops

        session = mpi_ops._handle_map
        if ranks is not None and not nodes.are_known(hvd, self.hierarchical, session):
            require_all(ranks, hvd.size())  # a search needs them

        def gather(local: list[int]) -> list[list[int]]:
            values = torch.tensor([local], device="cpu")
            return hvd.allgather(values, name="horovod_quant.frontends.nodes").tolist()

        return nodes.find(hvd, self._basics(), self.hierarchical, session, gather)

    # ---- planning and submitting a gradient ------------------------------------------------------------------

    def _new_plan(self, tensor: torch.Tensor, call: Call, policy: Policy | None) -> TensorPlan:
        number_unnamed_operations()
        name, size = call.name, call.process_set.size()
        self._check(call, tensor, size)  # also one that Horovod will reduce uncompressed
        scheme = None if policy is None else policy.scheme_for(name, tensor.numel())
        buckets = None if policy is None else self._buckets(call, tensor, policy, scheme)
        keys, signs = None, tuple[float, ...]()
        if scheme is None:
            item_bytes = 4 if tensor.dtype is torch.bfloat16 else tensor.element_size()  # see `_handed_over`
            bytes_handed_over = tensor.numel() * item_bytes
        else:
            keys = self._chains.setdefault(name, RngKey(self.seed, name))
            signs = gradient_fingerprint(name, tuple(tensor.shape), tensor.dtype, scheme, self.seed)
            bytes_handed_over = max(4, tensor.element_size()) * (1 + len(signs))
        counts = (
            name,
            ring_allreduce_bytes(4 * tensor.numel(), size),
            ring_allreduce_bytes(bytes_handed_over, size),
        )
        if isinstance(call, DirectCall):  # not remembered, because its name may be dropped
            return TensorPlan(call, tensor, scheme, buckets, keys, signs, Repeated(*counts))
        plan = TensorPlan(call, tensor, scheme, buckets, keys, signs, self._traffic.repeated(*counts))
        remember(plan, (self, policy))
        return plan

    def _send_again(self, tensor: torch.Tensor, plan: TensorPlan) -> tuple[torch.Tensor, Any]:
        """Send a gradient with a known plan.

        A step's first gradients check what may change between steps.
        """
        if plan.buckets is not None and not plan.buckets.has_begun:
            self._check_step(plan.call)
        return self._send(tensor, plan)

    def _send(self, tensor: torch.Tensor, plan: TensorPlan) -> tuple[torch.Tensor, Any]:
        counted, buckets, call = plan.counted, plan.buckets, plan.call
        counted.times += 1
        if plan.is_direct:
            self._traffic.expect(call.name, counted.float32_bytes)
            self._traffic.count(call.name, counted.sent_bytes)
        if plan.scheme is None or buckets is None:
            if buckets is not None:
                buckets.arrive()
            return self._handed_over(tensor, call)
        pending: Any = buckets.asked_before(call.name, tensor)
        if pending is not None:
            return self._control_tensor(tensor, pending), pending
        assert plan.keys is not None
        if self._sampler and not plan.is_direct and self.own_optimizer is None:
            self._sampler.take(call, tensor)
        memory = buckets.memory
        pending, plan.spare = plan.spare, None
        values = memory.taken(tensor, None if pending is None else pending.taken)
        step = self._next_step(call)
        taken = self._taken(call, values, memory)
        if pending is None:
            gradient, on_start = Gradient(taken, plan.keys, step), functools.partial(self._count, call)
            pending = PendingTensor(plan, gradient, plan.scheme, on_start, self._opener(call, memory))
        else:
            pending.gradient.buffer, pending.gradient.step = taken, step
        pending.taken = values
        destination = call.destination(tensor)
        in_place = taken is values and destination is tensor and memory.can_fill(tensor, values)
        pending.destination, pending.array = destination, values if in_place else None
        pending.version = version_of(tensor)
        control_tensor = self._control_tensor(tensor, pending)
        buckets.submit(pending)
        return control_tensor, pending

    def _control_tensor(self, tensor: torch.Tensor, pending: PendingTensor) -> torch.Tensor:
        """Return the control tensor that Horovod reduces for a gradient."""
        plan = pending.plan
        more = self._also_carried(plan.call, tensor)
        fingerprint = pending.fingerprint = plan.fingerprint[len(more) :] if more else plan.fingerprint
        control_tensor = plan.control_tensor.filled(fingerprint + more if more else fingerprint)
        if plan.call.grouped and tensor.is_cuda and _is_reduced_there(tensor.device):
            # A group's tensors must be on one device.
            control_tensor = control_tensor.pin_memory().to(tensor.device, non_blocking=True)
        pending.control_tensor = control_tensor
        return control_tensor

    def _handed_over(self, tensor: torch.Tensor, call: Call) -> tuple[torch.Tensor, Any]:
        """Return a tensor that Horovod reduces uncompressed, and its context.

        That is the result's destination, or None where this is the reduced tensor itself.
        """
        sent = tensor
        if tensor.dtype is torch.bfloat16:  # Horovod reduces no bfloat16
            sent = tensor.to(torch.float32)
        if not (sent.is_cpu or _is_reduced_there(sent.device)):
            sent = torch.empty(sent.shape, dtype=sent.dtype, device="cpu", pin_memory=True).copy_(sent)
        if not sent.is_contiguous():
            sent = sent.contiguous()
        return sent, None if sent is tensor else call.destination(tensor)

    # ---- hooks of subclasses for compressed gradients --------------------------------------------------------

    def _taken(self, call: Call, values: Any, memory: Memory) -> Any:
        """Return the values that the scheme encodes for a gradient."""
        return values

    def _next_step(self, call: Call) -> int:
        """Return the gradient's step for random bits."""
        step = self._steps.get(call.name)
        return self._direct.first_step if step is None else step

    def _count(self, call: Call, step: int) -> None:
        """Count a gradient when its collectives start."""
        self._steps[call.name] = step + 1

    def _opener(self, call: Call, memory: Memory) -> Callable[[int, int, Any], OpenState] | None:
        """Return the callback that loads the gradient's state, or None."""
        return None

    def _also_carried(self, call: Call, tensor: torch.Tensor) -> tuple[float, ...]:
        """Return numbers for the control tensor in place of fingerprint parts."""
        return ()

    def _delivered(self, call: Call, pending: PendingTensor, sums: Sequence[float]) -> None:
        """Hook for a decoded gradient, with its reduced control tensor."""


def is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _is_reduced_there(device: torch.device) -> bool:
    """True if Horovod reduces this device's tensors without a copy.

    A CPU-only build accepts none on a GPU.
    """
    import horovod.torch as hvd

    return device.type == "cpu" or (bool(hvd.cuda_built()) and not memories.is_staging_asked_for())
