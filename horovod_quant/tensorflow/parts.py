"""State of a variable that is split between workers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod_quant.frontends.binsgdm import SPREAD
from horovod_quant.tensorflow.collectives import worker_count
from horovod_quant.tensorflow.state import outside_of_traces, uncollected_variable


class StatePart:
    """Elements of a variable, used like a separate flat variable.

    From the first assignment on the elements are in a separate variable, the share, and the whole variable is empty,
    independent of its declared shape. If the whole variable is filled again, for example by loading, reads return its
    elements: its size is the only record of the split, so it cannot contradict its content.

    Args:
        variable: the whole variable, float32.
        start, stop: the range of elements of the flattened variable.
        process_set: Horovod's workers that together have all elements.

    Attributes:
        share: these elements, while the variable is empty.
    """

    def __init__(self, variable: tf.Variable, start: int, stop: int, process_set: Any) -> None:
        self.variable, self.start, self.stop = variable, start, stop
        self._process_set = process_set
        self.shape = tf.TensorShape([stop - start])
        self.share = outside_of_traces(self._make)
        self._refuse_to_be_saved()

    def _make(self) -> tf.Variable:
        # It needs no initialization in TensorFlow 1 graphs: it is assigned before it is read.
        with tf.device(self.variable.device):
            return uncollected_variable(tf.zeros(self.shape), "horovod_quant_share")

    def _refuse_to_be_saved(self) -> None:
        """Make checkpoints fail, which would save an empty variable.

        Only they read without a copy.
        """
        read = self.variable.read_value_no_copy

        def read_whole() -> tf.Tensor:
            if self.is_spread():
                raise RuntimeError(SPREAD)
            return read()

        self.variable.read_value_no_copy = read_whole

    def is_spread(self) -> bool:
        """Return whether the variable is empty, if known outside graphs."""
        return tf.executing_eagerly() and self.variable.read_value().shape != self.variable.shape

    def read_value(self) -> tf.Tensor:
        whole = _as_it_is(self.variable.read_value())

        def own() -> tf.Tensor:
            return tf.ensure_shape(tf.reshape(whole, [-1])[self.start : self.stop], self.shape)

        return tf.cond(tf.size(whole) > 0, own, self.share.read_value)

    def assign(self, value: tf.Tensor, read_value: bool = False) -> Any:
        """Assign the elements; return the operation, or None in eager code."""
        assigned = self.share.assign(value, read_value=False)
        with tf.control_dependencies([assigned]):
            zero = _zero()
            dimensions = tf.fill([zero + max(self.variable.shape.rank, 1)], zero)
            return self._assign_to_whole(tf.fill(dimensions, 0.0))

    def gathered(self, name: str) -> Any:
        """Gather the whole variable on all workers with parts of it.

        Return the operation, or None in eager code.
        """
        import horovod.tensorflow as hvd

        around = [[self.start, self.variable.shape.num_elements() - self.stop]]
        padded = tf.pad(self.read_value(), around)
        whole = hvd.allreduce(padded, op=hvd.Sum, name=name, process_set=self._process_set)
        return self._assign_to_whole(tf.reshape(whole, self.variable.shape))

    def forget(self) -> None:
        """Restore the variable's full size before something is loaded into it."""
        if self.is_spread():
            self._assign_to_whole(tf.zeros(self.variable.shape))

    def _assign_to_whole(self, value: tf.Tensor) -> Any:
        # The variable's assign() requires the shape of the present value.
        return tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=value)


tf.register_tensor_conversion_function(StatePart, lambda part, *unused, **options: part.read_value())


# TensorFlow assumes that a variable has its declared shape, or the one that the same graph assigns, and removes slices
# and conditions accordingly. Sizes that it cannot compute prevent this.


def _zero() -> tf.Tensor:
    """Return an int32 zero that TensorFlow cannot compute before the graph runs."""
    import horovod.tensorflow as hvd

    return tf.minimum(worker_count(hvd.global_process_set), 1) - 1


def _as_it_is(value: tf.Tensor) -> tf.Tensor:
    """Return a variable's value, without a copy, in its run-time shape.

    One element for a scalar.
    """
    value = value if value.shape.rank else tf.reshape(value, [-1])
    rank = value.shape.rank
    return tf.slice(value, tf.fill([rank], _zero()), [-1] * rank)
