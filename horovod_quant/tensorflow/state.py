"""What is counted in TensorFlow's variables, where no Python runs with the graph."""

from __future__ import annotations

import tensorflow as tf


class Ledger:
    """How often a gradient has been exchanged, and the bytes that one exchange takes.

    The variable is made outside of whatever is being traced. It belongs to no collection, and counts from zero where
    nothing has initialized it, so that programs with TensorFlow 1's sessions need not know of it.

    Attributes:
        bytes_sent: by one worker in one exchange.
        float32_bytes: what float32 would have sent.
    """

    def __init__(self) -> None:
        self.bytes_sent = self.float32_bytes = 0.0
        with tf.init_scope():
            self._count = tf.compat.v1.Variable(
                tf.zeros([], tf.int64),
                trainable=False,
                collections=[],
                use_resource=True,
                name="horovod_quant_exchanges",
            )
            self._read = None if tf.executing_eagerly() else self._value()

    def _value(self) -> tf.Tensor:
        if tf.executing_eagerly():
            return self._count.read_value()
        zero = tf.zeros([], tf.int64)
        return tf.cond(self._count.is_initialized(), self._count.read_value, lambda: zero)

    def enter(self) -> tf.Tensor:
        """Counts an exchange; returns its number from 0, int64."""
        before = self._value()
        with tf.control_dependencies([self._count.assign(before + 1)]):
            return tf.identity(before)

    def exchanges(self) -> int:
        """How many exchanges there have been.

        Raises:
            RuntimeError: TensorFlow 1's graphs keep their variables in a session, and there is no default one.
        """
        if self._read is None:
            return int(self._count.numpy())
        session = tf.compat.v1.get_default_session()
        if session is None:
            raise RuntimeError("stats(): call it within `with session.as_default():`")
        return int(session.run(self._read))
