"""TensorFlow trials: ``hvd.DistributedGradientTape`` in a ``tf.function``.

The loss has a gradient that computes nothing: it is in memory, and read without a copy. An element of each reduced
gradient is read, because TensorFlow runs only operations whose results are used; then the gradient is released, as by
an optimizer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_quant.tensorflow as hvq
from horovod_quant.analysis.models import Shapes
from horovod_quant.bench.rounds import WARM_UP
from horovod_quant.bench.variants import Options, Variant

workers = hvd


def configure() -> None:
    # TensorFlow's default number of concurrent operations, each on one thread.
    tf.config.threading.set_intra_op_parallelism_threads(1)


def barrier() -> None:
    hvd.allreduce(tf.zeros([1]), name="barrier")


def allgather(array: np.ndarray, name: str) -> np.ndarray:
    return hvd.allgather(tf.constant(array), name=name).numpy()


class Gradients:
    """The gradients as variables, which all methods share and none changes."""

    def __init__(self, shapes: Shapes, values: Sequence[np.ndarray]) -> None:
        self.shapes = shapes
        self.variables = [tf.Variable(value, name=name) for name, value in zip(shapes, values)]


class Trial:
    """A function that reduces the gradients with one method."""

    warm_up = WARM_UP

    def __init__(self, variant: Variant, gradients: Gradients, options: Options) -> None:
        self.variant = variant
        self.has_average = variant.averages
        self._gradients = gradients
        self._groups = options.groups
        self._exchanges = 0
        self._averages: list[np.ndarray] = []
        self._keep = tf.constant(False)
        # Unique names for each variant: a known name with another shape misses in Horovod's cache.
        self._scope = re.sub("[^A-Za-z0-9]+", "_", variant.label)
        self._optimizer: Any = None  # compressors hold weak references
        if variant.own_optimizer is not None:
            self._optimizer = getattr(hvq.optim, variant.own_optimizer)()
            self._optimizer.build(gradients.variables)
        self._compression: Any = None
        if variant.method is not None:
            ours = {"optimizer": self._optimizer} if variant.own_optimizer is not None else {}
            self._compression = variant.compression(hvd, hvq, **ours)
        signature = [tf.TensorSpec([], tf.bool)]
        self._exchange = tf.function(self._traced, signature, autograph=False).get_concrete_function()

    def _traced(self, keep: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def loss_of(*values: tf.Tensor) -> Any:
            return tf.zeros([]), lambda _: values

        with tf.name_scope(self._scope):
            variables = self._gradients.variables
            with tf.GradientTape() as tape:
                loss = loss_of(*variables)
            if self.variant.method is not None:
                tape = hvd.DistributedGradientTape(tape, compression=self._compression, groups=self._groups)
            reduced = tape.gradient(loss, variables)
            kept = tf.cond(
                keep, lambda: tf.numpy_function(self._store, reduced, tf.float32), lambda: tf.zeros([])
            )
            return tf.add_n([kept, *(gradient[(0,) * gradient.shape.rank] for gradient in reduced)])

    def _store(self, *reduced: np.ndarray) -> np.ndarray:
        self._averages = [array.copy() for array in reduced]
        return np.zeros((), np.float32)

    def prepare(self, keep: bool = False) -> None:
        """Prepare the next run; ``keep`` its result for `averages`."""
        self._keep = tf.constant(keep)

    def run(self) -> None:
        """Run the measured part."""
        self._exchange(self._keep).numpy()

    def averages(self) -> list[np.ndarray]:
        """Return the gradients after a run whose result was kept."""
        return self._averages

    def clear(self) -> None:
        self._averages = []
        self._exchanges += 1

    def bytes_sent(self) -> float:
        return self.variant.bytes_sent(self._compression, self._exchanges, self._gradients.shapes, hvd.size())
