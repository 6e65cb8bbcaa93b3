"""TensorFlow's side of `exchange`: ``hvd.DistributedGradientTape`` in a ``tf.function``.

The loss has a gradient that computes nothing: it is in memory, and read without a copy. An element of each reduced
gradient is read, because TensorFlow runs only what is used, and lets go of it, as an optimizer would.
"""

from __future__ import annotations

import os
import re
from math import prod
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

import horovod_quant.tensorflow as hvq
from horovod_quant.analysis.models import Shapes

NAME = "TensorFlow"


def configure() -> None:
    # As many operations at a time as TensorFlow runs by default, each on one thread.
    tf.config.threading.set_intra_op_parallelism_threads(1)


def barrier() -> None:
    hvd.allreduce(tf.zeros([1]), name="barrier")


def allgather(array: np.ndarray, name: str) -> np.ndarray:
    return hvd.allgather(tf.constant(array), name=name).numpy()


class Gradients:
    """The gradients, which are their own variables: all methods share them, and none changes them."""

    def __init__(self, shapes: Shapes, values: np.ndarray) -> None:
        ends = np.cumsum(list(map(prod, shapes.values())))
        self.variables = [
            tf.Variable(part.reshape(shape), name=name)
            for (name, shape), part in zip(shapes.items(), np.split(values, ends[:-1]))
        ]


class Trial:
    """A function that exchanges the gradients with one method."""

    def __init__(self, variant: Any, gradients: Gradients, options: Any) -> None:
        self.variant = variant
        self.compression: Any = None
        self._variables = gradients.variables
        self._groups = options.groups
        # Other names for each variant: the same name with another shape would be a miss in Horovod's cache.
        self._scope = re.sub("[^A-Za-z0-9]+", "_", variant.label(True))
        self._optimizer = None  # compressors hold weak references
        if variant.is_binsgdm:
            self._optimizer = hvq.optim.BinSGDM()
            self._optimizer.build(self._variables)
        if variant.exchanges:
            ours = {"optimizer": self._optimizer} if variant.is_binsgdm else {}
            self.compression = variant.compression(hvd, hvq, **ours)
        self._exchange = tf.function(self._traced, autograph=False).get_concrete_function()

    def _traced(self) -> tf.Tensor:
        @tf.custom_gradient
        def loss_of(*values: tf.Tensor) -> Any:
            return tf.zeros([]), lambda _: values

        with tf.name_scope(self._scope):
            with tf.GradientTape() as tape:
                loss = loss_of(*self._variables)
            if self.variant.exchanges:
                tape = hvd.DistributedGradientTape(tape, compression=self.compression, groups=self._groups)
            reduced = tape.gradient(loss, self._variables)
            return tf.add_n([gradient[(0,) * gradient.shape.rank] for gradient in reduced])

    def prepare(self) -> None:
        pass

    def run(self) -> None:
        """What is measured."""
        self._exchange().numpy()

    def clear(self) -> None:
        pass
