"""Errors in a graph, not before this worker has a gradient.

An error ends the run of a graph: a data set that is waited for gives no batch any more, and what depends on the batch
never starts. Of two workers that find the same error, one may have its batch already, and give gradients to Horovod;
if the other one had none yet, the first would wait for it for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod_quant.tensorflow.cached_subgraph import elementwise


def require(condition: tf.Tensor, told: Sequence[Any], gradient: tf.Tensor) -> Any:
    """As ``tf.debugging.Assert`` of a boolean scalar, whose error comes after ``gradient`` in a function."""
    # A session runs what is fetched from its graph, and that gradient need not be needed for it.
    if tf.compat.v1.get_default_graph().building_function:
        condition = _false_after(condition, opaque_false(gradient))
    return tf.debugging.Assert(condition, told)


@elementwise
def _false_after(condition: tf.Tensor, false: tf.Tensor) -> tf.Tensor:
    """``condition``, at once where it is true, and not before ``false`` where it is not."""
    return tf.cond(condition, lambda: tf.constant(True), lambda: tf.identity(false))


def opaque_false(tensor: tf.Tensor) -> tf.Tensor:
    """False, by a number in ``tensor``, should there be one.

    TensorFlow removes what is there for a control dependency alone, or for the size of a tensor whose size it knows.
    """
    # Not "greater than infinity", a constant that tf.debugging.enable_check_numerics refuses.
    return tf.reduce_any(tf.sign(tf.cast(tf.reshape(tensor, [-1])[:1], tf.float64)) > 1.0)
