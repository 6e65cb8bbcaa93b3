"""Cached functions for parts of kernels.

So a graph need not repeat their operations. Tracing takes a fraction of a millisecond for each operation, and a kernel
has tens to hundreds of them, for each gradient. These functions do not depend on a tensor's length, so each is traced
once, and every further use is one operation. Before a graph runs, Grappler and XLA inline the functions: the results
are bit-identical.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import tensorflow as tf

Function = Callable[..., tf.Tensor]


def elementwise(function: Function) -> Function:
    """Cache an elementwise ``function(x, *scalars, *constants)``: scalars are tensors, constants are not."""

    @functools.wraps(function)
    def call(x: Any, *others: Any) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        if tf.executing_eagerly():
            return function(x, *others)
        result = _traced(function, tf.TensorSpec(None, x.dtype), x, others)
        result.set_shape(x.shape)
        return result

    return call


def by_rows(function: Function) -> Function:
    """Cache a ``function(x, *constants)`` that processes each ``x[i]`` independently."""

    @functools.wraps(function)
    def call(x: tf.Tensor, *constants: Any) -> tf.Tensor:
        if tf.executing_eagerly():
            return function(x, *constants)
        result = _traced(function, tf.TensorSpec([None, *x.shape[1:]], x.dtype), x, constants)
        result.set_shape([x.shape[0], *result.shape[1:]])
        return result

    return call


def _traced(function: Function, spec: tf.TensorSpec, x: tf.Tensor, others: tuple[Any, ...]) -> tf.Tensor:
    scalars = [other for other in others if tf.is_tensor(other)]
    signature = (spec, *(tf.TensorSpec([], scalar.dtype) for scalar in scalars))
    return graph_of(function, signature, others[len(scalars) :])(x, *scalars)


@functools.cache
def graph_of(
    function: Function, signature: tuple[tf.TensorSpec, ...], constants: tuple[Any, ...], inline: bool = True
) -> Function:
    """Return the function of the signature's tensors, traced once."""
    attributes = None if inline else {"_noinline": True}
    return tf.function(
        lambda *tensors: function(*tensors, *constants),
        signature,
        autograph=False,
        experimental_attributes=attributes,
    )
