"""Reductions with kernels of TensorFlow operations.

The scheme's generator runs once, while tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovod_quant.frontends.binsgdm import clipped
from horovod_quant.schemes.base import (
    Allgather,
    Alltoall,
    BinaryState,
    Gradient,
    Workers,
    with_explained_errors,
)
from horovod_quant.tensorflow import kernels
from horovod_quant.tensorflow.collectives import (
    Scope,
    after_active_rank_query,
    not_constant_foldable,
    perform,
    worker_count,
)
from horovod_quant.tensorflow.groups import Member, StoredState
from horovod_quant.tensorflow.refusal import opaque_false, require
from horovod_quant.tensorflow.segments import FlatVariable
from horovod_quant.tensorflow.state import Ledger
from horovod_quant.transports.traffic import sent_bytes


def traced_reduction(
    members: Sequence[Member], scope: Scope, ledgers: Sequence[Ledger]
) -> Callable[[int, tf.Tensor], tf.Tensor]:
    """Create the operations that reduce a group of gradients.

    They are for one point of a graph, and the present number of workers.

    Args:
        members: the gradients, with known shapes.
        scope: the scope of its collectives.
        ledgers: the counter of each member's reductions.

    Returns:
        A function from a member's position and control tensor to its result.
    """
    process_set, workers = scope.process_set, scope.workers()
    scheme = members[0].scheme.for_workers(workers)
    collectives = scheme.collectives
    gradients = [
        _gradient(member, not_constant_foldable(member.tensor, process_set), ledger)
        for member, ledger in zip(members, ledgers)
    ]
    exchange = with_explained_errors(scheme, gradients, workers, kernels, "TensorFlow's tensors")
    request, output = next(exchange), None
    for stage in range(len(collectives)):
        for ledger, sent in zip(ledgers, sent_bytes(request, workers.size_of(request.group))):
            ledger.bytes_sent += sent
        splits = tf.constant(request.splits, tf.int32) if isinstance(request, Alltoall) else None
        array = _array_to_send(request.array, output, process_set)
        output = perform(collectives, stage, array, splits, scope)
        try:
            request = exchange.send(_answer(request, output, workers))
        except StopIteration as stop:
            decoded = stop.value

    def result(position: int, control_tensor: tf.Tensor) -> tf.Tensor:
        member = members[position]
        control_tensor = after_active_rank_query(collectives, scope, control_tensor)
        factor = _factor(member, control_tensor, process_set) / tf.cast(decoded.active, tf.float64)
        target = tf.TensorSpec([gradients[position].elements], member.tensor.dtype)
        return tf.reshape(decoded.write(position, factor, target), member.tensor.shape)

    return result


def _gradient(member: Member, values: Any, ledger: Ledger) -> Gradient:
    number: Any = ledger.enter()
    step = number if member.step is None else member.step
    stored = member.state
    chain: Any = kernels.RngKey(member.chain.seed, member.chain.name)
    if stored is None:
        return Gradient(values, chain, step)
    values = clipped(kernels, values, stored.clip_norm)
    if not stored.momentum.shape.num_elements():
        values = _after_assigning(values, stored)
    return Gradient(
        values,
        chain,
        step,
        BinaryState(FlatVariable(stored.momentum), FlatVariable(stored.scale), stored.beta),
    )


def _after_assigning(values: tf.Tensor, stored: StoredState) -> tf.Tensor:
    """Return the values after assigning a state without elements.

    No kernel reads it.

    TensorFlow numbers a graph's branches by their inputs, and Horovod's names have the numbers: workers that store
    elements of a variable and those that store none need the same inputs.
    """
    assigned = [part.assign(part.read_value(), read_value=False) for part in (stored.momentum, stored.scale)]
    with tf.control_dependencies(assigned):
        return tf.identity(values)


def _array_to_send(array: tf.Tensor, output: tf.Tensor | None, process_set: Any) -> tf.Tensor:
    """Return the array, non-constant and after the collective before.

    A worker that reduces no shard receives nothing and sends nothing: if TensorFlow knew this, it would remove the one
    collective and fold the other, and the other workers would wait indefinitely.
    """
    zero = 0 if output is None else tf.cast(opaque_false(output), tf.int32)
    if array.shape[0]:
        return not_constant_foldable(array, process_set, zero)
    nothing = tf.fill([tf.minimum(worker_count(process_set), zero)], tf.zeros([], array.dtype))
    nothing.set_shape([0])
    return nothing


def _answer(request: Any, output: tf.Tensor, workers: Workers) -> Any:
    size = workers.size_of(request.group)
    if isinstance(request, Allgather):
        lengths = [request.array.shape[0]] * size if request.lengths is None else list(request.lengths)
        return tf.split(tf.ensure_shape(output, [sum(lengths)]), lengths)
    if isinstance(request, Alltoall):
        own = request.splits[workers.rank_in(request.group)]
        if not own:
            return [tf.zeros([0], request.array.dtype)] * size
        return tf.split(tf.ensure_shape(output, [size * own]), [own] * size)
    return tf.ensure_shape(output, request.array.shape)


def _factor(member: Member, control_tensor: tf.Tensor, process_set: Any) -> tf.Tensor:
    """Return the factor by which Horovod multiplied the sum.

    NaN, with an error, if workers disagree.
    """
    values = tf.cast(control_tensor, tf.float64)
    signs = tf.constant(member.signs, tf.float64)
    agreed = tf.reduce_all(tf.equal(values[1 : 1 + len(member.signs)], values[0] * signs))
    # A saved function may be loaded by more workers, whose sum would overflow its fields.
    count, own = worker_count(process_set), process_set.size()
    agreed &= tf.equal(count, own)
    message = [member.disagreement, f"This graph was made for {own} workers. Workers now:", count]
    with tf.control_dependencies([require(agreed, message, member.tensor)]):
        return kernels.with_nonfinite(values[0], ~agreed, float("nan"))
