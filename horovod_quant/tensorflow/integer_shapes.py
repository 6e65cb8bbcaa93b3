"""Integer dimensions of shapes in TensorFlow 1 programs, where dimensions are objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def integer_shapes() -> Iterator[None]:
    """Context, also a decorator, in which dimensions are integers."""
    if isinstance(tf.TensorShape([0])[0], int):
        yield
        return
    tf.compat.v1.enable_v2_tensorshape()
    try:
        yield
    finally:
        tf.compat.v1.disable_v2_tensorshape()
