"""Who is asking? The one place that looks at Horovod's frames in TensorFlow.

Horovod calls ``compress(tensor)`` while it builds a graph, without saying for which variable, operation or process
set. The frames of its own functions know. Tested with Horovod 0.28.1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_quant.frontends.installing import install_page

KERAS_3_REMEDY = (
    "Horovod's DistributedOptimizer does not average gradients under Keras 3, and does not say so. Use "
    "horovod_quant.keras.DistributedOptimizer, which has the same arguments; or hvd.DistributedGradientTape, which "
    "averages under Keras 3 as well"
)


def require_horovod() -> None:
    """Raises ImportError, with the remedy, unless Horovod is installed and was built with TensorFlow."""
    try:
        import horovod.tensorflow  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"horovod_quant.tensorflow needs Horovod built with TensorFlow ({error}); {install_page()} has the commands"
        ) from error


# Inside of allreduce_grads the variables can be placeholders for any of their kind; its callers have the real ones.
_CALLERS_WITH_VARIABLES = {"__filtered_reduce_grads": "rv", "_filtered_reduce_grads": "rv", "gradient": "rs"}
_REDUCTIONS = ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter")
_FUNCTIONS = {*_REDUCTIONS, "allreduce_grads", "_allreduce", *_CALLERS_WITH_VARIABLES}

_UNRECOGNISED = (
    "horovod_quant cannot tell which gradient this is: the caller of compress() is not a Horovod function that it "
    "knows"
)


class HorovodCall(NamedTuple):
    """What Horovod is about to do with the tensor that it gave to ``compress``.

    Attributes:
        variable: whose gradient it is; None in a direct allreduce.
        name: the variable's name, or the one given to a direct allreduce; None if there is none.
        operation: Horovod's name for its operation; None if it will make one up from the tensor's.
        op: the reduction.
        process_set: where it reduces.
        ignore_name_scope: whether TensorFlow's name scopes stay out of the operation's name.
        siblings: the dense tensors of a grouped allreduce, in order; empty without one.
        variables: all whose gradients are being reduced, or that stay local; empty in a direct allreduce.
        is_export: whether no optimizer or tape asks: TensorFlow saves Horovod's function with a model.
        path: the variable's name for policies and statistics where that may differ between workers; None where it
            is ``name``.
        paths: those of all ``variables``.
        key: the name that random bits are drawn with, with ``path``.
        step: the number that random bits are drawn with, int64; None where the compressor counts.
        is_direct: whether no branch of Horovod's is around the call.
    """

    variable: Any = None
    name: str | None = None
    operation: str | None = None
    op: Any = None
    process_set: Any = None
    ignore_name_scope: bool = False
    siblings: Sequence[Any] = ()
    variables: tuple[Any, ...] = ()
    is_export: bool = False
    path: str | None = None
    paths: tuple[str, ...] = ()
    key: str | None = None
    step: tf.Tensor | None = None
    is_direct: bool = False

    def names(self) -> tuple[str, ...]:
        """Those of all ``variables``, for policies."""
        return self.paths or unique_names(self.variables)


class DuplicateCursor:
    """Whose turn it is of the tensors that Horovod takes from a list one by one, for they may be the same."""

    def __init__(self) -> None:
        self._tensors: Sequence[Any] | None = None
        self._taken: list[Any] = []

    def place(self, tensors: Sequence[Any], tensor: Any) -> int:
        """Where in ``tensors``, a list that Horovod has made for this one call, the tensor is that it takes now."""
        if tensors is not self._tensors:
            self._tensors, self._taken = tensors, []
        places = [i for i, other in enumerate(tensors) if other is tensor]
        place = places[sum(other is tensor for other in self._taken)]
        self._taken.append(tensor)
        if len(self._taken) == len(tensors):
            self._tensors, self._taken = None, []
        return place


def identify(turns: DuplicateCursor) -> HorovodCall:
    """Reads the frames that called ``compress``, which may have been called by a compressor of somebody else.

    Args:
        turns: the compressor's.

    Raises:
        RuntimeError: none of them is a function of Horovod that is known.
        ValueError: it is one that is not supported.
    """
    try:
        return _identify(turns)
    except LookupError as error:  # a variable is not there, or another one than it was
        raise RuntimeError(_UNRECOGNISED) from error


def _identify(turns: DuplicateCursor) -> HorovodCall:
    call = tensor = place = position = None
    for function, local in _horovod_functions():
        if call is None:
            call, tensor, place = _reduction(function, local, turns)
        elif function == "allreduce_grads":
            position = local["i"] if place is None else local["index_group"][place]
            if local["grads"][position] is not tensor:
                break
        elif position is not None and function in _CALLERS_WITH_VARIABLES:
            reduced = tuple(local[_CALLERS_WITH_VARIABLES[function]])
            call = call._replace(
                variable=reduced[position], name=unique_names(reduced)[position], variables=reduced
            )
            position = None
        elif call.variable is not None and function == "_allreduce":
            call = call._replace(variables=tuple(local["vars"]))
    else:
        if call is not None:
            return call if position is None else call._replace(is_export=True)
    raise RuntimeError(_UNRECOGNISED)


def unique_names(variables: Sequence[Any]) -> tuple[str, ...]:
    """The variables' names; the second one of a name is called ``name#1``, the third ``name#2``."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    for variable in variables:
        name = name_of(variable)
        same = seen[name]
        seen[name] += 1
        names.append(f"{name}#{same}" if same else name)
    return tuple(names)


def own_variable(variable: Any) -> Any:
    """TensorFlow's variable: the one in a variable of Keras 3, which has no ``ref()``."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def name_of(variable: Any) -> str:
    """Its name; a tensor that a tape watches has none in eager code."""
    return "watched" if isinstance(variable, tf.__internal__.EagerTensor) else variable.name


def _horovod_functions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Functions of Horovod on the stack that are known, the innermost first, with their variables.

    Some of these are in frames of their own: of comprehensions, before Python 3.12, and of what AutoGraph makes of a
    function's branches and loops. They count as the function's.
    """
    variables: dict[str, Any] = {}
    for function, local in _horovod_frames():
        variables = {**local, **variables}
        if function in _FUNCTIONS:
            yield function, variables
            variables = {}


def _horovod_frames() -> Iterator[tuple[str, dict[str, Any]]]:
    """All frames of Horovod on the stack, the innermost first; named as before AutoGraph's conversion."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("horovod."):
            name = frame.f_code.co_name
            yield name[4:] if name.startswith("tf__") else name, frame.f_locals
        frame = frame.f_back


def _reduction(
    function: str, local: dict[str, Any], turns: DuplicateCursor
) -> tuple[HorovodCall | None, Any, int | None]:
    """What Horovod does, with which tensor, and, of a grouped allreduce, the tensor's place among those."""
    if function in ("reducescatter", "grouped_reducescatter"):
        raise ValueError(
            f"compression= of {function}: horovod_quant compresses only allreduce; leave compression out there"
        )
    if function not in _REDUCTIONS:
        raise RuntimeError(_UNRECOGNISED)
    tensor, name, siblings, place = local["tensor"], local["name"], (), None
    if function == "grouped_allreduce":
        siblings = local["tensor_list"]
        place = local["tensor_list_idx"][turns.place(siblings, tensor)]
        name = f"{name or 'grouped'}.{place}"
    call = HorovodCall(
        None,
        name,
        local["name"],
        local["op"],
        local["process_set"],
        local["ignore_name_scope"],
        siblings,
    )
    return call, tensor, place


def optimizer_being_made() -> tuple[Any, Any] | None:
    """The distributed Keras optimizer whose construction hashes a compressor, and the process set that it is given.

    Horovod keeps a cache with the compressor in its keys. That is the only time that Horovod touches the compressor
    of an optimizer that will never average (Keras 3, or one worker), and the first time for all others.

    Returns:
        None in other circumstances.
    """
    for function, local in _horovod_frames():
        if function == "__init__" and hasattr(local.get("self"), "apply_gradients"):
            return local["self"], local.get("process_set")
    return None


def is_keras_3(optimizer: Any) -> bool:
    modules = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    keras = sys.modules.get("keras")
    return "keras" in modules and keras is not None and int(keras.__version__.partition(".")[0]) >= 3
