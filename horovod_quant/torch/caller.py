"""Who is asking? The one place that looks at Horovod's frames.

Horovod calls ``compress(tensor)`` without saying for which parameter, operation or process set. The calling frame
knows. Tested with Horovod 0.28.1, and 0.27.0 by scripts/test-horovod.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, Callable, Union

import torch

from horovod_quant.frontends.installing import install_page
from horovod_quant.frontends.step_counts import UNNAMED

_FRAMES_AT_MOST = 32
"""Between ``compress`` and Horovod: those of compressors that hand their calls on, say."""

_UNRECOGNISED = (
    "horovod_quant cannot tell which parameter this gradient belongs to: the caller of compress() is not a Horovod "
    "function that it knows. Give the compressor named_parameters=model.named_parameters()"
)


def require_horovod() -> None:
    """Raises ImportError, with the remedy, unless Horovod is installed and was built with PyTorch."""
    try:
        import horovod.torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"horovod_quant.torch needs Horovod built with PyTorch ({error}); {install_page()} has the commands"
        ) from error


class OptimizerCall:
    """A ``DistributedOptimizer`` wants to reduce the gradient of one of its parameters.

    Args:
        optimizer: the one that calls; not kept alive.
        parameter: whose gradient it is.
        grouped: whether the control tensor shares a grouped allreduce with others, hence must be on their device.

    Attributes:
        name: Horovod's name for the operation; another one, where the compressor was given names.
        op: the reduction.
        process_set: where it reduces.
    """

    def __init__(self, optimizer: Any, parameter: torch.Tensor, grouped: bool) -> None:
        from horovod.torch.mpi_ops import Adasum, global_process_set

        self._optimizer = weakref.ref(optimizer)  # which keeps its calls
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
        """Who calls again and again."""
        return self.optimizer

    def destination(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the result shall be written into: the gradient itself."""
        return tensor

    def device(self, tensor: torch.Tensor) -> torch.device:
        """Where the gradients of the optimizer are exchanged."""
        devices = {parameter.device for _, parameter in self.expected()}
        return tensor.device if len(devices) == 1 else torch.device("cpu")

    @property
    def names(self) -> list[str]:
        """Horovod's, of all gradients that it reduces for the optimizer, and of nothing else: more may be named, on one
        worker alone, or for another optimizer.
        """
        return [name for name, _ in self.expected()]

    @property
    def given_names(self) -> list[str]:
        """All that Horovod was given."""
        return list(self.optimizer._parameter_names.values())

    def expected(self) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters whose gradients Horovod reduces in each step, whether or not a pass has reached them, in
        the order in which the optimizer has them.
        """
        optimizer = self.optimizer
        names = optimizer._parameter_names
        reduced = getattr(optimizer, "_requires_update", None)
        own = [p for group in optimizer.param_groups for p in group["params"] if p in names]
        # Some scripts empty it, so that Horovod waits for no gradient that does not come.
        return [(names[p], p) for p in own if (p in reduced if reduced else p.requires_grad)]

    def is_under_way(self) -> Callable[[], bool]:
        """A function that tells whether the optimizer has operations under way."""
        optimizer = self._optimizer
        return lambda: any(
            handle is not None
            for handle, _ in getattr(optimizer(), "_handles", {None: (True, None)}).values()
        )

    def gathers(self) -> bool:
        """Whether Horovod gathers the gradients that are sparse."""
        return not getattr(self.optimizer, "sparse_as_dense", False)


class DirectCall:
    """``hvd.allreduce`` or ``hvd.grouped_allreduce``, or a caller who is unknown.

    Args:
        name: of the gradient.
        of: the name of the operation, which may be for several gradients.
        op: the reduction; None if the caller is unknown.
        process_set: where it reduces.
        grouped: see `OptimizerCall`.
    """

    def __init__(self, name: str, of: str, op: Any, process_set: Any, grouped: bool = False) -> None:
        self.name = name
        self.of = of
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

    @property
    def names(self) -> list[str]:
        return [self.of]


Call = Union[OptimizerCall, DirectCall]


def asking_optimizer() -> tuple[Any, Any]:
    """The optimizer and the parameter, if Horovod's optimizer itself called the function that calls this one, for one
    parameter alone; else two times None, as with a release of Horovod's that names the parameter otherwise.

    Cheap, and true of most gradients: `identify` finds out the rest.
    """
    frame = sys._getframe(2)
    if frame.f_code is not _hook_code():
        return None, None
    variables = frame.f_locals
    optimizer, parameter = variables.get("self"), variables.get("p")
    return (None, None) if parameter is None else (optimizer, parameter)


@functools.cache
def _hook_code() -> CodeType | None:
    require_horovod()
    from horovod.torch.optimizer import _DistributedOptimizer

    return getattr(_DistributedOptimizer._allreduce_grad_async, "__code__", None)


def identify(tensor: Any) -> Call | None:
    """Who wants to reduce the tensor, by the frame of Horovod's from which ``compress`` was called, itself or through
    compressors that hand their calls on; None if it is unknown.

    Args:
        tensor: what ``compress`` was given.
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


class _Positions(threading.local):
    """Which tensor of a list is being compressed: a list may contain the same one twice."""

    def __init__(self) -> None:
        self._frame = 0
        self._next = 0

    def next_of(self, tensor: Any, tensors: Sequence[Any], frame: FrameType) -> int:
        first = self._next if self._frame == id(frame) else 0
        order = [*range(first, len(tensors)), *range(min(first, len(tensors)))]
        position = next((i for i in order if tensors[i] is tensor), None)
        if position is None:  # a compressor that hands on another tensor than it was given
            position = order[0]
        self._frame, self._next = id(frame), (position + 1) % len(tensors)
        return position


_POSITIONS = _Positions()


def _op(variables: Any) -> Any:
    from horovod.torch.mpi_ops import Average, Sum

    if variables["op"] is not None:
        return variables["op"]
    return Sum if variables.get("average") is False else Average


class ParameterFinder:
    """Finds the names that a compressor was given: by parameters, or, for callers that `identify` does not know, by the
    identity of their gradients.

    A copy, or one that was unpickled, knows the names alone. The optimizer that it is used with first has their
    parameters.

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
        """The name of the parameter; None if it has none.

        Raises:
            ValueError: in a copy, the names cannot be those of the optimizer's parameters.
        """
        if self._unmatched:
            self._match(call.optimizer)
        return self._find(lambda parameter: parameter is call.parameter)

    def direct_call(self, tensor: Any, process_set: Any) -> DirectCall:
        """What can be said of a call from an unknown caller.

        Raises:
            RuntimeError: the tensor is no gradient of the named parameters.
        """
        name = self._find(lambda parameter: parameter.grad is tensor)
        if name is None:
            raise RuntimeError(_UNRECOGNISED)
        # All gradients share a schedule: in which order an unknown caller wants them back may differ between workers.
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

    def _match(self, optimizer: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shapes = [tuple(parameter.shape) for parameter in parameters]
        if shapes != [shape for _, shape in self._unmatched]:
            raise ValueError(
                f"named_parameters: this compressor is a copy, which has {len(self._unmatched)} names but no "
                f"parameters, and the optimizer's {len(parameters)} parameters have different shapes; construct a "
                f"new compressor with named_parameters= for this optimizer"
            )
        self.named = [(name, parameter) for (name, _), parameter in zip(self._unmatched, parameters)]
        self._unmatched = []
