"""Horovod's collectives as TensorFlow operations, their names, and the control tensor.

Under elastic training Horovod recognizes a failed worker by the names of its allreduces and allgathers in TensorFlow's
error message: every operation here has such a name, also an alltoall.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from horovod_quant.frontends.nodes import Nodes, flat
from horovod_quant.reductions.agreement import COMMON, SIGNS, SLOTS
from horovod_quant.schemes.base import Allgather, Allreduce, Alltoall, Collective, Workers
from horovod_quant.tensorflow.horovod_call import HorovodCall
from horovod_quant.tensorflow.refusal import require


class Scope(NamedTuple):
    """Process set and names of a gradient's collectives.

    ``gradient`` is the gradient's tensor; ``nodes`` are for hierarchical collectives; ``signature`` and ``labels`` are
    of the compressor's arguments; for ``is_direct`` see `HorovodCall`; with ``is_off`` workers may have joined.
    """

    label: str | None
    process_set: Any
    ignore_name_scope: bool
    gradient: tf.Tensor
    nodes: Nodes | None = None
    signature: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    is_direct: bool = False
    is_off: bool = False

    def workers(self) -> Workers:
        """Return the current workers."""
        return (self.nodes or flat(self.process_set)).workers

    @property
    def tensor_name(self) -> str | None:
        """Return the tensor's name from which Horovod names its operation."""
        return None if self.label is None else f"quant_{self.label}"

    def name(self, stage: int | str) -> str | None:
        """Return a collective's name, equal on all workers, unique in a graph.

        Returns None in eager code.
        """
        return None if self.label is None else f"HorovodAllreduce_quant_{stage}_{self.label}"


def scope_of(call: HorovodCall, tensor: tf.Tensor) -> Scope:
    """Return the scope of a gradient's collectives.

    Their names follow Horovod's name of its operation.
    """
    label = None
    if not tf.executing_eagerly():
        label = re.sub("[^a-zA-Z0-9_]", "_", tensor.name if call.operation is None else call.operation)
    return Scope(label, call.process_set, call.ignore_name_scope, tensor, is_direct=call.is_direct)


def perform(
    collectives: Sequence[Collective], stage: int, array: tf.Tensor, splits: tf.Tensor | None, scope: Scope
) -> tf.Tensor:
    """Perform a collective: sum, maximum, or concatenation in rank order.

    Args:
        collectives: the collectives of the reduction.
        stage: number of the collective to perform.
        array: the local array.
        splits: the splits of an alltoall.
        scope: the scope of the collectives.
    """
    import horovod.tensorflow as hvd

    collective = collectives[stage]
    if collective.needs_all_workers and not _need_all_workers(collectives[:stage]):
        array = _after(_active_rank_query(scope), array)
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


def after_active_rank_query(
    collectives: Sequence[Collective], scope: Scope, control_tensor: tf.Tensor
) -> tf.Tensor:
    """Return ``control_tensor`` after the active-rank query, if any.

    So the query's error comes first.

    Args:
        collectives: the collectives of the reduction, whose operations exist.
        scope: the scope of the collectives.
        control_tensor: the reduced control tensor.
    """
    if tf.executing_eagerly() or not _need_all_workers(collectives):
        return control_tensor
    return _after(_active_rank_query(scope), control_tensor)


def _after(zero: tf.Tensor, array: tf.Tensor) -> tf.Tensor:
    """Return the flat ``array`` after ``zero`` is computed, without a copy.

    Unlike a control dependency this works across a branch. TensorFlow removes a reshape without effect if the shape is
    known, but not a slice with a computed beginning.
    """
    elements = array.shape.num_elements()
    if elements is None:
        return tf.reshape(array, tf.shape(array) + zero)
    return tf.slice(array, [zero], [elements])


def _need_all_workers(collectives: Sequence[Collective]) -> bool:
    return any(collective.needs_all_workers for collective in collectives)


def _active_rank_query(scope: Scope) -> tf.Tensor:
    """Perform the active-rank query: return zero or fail.

    The result is int32; the error is on all active workers. It is an error if a worker is absent or has other
    arguments. A graph has one query for all reductions of a compressor. Horovod puts each allreduce in a branch, which
    is a separate graph; the query is in the graph around it.
    """
    if tf.executing_eagerly():
        return _perform_query(scope)
    current = tf.compat.v1.get_default_graph()
    in_branch = type(current).__name__ == "CondBranchFuncGraph" and not scope.is_direct
    graph = current.outer_graph if in_branch else current
    key = scope.process_set.process_set_id, scope.signature, graph._get_control_flow_context()
    known = getattr(graph, "_horovod_quant_roll_calls", None)
    if known is None:
        known = graph._horovod_quant_roll_calls = {}
    if key not in known:
        if in_branch:
            scope = scope._replace(gradient=_outside(current, scope.gradient))
        with graph.as_default():
            known[key] = _perform_query(scope)
    return known[key]


def _outside(branch: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Return ``tensor``, or an input of it, outside the branch.

    Returns a constant there if neither exists.
    """
    around = {id(inside): outside for outside, inside in branch.captures}
    looked_at, known = [tensor], {id(tensor)}
    for candidate in looked_at:
        if candidate.graph is not branch:
            return candidate
        if id(candidate) in around and candidate.dtype is not tf.resource:
            return around[id(candidate)]
        found = [each for each in candidate.op.inputs if id(each) not in known]
        known.update(map(id, found))
        looked_at += found
    with branch.outer_graph.as_default():
        return tf.zeros([1])


def _perform_query(scope: Scope) -> tf.Tensor:
    import horovod.tensorflow as hvd

    count = worker_count(scope.process_set)
    total = hvd.allreduce(
        tf.minimum(count, 1) * tf.constant([1, *scope.signature]), op=hvd.Sum, name=scope.name("present"),
        process_set=scope.process_set, ignore_name_scope=scope.ignore_name_scope,
    )  # fmt: skip
    agreed = tf.reduce_all(tf.reshape(tf.equal(tf.abs(total[1:]), total[0]), [SLOTS, SIGNS]), axis=1)
    # As `agreement.different`: if the schemes differ, their arguments are not compared.
    compared = tf.logical_and(tf.logical_not(agreed), tf.logical_or(agreed[0], tf.range(SLOTS) < len(COMMON)))
    expected = total[0] if scope.is_off else count
    unequal = [_UNEQUAL, tf.boolean_mask(tf.constant(scope.labels), compared)]
    checks = [
        require(tf.equal(total[0], expected), [_JOINED], scope.gradient),
        require(tf.reduce_all(agreed), unequal, scope.gradient),
    ]
    with tf.control_dependencies(checks):
        return total[0] - expected


_JOINED = (
    "a worker has called hvd.join(), and in TensorFlow only GlobalQSGD with uniform levels, not hierarchical, can "
    "continue without it; use that, or the same number of batches on every worker"
)

_UNEQUAL = "construct the compressor with the same arguments on all workers; these differ:"


def worker_count(process_set: Any) -> tf.Tensor:
    """Return the number of workers when the graph runs, int32."""
    import horovod.tensorflow as hvd

    return hvd.size_op(process_set_id=process_set.process_set_id)


def not_constant_foldable(tensor: tf.Tensor, process_set: Any, zero: Any = 0) -> tf.Tensor:
    """Return the flat ``tensor`` in a form that is not folded.

    Horovod's operations count as stateless: with a constant input they would be folded, that is run once, and perhaps
    on one worker alone. ``zero`` is a zero that depends on operations that must come before.
    """
    return _after(zero + tf.minimum(worker_count(process_set), 1) - 1, tf.reshape(tensor, [-1]))


def control_tensor(
    signs: Sequence[float], dtype: tf.DType, scope: Scope, also: Sequence[tf.Tensor] = ()
) -> tf.Tensor:
    """Return ``[1, signs..., also...]``, not constant: see `not_constant_foldable`."""
    one = tf.cast(tf.minimum(worker_count(scope.process_set), 1), dtype)
    numbers = tf.constant([1.0, *signs], dtype)
    if also:
        numbers = tf.concat([numbers, tf.cast(tf.stack(also), dtype)], 0)
    return tf.multiply(numbers, one, name=scope.tensor_name)


def is_elastic() -> bool:
    """Return whether the number of workers may change, by Horovod's environment variable."""
    return bool(int(os.environ.get("HOROVOD_ELASTIC", "0")))
