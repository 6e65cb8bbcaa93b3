"""Defaults and checks of compressors' arguments, and messages about them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Callable

import numpy as np

from horovod_quant.frontends import former_names, methods
from horovod_quant.schemes import registry
from horovod_quant.schemes.base import Scheme
from horovod_quant.schemes.hierarchical import Hierarchical, inner_of

MIN_ELEMENTS = 1024
"""Default ``min_elements`` of the compressors."""

GROUP_BYTES = 32 * 2**20
"""Default ``group_bytes`` of the compressors."""

NO_PROCESS_SET = (
    "hierarchical: it works only with all workers; remove process_set= from the optimizer and from the compressor, "
    "or use hierarchical=False"
)


class CompressorClass(type):
    """Metaclass of compressors that explains the missing instance.

    Horovod's built-in compressors are classes. Instances have methods of the same names, without additional cost.
    """

    def __getattribute__(cls, name: str) -> Any:
        found = super().__getattribute__(name)
        return _of_instances(cls, found) if name in ("compress", "decompress") else found


def _of_instances(owner: type, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with an explanation for a missing instance."""

    @functools.wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        if not given or not isinstance(given[0], owner):
            raise TypeError(
                f"compression={owner.__name__}: that is a class; use an instance, {owner.__name__}()"
            )
        return method(*given, **named)

    return call


def scheme_of(value: Any) -> Scheme:
    """Return a scheme, which may be given by a method's name.

    Raises:
        ValueError: ``value`` is anything else.
    """
    if isinstance(value, str):
        try:
            found = methods.parse(value, for_compressor=True).scheme()
        except ValueError as error:
            raise ValueError(f"scheme={value!r}: {error}") from None
        former_names.warn_of_another_meaning([value])
        if found is None:
            raise ValueError(
                f"scheme={value!r}: that is Horovod's own; use compression=hvd.Compression.{value}"
            )
        return found
    is_class = isinstance(value, CompressorClass) or isinstance(value, type) and issubclass(value, Scheme)
    if is_class:
        raise ValueError(f"scheme={value.__name__}: that is a class; use an instance, {value.__name__}()")
    if isinstance(type(value), CompressorClass):
        raise ValueError(f"scheme={value!r}: that is a compressor already; use it directly")
    if not isinstance(value, Scheme):
        raise ValueError(
            f"scheme={value!r}: use one of horovod_quant.schemes, as in QSGD(bits=4), or a method's name, as in "
            f"'qsgd-4'"
        )
    if isinstance(value, Hierarchical):
        raise ValueError(f"scheme={value!r}: give its inner scheme; use {value.compressor_call()}")
    registry.check(type(value))
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(f"scheme={value!r}: {error}; use tuples and numbers as its arguments") from None
    return value


def whole_number(value: Any) -> Any:
    """Convert a float that is whole, such as 32e6, to an int."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def hierarchy_of(value: Any, process_set: Any = None, name: str = "hierarchical") -> bool | int:
    """Return the argument ``hierarchical`` as a Python bool or int.

    Args:
        value: the argument.
        process_set: the argument ``process_set``.
        name: the name of an argument with the same values.

    Raises:
        ValueError: it is neither True nor False nor a number of workers, or comes with a process set.
    """
    is_switch = isinstance(value, (bool, np.bool_))
    if not is_switch and not (isinstance(value, (int, np.integer)) and 1 <= value <= 2**31):
        raise ValueError(f"{name}={value!r}: use True, False, or the number of workers per node, 1 or more")
    if value and process_set is not None:
        raise ValueError(NO_PROCESS_SET)
    return bool(value) if is_switch else int(value)


def require_process_set(process_set: Any) -> None:
    if process_set is not None and not hasattr(process_set, "process_set_id"):
        raise ValueError(f"process_set={process_set!r}: use an hvd.ProcessSet, or None")


def named_pairs(named_parameters: Any) -> list[tuple[str, Any]]:
    """Return the (name, parameter) pairs as a list.

    Raises:
        ValueError: the argument is something else, or two parameters have one name.
    """
    use = "use pairs of a name and a parameter, such as model.named_parameters()"
    try:
        pairs = list(named_parameters)
    except TypeError:
        raise ValueError(f"named_parameters={named_parameters!r}: {use}") from None
    if not pairs:
        raise ValueError(
            "named_parameters: it is empty; build the model first, and call model.named_parameters() anew for each use"
        )
    seen: set[str] = set()
    for pair in pairs:
        if not (
            isinstance(pair, (tuple, list))
            and len(pair) == 2
            and isinstance(pair[0], str)
            and hasattr(pair[1], "shape")
        ):
            shown = pair if isinstance(pair, (str, tuple)) else type(pair).__name__
            raise ValueError(f"named_parameters: it contains {shown!r}; {use}")
        if pair[0] in seen:
            raise ValueError(f"named_parameters: {pair[0]!r} appears twice; give each parameter its own name")
        seen.add(pair[0])
    return [(name, parameter) for name, parameter in pairs]


def require_no_host(scheme: Scheme, kernels: str) -> None:
    """Raise ValueError where a scheme cannot run on a framework's kernels."""
    needs = scheme.host_requirement()
    if needs is not None:
        raise ValueError(
            f"{needs}: {type(inner_of(scheme)).__name__} then needs its arrays in host memory, where "
            f"kernels={kernels!r} cannot run; use kernels='auto' or kernels='native'"
        )


def in_short(value: Any) -> str:
    """Return a short text for messages: a mapping's keys, else the beginning."""
    if isinstance(value, Mapping) and value:
        keys = ", ".join(repr(key)[:40] for key in list(value)[:6])
        return f"<{type(value).__name__} with the keys {keys}{', ...' * (len(value) > 6)}>"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
