"""The dimensions of shapes as integers in programs of TensorFlow 1, whose shapes have objects in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


@contextlib.contextmanager
def integer_shapes() -> Iterator[None]:
    """While it lasts; also as a decorator."""
    if isinstance(tf.TensorShape([0])[0], int):
        yield
        return
    tf.compat.v1.enable_v2_tensorshape()
    try:
        yield
    finally:
        tf.compat.v1.disable_v2_tensorshape()
