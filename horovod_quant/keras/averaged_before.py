"""Check for gradients that Horovod has averaged before the optimizer averages them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

_HOROVODS = ("allreduce_grads", "_Allreduce/")
"""Parts of the names of Horovod's functions and operations that reduce gradients."""


def require_not_averaged(gradients: Sequence[Any]) -> None:
    """Raise ValueError if a graph has reduced the gradients before.

    Eager code is not checked.
    """
    if tf.executing_eagerly():
        return
    if any(each in name for name in _names_before(gradients) for each in _HOROVODS):
        raise ValueError(
            "the gradients come from hvd.DistributedGradientTape, which has averaged them already, and this optimizer "
            "would average them again: use tf.GradientTape, or an optimizer without hvq.DistributedOptimizer"
        )


def _names_before(gradients: Sequence[Any]) -> Iterator[str]:
    """Yield the names of operations and functions that compute the gradients."""
    pending = [
        each
        for gradient in gradients
        for each in ([gradient.values] if isinstance(gradient, tf.IndexedSlices) else [gradient])
        if tf.is_tensor(each) and not isinstance(each, tf.__internal__.EagerTensor)
    ]
    captured: dict[int, dict[int, Any]] = {}
    seen_operations: set[int] = set()
    seen_functions: set[str] = set()
    while pending:
        tensor = pending.pop()
        graph, operation = tensor.graph, tensor.op
        if id(operation) in seen_operations:
            continue
        seen_operations.add(id(operation))
        if id(graph) not in captured:
            pairs = getattr(graph, "captures", ())
            captured[id(graph)] = {id(inside.op): outside for outside, inside in pairs}
        outside = captured[id(graph)].get(id(operation))
        if outside is not None and not isinstance(outside, tf.__internal__.EagerTensor):
            pending.append(outside)
        pending += operation.inputs
        yield operation.name
        for name in _called(operation.node_def):
            yield from _with_inner(graph, name, seen_functions)


def _called(node: Any) -> Iterator[str]:
    for attribute in node.attr.values():
        kind = attribute.WhichOneof("value")
        if kind == "func":
            yield attribute.func.name
        elif kind == "list":
            yield from (function.name for function in attribute.list.func)


def _with_inner(graph: Any, name: str, seen: set[str]) -> Iterator[str]:
    if name in seen:
        return
    seen.add(name)
    yield name
    if not graph._is_function(name):
        return
    for node in graph._get_function(name).cached_definition.node_def:
        yield node.name
        for inner in _called(node):
            yield from _with_inner(graph, inner, seen)
