"""Periodic measurement of the nmse on a sample of the gradients.

The blocks of a gradient that are compared are always the same ones, chosen while the graph is traced. In the steps that
are measured, one allreduce for each gradient averages them exactly, in float32, in addition to the reduction.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import tensorflow as tf

from horovod_quant.frontends.sample import BaseSampler, sampled
from horovod_quant.tensorflow.collectives import Scope, not_constant_foldable, worker_count


class ErrorSampler(BaseSampler):
    """Measurement of the nmse of averages; see `BaseSampler`."""

    def __init__(self, every: int, share: float) -> None:
        super().__init__(every, share)
        self._exchanges: Counter[tuple[str, str | None]] = Counter()
        self._lock = threading.Lock()  # TensorFlow's threads count

    def compared(
        self,
        name: str,
        key: str,
        gradient: tf.Tensor,
        result: tf.Tensor,
        control_tensor: tf.Tensor,
        scope: Scope,
    ) -> tf.Tensor:
        """Return ``result``, compared with the exact average in each ``every``-th run.

        Args:
            name: name of the gradient.
            key: the name that selects the sample, the same on every worker.
            gradient: this worker's gradient, of a known shape.
            result: result of the reduction.
            control_tensor: the reduced control tensor, whose first number was 1 on each worker.
            scope: scope of the collectives.
        """
        import horovod.tensorflow as hvd

        elements = gradient.shape.num_elements()
        indices = sampled(key, 0, elements, self.share)
        # Without the number of workers as an input, TensorFlow would take a call, or a collective, for a constant.
        count = worker_count(scope.process_set)

        def is_due(_: np.ndarray) -> np.bool_:
            # Where a graph reduces a name twice, workers may come to the two in different orders.
            with self._lock:
                self._exchanges[name, scope.label] += 1
                return np.bool_(self._exchanges[name, scope.label] % self.every == 0)

        def keep(total: np.ndarray, found: np.ndarray, workers: np.ndarray) -> np.int32:
            if total[0] == workers:  # otherwise one of them has called hvd.join()
                exact = total[1:].astype(np.float64) / total[0]
                weight = elements / len(indices)
                error, square = (weight * float(np.sum(each**2)) for each in (found - exact, exact))
                self._record(name, error, square)
            return np.int32(0)

        def measure() -> tf.Tensor:
            own = tf.gather(not_constant_foldable(gradient, scope.process_set), indices)
            total = hvd.allreduce(
                tf.concat([tf.ones([1]), tf.cast(own, tf.float32)], 0),
                op=hvd.Sum,
                name=scope.name("nmse"),
                process_set=scope.process_set,
                ignore_name_scope=True,  # the branch's scope has a number, which differs between workers
            )
            unit = tf.cast(tf.reshape(control_tensor, [-1])[0], tf.float32)
            found = tf.cast(tf.gather(tf.reshape(result, [-1]), indices), tf.float32) / unit
            return _call(keep, [total, found, count], tf.int32)

        measured = tf.cond(_call(is_due, [count], tf.bool), measure, lambda: tf.constant(0))
        with tf.control_dependencies([measured]):
            return tf.identity(result)


def _call(function: Any, inputs: list[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    """Return a scalar from Python.

    The call is not stateful, or it would wait for earlier calls.
    """
    return tf.ensure_shape(tf.numpy_function(function, inputs, dtype, stateful=False), [])
