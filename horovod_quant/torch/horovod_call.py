"""Who is asking? The one place that looks at Horovod's frames.

Horovod calls ``compress(tensor)`` without saying for which parameter, operation or process set. The calling frame
knows. Tested with Horovod 0.28.1, and 0.27.0 by scripts/test-horovod.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Callable, NamedTuple

_UNRECOGNISED = (
    "horovod_quant cannot tell which parameter this gradient belongs to: the caller of compress() is not a function "
    "of Horovod that it knows. Give the compressor named_parameters=model.named_parameters()"
)


def require_horovod() -> None:
    """Raises ImportError, with the remedy, unless Horovod is installed and was built with PyTorch."""
    try:
        import horovod.torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"horovod_quant.torch needs Horovod built with PyTorch ({error}): "
            f"HOROVOD_WITH_PYTORCH=1 pip install --no-cache-dir --no-build-isolation horovod"
        ) from error


class HorovodCall(NamedTuple):
    """What Horovod is about to do with the tensor that it gave to ``compress``.

    Attributes:
        name: Horovod's name for the operation, None if it will make one up.
        op: the reduction; None if the caller is unknown.
        process_set: where it reduces; None if the caller is unknown.
        optimizer: the DistributedOptimizer that calls, if one does.
        parameter: whose gradient it is, if an optimizer calls.
        grouped: whether the carrier will share a grouped allreduce with other tensors, hence must have their dtype.
    """

    name: str | None
    op: Any = None
    process_set: Any = None
    optimizer: Any = None
    parameter: Any = None
    grouped: bool = False


def identify(tensor: Any, depth: int = 2) -> HorovodCall | None:
    """Reads the frame that called ``compress``; None if it is not one of Horovod's.

    Args:
        tensor: what ``compress`` was given.
        depth: how many frames up that caller is.
    """
    frame: FrameType | None = sys._getframe(depth)
    if frame is None:
        return None
    variables = dict(frame.f_locals)
    function = frame.f_code.co_name
    if function in ("<listcomp>", "<genexpr>") and frame.f_back is not None:  # before Python 3.12
        function = frame.f_back.f_code.co_name
        variables = {**frame.f_back.f_locals, **variables}
    owner = variables.get("self")
    if hasattr(owner, "_parameter_names"):
        return _from_optimizer(function, owner, variables, tensor)
    if function == "allreduce" and {"name", "op", "process_set"} <= variables.keys():
        return HorovodCall(variables["name"], _op(variables), variables["process_set"])
    if function == "grouped_allreduce" and {"name", "op", "process_set", "tensors"} <= variables.keys():
        position = next(i for i, member in enumerate(variables["tensors"]) if member is tensor)
        prefix = "grouped" if variables["name"] is None else variables["name"]
        return HorovodCall(f"{prefix}.{position}", _op(variables), variables["process_set"], grouped=True)
    if function in ("reducescatter", "grouped_reducescatter"):
        raise ValueError(
            f"compression= of {function}: horovod_quant compresses allreduce only; leave compression out there"
        )
    return None


def _from_optimizer(function: str, optimizer: Any, variables: Any, tensor: Any) -> HorovodCall | None:
    parameter = variables.get("p")
    if parameter is None or parameter not in optimizer._parameter_names:
        return None
    from horovod.torch.mpi_ops import Adasum, global_process_set

    adasum = hasattr(optimizer, "_starting_models")
    return HorovodCall(
        name=optimizer._parameter_names[parameter],
        op=Adasum if adasum else optimizer.op,
        process_set=getattr(optimizer, "process_set", global_process_set),
        optimizer=optimizer,
        parameter=parameter,
        grouped=function == "_grouped_allreduce_grad_async",
    )


def handles_of(optimizer: Callable[[], Any]) -> list[Any]:
    """Horovod's handles of the operations that an optimizer has under way; another one's may be no numbers.

    Args:
        optimizer: gives the DistributedOptimizer, None if it is gone.
    """
    return [handle for handle, _ in getattr(optimizer(), "_handles", {}).values()]


def _op(variables: Any) -> Any:
    from horovod.torch.mpi_ops import Average, Sum

    if variables["op"] is not None:
        return variables["op"]
    return Sum if variables.get("average") is False else Average


class ParameterFinder:
    """Finds parameters by the identity of their gradients, for callers that `identify` does not know.

    Gradients arrive in much the same order each step, so the successor of the last one found is tried first.
    """

    def __init__(self, named_parameters: Any) -> None:
        self.named = list(named_parameters)
        self._next = 0

    def name_of(self, tensor: Any, parameter: Any = None) -> str | None:
        """The name of ``parameter``, or of the parameter whose gradient ``tensor`` is."""
        for offset in range(len(self.named)):
            position = (self._next + offset) % len(self.named)
            name, candidate = self.named[position]
            if candidate is parameter or candidate.grad is tensor:
                self._next = position + 1
                return name
        return None

    def call(self, tensor: Any, process_set: Any) -> HorovodCall:
        """What can be said of a call from an unknown caller.

        Raises:
            RuntimeError: the tensor is no gradient of the named parameters.
        """
        name = self.name_of(tensor)
        if name is None:
            raise RuntimeError(_UNRECOGNISED)
        return HorovodCall(name, process_set=process_set)
