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

KERAS_3_REMEDY = (
    "Horovod's DistributedOptimizer does not average gradients under Keras 3, and does not say so. Use "
    "tensorflow<2.16; or with a newer one the package tf-keras, TF_USE_LEGACY_KERAS=1 in the environment and "
    "optimizers of tf_keras; or hvd.DistributedGradientTape, which averages under Keras 3, too"
)


def require_horovod() -> None:
    """Raises ImportError, with the remedy, unless Horovod is installed and was built with TensorFlow."""
    try:
        import horovod.tensorflow  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"horovod_quant.tensorflow needs Horovod built with TensorFlow ({error}): "
            f"HOROVOD_WITH_TENSORFLOW=1 pip install --no-cache-dir --no-build-isolation horovod"
        ) from error


# Inside of allreduce_grads the variables can be placeholders for any of their kind; its callers have the real ones.
_CALLERS_WITH_VARIABLES = {"__filtered_reduce_grads": "rv", "_filtered_reduce_grads": "rv", "gradient": "rs"}


class HorovodCall(NamedTuple):
    """What Horovod is about to do with the tensor that it gave to ``compress``.

    Attributes:
        variable: whose gradient it is; None in a direct allreduce.
        name: the variable's name, or the one given to a direct allreduce; None if there is none.
        operation: Horovod's name for its operation; None if it will make one up from the tensor's.
        op: the reduction.
        process_set: where it reduces.
        ignore_name_scope: whether TensorFlow's name scopes stay out of the operation's name.
        siblings: the tensors of a grouped allreduce, in order; empty without one.
        variables: all whose gradients are being reduced, or that stay local; empty in a direct allreduce.
        is_export: whether no optimizer or tape asks: TensorFlow saves Horovod's function with a model.
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


def identify(tensor: Any) -> HorovodCall:
    """Reads the frames that called ``compress``.

    Raises:
        RuntimeError: none of them is a function of Horovod that is known.
        ValueError: it is one that is not supported.
    """
    call, position = None, None
    for function, local in _horovod_frames():
        if call is None:
            call = _reduction(function, local, tensor)
        elif function == "allreduce_grads":
            position = _position(tensor, local["grads"])
        elif position is not None and function in _CALLERS_WITH_VARIABLES:
            reduced = tuple(local[_CALLERS_WITH_VARIABLES[function]])
            call = call._replace(
                variable=reduced[position], name=unique_names(reduced)[position], variables=reduced
            )
            position = None
        elif call.variable is not None and function == "_allreduce":
            call = call._replace(variables=tuple(local["vars"]))
    if call is None:
        raise RuntimeError(
            "horovod_quant cannot tell which gradient this is: the caller of compress() is no function of Horovod "
            "that it knows"
        )
    return call if position is None else call._replace(is_export=True)


def unique_names(variables: Sequence[Any]) -> tuple[str, ...]:
    """The variables' names; the second one of a name is called ``name#1``, the third ``name#2``."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    for variable in variables:
        same = seen[variable.name]
        seen[variable.name] += 1
        names.append(f"{variable.name}#{same}" if same else variable.name)
    return tuple(names)


def _horovod_frames() -> Iterator[tuple[str, dict[str, Any]]]:
    """Functions of Horovod on the stack, the innermost first; named as before AutoGraph's conversion."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("horovod."):
            name = frame.f_code.co_name
            yield name[4:] if name.startswith("tf__") else name, frame.f_locals
        frame = frame.f_back


def _reduction(function: str, local: dict[str, Any], tensor: Any) -> HorovodCall | None:
    if function in ("reducescatter", "grouped_reducescatter"):
        raise ValueError(
            f"compression= of {function}: horovod_quant compresses allreduce only; leave compression out there"
        )
    if function not in ("allreduce", "grouped_allreduce"):
        return None
    siblings, name = local.get("tensors", ()), local["name"]
    if function == "grouped_allreduce":
        name = f"{name or 'grouped'}.{_position(tensor, siblings)}"
    return HorovodCall(
        None,
        name,
        local["name"],
        local["op"],
        local["process_set"],
        local["ignore_name_scope"],
        siblings,
    )


def _position(tensor: Any, tensors: Sequence[Any]) -> int:
    return next(i for i, member in enumerate(tensors) if member is tensor)


def optimizer_being_made() -> Any:
    """The distributed Keras optimizer whose construction hashes a compressor; None in other circumstances.

    Horovod keeps a cache with the compressor in its keys. That is the only time that Horovod touches the compressor
    of an optimizer that will never average (Keras 3), and the first time for all others.
    """
    for function, local in _horovod_frames():
        if function == "__init__" and hasattr(local.get("self"), "apply_gradients"):
            return local["self"]
    return None


def is_keras_3(optimizer: Any) -> bool:
    modules = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    keras = sys.modules.get("keras")
    return "keras" in modules and keras is not None and int(keras.__version__.partition(".")[0]) >= 3
