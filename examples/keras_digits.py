"""The same training as tf2_digits.py, with Keras: ``model.fit`` and Horovod's callbacks.

    horovodrun -np 4 python examples/keras_digits.py --compression global-qsgd --bits 8

An ordinary Horovod training script: horovod_quant only appears as the argument ``compression`` of the
DistributedOptimizer. Works with any number of workers, including a single one without horovodrun.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only; read when TensorFlow is imported

import digits
import horovod.tensorflow as hvd_tf  # has allgather_object, which Horovod's Keras module lacks
import horovod.tensorflow.keras as hvd
import tensorflow as tf
import training
from tf2_digits import make_batches, make_model

import horovod_quant.tensorflow as hvq

WARMUP_EPOCHS = 1


def make_optimizer(args: argparse.Namespace, seed: int) -> tf.keras.optimizers.legacy.Optimizer:
    """Return a legacy optimizer, which Horovod's learning-rate callbacks need."""
    if args.optimizer == "sgd":
        return tf.keras.optimizers.legacy.SGD(args.lr, momentum=0.9)
    if args.optimizer == "adam":
        return tf.keras.optimizers.legacy.Adam(args.lr)
    return hvq.optim.LegacyBinSGDM(args.lr, seed=seed)


class RecordSteps(tf.keras.callbacks.Callback):
    def __init__(self, record: training.Record) -> None:
        super().__init__()
        self._record = record

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._sum = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._sum = self._sum, logs["loss"] * (batch + 1)  # Keras passes the mean of the epoch so far
        self._record.step(self._sum - before)


def train(args: argparse.Namespace, seed: int, data: digits.Data) -> dict[str, Any]:
    """Train once; return the figures."""
    tf.keras.backend.clear_session()  # for the same names of variables each time: the random rounding depends on them
    tf.keras.utils.set_random_seed(seed)
    model = make_model()
    batches = make_batches(args, seed, data)
    compression = training.make_compression(args, seed, hvd, hvq)
    model.compile(
        optimizer=hvd.DistributedOptimizer(make_optimizer(args, seed), compression=compression),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    def cosine(epoch: float) -> float:
        return (1 + math.cos(math.pi * epoch / args.epochs)) / 2

    steps = args.epochs * len(batches)
    with training.Record(args, seed, steps, compression, model.count_params(), hvd_tf) as record:
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(args.lr, warmup_epochs=WARMUP_EPOCHS),
            hvd.callbacks.LearningRateScheduleCallback(
                args.lr, cosine, start_epoch=WARMUP_EPOCHS, staircase=False
            ),
            RecordSteps(record),
        ]
        model.fit(batches, epochs=args.epochs, callbacks=callbacks, verbose=0)

    _, accuracy = model.evaluate(data.test_images[..., None], data.test_labels, verbose=0)
    return record.figures({"accuracy": accuracy}, model.get_weights())


def main() -> None:
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)  # several workers share a machine
    tf.config.threading.set_inter_op_parallelism_threads(1)
    args = digits.parse_arguments("keras_digits.py", hvd_tf, hvq)
    data = digits.load_data()
    training.train_all(args, lambda seed: train(args, seed, data), digits.describe, hvd)


if __name__ == "__main__":
    main()
