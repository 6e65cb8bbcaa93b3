"""Identification of ``compress``'s caller; the only module that inspects Horovod's frames.

Horovod calls ``compress(tensor)`` without naming the parameter, operation or process set; the calling frame has them.
Tested with Horovod 0.28.1, and with 0.27.0 by scripts/test-horovod.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, Callable, Union

import torch

from horovod_quant.frontends.calls import Positions
from horovod_quant.frontends.installing import require_horovod
from horovod_quant.frontends.step_counts import UNNAMED

_FRAMES_AT_MOST = 32
"""Maximum frames between ``compress`` and Horovod, for example of wrapping compressors."""

_UNRECOGNISED = (
    "horovod_quant cannot tell which parameter this gradient belongs to: the caller of compress() is not a Horovod "
    "function that it knows. Give the compressor named_parameters=model.named_parameters()"
)

_POSITIONS = Positions()


class OptimizerCall:
    """A ``DistributedOptimizer``'s request to reduce the gradient of one of its parameters.

    Args:
        optimizer: the calling optimizer; not kept alive.
        parameter: the gradient's parameter.
        grouped: whether the control tensor shares a grouped allreduce with others, hence must be on their device.

    Attributes:
        name: Horovod's name for the operation, or the name given to the compressor.
        op: the reduction.
        process_set: the process set that reduces.
    """

    def __init__(self, optimizer: Any, parameter: torch.Tensor, grouped: bool) -> None:
        from horovod.torch.mpi_ops import Adasum, global_process_set

        self._optimizer = weakref.ref(optimizer)  # weak, since the optimizer keeps its calls
        self.parameter = parameter
        self.grouped = grouped
        self.name: str = optimizer._parameter_names[parameter]
        self.op = Adasum if hasattr(optimizer, "_starting_models") else optimizer.op
        self.process_set = getattr(optimizer, "process_set", global_process_set)

    @property
    def optimizer(self) -> Any:
        return self._optimizer()

    @property
    def caller(self) -> Any:
        """The object that makes such calls repeatedly."""
        return self.optimizer

    def destination(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor for the result: the gradient itself."""
        return tensor

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Return the device on which the optimizer's gradients are reduced."""
        devices = {parameter.device for _, parameter in self.expected()}
        return tensor.device if len(devices) == 1 else torch.device("cpu")

    @property
    def label(self) -> str:
        """Alphabetically first of Horovod's names of the optimizer's gradients.

        Horovod may have further names, on one worker alone or for another optimizer.
        """
        return min(name for name, _ in self.expected())

    def expected(self) -> list[tuple[str, torch.Tensor]]:
        """Return names and parameters of the gradients reduced in each step.

        They are in the optimizer's order, and include parameters that no backward pass has reached.
        """
        optimizer = self.optimizer
        names = optimizer._parameter_names
        reduced = getattr(optimizer, "_requires_update", None)
        named = [p for group in optimizer.param_groups for p in group["params"] if p in names]
        # Some scripts empty _requires_update, so that Horovod does not wait for gradients that never come.
        return [(names[p], p) for p in named if (p in reduced if reduced else p.requires_grad)]

    def is_under_way(self) -> bool:
        """True if the optimizer has operations under way."""
        handles = getattr(self.optimizer, "_handles", {None: (True, None)})
        return any(handle is not None for handle, _ in handles.values())


class DirectCall:
    """A call of ``hvd.allreduce`` or ``hvd.grouped_allreduce``, or by an unknown caller.

    Args:
        name: the gradient's name.
        label: the name of the operation, which may be for several gradients.
        op: the reduction; None if the caller is unknown.
        process_set: the process set that reduces.
        grouped: see `OptimizerCall`.
    """

    def __init__(self, name: str, label: str, op: Any, process_set: Any, grouped: bool = False) -> None:
        self.name = name
        self.label = label
        self.op = op
        self.process_set = process_set
        self.grouped = grouped

    @property
    def caller(self) -> Any:
        return self.process_set

    def destination(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)

    def device(self, tensor: torch.Tensor) -> torch.device:
        return tensor.device


Call = Union[OptimizerCall, DirectCall]


def asking_optimizer() -> tuple[Any, Any]:
    """Return optimizer and parameter of an optimizer's call, or None twice.

    This is cheap and covers most gradients; `identify` handles all other calls, such as grouped ones and those of
    Horovod releases that name the parameter differently.
    """
    frame = sys._getframe(2)
    if frame.f_code is not _hook_code():
        return None, None
    variables = frame.f_locals
    optimizer, parameter = variables.get("self"), variables.get("p")
    return (None, None) if parameter is None else (optimizer, parameter)


@functools.cache
def _hook_code() -> CodeType | None:
    require_horovod("torch", "PyTorch")
    from horovod.torch.optimizer import _DistributedOptimizer

    return getattr(_DistributedOptimizer._allreduce_grad_async, "__code__", None)


def identify(tensor: Any) -> Call | None:
    """Identify the call that reduces a tensor by Horovod's nearest frame.

    Returns None if it is unknown. Compressors that wrap this one may be between ``compress`` and Horovod.

    Args:
        tensor: the argument of ``compress``.
    """
    frame = _nearest_of_horovod(sys._getframe(1))
    if frame is None:
        return None
    variables = dict(frame.f_locals)
    if frame.f_code.co_name in ("<listcomp>", "<genexpr>") and frame.f_back is not None:  # before Python 3.12
        frame = frame.f_back
        variables = {**frame.f_locals, **variables}
    function = frame.f_code.co_name
    if function in ("_allreduce_grad_async", "_grouped_allreduce_grad_async"):
        optimizer, parameter = variables.get("self"), variables.get("p")
        if parameter is None or parameter not in getattr(optimizer, "_parameter_names", {}):
            return None
        return OptimizerCall(optimizer, parameter, function.startswith("_grouped"))
    if function == "allreduce" and {"name", "op", "process_set"} <= variables.keys():
        name = UNNAMED if variables["name"] is None else variables["name"]
        return DirectCall(name, name, _op(variables), variables["process_set"])
    if function == "grouped_allreduce" and {"name", "op", "process_set", "tensors"} <= variables.keys():
        name = "grouped" if variables["name"] is None else variables["name"]
        position = _POSITIONS.next_of(tensor, variables["tensors"], frame)
        return DirectCall(f"{name}.{position}", name, _op(variables), variables["process_set"], grouped=True)
    if function in ("reducescatter", "grouped_reducescatter"):
        raise ValueError(
            f"compression= of {function}: horovod_quant compresses only allreduce; leave compression out there"
        )
    return None


def _nearest_of_horovod(frame: FrameType | None) -> FrameType | None:
    for _ in range(_FRAMES_AT_MOST):
        if frame is None:
            return None
        if str(frame.f_globals.get("__name__", "")).startswith("horovod."):
            return frame
        frame = frame.f_back
    return None


def _op(variables: Any) -> Any:
    from horovod.torch.mpi_ops import Average, Sum

    if variables["op"] is not None:
        return variables["op"]
    return Sum if variables.get("average") is False else Average


class ParameterFinder:
    """Lookup of the names given to a compressor, by parameter.

    For callers that `identify` does not know, it finds names by the identity of gradients. A copied or unpickled finder
    has names only, and takes the parameters from the first optimizer or DDP model that uses it.

    Args:
        named_parameters: pairs of a name and a parameter.
    """

    def __init__(self, named_parameters: Any) -> None:
        self.named = list(named_parameters)
        self._unmatched: list[tuple[str, tuple[int, ...]]] = []
        self._next = 0

    def __getstate__(self) -> list[tuple[str, tuple[int, ...]]]:
        return self._unmatched or [(name, tuple(parameter.shape)) for name, parameter in self.named]

    def __setstate__(self, state: list[tuple[str, tuple[int, ...]]]) -> None:
        self.named, self._unmatched, self._next = [], state, 0

    def name_of(self, call: OptimizerCall) -> str | None:
        """Return the name of the call's parameter, or None.

        Raises:
            ValueError: the names of a copy do not fit the optimizer's parameters.
        """
        self.match(parameter for group in call.optimizer.param_groups for parameter in group["params"])
        return self._find(lambda parameter: parameter is call.parameter)

    def match(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give the names of a copy to parameters, by their order.

        Raises:
            ValueError: the shapes are others.
        """
        if not self._unmatched:
            return
        parameters = list(parameters)
        if [tuple(each.shape) for each in parameters] != [shape for _, shape in self._unmatched]:
            raise ValueError(
                f"named_parameters: this compressor is a copy, which has {len(self._unmatched)} names but no "
                f"parameters, and the {len(parameters)} parameters here have different shapes; construct a new "
                f"compressor with named_parameters="
            )
        self.named = [(name, parameter) for (name, _), parameter in zip(self._unmatched, parameters)]
        self._unmatched = []

    def direct_call(self, tensor: Any, process_set: Any) -> DirectCall:
        """Return the call of an unknown caller, named by its gradient.

        Raises:
            RuntimeError: the tensor is no gradient of the named parameters.
        """
        name = self._find(lambda parameter: parameter.grad is tensor)
        if name is None:
            raise RuntimeError(_UNRECOGNISED)
        # All gradients share buckets: an unknown caller may fetch results in different orders on different workers.
        return DirectCall(name, min(name for name, _ in self.named), None, process_set)

    def _find(self, is_meant: Callable[[Any], bool]) -> str | None:
        # Gradients arrive in much the same order each step, so the successor of the last one found is tried first.
        for offset in range(len(self.named)):
            position = (self._next + offset) % len(self.named)
            name, candidate = self.named[position]
            if is_meant(candidate):
                self._next = position + 1
                return name
        return None
