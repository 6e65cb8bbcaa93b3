"""Identification of the caller of ``compress``.

The only module that inspects Horovod's frames in TensorFlow. Horovod calls ``compress(tensor)`` while it builds a
graph, without naming the variable, operation or process set; the frames of its functions have them. Tested with Horovod
0.28.1.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_quant.frontends.calls import Positions

KERAS_3_REMEDY = (
    "Horovod's DistributedOptimizer does not average gradients under Keras 3, and gives no warning. Use "
    "horovod_quant.keras.DistributedOptimizer, which has the same arguments; or hvd.DistributedGradientTape, which "
    "averages under Keras 3 as well, the gradients of [v.value for v in model.trainable_variables]"
)

# Inside allreduce_grads the variables can be placeholders for any of their kind; its callers have the real ones.
_CALLERS_WITH_VARIABLES = {"__filtered_reduce_grads": "rv", "_filtered_reduce_grads": "rv", "gradient": "rs"}
_REDUCTIONS = ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter")
_FUNCTIONS = {*_REDUCTIONS, "allreduce_grads", "_allreduce", *_CALLERS_WITH_VARIABLES}

_UNRECOGNISED = (
    "horovod_quant cannot tell which gradient this is: the caller of compress() is not a Horovod function that it "
    "knows"
)

_POSITIONS = Positions()


class HorovodCall(NamedTuple):
    """Horovod's operation on the tensor that it passed to ``compress``.

    Attributes:
        variable: the gradient's variable; None in a direct allreduce.
        name: the variable's name, or the one given to a direct allreduce; None if there is none.
        operation: the name given to Horovod's operation, with the index in a group; None if Horovod will derive it
            from the tensor's name.
        op: the reduction.
        process_set: the process set that reduces.
        ignore_name_scope: whether TensorFlow's name scopes stay out of the operation's name.
        siblings: the dense tensors of a grouped allreduce, in order; empty without one.
        variables: all variables whose gradients are being reduced, or stay local; empty in a direct allreduce.
        is_export: whether TensorFlow saves Horovod's function with a model, without an optimizer or tape.
        path: the variable's name for policies and statistics where that may differ between workers; None where it
            is ``name``.
        paths: the paths of all ``variables``.
        key: the name in the random key where the variable's name may differ between workers.
        step: the step in the random key, int64; None where the compressor counts.
        is_direct: whether the call is outside any branch of Horovod.
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
        """Return the names of all ``variables``, for policies."""
        return self.paths or unique_names(map(name_of, self.variables))


def identify() -> HorovodCall:
    """Identify the call by the frames that called ``compress``.

    Another compressor may be between.

    Raises:
        RuntimeError: no frame is a known function of Horovod.
        ValueError: the function is not supported.
    """
    try:
        return _identify()
    except LookupError as error:  # a local variable of Horovod's function is missing or different
        raise RuntimeError(_UNRECOGNISED) from error


def _identify() -> HorovodCall:
    call = tensor = index = position = None
    for function, local in _horovod_functions():
        if call is None:
            call, tensor, index = _reduction(function, local)
        elif function == "allreduce_grads":
            position = local["i"] if index is None else local["index_group"][index]
            if local["grads"][position] is not tensor:
                break
        elif position is not None and function in _CALLERS_WITH_VARIABLES:
            reduced = tuple(local[_CALLERS_WITH_VARIABLES[function]])
            call = call._replace(
                variable=reduced[position],
                name=unique_names(map(name_of, reduced))[position],
                variables=reduced,
                key=call.operation,  # Horovod's generic name, if it is asked for those
            )
            position = None
        elif call.variable is not None and function == "_allreduce":
            call = call._replace(variables=tuple(local["vars"]))
    else:
        if call is not None:
            return call if position is None else call._replace(is_export=True)
    raise RuntimeError(_UNRECOGNISED)


def unique_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names made unique.

    The second of a name is ``name#1``, the third ``name#2``.
    """
    unique: list[str] = []
    seen: Counter[str] = Counter()
    for name in names:
        unique.append(f"{name}#{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return tuple(unique)


def own_variable(variable: Any) -> Any:
    """Return TensorFlow's variable inside a variable of Keras 3.

    The latter has no ``ref()``.
    """
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", variable)


def name_of(variable: Any) -> str:
    """Return a variable's name, or None.

    A tensor watched by a tape has none in eager code.
    """
    return "watched" if isinstance(variable, tf.__internal__.EagerTensor) else variable.name


def _horovod_functions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield known Horovod functions on the stack with local variables.

    The innermost comes first. Some local variables are in separate frames: of comprehensions, before Python 3.12, and
    of the functions that AutoGraph generates for branches and loops. They count as the function's.
    """
    variables: dict[str, Any] = {}
    for function, local in _horovod_frames():
        variables = {**local, **variables}
        if function in _FUNCTIONS:
            yield function, variables
            variables = {}


def _horovod_frames() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all Horovod frames on the stack, innermost first.

    Names are those before AutoGraph's conversion.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("horovod."):
            name = frame.f_code.co_name
            yield name[4:] if name.startswith("tf__") else name, frame.f_locals
        frame = frame.f_back


def _reduction(function: str, local: dict[str, Any]) -> tuple[HorovodCall | None, Any, int | None]:
    """Return Horovod's call, its tensor, and its index in a group."""
    if function in ("reducescatter", "grouped_reducescatter"):
        raise ValueError(
            f"compression= of {function}: horovod_quant compresses only allreduce; leave compression out there"
        )
    if function not in _REDUCTIONS:
        raise RuntimeError(_UNRECOGNISED)
    tensor, name, siblings, index = local["tensor"], local["name"], (), None
    if function == "grouped_allreduce":
        siblings = local["tensor_list"]
        index = local["tensor_list_idx"][_POSITIONS.next_of(tensor, siblings, siblings)]
        name = f"{name or 'grouped'}.{index}"
    call = HorovodCall(
        None,
        name,
        None if local["name"] is None else name,
        local["op"],
        local["process_set"],
        local["ignore_name_scope"],
        siblings,
    )
    return call, tensor, index


def optimizer_being_made() -> tuple[Any, Any] | None:
    """Return the distributed Keras optimizer under construction, or None.

    It hashes the compressor and its process set for a cache of Horovod. For an optimizer that will never average (Keras
    3, or one worker) this is the only use of the compressor, and for all others the first.
    """
    for function, local in _horovod_frames():
        if function == "__init__" and hasattr(local.get("self"), "apply_gradients"):
            return local["self"], local.get("process_set")
    return None


def is_keras_3(optimizer: Any) -> bool:
    modules = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    keras = sys.modules.get("keras")
    return "keras" in modules and keras is not None and int(keras.__version__.partition(".")[0]) >= 3
