"""State of a variable that is spread over workers: each keeps some elements alone."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_quant.frontends.binsgdm import SPREAD
from horovod_quant.tensorflow.collectives import worker_count
from horovod_quant.tensorflow.state import outside_of_traces


class StatePart:
    """Some elements of a variable, that are read and assigned, flat, like a variable of their own.

    From the first assignment on they are in a variable of their own, the share, and the whole variable is empty,
    whatever shape it declares. Where something makes it whole again, as loading does, its elements are what is read
    next: that it has any is all that tells so, and cannot be at odds with what it holds.

    Args:
        variable: the whole one, float32.
        start, stop: which elements, of the variable as a flat one.

    Attributes:
        share: these elements, while the variable is empty.
    """

    def __init__(self, variable: tf.Variable, start: int, stop: int) -> None:
        self.variable, self.start, self.stop = variable, start, stop
        self.shape = tf.TensorShape([stop - start])
        self.share: tf.Variable
        outside_of_traces(self._make)
        self._refuse_to_be_saved()

    def _make(self) -> None:
        # Nothing need initialize it in TensorFlow 1's graphs: it is assigned before it is read.
        with tf.device(self.variable.device):
            self.share = tf.compat.v1.Variable(
                tf.zeros(self.shape),
                trainable=False,
                collections=[],
                use_resource=True,
                name="horovod_quant_share",
            )

    def _refuse_to_be_saved(self) -> None:
        """TensorFlow reads variables without a copy for checkpoints alone, and would save an empty one."""
        read = self.variable.read_value_no_copy

        def read_whole() -> tf.Tensor:
            if self.is_spread():
                raise RuntimeError(SPREAD)
            return read()

        self.variable.read_value_no_copy = read_whole

    def is_spread(self) -> bool:
        """Whether the variable is empty now, as far as can be told outside of graphs."""
        return tf.executing_eagerly() and self.variable.read_value().shape != self.variable.shape

    def read_value(self) -> tf.Tensor:
        whole = _as_it_is(self.variable.read_value())

        def own() -> tf.Tensor:
            return tf.ensure_shape(tf.reshape(whole, [-1])[self.start : self.stop], self.shape)

        return tf.cond(tf.size(whole) > 0, own, self.share.read_value)

    def assign(self, value: tf.Tensor, read_value: bool = False) -> Any:
        """Returns the operation that assigns, None in eager code: there is nothing else to return."""
        assigned = self.share.assign(value, read_value=False)
        with tf.control_dependencies([] if assigned is None else [assigned]):
            zero = _zero()
            dimensions = tf.fill([zero + max(self.variable.shape.rank, 1)], zero)
            return self._assign_to_whole(tf.fill(dimensions, 0.0))

    def gathered(self, name: str, process_set: Any) -> Any:
        """Makes the variable whole on all workers that keep parts of it; returns the operation, None in eager code."""
        import horovod.tensorflow as hvd

        around = [[self.start, self.variable.shape.num_elements() - self.stop]]
        padded = tf.pad(self.read_value(), around)
        whole = hvd.allreduce(padded, op=hvd.Sum, name=name, process_set=process_set)
        return self._assign_to_whole(tf.reshape(whole, self.variable.shape))

    def forget(self) -> None:
        """Makes the variable whole for what will be loaded into it."""
        if self.is_spread():
            self._assign_to_whole(tf.zeros(self.variable.shape))

    def _assign_to_whole(self, value: tf.Tensor) -> Any:
        # The variable's own assign() insists on the shape of what the variable holds.
        return tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=value)


tf.register_tensor_conversion_function(StatePart, lambda part, *unused, **options: part.read_value())


# TensorFlow takes for granted that a variable has the shape that is declared, or that the same graph assigns, and
# removes slices and conditions accordingly. Sizes that it cannot compute keep it from that.


def _zero() -> tf.Tensor:
    """Zero, int32, as TensorFlow does not know before the graph runs."""
    import horovod.tensorflow as hvd

    return tf.minimum(worker_count(hvd.global_process_set), 1) - 1


def _as_it_is(value: tf.Tensor) -> tf.Tensor:
    """A variable's value, without a copy, in the shape that it has when the graph runs; of a scalar one element."""
    value = value if value.shape.rank else tf.reshape(value, [-1])
    rank = value.shape.rank
    return tf.slice(value, tf.fill([rank], _zero()), [-1] * rank)
