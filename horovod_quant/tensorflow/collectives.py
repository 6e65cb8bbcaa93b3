"""Horovod's collectives as TensorFlow operations, for the requests of schemes; names; the carrier.

Horovod recognizes a failed worker, under elastic training, by the names of its allreduces and allgathers in
TensorFlow's error message: every operation here is called like one of them, an alltoall, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_quant.nodes import Nodes, flat
from horovod_quant.schemes.base import Allgather, Allreduce, Alltoall, Collective, Workers
from horovod_quant.tensorflow.horovod_call import HorovodCall


class Scope(NamedTuple):
    """Where collectives run, and how they are called; ``nodes`` where they are hierarchical."""

    label: str | None
    process_set: Any
    ignore_name_scope: bool
    nodes: Nodes | None = None

    def workers(self) -> Workers:
        """Who takes part, as it is now."""
        return (self.nodes or flat(self.process_set)).workers

    @property
    def tensor_name(self) -> str | None:
        """For a tensor that Horovod is to name its own operation after."""
        return None if self.label is None else f"quant_{self.label}"

    def name(self, stage: int) -> str | None:
        """The same on every worker, and another one for every operation of a graph. Eager operations have none."""
        return None if self.label is None else f"HorovodAllreduce_quant_{stage}_{self.label}"


def scope_of(call: HorovodCall, tensor: tf.Tensor) -> Scope:
    """The scope of a gradient's collectives, named after the operation that Horovod will make itself."""
    label = None
    if not tf.executing_eagerly():
        label = re.sub("[^a-zA-Z0-9_]", "_", tensor.name if call.operation is None else str(call.name))
    return Scope(label, call.process_set, call.ignore_name_scope)


def perform(
    collective: Collective, array: tf.Tensor, splits: tf.Tensor | None, scope: Scope, stage: int
) -> tf.Tensor:
    """Sum, maximum, or the concatenation of what comes from the workers in rank order."""
    import horovod.tensorflow as hvd

    group = scope.process_set if scope.nodes is None else scope.nodes.process_sets[collective.group]
    named = {
        "name": scope.name(stage),
        "process_set": group,
        "ignore_name_scope": scope.ignore_name_scope,
    }
    if collective.request is Allreduce:
        return hvd.allreduce(array, op=hvd.Max if collective.op == "max" else hvd.Sum, **named)
    if collective.request is Allgather:
        return hvd.allgather(array, **named)
    if collective.request is Alltoall:
        return hvd.alltoall(array, splits, **named)[0]
    raise TypeError(f"not a collective that Horovod can perform: {collective!r}")


def worker_count(process_set: Any) -> tf.Tensor:
    """The number of workers when the graph runs, int32."""
    import horovod.tensorflow as hvd

    return hvd.size_op(process_set_id=process_set.process_set_id)


def unfoldable(tensor: tf.Tensor, process_set: Any, zero: Any = 0) -> tf.Tensor:
    """``tensor``, flat, and without a copy, as what no optimizer of graphs takes for a constant.

    Horovod's operations count as stateless: with a constant for an input they would be folded, that is run once,
    and perhaps on one worker alone. ``zero`` is one that depends on what must come before.
    """
    beginning = zero + tf.minimum(worker_count(process_set), 1) - 1
    # A reshape to a shape that is computed would be removed where it changes nothing.
    return tf.slice(tf.reshape(tensor, [-1]), [beginning], [tensor.shape.num_elements()])


def carrier(signs: Sequence[float], dtype: tf.DType, scope: Scope) -> tf.Tensor:
    """``[1, signs...]``, derived from the number of workers, so that it is no constant: see `unfoldable`."""
    one = tf.cast(tf.minimum(worker_count(scope.process_set), 1), dtype)
    return tf.multiply(tf.constant([1.0, *signs], dtype), one, name=scope.tensor_name)


def is_elastic() -> bool:
    """Whether the number of workers may change, by the variable that Horovod itself looks at."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))
